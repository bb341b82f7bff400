"""Which layers have CUDA graphs: what runs without is named, and computes what it did."""

from __future__ import annotations

import contextlib
import gc
import io
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from megasnn.engine import Engine
from megasnn.kernels.spike_codec import Content
from megasnn.layers import ConvNormNeuron, MeanLinear
from megasnn.models.layer import Layer, layer
from megasnn.models.model import Model
from megasnn.models.spikformer.model import Spikformer
from megasnn.models.vgg_dvs.model import VggDvs
from megasnn.pipeline.executor import PipelineError
from megasnn.pipeline.graph_room import Places
from megasnn.pipeline.layer_graphs import LayerGraphs
from megasnn.pipeline.transfers import Transfers
from megasnn.telemetry.reporter import Reporter, RunOutline
from megasnn.training.memory import forecast_memory
from tests.models.networks import CLASSES, Sum, between
from tests.recorded_graphs import RecordedGraphs, Refused, recorded_graphs

FLAGS = {"micro_batch_size": 4, "global_batch_size": 8, "train_iters": 12, "lr": 1e-2, "neuron_backend": "torch"}
Between = Callable[[Engine, int], object]


class Counting(nn.Module):
    """Multiplies by a number that Python knows."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += not x.is_meta
        return x * (self.calls + 0.5)


def counting() -> Iterable[Layer]:
    yield layer("counting", Counting())


def skipping() -> Iterable[Layer]:
    yield layer("unit", ConvNormNeuron(4, 4))
    yield layer("sum", Sum(), takes=("unit", "stem"))


def plain() -> Iterable[Layer]:
    yield layer("unit", ConvNormNeuron(4, 4))


def nothing(engine: Engine, step: int) -> None:
    pass


def trained(
    model: Model, asked: str, between_steps: Between = nothing, sizes: Iterable[int] = (8, 8, 8), **flags: object
) -> list[Any]:
    """Losses and norms."""
    random, found = torch.Generator().manual_seed(0), []
    with Engine(model, cuda_graphs=asked, **FLAGS, **flags) as engine:
        for step, size in enumerate(sizes):
            between_steps(engine, step)
            images = torch.rand(size, *engine.distributed.model.input_shape, generator=random)
            result = engine.train_step(images, torch.arange(size) % CLASSES)
            found.append((result.loss, result.grad_norm))
    return found


def told(model: Model, between_steps: Between = nothing, sizes: Iterable[int] = (8, 8, 8)) -> str:
    """What is said of steps that have graphs, which are those without."""
    with contextlib.redirect_stderr(io.StringIO()) as text, recorded_graphs() as graphs:
        found = trained(model, "auto", between_steps, sizes)
        assert found == trained(model, "off", between_steps, sizes) and graphs.replays > 0
    return text.getvalue()


def test_a_module_of_ones_own() -> None:
    model = between(counting)
    why = "Counting is no module of MegaSNN's or torch's: what it decides in Python would be decided once"
    assert told(model) == f"WARNING: counting runs without CUDA graphs: {why}\n"
    with recorded_graphs(), pytest.raises(ValueError, match="counting cannot have CUDA graphs: .*--cuda-graphs auto"):
        trained(model, "on")
    with mock.patch("megasnn.pipeline.graphs.KNOWN", ("megasnn", "torch", "tests")), recorded_graphs():
        assert trained(model, "on") != trained(model, "off"), "a number that was taken down stays"


def test_an_input_that_is_taken_twice() -> None:
    assert told(between(skipping)).count("its input is taken several times") == 2


def test_hooks_that_come_later() -> None:
    calls: list[int] = []

    def hook(engine: Engine, step: int) -> None:
        if step == 2:
            unit = engine.distributed.chunks[0].layers[1]
            unit.register_forward_hook(lambda *_: calls.append(step))

    assert "unit runs without CUDA graphs: ConvNormNeuron has hooks" in told(between(plain), hook, (8, 8, 8, 8))
    assert len(calls) == 2 * 4, "in each of two steps, with graphs elsewhere and without"


def steps_that_make(asked: str, between_steps: Between, sizes: Iterable[int]) -> list[tuple[bool, bool, bool]]:
    """Of each step, whether transfers were told that graphs may be made, whether some were, and whether some ran."""
    counts: list[tuple[bool, int, int]] = []
    rooms: list[int] = []
    begin, graphs = Transfers.begin, RecordedGraphs()

    def noted(self: Transfers, *given: Any) -> None:
        counts.append((given[3], graphs.captures, graphs.replays))
        rooms.append(graphs.rooms)
        begin(self, *given)

    with recorded_graphs(graphs), mock.patch.object(Transfers, "begin", noted):
        found = trained(between(plain), asked, between_steps, sizes)
        assert found == trained(between(plain), "off", between_steps, sizes)
    assert all(more > fewer for (fewer, more), (may, *_) in zip(pairwise(rooms), counts[1:], strict=True) if may)
    steps = pairwise(counts[: len(found) + 1])
    return [(may, after[1] > made, after[2] > replayed) for (may, made, replayed), after in steps]


NOTHING, MAKES, REPLAYS = (False, False, False), (True, True, True), (False, False, True)


def test_graphs_are_made_in_steps_that_have_said_so() -> None:
    """In the second step of every kind, and behind one in which a layer was left out."""

    def hook(engine: Engine, step: int) -> None:
        if step == 8:
            engine.distributed.chunks[0].layers[1].register_forward_hook(lambda *_: None)

    sizes = (8, 8, 8, 7, 8, 7, 7, 8, 8, 8, 7, 7)
    others = [REPLAYS, REPLAYS, MAKES, REPLAYS, REPLAYS, NOTHING, MAKES, REPLAYS, MAKES]
    assert steps_that_make("auto", hook, sizes) == [NOTHING, MAKES, REPLAYS, *others]
    assert steps_that_make("off", nothing, (8, 8)) == [NOTHING, NOTHING]


@pytest.mark.parametrize("what", ["all", "backward"])
def test_what_lacks_a_graph_unforeseen_gets_it_in_the_next_step(what: str) -> None:
    def forget(engine: Engine, step: int) -> None:
        graphs = engine.distributed.chunks[0].graphs
        if step == 3 and graphs is not None:
            for each in graphs._graphs.values():
                each._backward = None
            if what == "all":
                graphs._graphs.clear()

    lacking = NOTHING if what == "all" else REPLAYS
    assert steps_that_make("on", forget, [8] * 6) == [NOTHING, MAKES, REPLAYS, lacking, MAKES, REPLAYS]


def test_inputs_of_many_sizes() -> None:
    text = told(between(plain), sizes=(8, 8, 7, 7, 6, 6))
    assert "unit runs without CUDA graphs: its inputs have changing shapes: now [2, 2, 4, 4, 4], after 2 others" in text


@pytest.mark.parametrize("part", ["_forward", "_differentiate"])
def test_what_is_under_way_keeps_its_graphs_when_a_layer_is_left_out(part: str) -> None:
    """The third step has a second micro-batch, for which a capture fails when the first one is to go backward yet."""
    refused = Refused("unit", part, slot=1)
    with contextlib.redirect_stderr(io.StringIO()) as text, recorded_graphs(RecordedGraphs(refused)) as graphs:
        flags = {"pipeline_schedule": "gpipe"}
        found = trained(between(plain), "auto", sizes=(4, 4, 8, 8), **flags)
        assert found == trained(between(plain), "off", sizes=(4, 4, 8, 8), **flags) and graphs.replays > 0
    assert refused.failures == 1 and text.getvalue().count("WARNING: unit runs without CUDA graphs") == 1


@pytest.mark.parametrize("number", [0, 4])
def test_a_graph_that_there_is_no_memory_for(number: int) -> None:
    """For what the first layer is given, and for a gradient."""
    places, made = Places.__init__, list[Places]()

    def refused(self: Places, *arguments: Any) -> None:
        made.append(self)
        if len(made) == number + 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        places(self, *arguments)

    with mock.patch.object(Places, "__init__", refused):
        text = told(between(plain))
    assert text.count("WARNING: ") == 1 and "cannot be captured (OutOfMemoryError: CUDA out of memory)" in text


def test_graphs_that_nobody_needs_are_freed_at_once() -> None:
    """Their memory can be given to those of the next step, without Python's collector."""
    made: list[weakref.ref[LayerGraphs]] = []
    begin = LayerGraphs.__init__

    def noted(graphs: LayerGraphs, *args: Any) -> None:
        made.append(weakref.ref(graphs))
        begin(graphs, *args)

    alive: list[int] = []

    def look(engine: Engine, step: int) -> None:
        (chunk,) = engine.distributed.chunks.values()
        assert chunk.graphs is not None
        alive.append(sum(each() is not None for each in made) - len(chunk.graphs._graphs))

    gc.disable()
    try:
        refused = Refused("unit", "_forward", slot=1)
        with mock.patch.object(LayerGraphs, "__init__", noted), recorded_graphs(RecordedGraphs(refused)):
            trained(between(plain), "auto", look, (4, 4, 8, 8, 8), pipeline_schedule="gpipe")
    finally:
        gc.enable()
    assert refused.failures and len(made) > 4 and alive[-1] == 0, alive


