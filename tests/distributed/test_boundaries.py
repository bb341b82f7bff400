"""What a boundary carries is known before it is there: models of MegaSNN's layers send no descriptors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from megasnn import Engine
from megasnn.kernels.spike_codec import Content
from megasnn.layers import (
    BuildContext,
    ConvNormNeuron,
    KeyedLayer,
    ParallelBatchNorm,
    ParallelConv,
    ParallelNeuron,
    SpikingNeuron,
    WholeImages,
)
from megasnn.layers.shape_inference import to_channels_last
from megasnn.models.build import describe
from megasnn.models.description import Carried
from megasnn.models.layer import Layer, layer
from megasnn.models.model import Model
from megasnn.models.spikformer.model import Spikformer
from megasnn.models.vgg_dvs.model import VggDvs
from megasnn.parallel_state import Group
from megasnn.pipeline.boundaries import Boundaries
from megasnn.pipeline.p2p import TensorDescriptor
from tests.models.networks import between
from tests.parity.zoo import CASES

SMALL = {
    "spikformer": Spikformer(
        image_size=16, num_classes=10, patch_size=4, embed_dim=32, depth=2, num_heads=4, time_steps=2, mlp_ratio=2.0
    ),
    "vgg_dvs": VggDvs(channels="4,P,8,8,P", image_size=16, time_steps=3, num_classes=10, dropout=0.4),
    **{name: CASES[name].model for name in ("sew_resnet-add", "qkformer", "spike_driven")},
}
LAYOUTS = {
    "bf16": (2, {"precision": "bf16"}),
    "plain-neurons": (2, {"neuron_backend": "torch"}),
    "frozen": (2, {}),  # the first layers
    "tensor": (4, {"tensor_model_parallel_size": 2}),
    "rows": (4, {"context_parallel_size": 2, "context_parallel_cut": "rows"}),
    "samples": (4, {"context_parallel_size": 2}),
}


def _headers(name: str, flags: dict[str, object]) -> int:
    """How many descriptors this rank has sent in a step, one of fewer samples, and an evaluation of a single one."""
    sent, to_header = [], TensorDescriptor.to_header

    def told(descriptor: TensorDescriptor) -> Tensor:
        sent.append(descriptor)
        return to_header(descriptor)

    model, layout = SMALL[name], {"pipeline_model_parallel_size": 2, **flags}
    with (
        mock.patch.object(TensorDescriptor, "to_header", told),
        Engine(model, micro_batch_size=4, global_batch_size=10, train_iters=2, **layout) as engine,
    ):
        shape = engine.distributed.model.input_shape
        for samples in (10, 7):
            images = torch.rand(samples, *shape, generator=torch.Generator().manual_seed(0))
            engine.train_step(images, torch.arange(samples) % 5)
        engine.evaluate(images[:1], torch.zeros(1, dtype=torch.long))
    return len(sent)


ALL = [(name, layout) for name in SMALL for layout in LAYOUTS if (name, layout) != ("sew_resnet-add", "rows")]
SOME = [(name, "bf16") for name in SMALL] + [("spikformer", layout) for layout in list(LAYOUTS)[1:]]
SOME += [("spike_driven", "plain-neurons"), ("qkformer", "rows"), ("vgg_dvs", "samples")]


@pytest.mark.parametrize(
    ("name", "layout"), [*SOME, *(pytest.param(*each, marks=pytest.mark.matrix) for each in ALL if each not in SOME)]
)
def test_no_rank_has_to_be_told(ranks, name: str, layout: str) -> None:
    size, flags = LAYOUTS[layout]
    if layout == "frozen":
        layers = describe(SMALL[name]).layers
        flags = {"lr_scale_of": ",".join(f"{each.name}.*=0" for each in layers[: len(layers) // 2 + 1])}
    assert ranks(size, _headers, name, flags) == [0] * size


class CutOff(nn.Module):
    """Its second half has no history; what it gives is neither channels-last in memory nor contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.unit = ConvNormNeuron(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.unit(x)
        return (0.5 * y).transpose(3, 4).contiguous().transpose(3, 4), y.detach()


class NoDerivative(SpikingNeuron):
    """A threshold, without a surrogate."""

    def charge(self, x: Tensor, state: dict[str, Tensor]) -> Tensor:
        return state["v"] + x

    def fire(self, h: Tensor, state: dict[str, Tensor]) -> Tensor:
        return (h > 1).to(h.dtype)

    def reset(self, h: Tensor, spikes: Tensor, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"v": h * (1 - spikes)}


class Stop(KeyedLayer):
    def __init__(self) -> None:
        super().__init__()
        self.unit = ConvNormNeuron(4, 4)

    def forward(self, x: Tensor, samples: range | None = None) -> Tensor:
        return self.unit(x).detach()


class StopConv(ParallelConv):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).detach()


