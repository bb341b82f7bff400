"""Layers that give several tensors, and layers that take what earlier ones have given, over stages."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from megasnn.common.bundle import Bundle, entries_of, logits_of
from megasnn.layers import BuildContext, ConvNormNeuron, Numerics
from megasnn.layers.layer import Layer, layer
from megasnn.layers.shape_inference import mark_spikes
from megasnn.layers.tensors import materialise
from megasnn.models.build import describe_model
from megasnn.models.losses import cross_entropy_sum
from megasnn.models.model import Model
from megasnn.parallel.traffic import traffic
from megasnn.pipeline.chunk import build_chunks
from megasnn.pipeline.profile_layers import count_memory, profile_layers
from tests.models.networks import CLASSES, Bundles, Random, Sum, UNet, Up, between
from tests.parity.ranks import (
    Layout,
    built,
    evaluated,
    forward_backward,
    images,
    inputs_of,
    tensors_of,
)

CPU = torch.device("cpu")


def test_one_rank_computes_what_autograd_computes() -> None:
    described = describe_model(UNet())
    context = BuildContext(numerics=Numerics(torch.float64, torch.float64))
    bounds = [range(0, 3), range(3, 5), range(5, 8), range(8, 10)]
    chunks = [*build_chunks(described, bounds, range(4), context, CPU, 3).values()]
    layers = described.named_layers(context)
    materialise(layers, CPU, 3)
    x, labels = images(UNet())
    of = dict(layers)
    stem = of["stem"](x.unsqueeze(0))
    down = of["down.0"](stem)
    up = of["up.0"](of["up.1"](of["down.1"](down), down), stem)
    out = of["out"](torch.cat([up, stem], 2))
    logits = of["head"](torch.cat([stem, out], 2))
    cross_entropy_sum(logits, labels).backward()
    carried: Tensor | list[Tensor] = x
    for chunk in chunks:
        carried = chunk(carried, range(len(x)))
    assert isinstance(carried, Tensor) and torch.equal(carried, logits)
    cross_entropy_sum(carried, labels).backward()
    ours = {e.name: e.tensor.grad for chunk in chunks for e in chunk.sharded_tensors() if e.is_parameter}
    for name, module in layers:
        for path, parameter in module.named_parameters(prefix=name):
            torch.testing.assert_close(ours[path], parameter.grad, rtol=1e-12, atol=1e-14)
    assert [[each.name for each in chunk.hands_on] for chunk in chunks[:-1]] == [
        ["the output of stem", "the output of down.0", "the output of down.1"],
        ["the output of stem", "the output of pass", "the output of up.1"],
        ["the output of stem", "the output of out"],
    ]


def _random_step(seed: int, chunks: int) -> tuple[float, dict[str, Tensor]]:
    """Loss, gradients and buffers of a random network that is cut at random places, on one rank."""
    draw, model = random.Random(seed), describe_model(Random(seed=seed))
    cuts = sorted(draw.choices(range(len(model.layers) + 1), k=chunks - 1))
    bounds = [range(start, end) for start, end in zip([0, *cuts], [*cuts, len(model.layers)], strict=True)]
    layout = Layout(schedule="interleaved" if chunks > 1 else "1f1b", chunks=chunks)
    with built(model, layout, torch.float32, bounds=bounds) as engine:
        x, labels = images(Random())
        loss = forward_backward(engine, inputs_of(engine, x[:4].float(), labels[:4], 2), 4)
        engine.running_statistics.merge(2)
        return loss, tensors_of(engine)


@pytest.mark.parametrize("seed", range(4))
def test_no_cut_of_a_random_network_changes_a_bit(seed: int) -> None:
    loss, expected = _random_step(seed, 1)
    for chunks in (2, 3, 5):
        other, found = _random_step(seed, chunks)
        assert other == loss and found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def _traffic() -> dict[str, tuple[int, int]]:
    """Bytes and dense bytes of one micro-batch over a boundary in the middle, by direction."""
    x, labels = images(Bundles())
    bounds = [range(2), range(2, 6)]
    with built(describe_model(Bundles()), Layout(pipeline=2), torch.float32, bounds=bounds) as engine:
        micro = inputs_of(engine, x[:2].float(), labels[:2], 2)
        traffic.reset()
        with traffic.counting():
            forward_backward(engine, micro, 2)
            evaluated(engine, micro * 2)
            forward_backward(engine, micro, 2)
        found = {group: (t.bytes, t.dense_bytes) for group, t in traffic.by_group.items()}
        traffic.reset()
        return found


def test_each_entry_travels_in_its_own_format_and_gradients_only_where_they_are_needed(ranks) -> None:
    first, second = ranks(2, _traffic)
    count = 2 * 2 * 4 * 6 * 6  # values of an entry
    of_one = 4 * count + count // 8 + count
    assert first["pp"] == (4 * of_one, 4 * 3 * 4 * count)
    assert second["backward"] == (2 * 3 * 4 * count,) * 2  # of the counts zeros: that they are cut off is not foreseen


def test_costs_of_a_boundary_are_those_of_all_that_crosses_it() -> None:
    model = describe_model(UNet())
    costs = profile_layers(model, 2, BuildContext(), CPU, 1)
    spikes = 2 * 2 * 4 * 8 * 8
    assert costs[0].gradient == 4 * spikes and costs[0].message == spikes // 8
    assert costs[2].gradient == 4 * (spikes + spikes // 2 + spikes // 8)  # stem, down.0, down.1
    assert costs[-1].gradient == 4 * 2 * 2 * CLASSES
    tried = count_memory(describe_model(Bundles()), 2, BuildContext(), CPU)
    count = 2 * 2 * 4 * 6 * 6  # values of an entry
    assert tried.layers[1].gradient == 2 * 4 * count and tried.layers[1].held > 0  # of the spikes and the dense values


def _bounded(output: dict[str, Tensor], labels: Tensor) -> Tensor:
    return cross_entropy_sum(output, labels) + output["rate"].mean() * len(labels)


def _step_with_a_loss_of_its_own(layout: Layout) -> tuple[float, list[float]]:
    bounds = [range(6)] if layout.pipeline == 1 else [range(4), range(4, 6)]
    with built(describe_model(Bundles()), layout, bounds=bounds) as engine:
        engine.loss.training_loss = _bounded
        x, labels = images(Bundles())
        micro = inputs_of(engine, x, labels, len(x))
        return forward_backward(engine, micro, len(x)), evaluated(engine, micro)


def test_a_loss_sees_the_bundle_and_hits_are_counted_by_the_logits(ranks) -> None:
    ((loss, evaluated),) = ranks(1, _step_with_a_loss_of_its_own, Layout())
    assert evaluated[1] == len(images(Bundles())[1]) and 0 < evaluated[2] <= evaluated[3] == evaluated[1]
    for other, totals in ranks(2, _step_with_a_loss_of_its_own, Layout(pipeline=2)):
        assert other == loss and totals == evaluated
    first, second = torch.zeros(1), torch.ones(1)
    assert logits_of((first, second)) is first and logits_of({"a": first, "b": second}) is first
    assert logits_of({"a": first, "logits": second}) is second


class Changing(nn.Module):
    """Gives something else than in the dry run, in ways of its own."""

    def __init__(self, change: Callable[[dict[str, Tensor]], object]) -> None:
        super().__init__()
        self.unit, self.change = ConvNormNeuron(4, 4), change

    def forward(self, x: Tensor) -> object:
        y = {"spikes": self.unit(x), "dense": 0.5 * x}
        return y if x.is_meta else self.change(y)


class Meeting(nn.Module):
    def forward(self, x: Bundle) -> Tensor:
        first, second = entries_of(x).values()
        return first + second


CHANGES: dict[str, Callable[[dict[str, Tensor]], object]] = {
    "an entry less": lambda y: {"spikes": y["spikes"]},
    "a tuple": lambda y: tuple(y.values()),
    "a tensor": lambda y: y["spikes"],
    "a list": lambda y: list(y.values()),
}
NAMED = {
    "an entry less": r"two: .*\['spikes'\].*\['spikes', 'dense'\]",
    "a tuple": r"two: .*\[0, 1\]",
    "a tensor": r"two: its output has the entries \[None\]",
    "a list": "two: .* not a list",
}


@pytest.mark.parametrize("change", NAMED)
def test_an_output_that_differs_from_the_dry_runs_is_refused_at_the_first_step(change: str) -> None:
    model = _model(lambda: layer("two", Changing(CHANGES[change])), lambda: layer("one", Meeting()))
    chunk = build_chunks(describe_model(model), [range(4)], [0], BuildContext(), CPU, 0)[0]
    with pytest.raises(ValueError, match=NAMED[change]):
        chunk(torch.zeros(3, 3, 4, 4), range(3))


def _model(*layers: Callable[[], Layer]) -> Model:
    return between(lambda: (make() for make in layers))


class Gives(nn.Module):
    def __init__(self, make: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.unit, self.make = ConvNormNeuron(4, 4), make

    def forward(self, x: Tensor) -> object:
        return self.make(self.unit(x))


class ChangesAnEntry(nn.Module):
    def forward(self, x: tuple[Tensor, Tensor]) -> Tensor:
        return x[0] + x[1].add_(1)


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Gives(lambda y: y * y.max().item())

    def forward(self, x: Tensor) -> object:
        return self.inner(x)


def up(*takes: str) -> Callable[[], Layer]:
    return lambda: layer("a", Up(4, 4), takes=takes)


def gives(make: Callable[[Tensor], object]) -> Callable[[], Layer]:
    return lambda: layer("a", Gives(make))


def unit(name: str, **options: object) -> Callable[[], Layer]:
    return lambda: layer(name, ConvNormNeuron(4, 4), **options)


def meet() -> Layer:
    return layer("meet", Meeting())


@pytest.mark.parametrize(
    ("layers", "named"),
    [
        ([up("stem", "b")], "a takes 'b'.*stem"),
        ([up("stem", "head")], "a takes 'head'"),
        ([up("stem")], r"a, given \[2, 2, 4, 4, 4\]: .*forward.*skip"),
        ([up("stem", "stem")], r"a, given \[.*\] and \[.*\]: .*broadcast"),
        ([unit("a"), unit("b", takes="stem")], "a: no later layer"),
        (
            [lambda: layer("a", torch.Tensor.relu_), lambda: layer("b", Sum(), takes=("a", "stem"))],
            "a, given .*in place",
        ),
        (
            [
                gives(lambda y: (y, 2 * y)),
                lambda: layer("b", ChangesAnEntry()),
                lambda: layer("c", Sum(), takes=("a", "b")),
            ],
            "b, given .*in place",
        ),
        ([gives(lambda y: [y])], "a, given .*list"),
        ([gives(lambda y: {1: y})], "a, given .*dict"),
        ([gives(lambda y: ())], "a, given .*empty tuple"),
        ([gives(lambda y: (y, 1))], "entry 1 of a layer's output must be a tensor, not int"),
        ([lambda: layer("a", Reads())], r"a, given .*: in inner: .*test_bundles.py, line \d+\)"),
        ([gives(ConvNormNeuron(5, 4))], "a, .*: in make.conv: .* 5 input channels, got 4"),
        ([lambda: layer("a", ConvNormNeuron(4, 4), takes=())], r"a: takes=\(\)"),
        ([unit("a", takes=("stem", "stem"))], r"a, given \[.*\] and \[.*\]: TypeError"),
        ([lambda: layer("a", ConvNormNeuron)], "'a' takes a torch.nn.Module, got .*ConvNormNeuron"),
        ([lambda: layer("a", 3)], "'a' takes a torch.nn.Module, got 3"),
    ],
)
def test_what_cannot_be_put_together_is_refused_with_its_place(layers, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        describe_model(_model(*layers))


class Pair(NamedTuple):
    spikes: Tensor
    dense: Tensor


@pytest.mark.parametrize("kind", [Pair, lambda a, b: OrderedDict(spikes=a, dense=b)])
def test_the_next_layer_gets_a_plain_tuple_or_dict_of_a_class_of_its_own(kind: Callable[..., Bundle]) -> None:
    class Takes(nn.Module):
        def forward(self, x: Bundle) -> Tensor:
            assert type(x) in (tuple, dict)
            return sum(entries_of(x).values())

    makes = [lambda: layer("two", Gives(lambda y: kind(y, 0.5 * y))), lambda: layer("one", Takes())]
    model = describe_model(_model(*makes))
    assert [entry.content.name for entry in model.layers[1].entries.values()] == ["SPIKES", "DENSE"]
    chunk = build_chunks(model, [range(4)], [0], BuildContext(), CPU, 0)[0]
    assert chunk(torch.zeros(3, 3, 4, 4), range(3)).shape == (2, 3, CLASSES)


@pytest.mark.parametrize(("says", "content"), [(mark_spikes, "SPIKES"), (lambda y: mark_spikes(y, 2), "COUNTS")])
def test_a_forward_says_what_does_not_follow_from_it(says: Callable[[Tensor], Tensor], content: str) -> None:
    described = describe_model(_model(gives(lambda y: says(2 * (0.5 * y)))))
    assert described.layers[1].entries[None].content.name == content


def test_contents_are_found_for_each_entry() -> None:
    described = describe_model(Bundles())
    assert {key: entry.content.name for key, entry in described.layers[2].entries.items()} == {
        "drive": "DENSE",
        "spikes": "SPIKES",
        "fired": "COUNTS",
    }
    assert list(described.layers[0].entries) == [None] and not described.is_chain
    assert [each.name for each in described.carried(2)][:2] == [
        "entry 'drive' of the output of block.0",
        "entry 'spikes' of the output of block.0",
    ]
    assert describe_model(_model()).is_chain and list(entries_of(torch.zeros(1))) == [None]
