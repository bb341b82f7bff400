"""Which chunks have CUDA graphs, when they are captured and how, and what is refused."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from megasnn.device_checks import place_of
from megasnn.engine import Engine
from megasnn.layers import ConvNormNeuron, MeanLinear
from megasnn.layers.shape_inference import mark_spikes
from megasnn.models.layer import Layer, layer
from megasnn.models.model import Model
from megasnn.pipeline.graphs import CudaCapture
from megasnn.pipeline.p2p import Transfers
from tests.models.networks import CLASSES, between
from tests.recorded_graphs import RecordedGraphs, recorded_graphs

FLAGS = {"micro_batch_size": 4, "global_batch_size": 8, "train_iters": 12, "lr": 1e-2, "neuron_backend": "torch"}


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


def plain() -> Iterable[Layer]:
    yield layer("unit", ConvNormNeuron(4, 4))


def trained(
    model: Model,
    asked: str,
    sizes: Iterable[int] = (8, 8, 8),
    between_steps: Callable[[Engine, int], object] = lambda engine, step: None,
) -> list[Any]:
    """Losses and norms."""
    random, found = torch.Generator().manual_seed(0), []
    with Engine(model, cuda_graphs=asked, **FLAGS) as engine:
        for step, size in enumerate(sizes):
            between_steps(engine, step)
            images = torch.rand(size, *engine.distributed.description.input_shape, generator=random)
            result = engine.train_step(images, torch.arange(size) % CLASSES)
            found.append((result.loss, result.grad_norm))
    return found


def hooked() -> Iterable[Layer]:
    unit = ConvNormNeuron(4, 4)
    unit.register_forward_hook(lambda *_: None)
    yield layer("unit", unit)


@pytest.mark.parametrize(("layers", "named"), [(counting, "counting"), (hooked, "unit")])
def test_layers_that_cannot_have_graphs_are_named(layers: Any, named: str) -> None:
    with recorded_graphs(), pytest.raises(ValueError, match=f"{named} cannot have CUDA graphs"):
        trained(between(layers), "on")


def test_graphs_are_captured_in_the_second_step_of_two_sizes() -> None:
    captures: list[int] = []
    begin, graphs = Transfers.begin, RecordedGraphs()

    def noted(self: Transfers, schedule: Any, sizes: Any) -> None:
        captures.append(graphs.captures)
        begin(self, schedule, sizes)

    sizes = (8, 8, 8, 7, 8, 7, 7, 6, 6)
    with recorded_graphs(graphs), mock.patch.object(Transfers, "begin", noted):
        found = trained(between(plain), "on", sizes)
    assert found == trained(between(plain), "off", sizes)
    captured = [after > before for before, after in zip(captures, [*captures[1:], graphs.captures], strict=True)]
    assert captured == [False, True, False, False, False, True, False, False, False]


def test_weights_that_were_moved_are_refused() -> None:
    def changed(engine: Engine, step: int) -> None:
        unit = engine.distributed.chunks[0].layers[1]
        if step == 2:
            unit.conv.weight.data = unit.conv.weight.data.clone()

    with recorded_graphs(), pytest.raises(RuntimeError, match="--cuda-graphs off"):
        trained(between(plain), "on", between_steps=changed)


class Claims(nn.Module):
    """Says that its input holds spikes."""

    def forward(self, x: Tensor) -> Tensor:
        return mark_spikes(x, 1)


@dataclass(frozen=True, kw_only=True)
class OfSpikes(Model):
    image_size: int = 4
    time_steps: int = 2
    num_classes: int = CLASSES

    def layers(self) -> Iterable[Layer]:
        yield layer("stem", nn.Sequential(Claims(), ConvNormNeuron(3, 4)))
        yield layer("head", MeanLinear(4, CLASSES))


def test_what_a_check_finds_in_a_replay() -> None:
    """In the first of two micro-batches: the second one does not hide it."""
    known = mock.patch("megasnn.pipeline.graphs.KNOWN", ("megasnn", "torch", "tests"))
    with known, recorded_graphs() as graphs, Engine(OfSpikes(), cuda_graphs="on", **FLAGS) as engine:
        images, labels = torch.ones(8, 3, 4, 4), torch.arange(8) % CLASSES
        images[:, 0, 0] = 0
        for _ in range(3):
            engine.train_step(images, labels)
        images[0, 0, 0, 0], before = 0.5, graphs.replays
        with pytest.raises(ValueError, match="stem: pack_bits takes 0 and 1") as raised:
            engine.train_step(images, labels)
        assert place_of(raised.value).endswith("0F0, micro-batch 0")
        assert graphs.replays > before


@pytest.mark.parametrize(("flags", "why"), [({"device": "cpu"}, "--device cpu"), ({"bptt_steps": 1}, "--bptt-steps")])
def test_where_no_layer_has_them(flags: dict[str, Any], why: str) -> None:
    with mock.patch("torch.cuda.device_count", return_value=0):
        with pytest.raises(ValueError, match=f"--cuda-graphs on: .*{why}"):
            Engine(between(plain), cuda_graphs="on", **FLAGS, **flags)


def test_how_a_cuda_graph_is_captured(monkeypatch) -> None:
    """On a stream of its own, in the pool asked for, by a thread that is strict with itself alone; Python frees
    nothing, and nothing waits for the device."""
    told: list[Any] = []
    graph = SimpleNamespace(
        capture_begin=lambda pool, capture_error_mode: told.append((pool, capture_error_mode, gc.isenabled())),
        capture_end=lambda: told.append("end"),
        replay=lambda: told.append("replay"),
    )
    stream = mock.MagicMock()
    for name, value in {
        "Stream": lambda device: "own",
        "stream": lambda which: told.append(which) or stream,
        "CUDAGraph": lambda: graph,
        "graph_pool_handle": lambda: "pool",
        "empty_cache": lambda: None,
        "synchronize": lambda: pytest.fail("it waits for the device"),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    capture = CudaCapture(torch.device("cuda"))
    capture(lambda: told.append("work"), capture.pool())()
    assert told == ["own", ("pool", "thread_local", False), "work", "end", "replay"] and gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        capture(lambda: 1 / 0, "pool")  # type: ignore[arg-type, return-value]
    assert gc.isenabled()
