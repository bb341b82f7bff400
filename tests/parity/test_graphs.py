"""CUDA graphs, by a stand-in (recorded_graphs.py): steps have the bits of those without; who has them, and when."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from megasnn.common.checks import context_of_error
from megasnn.config import parse
from megasnn.config.training import Length
from megasnn.engine import Engine
from megasnn.layers import ConvNormNeuron, MeanLinear
from megasnn.layers.layer import Layer, layer
from megasnn.layers.shape_inference import mark_spikes
from megasnn.models.build import describe_model
from megasnn.models.model import Model, run_config
from megasnn.models.registry import MODELS
from megasnn.parallel.collectives import start_all_reduce_sum
from megasnn.parallel.traffic import traffic
from megasnn.parallel_state import Group
from megasnn.pipeline.graph_capture import CudaCapture
from megasnn.telemetry.spikes import LayerSpikes
from megasnn.training.metrics import Metrics
from tests.gpu_waits import MODEL_FLAGS
from tests.models.networks import CLASSES, Random, between
from tests.parity.ranks import Layout, built, forward_backward, inputs_of, tensors_of
from tests.recorded_graphs import RecordedGraphs, recorded_graphs

SIZES = "--micro-batch-size 2 --train-iters 9 --lr 1e-3 --clip-grad 0.1 --ema-decay 0.9 --neuron-backend torch"
FLAGS = {model: flags.replace("--depth 2", "--depth 1") for model, flags in MODEL_FLAGS.items()}
PIPELINE = "--pipeline-model-parallel-size 2 --pipeline-schedule"
LAYOUT = "--pipeline-model-parallel-layout"
ROWS = "--global-batch-size 4 --context-parallel-size 2 --context-parallel-cut rows"
Steps = list[tuple[float, float, list[LayerSpikes], dict[str, float]]]


def trained(model: str, flags: str, steps: int, watched: int | None = None) -> tuple[Steps, dict[str, Tensor]]:
    """Loss, norm, spikes and traffic of each step, and all tensors behind them. The first step is without graphs."""
    config = parse(run_config(MODELS[model]), f"{FLAGS[model]} {SIZES} {flags}".split())
    samples, random = config.training.global_batch_size, torch.Generator().manual_seed(0)
    labels, found = torch.arange(samples) % config.model.num_classes, []
    with Engine(config, length=Length(steps)) as engine, traffic.counting():
        watch = Metrics(engine)
        for step in range(steps):
            watch.spikes.enabled = step == watched
            images = torch.rand(samples, *config.model.input_shape, generator=random)
            result = engine.train_step(images, labels)
            engine.evaluate(images, labels)
            scalars, spikes = watch.since_last(step)
            moved = {name: value for name, value in scalars.items() if name.startswith("communication/")}
            found.append((result.loss, result.grad_norm, spikes, moved))
        return found, engine.state_dict()


def with_and_without(model: str, flags: str, steps: int = 3, watched: int | None = None) -> RecordedGraphs:
    with recorded_graphs() as graphs:
        found, tensors = trained(model, f"{flags} --cuda-graphs on", steps, watched)
        assert graphs.replays > 0
        expected, others = trained(model, flags, steps, watched)
    assert found == expected
    assert all(torch.equal(value, others[name]) for name, value in tensors.items())
    return graphs


def changes_no_bit(model: str, flags: str) -> None:
    with_and_without(model, flags)  # a rank's graphs cannot be sent


@pytest.mark.parametrize(("model", "flags"), [
    ("spikformer", f"--global-batch-size 4 {PIPELINE} zbv {LAYOUT} 2|2|2|2"),
    ("vgg_dvs", f"--global-batch-size 7 {PIPELINE} 1f1b {LAYOUT} 2|2"),
    ("vgg_dvs", f"--global-batch-size 8 {PIPELINE} zb1p {LAYOUT} 2|2"),
    ("spikformer", "--global-batch-size 4 --tensor-model-parallel-size 2"),
    ("spikformer", ROWS),
    ("vgg_dvs", "--global-batch-size 8 --micro-batch-size 3 --context-parallel-size 2"),
])  # fmt: skip
def test_graphs_change_no_bit(ranks, model: str, flags: str) -> None:
    """Of weights, their average, running statistics and losses: dropout, uneven micro-batches, several under way."""
    ranks(2, changes_no_bit, model, flags)


def leaves_an_exchange_open() -> None:
    with mock.patch("megasnn.layers.attention.start_all_reduce_sum", never_awaited):
        with pytest.raises(RuntimeError, match="cannot be captured .*unjoined work: allreduce_"):
            with_and_without("spikformer", ROWS)


def never_awaited(x: Tensor, group: Group) -> Callable[[], object]:
    start_all_reduce_sum(x, group)
    return lambda: None


def test_an_exchange_that_nobody_waits_for_is_refused(ranks) -> None:
    """A driver ends no capture before all that began in it."""
    ranks(2, leaves_an_exchange_open)


@pytest.mark.parametrize(("watched", "steps_with_graphs"), [(1, 2), (2, 2)])
def test_a_step_whose_spikes_are_counted_goes_without(watched: int, steps_with_graphs: int) -> None:
    """Also where it comes between the first step and the one in which graphs are captured."""
    graphs = with_and_without("vgg_dvs", "--global-batch-size 4 --precision bf16", steps=4, watched=watched)
    assert graphs.replays == 3 * 2 * steps_with_graphs, "three for each of two micro-batches"


def random_steps(graphs: RecordedGraphs | None) -> list[tuple[float, list[Tensor]]]:
    """Losses, gradients and buffers of steps of a random network in three chunks of one rank."""
    network, found = Random(seed=3), []
    layout = Layout(schedule="interleaved", chunks=3)
    with built(describe_model(network), layout, torch.float32, backend="torch", graphs=graphs) as engine:
        for step in range(3):
            random = torch.Generator().manual_seed(step)
            images = torch.rand(4, *network.input_shape, generator=random)
            labels = torch.randint(CLASSES, (4,), generator=random)
            batches = [
                replace(each, samples=range(4 * step + 2 * i, 4 * step + 2 * i + 2))
                for i, each in enumerate(inputs_of(engine, images, labels, 2))
            ]
            loss = forward_backward(engine, batches, 4)
            engine.running_statistics.merge(2)
            found.append((loss, [each.clone() for each in tensors_of(engine).values()]))
    return found


def test_random_networks() -> None:
    """Skips, bundles, layers that share tensors. Their classes are vouched for here."""
    with mock.patch("megasnn.pipeline.graphs.KNOWN", ("megasnn", "torch", "tests")), recorded_graphs() as graphs:
        found, expected = (random_steps(each) for each in (graphs, None))
    assert graphs.replays > 0
    for (loss, tensors), (other, others) in zip(found, expected, strict=True):
        assert loss == other and all(map(torch.equal, tensors, others))


def test_what_is_taken_from_the_host_is_refused() -> None:
    """A number that goes to keys while a graph is made; the error names the layer."""
    with mock.patch("megasnn.layers.dropout.copy_without_waiting", lambda keys, device: keys + torch.tensor(1)):
        with pytest.raises(RuntimeError, match="cannot be captured .*not permitted when stream is capturing"):
            with_and_without("vgg_dvs", "--global-batch-size 4")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("model", MODEL_FLAGS)
def test_on_a_gpu(model: str, precision: str) -> None:
    flags = f"--global-batch-size 5 --device cuda --deterministic --neuron-backend auto --precision {precision}"
    found, tensors = trained(model, f"{flags} --cuda-graphs on", 4)
    expected, others = trained(model, flags, 4)
    assert found == expected and all(torch.equal(value, others[name]) for name, value in tensors.items())


OF_ENGINES = {"micro_batch_size": 4, "global_batch_size": 8, "train_iters": 12, "lr": 1e-2, "neuron_backend": "torch"}


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


def losses_of(
    model: Model,
    asked: str,
    sizes: Iterable[int] = (8, 8, 8),
    between_steps: Callable[[Engine, int], object] = lambda engine, step: None,
) -> list[Any]:
    """Losses and norms."""
    random, found = torch.Generator().manual_seed(0), []
    with Engine(model, cuda_graphs=asked, **OF_ENGINES) as engine:
        for step, size in enumerate(sizes):
            between_steps(engine, step)
            images = torch.rand(size, *engine.config.model.input_shape, generator=random)
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
        losses_of(between(layers), "on")


def test_graphs_are_captured_in_the_second_step_of_two_sizes() -> None:
    captures, graphs = list[int](), RecordedGraphs()
    sizes = (8, 8, 8, 7, 8, 7, 7, 6, 6)
    with recorded_graphs(graphs):
        found = losses_of(between(plain), "on", sizes, lambda engine, step: captures.append(graphs.captures))
    assert found == losses_of(between(plain), "off", sizes)
    captured = [after > before for before, after in zip(captures, [*captures[1:], graphs.captures], strict=True)]
    assert captured == [False, True, False, False, False, True, False, False, False]


def test_weights_that_were_moved_are_refused() -> None:
    def changed(engine: Engine, step: int) -> None:
        unit = engine.distributed.chunks[0].layers[1]
        if step == 2:
            unit.conv.weight.data = unit.conv.weight.data.clone()

    with recorded_graphs(), pytest.raises(RuntimeError, match="--cuda-graphs off"):
        losses_of(between(plain), "on", between_steps=changed)


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
    with known, recorded_graphs() as graphs, Engine(OfSpikes(), cuda_graphs="on", **OF_ENGINES) as engine:
        images, labels = torch.ones(8, 3, 4, 4), torch.arange(8) % CLASSES
        images[:, 0, 0] = 0
        for _ in range(3):
            engine.train_step(images, labels)
        images[0, 0, 0, 0], before = 0.5, graphs.replays
        with pytest.raises(ValueError, match="stem: pack_bits takes 0 and 1") as raised:
            engine.train_step(images, labels)
        assert context_of_error(raised.value).endswith("0F0, micro-batch 0")
        assert graphs.replays > before


@pytest.mark.parametrize(("flags", "why"), [({"device": "cpu"}, "--device cpu"), ({"bptt_steps": 1}, "--bptt-steps")])
def test_where_no_layer_has_them(flags: dict[str, Any], why: str) -> None:
    with mock.patch("torch.cuda.device_count", return_value=0):
        with pytest.raises(ValueError, match=f"--cuda-graphs on: .*{why}"):
            Engine(between(plain), cuda_graphs="on", **OF_ENGINES, **flags)


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
