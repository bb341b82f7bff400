"""Layers that once computed something else on another layout, or were refused though they are right."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from spikingjelly.activation_based import layer as sj
from spikingjelly.activation_based import neuron
from torch import Tensor, nn

from megasnn.kernels import NeuronSpec
from megasnn.layers import (
    BuildContext,
    ConvNormNeuron,
    MeanLinear,
    MeanOverSpace,
    ParallelBatchNorm,
    ParallelConv,
    ParallelLinear,
    ParallelNeuron,
    apply_layer,
)
from megasnn.models.building import describe
from megasnn.models.layer import Layer, layer
from megasnn.models.model import Model
from megasnn.parallel.sharding import materialise
from megasnn.parallel_state import Group
from megasnn.pipeline.p2p import WireOptions
from megasnn.pipeline.profile_layers import profile_layers
from tests.models.networks import CLASSES, between
from tests.models.steps import assert_equal, one_step
from tests.parity.ranks import Layout, assemble

CPU, TWO = torch.device("cpu"), Group("tensor", (0, 1))


class Centre(nn.Module):
    """Takes the mean of all features away; a plain module."""

    def forward(self, x: Tensor) -> Tensor:
        return x - 0.5 * x.mean(2, keepdim=True)


@dataclass(frozen=True, kw_only=True)
class WholeOutputs(Model):
    """Plain layers and functions behind linear layers whose output every rank has whole."""

    image_size: int = 4
    time_steps: int = 2
    num_classes: int = CLASSES

    def layers(self) -> Iterable[Layer]:
        yield layer("stem", ConvNormNeuron(3, 8))
        yield layer("first", MeanLinear(8, 6))
        yield layer("centre", Centre())
        yield layer("linear", nn.Linear(6, 8))
        yield layer("relu", nn.ReLU())
        yield layer("second", ParallelLinear(8, 6))
        yield layer("again", nn.Linear(6, 6))
        yield layer("head", ParallelLinear(6, self.num_classes))


class Signals(WholeOutputs):
    """`MeanLinear` on `[T, N, C, L]`, and behind tokens as well."""

    @property
    def input_shape(self) -> tuple[int, ...]:
        return 3, 6

    def layers(self) -> Iterable[Layer]:
        yield layer("stem", ConvNormNeuron(3, 8, 3, dims=1))
        yield layer("head", MeanLinear(8, self.num_classes))


@pytest.mark.parametrize("model", [WholeOutputs(), Signals()], ids=["whole", "signals"])
def test_what_is_whole_behind_a_linear_layer_is_not_gathered(ranks, model: Model) -> None:
    assert_equal(ranks(2, one_step, model, Layout(tensor=2)), ranks(1, one_step, model, Layout()))


def test_a_learned_time_constant_behind_a_whole_output_is_refused_with_tensor_parallelism() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Wrong(WholeOutputs):
        def layers(self) -> Iterable[Layer]:
            yield layer("mean", MeanOverSpace())
            yield layer("first", ParallelLinear(3, 6, style="row"))
            yield layer("fire", ParallelNeuron(NeuronSpec("plif", tau=2.0)))
            yield layer("head", ParallelLinear(6, self.num_classes))

    described = describe(Wrong(time_steps=1))
    with pytest.raises(ValueError, match="--tensor-model-parallel-size"):
        described.build(BuildContext(TWO))


class Changes(nn.Module):
    def forward(self, x: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"a": x["a"].add_(1), "b": x["b"]}


class Pair(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"a": x + 0, "b": 2 * x}


class Meet(nn.Module):
    def forward(self, x: dict[str, Tensor]) -> Tensor:
        return x["a"] + x["b"]


def _layers(*made: tuple[str, Callable[[], Any]], **options: Any) -> Model:
    def layers() -> Iterator[Layer]:
        return (layer(name, make(), **options) for name, make in made)

    return between(layers)


def test_an_input_that_is_changed_in_place_is_refused_and_torchs_modules_do_it_aside() -> None:
    with pytest.raises(ValueError, match="changes: .*|changes, given"):
        describe(_layers(("pair", Pair), ("changes", Changes), ("meet", Meet)))
    described = describe(_layers(("relu", lambda: nn.ReLU(inplace=True)), ("conv", lambda: nn.Conv2d(4, 4, 1))))
    relu = dict(described.named_layers(BuildContext()))["relu"]
    x = -torch.ones(2, 1, 4, 2, 2)
    assert apply_layer(relu, x, range(1)).max() == 0 and x.max() == -1


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def reset_parameters(self) -> None:
        self.seen.zero_()

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return x


@pytest.mark.parametrize("axis", ["data", "context"])
def test_a_buffer_that_a_forward_changes_is_refused_with_replicas(axis: str) -> None:
    described = describe(_layers(("counts", Counts)))
    assert described.build(BuildContext())
    with pytest.raises(ValueError, match="counts.*'seen'"):
        described.build(BuildContext(**{axis: Group(axis, (0, 1))}))


class Image(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.ndim > 3 else x.reshape(2, -1, 4, 1, 1)


class Tokens(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean((3, 4))


@pytest.mark.parametrize(
    "make",
    [lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0), lambda: nn.Flatten(0, 1), lambda: nn.Softmax(0)],
    ids=["attention", "flatten", "softmax"],
)
def test_a_sample_does_not_depend_on_others(make: Callable[[], nn.Module]) -> None:
    """Attention of torch's is over time, and not over time and samples."""
    layers = describe(_layers(("tokens", Tokens), ("mixes", make), ("image", Image))).named_layers(BuildContext())
    materialise(layers, CPU, 0)
    x, mixes = torch.randn(2, 3, 4), dict(layers)["mixes"]
    y = apply_layer(mixes, x, range(3)).reshape(x.shape)
    assert torch.allclose(apply_layer(mixes, x[:, :1], range(1)).view(2, 1, 4), y[:, :1], atol=1e-6)


