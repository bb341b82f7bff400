"""Truncated backpropagation through time: windows against SpikingJelly with `detach_net`, on any layout."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from spikingjelly.activation_based import functional, neuron, surrogate
from spikingjelly.activation_based import layer as theirs
from torch import Tensor, nn

import megasnn
from megasnn import ConvNormNeuron, Engine, MeanLinear, ParallelDropout, layer
from megasnn.config import ConfigError
from megasnn.engine.batch import CheckedBatch
from tests.parity.ranks import SIZES, TOLERANCE, RankStep, assemble, assert_equal, error, images
from tests.parity.spikingjelly_reference import with_other_norms
from tests.parts import gradients, parts

WINDOW = 2


def lif() -> neuron.LIFNode:
    return neuron.LIFNode(step_mode="m", detach_reset=True, surrogate_function=surrogate.Sigmoid())


class Slow(megasnn.SpikingNeuron):
    """A neuron of one's own, whose potential decays slowly: what is carried over matters."""

    def charge(self, x: Tensor, state: dict[str, Tensor]) -> Tensor:
        return 0.9 * state["v"] + x

    def reset(self, h: Tensor, spikes: Tensor, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"v": h - spikes.detach()}


@dataclass(frozen=True, kw_only=True)
class Small(megasnn.Model):
    """Units of ours, and plain modules with a neuron of SpikingJelly's; or with a neuron of one's own and dropout."""

    image_size: int = 8
    time_steps: int = 4
    num_classes: int = 5
    in_channels: int = 2
    frames: bool = False
    own: bool = False

    @property
    def input_shape(self) -> tuple[int, ...]:
        image = (self.in_channels, self.image_size, self.image_size)
        return (self.time_steps, *image) if self.frames else image

    def layers(self) -> Any:
        yield layer("first", ConvNormNeuron(self.in_channels, 8, kernel_size=3))
        if self.own:
            yield layer("second", ConvNormNeuron(8, 8, kernel_size=3, neuron=Slow(8)))
            yield layer("dropout", ParallelDropout(0.3, "dropout"))
        else:
            yield layer("second", ConvNormNeuron(8, 8, kernel_size=3, max_pool=True))
        yield layer("conv", nn.Conv2d(8, 8, 3, padding=1, bias=False))
        yield layer("norm", nn.BatchNorm2d(8))
        yield layer("fire", lif())
        yield layer("head", MeanLinear(8, self.num_classes))


class Reference(nn.Module):
    """The same of SpikingJelly's layers, on `[T, N, C, H, W]`."""

    def __init__(self) -> None:
        super().__init__()
        for name, channels in (("first", 2), ("second", 8)):
            unit = {"conv": theirs.Conv2d(channels, 8, 3, padding=1, bias=False), "norm": theirs.BatchNorm2d(8)}
            self.add_module(name, nn.ModuleDict({**unit, "neuron": lif()}))
        self.conv, self.norm, self.fire = theirs.Conv2d(8, 8, 3, padding=1, bias=False), theirs.BatchNorm2d(8), lif()
        self.pool, self.head = theirs.MaxPool2d(3, 2, 1), nn.Linear(8, 5)
        functional.set_step_mode(self, "m")

    def forward(self, x: Tensor) -> Tensor:
        x = self.first["neuron"](self.first["norm"](self.first["conv"](x)))
        x = self.second["neuron"](self.pool(self.second["norm"](self.second["conv"](x))))
        return self.head(self.fire(self.norm(self.conv(x))).mean((3, 4)))


data = partial(images, scale=2.0)


def one_step(model: Small, flags: dict[str, Any], weights: dict[str, Tensor] | None = None) -> RankStep:
    fired: list[int] = []
    sizes = {"micro_batch_size": SIZES[0], "global_batch_size": sum(SIZES), "train_iters": 1}
    with Engine(model, **sizes, precision="fp64", clip_grad=0.0, bptt_steps=WINDOW, **flags) as engine:
        if weights is not None:
            engine.load_state_dict(weights)
        for _, each in engine.distributed.neurons():
            each.observer = lambda spikes: fired.append(int(spikes.sum()))
        result = engine.train_step(*data(model))
        coordinates = engine.state.coordinates
        step = RankStep(
            (coordinates.pp, coordinates.dp_replicate, 0, coordinates.tp), result.loss, result.grad_norm, [], sum(fired)
        )
        tensors = engine.distributed.tensors
        step.gradients = gradients(tensors)
        step.buffers = parts([each for each in tensors if not each.is_parameter])
        return step