WITHOUT_DERIVATIVE = {
    "neuron": lambda: nn.Sequential(ParallelConv(4, 4, 1), NoDerivative(4)),
    "neuron of a unit": lambda: ConvNormNeuron(4, 4, neuron=NoDerivative(4)),
    "keyed layer": Stop,
    "convolution": lambda: StopConv(4, 4, 1),
}


def _losses(kind: str, flags: dict[str, object]) -> list[float]:
    layers = lambda: [layer("cut", WITHOUT_DERIVATIVE[kind]()), layer("behind", ConvNormNeuron(4, 4))]  # noqa: E731
    with Engine(between(layers), micro_batch_size=2, global_batch_size=4, train_iters=2, **flags) as engine:
        images = torch.rand(4, *engine.config.model.input_shape, generator=torch.Generator().manual_seed(0))
        return [float(engine.train_step(images, torch.arange(4)).loss) for _ in range(2)]


@pytest.mark.parametrize("kind", WITHOUT_DERIVATIVE)
def test_layers_without_a_derivative_may_end_a_stage(ranks, kind: str) -> None:
    cut = {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "2|2"}
    assert ranks(2, _losses, kind, cut)[0] == ranks(1, _losses, kind, {})[0]


class Joined(nn.Module):
    def forward(self, both: tuple[Tensor, Tensor]) -> Tensor:
        return both[0] + both[1]


def _carried(
    model: Model, stop: int, samples: int = 3, context: BuildContext | None = None
) -> list[TensorDescriptor | None]:
    described = describe(model)
    boundaries = Boundaries(described, context or BuildContext())
    boundaries.find([samples])
    return [boundaries.planned(each, samples) for each in described.carried(stop)]


def test_what_is_planned_is_what_layers_give() -> None:
    dense, cut_off = _carried(between(lambda: [layer("two", CutOff()), layer("one", Joined())]), 2)
    assert dense == TensorDescriptor(
        (2, 3, 4, 4, 4), (0, 1, 3, 4, 2), torch.float32, Content.DENSE, torch.float32, True
    )
    assert cut_off is None, "the dry run does not show whether a layer that is trained is cut off"
    with torch.no_grad():
        (dense, _) = _carried(between(lambda: [layer("two", CutOff()), layer("one", Joined())]), 2)
        assert dense is not None and not dense.learns


