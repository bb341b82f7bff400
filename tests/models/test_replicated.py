"""Plain modules, whole on every rank beside sharded ones: what they compute, keep and start from, and what is
refused."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from spikingjelly.activation_based import layer as sj
from spikingjelly.activation_based import neuron
from torch import Tensor, nn

import megasnn
from megasnn.common.grid import Grid
from megasnn.layers import (
    BuildContext,
    ConvNormNeuron,
    MeanLinear,
    ParallelBatchNorm,
    ParallelConv,
    ParallelDropout,
    ParallelLinear,
    apply_layer,
)
from megasnn.layers.layer import FunctionLayer, Layer, layer
from megasnn.layers.tensors import materialise, sharded_tensors
from megasnn.models.build import describe_model
from megasnn.models.model import Model
from megasnn.parallel_state import ParallelState
from megasnn.pipeline.chunk import PipelineChunk, build_chunks
from tests.models.networks import CLASSES, Integrates, Plain, between
from tests.parity.ranks import Layout, assemble, one_step

CPU, TWO = torch.device("cpu"), BuildContext(ParallelState.without_process_groups(Grid(tp=2)))
KEPT: list[Any] = []


def model_of(*makers: Callable[[], nn.Module], **options: Any) -> Model:
    def layers() -> Iterator[Layer]:
        return (layer(f"plain.{index}", make(), **options) for index, make in enumerate(makers))

    return between(layers, width=8, image_size=8)


def with_values(model: Model) -> dict[str, Any]:
    layers = describe_model(model).named_layers(BuildContext(time_steps=2))
    materialise(layers, CPU, 0)
    return dict(layers)


# --- outputs that are whole


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
        yield layer("mixing", nn.Sequential(nn.Identity(), Centre()))
        yield layer("tanh", torch.tanh)
        yield layer("twice", torch.add, takes=("tanh", "tanh"))
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


class Pooled(WholeOutputs):
    """Logits that a convolution gives, and that a function takes the mean of."""

    def layers(self) -> Iterable[Layer]:
        yield layer("stem", ConvNormNeuron(3, 8))
        yield layer("classes", nn.Conv2d(8, CLASSES, 1))
        yield layer("mean", lambda x: x.mean((-1, -2)))


# --- initial values, and what was set on modules


def around(kind: str = "usual", cut: bool = False) -> Model:
    """A plain part between layers of ours, whole or given to `shard`."""
    return between(partial(_around, kind, cut), width=8)


def _around(kind: str, cut: bool) -> list[Layer]:
    part, initialise = _part(kind), _ones if kind == "initialised" else None
    if cut:
        return [layer("part", megasnn.shard(part, initialise=initialise))]
    return [layer("part", part, initialise=initialise)]


def _part(kind: str) -> nn.Module:
    part = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
    if kind == "frozen":
        part[0].weight.register_hook(lambda grad: KEPT.append(grad))
        part[0].weight.requires_grad_(False)
        part[1].bias.requires_grad_(False)
    if kind == "tagged":
        part[0].note, part[0].weight.note, part[1].bias.note = "a", ["b"], "c"
        part[0].register_forward_hook(lambda module, given, y: KEPT.append((module.note, tuple(y.shape))))
    if kind == "hooked":
        part[0].weight.register_hook(lambda grad: KEPT.append(float(grad.abs().sum())))
    return part


def _ones(module: nn.Module) -> None:
    if isinstance(module, (nn.Conv2d, nn.BatchNorm2d)):
        nn.init.ones_(module.weight)
    if isinstance(module, nn.BatchNorm2d):
        nn.init.constant_(module.bias, 0.25)


def chunk_of(model: Model) -> PipelineChunk:
    return build_chunks(describe_model(model), [range(3)], [0], BuildContext(), CPU, 0)[0]


def forward_backward(model: Model) -> PipelineChunk:
    chunk = chunk_of(model)
    KEPT.clear()
    images = torch.rand(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    chunk(images, range(2)).square().sum().backward()
    return chunk


BOTH = pytest.mark.parametrize("cut", [False, True], ids=["whole", "shard"])


@BOTH
def test_a_users_initial_values_come_behind_the_modules_own(cut: bool) -> None:
    conv, norm = chunk_of(around(kind="initialised", cut=cut)).layers[1][:2]
    assert torch.equal(conv.weight, torch.ones(8, 8, 3, 3)) and torch.equal(norm.bias, torch.full((8,), 0.25))
    usual = chunk_of(around(cut=cut)).layers[1][0].weight
    assert usual.std() > 0.05 and torch.equal(usual, chunk_of(around(cut=not cut)).layers[1][0].weight)


def _frozen_and_usual(cut: bool) -> list[Any]:
    return [one_step(around(kind=kind, cut=cut), Layout(tensor=2)) for kind in ("frozen", "usual")]


@BOTH
def test_frozen_weights_stay_frozen_and_the_others_learn_the_same(ranks, cut: bool) -> None:
    steps = ranks(2, _frozen_and_usual, cut)
    frozen, usual = (assemble([each[number] for each in steps], "gradients") for number in (0, 1))
    assert usual.keys() - frozen.keys() == {"part.0.weight", "part.1.bias"}
    for name, value in frozen.items():
        assert torch.equal(value, usual[name]) and value.abs().max() > 0, name


@BOTH
def test_attributes_and_hooks_of_modules_stay(cut: bool) -> None:
    conv, norm = forward_backward(around(kind="tagged", cut=cut)).layers[1][:2]
    assert (conv.note, conv.weight.note, norm.bias.note) == ("a", ["b"], "c")
    assert [note for note, shape in KEPT] == ["a"] and KEPT[0][1][-3:] == (8, 4, 4)


def test_hooks_of_whole_parameters_see_the_gradient() -> None:
    chunk = forward_backward(around(kind="hooked"))
    assert KEPT == [float(chunk.layers[1][0].weight.grad.abs().sum())] and KEPT[0] > 0


def test_initial_values_are_those_of_the_modules_kind_and_depend_on_the_name() -> None:
    state = torch.random.get_rng_state()
    built, again = with_values(Plain()), with_values(Plain())
    assert torch.equal(state, torch.random.get_rng_state()), "training's own randomness has not moved"
    for name, module in built.items():
        for ours, theirs in zip(module.state_dict().values(), again[name].state_dict().values(), strict=True):
            assert torch.equal(ours, theirs)
    weight = built["conv"].weight
    assert weight.abs().max() <= 1 / 27**0.5 and weight.std() > 0.3 / 27**0.5
    assert torch.equal(built["norm"].weight, torch.ones(8)) and isinstance(built["norm"], ParallelBatchNorm)
    twins = with_values(between(lambda: [layer(name, ConvNormNeuron(4, 4)) for name in "ab"]))
    assert not torch.equal(twins["a"].conv.weight, twins["b"].conv.weight)
    plif = with_values(model_of(lambda: neuron.ParametricLIFNode(init_tau=4.0, step_mode="m")))["plain.0"]
    assert plif.w.sigmoid().item() == pytest.approx(0.25), "a single number that its constructor sets"


def test_a_function_of_the_users_initialises_a_module_of_ones_own() -> None:
    def fill(module: nn.Module, gain: float = 2.0) -> None:
        if isinstance(module, Scale):
            nn.init.constant_(module.scale, gain)

    assert with_values(model_of(Scale, initialise=fill))["plain.0"].scale.item() == 2


def _widths(module: nn.Module, path: str) -> None:
    """Values that tell path and shape that the function sees, with a random part."""
    if path.endswith(".norm"):
        nn.init.constant_(module.bias, len(path))
    if isinstance(module, (ParallelConv, nn.Conv2d)):
        nn.init.normal_(module.weight).add_(100 * module.weight.shape[0] + len(path))


def _layers_with_widths(plain: bool) -> list[Layer]:
    made = nn.Conv2d(8, 8, 1) if plain else ConvNormNeuron(8, 8)
    cut = nn.Sequential(OrderedDict(conv=nn.Conv2d(8, 8, 1), norm=nn.BatchNorm2d(8)))
    return [
        layer("one", made, initialise=_widths),
        layer("two", megasnn.shard(cut, initialise=_widths)),
    ]


def test_a_function_of_module_and_path_initialises_layers_of_ours_alike_on_every_layout() -> None:
    model = between(partial(_layers_with_widths, False), width=8)
    whole = {name: value for part in with_values(model).items() for name, value in _named_values(*part)}
    assert torch.equal(whole["one.norm.bias"], torch.full((8,), float(len("one.norm"))))
    assert torch.equal(whole["two.norm.bias"], torch.full((8,), float(len("two.norm"))))
    # A normal value differs from its mean by less than 6 here.
    assert (whole["one.conv.weight"] - 800 - len("one.conv")).abs().max() < 6
    assert not torch.equal(whole["one.conv.weight"], whole["two.conv.weight"])
    of_first_rank = describe_model(model).named_layers(TWO)
    materialise(of_first_rank, CPU, 0)
    for entry in sharded_tensors(of_first_rank):
        assert torch.equal(entry.tensor, entry.shard.cut(whole[entry.name])), entry.name


def test_a_plain_module_gets_its_path_too() -> None:
    conv = with_values(between(partial(_layers_with_widths, True), width=8))["one"]
    assert (conv.weight - 800 - len("one")).abs().max() < 6


def _named_values(prefix: str, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return ((f"{prefix}.{name}", value) for name, value in module.state_dict().items())


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x


def test_a_tensor_that_nothing_initialises_is_refused() -> None:
    with pytest.raises(ValueError, match="'scale' of Scale"):
        with_values(model_of(Scale))


# --- time, state and statistics


class Image(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.ndim > 3 else x.reshape(2, -1, 8, 1, 1)


class Tokens(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean((3, 4))


def attends(batch_first: bool = False) -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=batch_first)


@pytest.mark.parametrize(
    "make", [attends, lambda: nn.Sequential(nn.Flatten(0, 1), nn.Unflatten(0, (2, -1))), lambda: nn.Softmax(0)]
)
def test_a_sample_does_not_depend_on_others(make: Callable[[], nn.Module]) -> None:
    """Attention of torch's is over time, and not over time and samples."""
    mixes, x = with_values(model_of(Tokens, make, Image))["plain.1"], torch.randn(2, 3, 8)
    y = apply_layer(mixes, x, range(3)).reshape(x.shape)
    assert torch.allclose(apply_layer(mixes, x[:, :1], range(1)).view(2, 1, 8), y[:, :1], atol=1e-6)