def test_weights_that_move_are_refused() -> None:
    def move(engine: Engine, step: int) -> None:
        if step == 2:
            weight = engine.distributed.chunks[0].layers[1].conv.weight
            weight.data = weight.data.clone()

    with recorded_graphs(), pytest.raises(RuntimeError, match="moved in memory after CUDA graphs were made"):
        trained(between(plain), "on", move)


@dataclass(frozen=True, kw_only=True)
class OfSpikes(Model):
    image_size: int = 4
    time_steps: int = 2
    num_classes: int = CLASSES

    def layers(self) -> Iterable[Layer]:
        yield layer("stem", ConvNormNeuron(3, 4, content=Content.SPIKES))
        yield layer("head", MeanLinear(4, CLASSES))


def test_what_a_check_finds_in_a_replay() -> None:
    """In the first of two micro-batches: the second one does not hide it."""
    with recorded_graphs() as graphs, Engine(OfSpikes(), cuda_graphs="on", **FLAGS) as engine:
        images, labels = torch.ones(8, 3, 4, 4), torch.arange(8) % CLASSES
        images[:, 0, 0] = 0
        for _ in range(3):
            engine.train_step(images, labels)
        images[0, 0, 0, 0], before = 0.5, graphs.replays
        with pytest.raises(PipelineError, match="0F0, micro-batch 0: .*stem: pack_bits takes 0 and 1"):
            engine.train_step(images, labels)
        assert graphs.replays > before