class Doubled(nn.Module):
    """Has no weights, changes what a layer of MegaSNN's gives in place, and gives whole numbers beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.neuron = ParallelNeuron()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.neuron(x).mul_(2), torch.ones(2, x.shape[1], 1, 1, 1, dtype=torch.int64, device=x.device)


def test_layers_without_weights_and_whole_numbers_are_planned_too() -> None:
    doubled, ones = _carried(between(lambda: [layer("two", Doubled()), layer("one", Joined())]), 2)
    assert doubled is not None and doubled.learns
    assert ones is not None and not ones.learns


def test_the_order_of_plain_modules_is_not_planned() -> None:
    plain = lambda: [layer("plain", nn.Conv2d(4, 4, 1)), layer("own", ConvNormNeuron(4, 4))]  # noqa: E731
    assert _carried(between(plain), 2) == [None]
    (own,) = _carried(between(plain), 3)
    assert own is not None and own.shape == (2, 3, 4, 4, 4)


def test_what_has_no_dry_run_is_not_planned() -> None:
    boundaries = Boundaries(replace(describe(SMALL["vgg_dvs"]), dry_run=None), BuildContext())
    boundaries.find([3])
    assert boundaries.planned(Carried(0, None, Content.DENSE, ""), 3) is None


def test_a_plan_that_evaluation_has_made_serves_training() -> None:
    described = describe(SMALL["vgg_dvs"])
    boundaries, (carried,) = Boundaries(described, BuildContext()), described.carried(2)
    with torch.inference_mode():
        boundaries.find([3])
        evaluated = boundaries.planned(carried, 3)
    assert evaluated is not None and boundaries.planned(carried, 3) == replace(evaluated, learns=True)


class NormOfPixel(nn.Module):
    """One value per channel and sample."""

    def __init__(self, norm: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.unit, self.norm = ConvNormNeuron(4, 4), norm

    def forward(self, x: Tensor) -> Tensor:
        y = self.unit(x)
        return y * self.norm(y[:1].mean((3, 4), keepdim=True))


def _needs_two(x: Tensor) -> Tensor:
    if x.shape[1] < 2:
        raise ValueError("two samples at least")
    return x


NORMS = {
    "MegaSNN's": lambda: ParallelBatchNorm(4),
    "torch's": lambda: lambda x: nn.functional.batch_norm(x[0], None, None, training=True)[None],
}


@pytest.mark.parametrize("norm", NORMS)
def test_a_single_value_of_a_norm_has_no_plan(norm: str) -> None:
    model = between(lambda: [layer("mine", NormOfPixel(NORMS[norm]())), layer("own", ConvNormNeuron(4, 4))])
    assert _carried(model, 2, samples=1) == [None] and _carried(model, 2, samples=2) != [None]


def test_other_errors_of_a_dry_run_are_not_hidden() -> None:
    model = between(lambda: [layer("mine", NormOfPixel(_needs_two)), layer("own", ConvNormNeuron(4, 4))])
    with pytest.raises(ValueError, match=r"mine, given .*: two samples at least"):
        _carried(model, 2, samples=1)


class InPairs(nn.Module):
    """Compares samples, in training."""

    def __init__(self) -> None:
        super().__init__()
        self.unit = ConvNormNeuron(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.unit(_needs_two(x) if self.training else x)


def in_pairs() -> Iterable[Layer]:
    yield layer("mine", InPairs())
    yield layer("own", ConvNormNeuron(4, 4))


def _loss_of_five(flags: dict[str, object]) -> float:
    """In evaluation, which leaves one sample over."""
    with Engine(between(in_pairs), micro_batch_size=2, global_batch_size=4, train_iters=1, **flags) as engine:
        images = torch.rand(5, *engine.config.model.input_shape, generator=torch.Generator().manual_seed(0))
        return engine.evaluate(images, torch.arange(5) % 4).loss


def test_what_a_layer_refuses_in_training_alone_can_be_evaluated(ranks) -> None:
    cut = {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "2|2"}
    assert ranks(2, _loss_of_five, cut)[0] == ranks(1, _loss_of_five, {})[0]


def test_ranks_that_share_out_rows_have_some_of_them_up_to_where_images_are_whole() -> None:
    class Whole(nn.Module):
        mixes_rows = False

        def __init__(self) -> None:
            super().__init__()
            self.whole = WholeImages()

        def forward(self, x: Tensor) -> Tensor:
            return self.whole(x)

    model = between(lambda: [layer("whole", Whole()), layer("own", ConvNormNeuron(4, 4))], image_size=5)
    context = BuildContext(context=Group("context", (0, 1), 0), cut="rows")
    (own,), whole, behind = (_carried(model, stop, context=context) for stop in (1, 2, 3))
    assert own is not None and own.shape == (2, 3, 4, 3, 5)
    assert whole == behind == [None]


def test_nothing_is_tried_out_between_the_actions_of_a_step(ranks) -> None:
    assert ranks(2, _tried_in_actions, 2) == [(2, 0)] * 2
    assert ranks(1, _tried_in_actions, 1) == [(0, 0)], "without boundaries"


def _tried_in_actions(stages: int) -> tuple[int, int]:
    """How many dry runs for boundaries there were in a step with micro-batches of two sizes, and in its actions."""
    runs, places, found = [], [], Boundaries._of
    model = between(lambda: [layer("own", ConvNormNeuron(4, 4))])
    flags = {"micro_batch_size": 4, "global_batch_size": 10, "train_iters": 2, "pipeline_model_parallel_size": stages}
    with Engine(model, **flags) as engine:

        def counted(boundaries: Boundaries, samples: int, trains: bool) -> dict[object, TensorDescriptor]:
            runs.append(samples)
            places.append(engine.distributed.executor.place())
            return found(boundaries, samples, trains)

        with mock.patch.object(Boundaries, "_of", counted):
            engine.train_step(torch.rand(10, *engine.config.model.input_shape), torch.arange(10) % 4)
    return len(runs), sum(place is not None for place in places)


def test_layers_hand_on_tensors_and_get_gradients_with_their_channels_last() -> None:
    x, seen = torch.rand(2, 3, 4, 5, 6, requires_grad=True), list[Tensor]()
    y = 2 * x
    y.register_hook(lambda gradient: seen.append(gradient))
    given = to_channels_last(y)
    assert torch.equal(given, y) and given.movedim(2, -1).is_contiguous() and not y.movedim(2, -1).is_contiguous()
    assert to_channels_last(given) is given
    z = given * 1
    to_channels_last(z).backward(gradient := torch.rand(2, 3, 4, 5, 6))
    assert torch.equal(seen[0], gradient) and seen[0].movedim(2, -1).is_contiguous()
    repeated = torch.ones(1, 1, 1, 1, 1).expand(2, 3, 4, 5, 6)
    assert to_channels_last(repeated) is repeated, "takes no memory"