CONTAINERS: dict[str, Callable[[], nn.Module]] = {
    "steps": lambda: sj.MultiStepContainer(nn.Conv2d(8, 8, 1), neuron.IFNode()),
    "linear": lambda: nn.Sequential(Tokens(), sj.LinearRecurrentContainer(neuron.IFNode(), 8, 8, step_mode="m")),
    "elements": lambda: sj.ElementWiseRecurrentContainer(neuron.IFNode(), torch.add, step_mode="m"),
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_containers_of_spikingjelly_call_neurons_in_single_step_mode_and_start_anew(kind: str) -> None:
    torch.manual_seed(0)
    container, x = with_values(model_of(CONTAINERS[kind], Image))["plain.0"], torch.rand(2, 3, 8, 1, 1)
    assert torch.equal(apply_layer(container, x, range(3)), apply_layer(container, x, range(3)))


def still() -> list[Layer]:
    return [layer("conv", nn.Conv2d(4, 4, 1)), layer("still", nn.BatchNorm2d(4).eval())]


def test_a_norm_in_evaluation_mode_keeps_its_statistics(ranks) -> None:
    (step,) = ranks(1, one_step, between(still), Layout())
    buffers = assemble([step], "buffers")
    assert torch.equal(buffers["still.running_mean"], torch.zeros(4, dtype=torch.float64))
    assert buffers["stem.norm.running_mean"].abs().max() > 0


def test_a_norm_at_two_places_stays_one() -> None:
    norm = with_values(model_of(lambda: nn.Sequential(*[nn.BatchNorm2d(8)] * 2)))["plain.0"]
    assert norm[0] is norm[1] and isinstance(norm[1], ParallelBatchNorm) and norm[1].calls == 2


def test_torchs_modules_that_work_in_place_do_it_aside() -> None:
    relu = with_values(model_of(lambda: nn.ReLU(inplace=True), lambda: nn.Conv2d(8, 8, 1)))["plain.0"]
    x = -torch.ones(2, 1, 8, 2, 2)
    assert apply_layer(relu, x, range(1)).max() == 0 and x.max() == -1


# --- refusals

MADE, ONES, MADE_BEFORE = nn.Conv2d(8, 8, 1), torch.ones(1), ConvNormNeuron(8, 8)


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return x


class Halved(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * super().forward(x)


class With(ConvNormNeuron):
    """A block with a part that it does not call."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__(8, 8)
        self.part = part


class Scaled(ConvNormNeuron):
    def __init__(self) -> None:
        super().__init__(8, 8)
        self.scale = nn.Parameter(torch.Tensor(1))


class Steeper(Integrates):
    def __init__(self) -> None:
        super().__init__(8)
        self.steep = nn.Parameter(torch.ones(8))


class Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = ParallelDropout(0.2, "a")

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.dropout(x))


class Function(ConvNormNeuron):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__(8, 8)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(super().forward(x))


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "dropout": (lambda: nn.Dropout2d(0.1), r"draws .*megasnn\.ParallelDropout"),
    "single step": (lambda: sj.Conv2d(8, 8, 1), "step_mode='m'"),
    "buffer": (Counts, "'seen'"),
    "lazy": (lambda: nn.LazyConv2d(8, 1), "uninitialized"),
    "batch first": (lambda: attends(batch_first=True), "batch_first=True"),
    "sizes": (lambda: nn.Conv2d(4, 8, 1), r"given \[2, 2, 8, 8, 8\]"),
    "values": (lambda: MADE, "Conv2d has values in 'weight'"),
    "own norm": (lambda: Halved(8), "Halved is a batch norm"),
    "made before": (lambda: MADE_BEFORE, "made outside `layers`"),
    "dropout inside": (lambda: Function(nn.Dropout(0.1)), r"in function: .* draws .*megasnn\.ParallelDropout"),
    "state inside": (lambda: With(neuron.LIFNode(step_mode="m")), r"part \(LIFNode\)"),
    "weights inside": (lambda: With(nn.Conv2d(8, 8, 1)), r"part \(Conv2d\) .* 'weight'"),
    "weights beside": (Scaled, "Scaled .* 'scale'"),
    "weights of neurons": (lambda: With(Steeper()), r"part \(Steeper\) .*self\.per_channel\('steep'"),
    "dropout twice": (Drops, "twice"),
    "function": (lambda: Function(partial(F.dropout, p=0.2)), "bernoulli_ draws"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_computed_alike_everywhere_is_refused_with_the_layers_name(kind: str) -> None:
    make, names = REFUSED[kind]
    with pytest.raises(ValueError, match=rf"plain\.0.*{names}"):
        describe_model(model_of(make)).build(BuildContext())


def test_a_function_that_could_draw_and_does_not_is_taken() -> None:
    assert describe_model(model_of(lambda: FunctionLayer(lambda x: F.scaled_dot_product_attention(x, x, x)))).layers


def test_sizes_that_do_not_divide_are_refused_or_stay_whole() -> None:
    with pytest.raises(ValueError, match="the first layer: out_channels 8 .*--tensor-model-parallel-size 3"):
        describe_model(model_of()).build(BuildContext(ParallelState.without_process_groups(Grid(tp=3))))
    narrow = describe_model(model_of(lambda: nn.Conv2d(8, 6, 1), lambda: nn.Conv2d(6, 8, 1)))
    assert narrow.build(BuildContext(ParallelState.without_process_groups(Grid(tp=4))))