GRAPHED: list[Model] = [
    Spikformer(embed_dim=32, depth=1, num_heads=4, image_size=16, in_channels=3, time_steps=2),
    VggDvs(channels="16,32,P,64,P", image_size=16, time_steps=3),
]


@pytest.mark.parametrize("model", GRAPHED, ids=lambda model: model.name)
@pytest.mark.parametrize("slots", [1, 2, 4])
def test_what_graphs_take_is_forecast(model: Model, slots: int) -> None:
    """From the sizes of layers alone, beside what a step without graphs keeps."""
    flags = {**FLAGS, "micro_batch_size": 8 // slots, "pipeline_schedule": "gpipe"}
    with recorded_graphs() as graphs, Engine(model, cuda_graphs="on", **flags) as engine:
        images, labels = torch.rand(8, *engine.distributed.model.input_shape), torch.arange(8) % 10
        for _ in range(3):
            engine.train_step(images, labels)
        reporter = Reporter(RunOutline(1, 1), is_writer=False)
        (forecast,) = forecast_memory(engine.config, engine, reporter)
        assert forecast.kept + forecast.graphs == pytest.approx(1e-6 * _taken_bytes(engine, graphs), rel=0.1)
    assert " + CUDA graphs 7" in str(replace(forecast, graphs=7.0)) and forecast.total > forecast.graphs > 0


def _taken_bytes(engine: Engine, graphs: RecordedGraphs) -> int:
    """Of the pools of graphs, when they are fullest, and of the places beside them that something is copied to."""
    made = [of_layer for chunk in engine.distributed.chunks.values() for of_layer in chunk.graphs._graphs.values()]
    places = [each for of_layer in made for each in (of_layer.inputs, of_layer._backward._grads)]
    storages = {place.untyped_storage() for each in places for place in each.tensors}
    return sum(each.peak for each in graphs.pools) + sum(each.nbytes() for each in storages - {*graphs.memory()})


@pytest.mark.parametrize(("flags", "why"), [
    ({"device": "cpu"}, "there are none with --device cpu"),
    ({}, "this rank computes on a CPU"),
    ({"recompute": "always"}, "with --recompute or --memory-budget what forward keeps is computed again"),
    ({"bptt_steps": 1}, "with --bptt-steps neurons go on from the window before"),
])  # fmt: skip
def test_where_no_layer_has_them(flags: dict[str, Any], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch("torch.cuda.device_count", return_value=0):
        with pytest.raises(ValueError, match=f"--cuda-graphs on: {why}; use auto or off"):
            Engine(between(plain), cuda_graphs="on", **FLAGS, **flags)
        Engine(between(plain), cuda_graphs="auto", **FLAGS, **flags).close()
    assert capsys.readouterr().err == f"WARNING: --cuda-graphs auto: no layer has CUDA graphs: {why}\n"
