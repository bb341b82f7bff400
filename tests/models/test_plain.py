"""Models of plain modules: torch's and SpikingJelly's layers, whole on every rank, beside sharded ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.nn.functional as functional_torch
from spikingjelly.activation_based import layer as sj
from spikingjelly.activation_based import neuron
from torch import Tensor, nn

from megasnn.kernels.spike_codec import Content
from megasnn.layers import (
    BuildContext,
    ConvNormNeuron,
    KeyedLayer,
    MeanLinear,
    ParallelBatchNorm,
    ParallelDropout,
    SpikingNeuron,
)
from megasnn.layers.holding import content_of
from megasnn.models.building import describe
from megasnn.models.layer import Computed, Layer, layer
from megasnn.models.model import Model, run_config
from megasnn.parallel.sharding import materialise
from megasnn.parallel_state import Group
from megasnn.pipeline.chunk import describe_tensors
from tests.models.networks import CLASSES, between
from tests.models.steps import assert_equal, one_step
from tests.parity.ranks import Layout

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Plain(Model):
    """Nothing in it knows of MegaSNN, but one unit in the middle."""

    image_size: int = 8
    time_steps: int = 3
    num_classes: int = CLASSES
    width: int = 8
    sharded: bool = True

    def layers(self) -> Iterable[Layer]:
        yield layer("conv", nn.Conv2d(3, self.width, 3, padding=1))
        yield layer("norm", nn.BatchNorm2d(self.width))
        yield layer("fire", neuron.LIFNode(step_mode="m"), holds=Content.SPIKES)
        yield layer("pool", nn.MaxPool2d(2))
        if self.sharded:
            yield layer("unit", ConvNormNeuron(self.width, self.width, 3))
        yield layer(
            "block",
            nn.Sequential(
                sj.Conv2d(self.width, 2 * self.width, 3, padding=1, bias=False, step_mode="m"),
                sj.BatchNorm2d(2 * self.width, step_mode="m"),
                neuron.LIFNode(step_mode="m"),
            ),
        )
        yield layer("mean", nn.AdaptiveAvgPool2d(1))
        yield layer("flat", nn.Flatten())
        yield layer("head", nn.Linear(2 * self.width, self.num_classes))


@dataclass(frozen=True, kw_only=True)
class Functions(Plain):
    """The same with functions in place of modules without parameters, and a sum of two layers."""

    functions: bool = True

    def layers(self) -> Iterable[Layer]:
        for each in super().layers():
            if self.functions and each.name == "mean":
                yield layer("mean", lambda x: x.mean((-1, -2)))
            elif self.functions and each.name == "flat":
                yield layer("flat", torch.add, takes=("mean", "mean"))
            elif each.name == "flat":
                yield layer("flat", Doubled())
            else:
                yield each


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x.flatten(2)


def test_a_function_is_a_layer(ranks) -> None:
    """As a module that does the same, also where ranks share the channels of what it is given."""
    one = ranks(1, one_step, Functions(functions=False), Layout())
    for layout in (Layout(), Layout(tensor=2, pipeline=2)):
        assert_equal(ranks(layout.world_size, one_step, Functions(), layout), one)


def test_initial_values_are_those_of_the_modules_kind_and_depend_on_the_name() -> None:
    built = dict(describe(Plain()).named_layers(BuildContext()))
    state = torch.random.get_rng_state()
    materialise(built.items(), CPU, seed=0)
    assert torch.equal(state, torch.random.get_rng_state()), "training's own randomness has not moved"
    again = dict(describe(Plain()).named_layers(BuildContext()))
    materialise(again.items(), CPU, seed=0)
    for name, module in built.items():
        for ours, theirs in zip(module.state_dict().values(), again[name].state_dict().values(), strict=True):
            assert torch.equal(ours, theirs)
    weight = built["conv"].weight
    assert weight.abs().max() <= 1 / 27**0.5 and weight.std() > 0.3 / 27**0.5
    assert torch.equal(built["norm"].weight, torch.ones(8)) and isinstance(built["norm"], ParallelBatchNorm)


def _model(*makers: Callable[[], nn.Module], **options: object) -> Model:
    def layers() -> Iterable[Layer]:
        return (layer(f"plain.{index}", make(), **options) for index, make in enumerate(makers))

    return between(layers, width=8, image_size=8)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x


MADE = nn.Conv2d(8, 8, 1)
ONES = torch.ones(1)


class Cache(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(3), persistent=False)


def _scaled(x: Tensor, scale: Tensor = ONES) -> Tensor:
    return scale * x


@pytest.mark.parametrize(
    "function",
    [lambda x: MADE(x), MADE.forward, partial(torch.add, ONES), _scaled],
    ids=["global", "method", "partial", "default"],
)
def test_a_function_that_holds_weights_is_refused_with_the_layers_name(function) -> None:
    with pytest.raises(ValueError, match="a: a function that holds a (Conv2d|Tensor): make a module of both"):
        layer("a", function)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Dropout(0.1), r"plain\.0: Dropout \(Dropout\) draws random numbers that depend on the layout: use"),
        (lambda: sj.Conv2d(8, 8, 1), r"step mode 's'.*step_mode='m'"),
        (Cache, r"a buffer 'table' that is not saved"),
        (lambda: nn.LazyConv2d(8, 1), r"does not say its sizes"),
        (lambda: nn.Conv2d(4, 8, 1), r"plain\.0, given \[2, 2, 8, 8, 8\]: Invalid channel dimensions"),
        (lambda: MADE, r"plain\.0: weight of Conv2d has values: make modules in `layers`"),
    ],
)
def test_what_cannot_be_computed_alike_everywhere_is_refused_with_the_layers_name(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        describe(_model(make))


def test_a_parameter_that_nothing_initialises_is_refused_and_a_function_of_the_users_helps() -> None:
    built = describe(_model(Scale)).named_layers(BuildContext())
    with pytest.raises(ValueError, match="nothing initialises 'scale' of Scale: .* reset_parameters .* initialise="):
        materialise(built, CPU, 0)

    def fill(module: nn.Module) -> None:
        if isinstance(module, Scale):
            nn.init.constant_(module.scale, 2.0)

    built = describe(_model(Scale, initialise=fill)).named_layers(BuildContext())
    materialise(built, CPU, 0)
    assert dict(built)["plain.0"].scale.item() == 2.0


def test_sizes_that_do_not_divide_are_refused_with_layer_and_flag() -> None:
    three = BuildContext(Group("tensor", (0, 1, 2)))
    with pytest.raises(
        ValueError, match="the first layer: out_channels 8 does not divide by --tensor-model-parallel-size 3"
    ):
        describe(_model()).build(three)
    narrow = describe(_model(lambda: nn.Conv2d(8, 6, 1), lambda: nn.Conv2d(6, 8, 1)))
    assert narrow.build(BuildContext(Group("tensor", (0, 1, 2, 3)))), "what does not divide stays whole"


def test_a_promise_about_the_output_is_checked() -> None:
    class Twice(ConvNormNeuron):
        def forward(self, x: Tensor) -> Tensor:
            spikes = super().forward(x)
            return spikes + spikes

    @dataclass(frozen=True, kw_only=True)
    class Wrong(Model):
        num_classes: int = CLASSES

        def layers(self) -> Iterable[Layer]:
            yield layer("twice", Twice(3, 8), holds=Content.SPIKES)
            yield layer("head", MeanLinear(8, CLASSES))

    with pytest.raises(ValueError, match="twice: holds=SPIKES, but its output can be larger than 1"):
        describe(Wrong())
    assert describe_tensors(describe(_model()), BuildContext())
    assert content_of(torch.empty(1)) is Content.DENSE


@dataclass(frozen=True, kw_only=True)
class Twins(Model):
    def layers(self) -> Iterable[Layer]:
        yield layer("a", ConvNormNeuron(3, 8))
        yield layer("a", MeanLinear(8, 10))


def test_a_name_is_for_one_layer_and_the_last_layer_gives_logits() -> None:
    with pytest.raises(ValueError, match="two layers of twins have the name 'a'"):
        describe(Twins())
    with pytest.raises(ValueError, match=r"head: the last layer gives \[2, 2, 4\].*logits are \[2, 2, 7\]"):
        described = _model()
        object.__setattr__(described, "num_classes", 7)
        describe(described)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.unit, self.plain = ConvNormNeuron(8, 8), nn.Conv2d(8, 8, 1)


class WithDropout(ConvNormNeuron):
    def __init__(self, part: nn.Module) -> None:
        super().__init__(8, 8)
        self.part = part


class Scaled(ConvNormNeuron):
    def __init__(self) -> None:
        super().__init__(8, 8)
        self.scale = nn.Parameter(torch.Tensor(1))


class Unsaved(ConvNormNeuron):
    def __init__(self) -> None:
        super().__init__(8, 8)
        self.register_buffer("mask", torch.ones(8, 1, 1), persistent=False)


class Steeper(SpikingNeuron):
    def __init__(self) -> None:
        super().__init__(8)
        self.steep = nn.Parameter(torch.ones(8))

    def charge(self, x: Tensor, state: dict[str, Tensor]) -> Tensor:
        return self.of("steep", x) * x

    def reset(self, h: Tensor, spikes: Tensor, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return state


class Steep(ConvNormNeuron):
    def __init__(self) -> None:
        super().__init__(8, 8, neuron=Steeper())


class DropsTwice(KeyedLayer):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = ParallelDropout(0.2, "twice")

    def forward(self, x: Tensor, samples: range | None) -> Tensor:
        return self.dropout(self.dropout(x, samples), samples)


class Dropping(ConvNormNeuron):
    def forward(self, x: Tensor) -> Tensor:
        return functional_torch.dropout(super().forward(x), 0.2)


class Unkeyed(ConvNormNeuron):
    def __init__(self) -> None:
        super().__init__(8, 8)
        self.dropout = ParallelDropout(0.2, "unkeyed")

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(super().forward(x))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: WithDropout(nn.Dropout(0.1)), r"plain\.0: part \(Dropout\) draws random numbers"),
        (lambda: WithDropout(nn.BatchNorm2d(8)), r"plain\.0: part \(BatchNorm2d\) .* use megasnn\.ParallelBatchNorm"),
        (lambda: WithDropout(neuron.LIFNode(step_mode="m")), r"part \(LIFNode\) .* keeps its state"),
        (
            Mixed,
            r"plain\.0: plain\.weight of Conv2d: a plain module with parameters inside .* cannot be cut: use Parallel",
        ),
        (
            Scaled,
            r"plain\.0: scale of Scaled stands beside layers that are cut by channel.* yield that as a layer of its",
        ),
        (
            Steep,
            r"plain\.0: neuron\.steep of Steeper is not cut .* declare it with self\.per_channel\('steep', its init",
        ),
        (Unsaved, r"plain\.0: Unsaved has a buffer 'mask' that is not saved"),
        (
            DropsTwice,
            r"plain\.0.* this ParallelDropout is called twice in one forward, and would draw the same both times",
        ),
        (lambda: Dropping(8, 8), r"plain\.0.* dropout draws random numbers that depend on the layout"),
        (Unkeyed, r"plain\.0.*dropout needs the positions of 2 samples, got None; .* is a KeyedLayer"),
    ],
)
def test_a_block_whose_result_would_depend_on_the_layout_is_refused(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        describe(_model(make))


@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (lambda x: torch.native_dropout(x, 0.5, True)[0], "native_dropout"),
        (lambda x: functional_torch.scaled_dot_product_attention(x, x, x, dropout_p=0.2), "scaled_dot_product"),
        (lambda x: x.clone().log_normal_(), "log_normal_"),
        (lambda x: x.clone().cauchy_(), "cauchy_"),
        (lambda x: x.clone().geometric_(0.5), "geometric_"),
        (lambda x: x.clone().random_(), "random_"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_function_that_draws_is_refused(draw, name: str) -> None:
    with pytest.raises(ValueError, match=rf"plain\.0.* {name}.* draws random numbers that depend on the layout"):
        describe(_model(lambda: Computed(draw)))


def test_a_function_that_could_draw_and_does_not_is_taken() -> None:
    def attend(x: Tensor) -> Tensor:
        return functional_torch.scaled_dot_product_attention(x, x, x)

    assert len(describe(_model(lambda: Computed(attend))).layers) > 1


class Joined(nn.Module):
    """Two units, whose outputs meet by a function."""

    def __init__(self, meet: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.meet = ConvNormNeuron(8, 8), ConvNormNeuron(8, 8), meet

    def forward(self, x: Tensor) -> Tensor:
        return self.meet(self.a(x), self.b(x))


class Inhibited(SpikingNeuron):
    def charge(self, x: Tensor, state: dict[str, Tensor]) -> Tensor:
        return x - x.mean(1, keepdim=True)

    def reset(self, h: Tensor, spikes: Tensor, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return state


MIXING: dict[str, Callable[[], nn.Module]] = {
    "cat": lambda: Joined(lambda a, b: torch.cat([a[:, :, :4], b[:, :, 4:]], 2)),
    "chunk": lambda: Joined(lambda a, b: torch.cat(a.chunk(2, 2)[::-1], dim=2)),
    "mean": lambda: Joined(lambda a, b: a * b.mean(2, keepdim=True)),
    "softmax": lambda: Joined(lambda a, b: a * b.softmax(-3)),
    "__getitem__": lambda: Joined(lambda a, b: a + b[:, :, :1]),
    "sum": lambda: Joined(lambda a, b: a * b.sum()),
    "flip": lambda: Joined(lambda a, b: a + b.flatten(0, 1).flip(1).unflatten(0, a.shape[:2])),
    "of a neuron": lambda: ConvNormNeuron(8, 8, neuron=Inhibited(8)),
}


@pytest.mark.parametrize("kind", MIXING)
def test_what_mixes_channels_is_refused_where_ranks_share_them_out(kind: str) -> None:
    described = describe(_model(MIXING[kind]))  # right on one rank
    with pytest.raises(ValueError, match=r"plain\.0.*--tensor-model-parallel-size above 1"):
        described.build(BuildContext(Group("tensor", (0, 1))))


def test_what_leaves_channels_alone_is_not_refused() -> None:
    def meet(a: Tensor, b: Tensor) -> Tensor:
        return a * torch.cat([b[..., :4], b[..., 4:]], -1) + b.mean((3, 4), keepdim=True) + torch.maximum(a, b)

    described = describe(_model(lambda: Joined(meet)))
    assert len(described.build(BuildContext(Group("tensor", (0, 1))))) == 3


class Halved(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * super().forward(x)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tensor([True, False]))

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_a_batch_norm_with_a_forward_of_its_own_is_not_swapped() -> None:
    with pytest.raises(ValueError, match=r"Halved \(Halved\) is a batch norm with a forward of its own"):
        describe(_model(lambda: Halved(8)))


def test_a_buffer_that_only_the_constructor_sets_is_refused() -> None:
    built = describe(_model(Masked)).named_layers(BuildContext())
    with pytest.raises(ValueError, match="nothing initialises 'mask' of Masked: values that its constructor sets"):
        materialise(built, CPU, 0)


def test_a_parametric_neuron_of_spikingjelly_is_a_layer() -> None:
    def fill(module: nn.Module) -> None:
        if isinstance(module, neuron.ParametricLIFNode):
            nn.init.zeros_(module.w)

    described = describe(_model(lambda: neuron.ParametricLIFNode(step_mode="m"), initialise=fill))
    built = described.named_layers(BuildContext())
    materialise(built, CPU, 0)
    assert dict(built)["plain.0"].w.item() == 0.0
    built = describe(_model(lambda: neuron.ParametricLIFNode(init_tau=4.0, step_mode="m"))).named_layers(BuildContext())
    materialise(built, CPU, 0)
    assert dict(built)["plain.0"].w.sigmoid().item() == pytest.approx(0.25)


MADE_BEFORE = ConvNormNeuron(8, 8)


def test_sharded_modules_too_are_made_where_they_are_yielded() -> None:
    with pytest.raises(ValueError, match=r"plain\.0: made outside `layers`"):
        describe(_model(lambda: MADE_BEFORE)).build(BuildContext())


def test_a_class_that_is_no_model_yet_is_refused_with_what_it_lacks() -> None:
    class Bare(Model):
        def layers(self) -> Iterable[Layer]:
            yield layer("head", MeanLinear(3, 10))

    @dataclass(frozen=True, kw_only=True)
    class Lacking(Bare):
        width: int

    @dataclass(frozen=True, kw_only=True)
    class Empty(Model):
        def layers(self) -> Iterable[Layer]:
            return []

    @dataclass(frozen=True, kw_only=True)
    class Unnamed(Model):
        def layers(self) -> Iterable[Layer]:
            yield MeanLinear(3, 10)  # type: ignore[misc]

    with pytest.raises(ValueError, match="Bare is no dataclass: put @dataclass"):
        run_config(Bare)
    with pytest.raises(ValueError, match="Lacking.width has no default, and is a flag"):
        run_config(Lacking)
    with pytest.raises(ValueError, match="`layers` yields nothing"):
        describe(Empty())
    with pytest.raises(ValueError, match="`layers` yields a MeanLinear; yield megasnn.layer"):
        describe(Unnamed())


def test_logits_that_are_pooled_are_whole_on_every_rank() -> None:
    @dataclass(frozen=True, kw_only=True)
    class AllConvolution(Model):
        image_size: int = 8
        num_classes: int = CLASSES

        def layers(self) -> Iterable[Layer]:
            yield layer("stem", ConvNormNeuron(3, 8))
            yield layer("classes", nn.Conv2d(8, CLASSES, 1))
            yield layer("mean", nn.AdaptiveAvgPool2d(1))
            yield layer("flat", nn.Flatten())

    assert len(describe(AllConvolution()).build(BuildContext(Group("tensor", (0, 1))))) == 4
