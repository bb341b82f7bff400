"""Steps by graphs are bit for bit the steps without, on a stand-in for CUDA graphs (tests/recorded_graphs.py)."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor

from megasnn.config import parse
from megasnn.config.training import Length
from megasnn.engine import Engine
from megasnn.models.build import describe
from megasnn.models.model import run_config
from megasnn.models.registry import MODELS
from megasnn.telemetry.spikes import LayerSpikes
from megasnn.training.metrics import Metrics
from tests.gpu_waits import MODEL_FLAGS
from tests.models.networks import CLASSES, Random
from tests.parity.ranks import Layout, built, forward_backward, inputs_of, tensors_of
from tests.recorded_graphs import RecordedGraphs, recorded_graphs

SIZES = "--micro-batch-size 2 --train-iters 9 --lr 1e-3 --clip-grad 0.1 --ema-decay 0.9 --neuron-backend torch"
FLAGS = {model: flags.replace("--depth 2", "--depth 1") for model, flags in MODEL_FLAGS.items()}
PIPELINE = "--pipeline-model-parallel-size 2 --pipeline-schedule"
LAYOUT = "--pipeline-model-parallel-layout"
Steps = list[tuple[float, float, list[LayerSpikes]]]


def trained(model: str, flags: str, steps: int, watched: int | None = None) -> tuple[Steps, dict[str, Tensor]]:
    """Loss, norm and spikes of each step, and all tensors behind them. The first step is without graphs."""
    config = parse(run_config(MODELS[model]), f"{FLAGS[model]} {SIZES} {flags}".split())
    samples, random = config.training.global_batch_size, torch.Generator().manual_seed(0)
    labels, found = torch.arange(samples) % config.model.num_classes, []
    with Engine(config, length=Length(steps)) as engine:
        watch = Metrics(engine)
        for step in range(steps):
            watch.spikes.enabled = step == watched
            images = torch.rand(samples, *config.model.input_shape, generator=random)
            result = engine.train_step(images, labels)
            engine.evaluate(images, labels)
            found.append((result.loss, result.grad_norm, watch.since_last(step)[1]))
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
])  # fmt: skip
def test_graphs_change_no_bit(ranks, model: str, flags: str) -> None:
    """Of weights, their average, running statistics and losses: dropout, uneven micro-batches, several under way."""
    ranks(2, changes_no_bit, model, flags)


@pytest.mark.parametrize(("watched", "steps_with_graphs"), [(1, 2), (2, 2)])
def test_a_step_whose_spikes_are_counted_goes_without(watched: int, steps_with_graphs: int) -> None:
    """Also where it comes between the first step and the one in which graphs are captured."""
    graphs = with_and_without("vgg_dvs", "--global-batch-size 4 --precision bf16", steps=4, watched=watched)
    assert graphs.replays == 3 * 2 * steps_with_graphs, "three for each of two micro-batches"


def random_steps(graphs: RecordedGraphs | None) -> list[tuple[float, list[Tensor]]]:
    """Losses, gradients and buffers of steps of a random network in three chunks of one rank."""
    model, found = describe(Random(seed=3)), []
    layout = Layout(schedule="interleaved", chunks=3)
    with built(model, layout, torch.float32, backend="torch", graphs=graphs) as engine:
        for step in range(3):
            random = torch.Generator().manual_seed(step)
            images = torch.rand(4, *model.input_shape, generator=random)
            labels = torch.randint(CLASSES, (4,), generator=random)
            batches = [
                replace(each, samples=range(4 * step + 2 * i, 4 * step + 2 * i + 2))
                for i, each in enumerate(inputs_of(engine, images, labels, 2))
            ]
            loss = forward_backward(engine, batches, 4)
            engine.merge_statistics(2)
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
    with mock.patch("megasnn.layers.dropout.without_waiting", lambda keys, device: keys + torch.tensor(1)):
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