@pytest.mark.parametrize("frames", [False, True], ids=["images", "frames"])
def test_one_rank_equals_spikingjelly(ranks, frames: bool) -> None:
    model = Small(frames=frames)
    reference = with_other_norms(Reference)
    weights = {name: value.clone() for name, value in reference.state_dict().items()}
    normalised: list[Tensor] = []
    reference.second["norm"].register_forward_hook(lambda _, inputs, y: normalised.append(inputs[0].detach()))
    images, labels = data(model)
    windows, loss = model.time_steps // WINDOW, torch.zeros((), dtype=torch.float64)
    for x, y in zip(images.split(SIZES), labels.split(SIZES), strict=True):
        functional.reset_net(reference)
        steps = x.transpose(0, 1) if frames else x.expand(model.time_steps, *x.shape)
        for window in steps.split(WINDOW):
            logits = reference(window)
            part = F.cross_entropy(logits.mean(0), y, reduction="sum") / (len(labels) * windows)
            part.backward()
            functional.detach_net(reference)
            loss += part.detach()
    (step,) = ranks(1, one_step, model, {}, weights)
    assert step.loss == pytest.approx(loss.item(), rel=TOLERANCE)
    gradients = assemble([step], "gradients")
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
    assert gradients.keys() == expected.keys() and all(value.abs().max() > 0 for value in expected.values())
    for name, value in gradients.items():
        assert error(value, expected[name]) < TOLERANCE, name
    # Running statistics are over all windows of the global batch, once.
    values = torch.cat([each.transpose(0, 2).flatten(1) for each in normalised], dim=1)
    buffers = assemble([step], "buffers")
    assert error(buffers["second.norm.running_mean"], 0.1 * values.mean(1)) < TOLERANCE
    assert error(buffers["second.norm.running_var"], 0.9 + 0.1 * values.var(1)) < TOLERANCE
    assert buffers["second.norm.num_batches_tracked"] == 1


def _pipeline(schedule: str, layout: str) -> dict[str, Any]:
    return {
        "pipeline_model_parallel_size": 2,
        "pipeline_schedule": schedule,
        "pipeline_model_parallel_layout": layout,
    }


LAYOUTS: dict[str, dict[str, Any]] = {
    "data 2": {},
    "tensor 2": {"tensor_model_parallel_size": 2},
    "1f1b": _pipeline("1f1b", "2|4"),
    "interleaved": _pipeline("interleaved", "1|2|1|2"),
    "zbv": _pipeline("zbv", "1|2|1|2"),
}
OWN = {"data 2": {}, "zbv": _pipeline("zbv", "1|2|2|2")}


@pytest.fixture(scope="module")
def one(ranks) -> dict[bool, list[RankStep]]:
    return {own: ranks(1, one_step, Small(own=own), {}) for own in (False, True)}


@pytest.mark.parametrize("own", [False, True], ids=["spikingjelly", "own"])
def test_every_layout_computes_the_same(ranks, one, own: bool) -> None:
    for flags in (OWN if own else LAYOUTS).values():
        assert_equal(ranks(2, one_step, Small(own=own), flags), one[own])


def test_windows_of_a_micro_batch_follow_each_other_with_the_same_samples() -> None:
    images, labels = data(Small(frames=True))
    with Engine(Small(frames=True), micro_batch_size=2, train_iters=1, bptt_steps=WINDOW, mixup_alpha=1.0) as engine:
        batch = engine.batches.rank_batch(CheckedBatch({"images": images}, labels, 5), 10)
        windows = engine.batches.micro_batches(batch, trains=True)
        assert [window.goes_on for window in windows] == [False, True] * 3
        assert [window.samples for window in windows[::2]] == [range(10, 12), range(12, 14), range(14, 15)]
        for first, second in zip(windows[::2], windows[1::2], strict=True):
            assert first.samples == second.samples and first.targets is second.targets
            assert first.inputs["images"].shape == (first.size, WINDOW, 2, 8, 8)
        alone = [each.inputs["images"] for each in windows[4:]]  # a sample alone has nothing to be mixed with
        whole = torch.cat(alone, dim=1)
        assert torch.allclose(whole, images[4:].float())


def test_evaluation_does_not_depend_on_windows() -> None:
    model, logits = Small(frames=True, own=True), []
    images, labels = data(model)
    for steps in (None, 1, 2, 4):
        with Engine(model, micro_batch_size=2, train_iters=1, precision="fp64", bptt_steps=steps) as engine:
            logits.append(engine.predict(images))
            loss = engine.evaluate(images, labels).loss
            assert loss == pytest.approx(F.cross_entropy(logits[-1], labels).item(), rel=1e-12)
    assert all((each - logits[0]).norm() <= 1e-9 * logits[0].norm() for each in logits[1:])
    assert logits[0].std() > 0


class TimeWeights(nn.Module):
    """A weight for each time step."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(steps))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.view(-1, 1, 1, 1, 1)


@dataclass(frozen=True, kw_only=True)
class Weighted(Small):
    def layers(self) -> Any:
        *before, head = super().layers()
        yield from before
        yield layer("weighted", TimeWeights(self.time_steps))
        yield head


@pytest.mark.parametrize(
    ("model", "steps", "problem"),
    [
        (Small(), 3, "--time-steps 4 does not divide by --bptt-steps 3"),
        (Small(), 8, "--time-steps 4 does not divide by --bptt-steps 8"),
        (Weighted(), 2, "weighted.weight depends on --time-steps 4: .* windows of --bptt-steps 2"),
    ],
)
def test_what_cannot_be_cut_into_windows_is_refused(model: Small, steps: int, problem: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=problem):
        Engine(model, micro_batch_size=2, train_iters=1, bptt_steps=steps)
    assert not megasnn.parallel_state.model_parallel_is_initialized()
    if isinstance(model, Weighted):
        Engine(model, micro_batch_size=2, train_iters=1).close()