def test_a_function_of_the_users_initialises_any_module_and_may_be_told_its_path() -> None:
    seen = set[str]()

    def fill(module: nn.Module, path: str) -> None:
        seen.add(path)
        if isinstance(module, (nn.Conv2d, ParallelConv)):
            nn.init.constant_(module.weight, 0.25)

    def fill_norms(module: nn.Module) -> None:
        if isinstance(module, ParallelBatchNorm):
            nn.init.constant_(module.bias, 2.0)

    parts = ("plain", lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU())), ("ours", lambda: ConvNormNeuron(4, 4))
    layers = describe(_layers(*parts, initialise=fill)).named_layers(BuildContext())
    materialise(layers, CPU, 0)
    plain, ours = (dict(layers)[name] for name in ("plain", "ours"))
    assert torch.equal(plain[0].weight, torch.full_like(plain[0].weight, 0.25))
    assert torch.equal(ours.conv.weight, torch.full_like(ours.conv.weight, 0.25)) and {"0", "conv"} <= seen
    assert torch.equal(ours.norm.weight, torch.ones(4))
    layers = describe(_layers(*parts, initialise=fill_norms)).named_layers(BuildContext())
    materialise(layers, CPU, 0)
    assert torch.equal(dict(layers)["ours"].norm.bias, torch.full((4,), 2.0))


CONTAINERS: dict[str, Callable[[], nn.Module]] = {
    "steps": lambda: sj.MultiStepContainer(nn.Conv2d(4, 4, 1), neuron.IFNode()),
    "linear": lambda: nn.Sequential(Tokens(), sj.LinearRecurrentContainer(neuron.IFNode(), 4, 4, step_mode="m")),
    "elements": lambda: sj.ElementWiseRecurrentContainer(neuron.IFNode(), torch.add, step_mode="m"),
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_containers_of_spikingjelly_call_neurons_in_single_step_mode(kind: str) -> None:
    torch.manual_seed(0)
    described = describe(_layers(("container", CONTAINERS[kind]), ("image", Image)))
    layers = described.named_layers(BuildContext(time_steps=2))
    materialise(layers, CPU, 0)
    container, x = dict(layers)["container"], torch.rand(2, 3, 4, 1, 1)
    first = apply_layer(container, x, range(3))
    assert torch.equal(apply_layer(container, x, range(3)), first), "it starts anew"


def test_attention_over_samples_is_refused_where_ranks_share_them_out() -> None:
    def attends(batch_first: bool) -> nn.Module:
        return nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=batch_first)

    shared = BuildContext(context=Group("context", (0, 1)))
    for batch_first in (True, False):
        described = describe(_layers(("tokens", Tokens), ("mixes", partial(attends, batch_first)), ("image", Image)))
        if batch_first:
            with pytest.raises(ValueError, match="mixes.*batch_first=True"):
                described.build(shared)
        else:
            assert described.build(shared)


class Embeds(nn.Module):
    """Numbers of tokens `[T, N, 1, L]` to their vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.embedding(x.long()).flatten(2, 3).transpose(2, 3)


@dataclass(frozen=True, kw_only=True)
class Embedded(WholeOutputs):
    @property
    def input_shape(self) -> tuple[int, ...]:
        return 1, 6

    def example_input(self, samples: int, generator: torch.Generator) -> Tensor:
        return torch.randint(0, 5, (samples, *self.input_shape), generator=generator)

    def layers(self) -> Iterable[Layer]:
        yield layer("embedding", Embeds())
        yield layer("unit", ConvNormNeuron(8, 8, dims=1))
        yield layer("head", MeanLinear(8, self.num_classes))


def test_layers_are_measured_on_examples_of_the_model() -> None:
    context = BuildContext(time_steps=2)
    assert len(profile_layers(describe(Embedded()), 2, context, CPU, WireOptions(), rounds=1)) == 3


class Still(WholeOutputs):
    def layers(self) -> Iterable[Layer]:
        yield layer("stem", ConvNormNeuron(3, 4))
        yield layer("conv", nn.Conv2d(4, 4, 1))
        yield layer("still", nn.BatchNorm2d(4).eval())
        yield layer("head", MeanLinear(4, self.num_classes))


def test_a_norm_in_evaluation_mode_keeps_its_statistics(ranks) -> None:
    (step,) = ranks(1, one_step, Still(), Layout())
    buffers = assemble([step], "buffers")
    assert torch.equal(buffers["still.running_mean"], torch.zeros(4, dtype=torch.float64))
    assert buffers["stem.norm.running_mean"].abs().max() > 0
