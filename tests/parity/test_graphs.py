"""Steps by graphs are bit for bit the steps without, on a stand-in for CUDA graphs (tests/recorded_graphs.py)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megasnn.config import parse
from megasnn.config.training import Length
from megasnn.engine import Engine
from megasnn.engine.model import DistributedModel, ModelOptions
from megasnn.layers import BuildContext
from megasnn.layers.norm import ParallelBatchNorm
from megasnn.layers.weight_grad import CastWeights
from megasnn.models.build import describe
from megasnn.models.model import run_config
from megasnn.models.registry import MODELS
from megasnn.parallel.gradient_buckets import GradientBuckets
from megasnn.parallel_state import destroy_model_parallel, initialize_model_parallel
from megasnn.pipeline.capture import GraphOptions
from megasnn.pipeline.executor import PipelineError
from megasnn.pipeline.graph_room import MicroBatchPass
from megasnn.pipeline.graphs import ChunkGraphs
from megasnn.pipeline.layer_graphs import LayerGraphs
from megasnn.pipeline.step_state import MicroBatchInput
from megasnn.pipeline.transfers import Transfers
from megasnn.schedule import plan_schedule
from megasnn.telemetry.spikes import LayerSpikes
from megasnn.training.metrics import Metrics
from tests.host_waits import MODEL_FLAGS
from tests.models.networks import CLASSES, Random
from tests.recorded_graphs import FAILURE, Pool, RecordedGraphs, Refused, is_recording, recorded_graphs

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
            found.append((result.loss, result.grad_norm, watch.since_last(step).layers))
        return found, engine.state_dict()


def with_and_without(
    model: str,
    flags: str,
    steps: int = 3,
    watched: int | None = None,
    graphs: RecordedGraphs | None = None,
    asked: str = "on",
) -> RecordedGraphs:
    graphs = graphs or RecordedGraphs()
    with recorded_graphs(graphs):
        found, tensors = trained(model, f"{flags} --cuda-graphs {asked}", steps, watched)
        assert graphs.replays > 0
        expected, others = trained(model, flags, steps, watched)
    assert found == expected
    assert all(torch.equal(value, others[name]) for name, value in tensors.items())
    return graphs


@pytest.mark.parametrize(("ranks_wanted", "model", "flags"), [
    (2, "spikformer", f"--global-batch-size 4 {PIPELINE} zbv {LAYOUT} 2|2|2|2"),
    (2, "vgg_dvs", f"--global-batch-size 7 {PIPELINE} 1f1b {LAYOUT} 2|2"),
    (2, "vgg_dvs", f"--global-batch-size 8 {PIPELINE} zb1p {LAYOUT} 2|2"),
])  # fmt: skip
def test_graphs_change_no_bit(ranks, ranks_wanted: int, model: str, flags: str) -> None:
    """Of weights, their average, running statistics and losses: dropout, uneven micro-batches, several under way."""
    ranks(ranks_wanted, with_and_without, model, flags)


def steps_that_make() -> list[bool]:
    """Of each step, whether this rank's transfers were told that graphs may be made; the first rank leaves a layer out
    in the fourth one."""
    found, begin = list[bool](), Transfers.begin

    def noted(self: Transfers, *given: Any) -> None:
        found.append(given[3])
        begin(self, *given)

    flags = f"{FLAGS['vgg_dvs']} {SIZES} --global-batch-size 4 {PIPELINE} 1f1b {LAYOUT} 2|2 --cuda-graphs auto"
    config = parse(run_config(MODELS["vgg_dvs"]), flags.split())
    with recorded_graphs(), mock.patch.object(Transfers, "begin", noted):
        with Engine(config, length=Length(6)) as engine:
            for step in range(6):
                if step == 3 and engine.state.rank == 0:
                    engine.distributed.chunks[0].layers[0].register_forward_hook(lambda *_: None)
                engine.train_step(torch.rand(4, *config.model.input_shape), torch.arange(4))
    return found


def test_ranks_agree_on_the_steps_that_make_graphs(ranks) -> None:
    """What is posted in them counts on all ranks posting alike."""
    assert ranks(2, steps_that_make) == [[False, True, False, False, True, False]] * 2


@pytest.mark.parametrize("watched", [1, 2])
def test_a_step_whose_spikes_are_counted_goes_without(watched: int) -> None:
    """Also where it is the one in which graphs would have been made."""
    graphs = with_and_without("vgg_dvs", "--global-batch-size 4 --precision bf16", steps=4, watched=watched)
    assert graphs.replays == 3 * 4 * 2 * 2, "three for each of four layers and two micro-batches, in two steps"


PARTS = {
    "_forward": "its forward",
    "_differentiate": "the gradients of its inputs",
    "_add_weight_gradients": "the gradients of its weights",
}


def names_of(model: str) -> list[str]:
    config = parse(run_config(MODELS[model]), f"{FLAGS[model]} {SIZES}".split())
    return [each.name for each in describe(config.model, config.neuron.spec).layers]


UNEVEN = "--global-batch-size 5 --pipeline-schedule gpipe"


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(("model", "layer", "slot"), [
    ("vgg_dvs", 0, 0), ("vgg_dvs", 1, 0), ("vgg_dvs", 1, 1), ("vgg_dvs", -1, 0), ("spikformer", 5, 1),
])  # fmt: skip
def test_a_layer_whose_capture_fails_goes_without(model: str, layer: int, part: str, slot: int, capfd) -> None:
    """The first layer, one whose output and gradient other graphs hand on, the last one, one with attention; before
    there is any graph of it, and while another micro-batch is under way with its graph."""
    name = names_of(model)[layer]
    refused = Refused(name, part, slot)
    graphs = with_and_without(model, UNEVEN, graphs=RecordedGraphs(refused), asked="auto")
    assert refused.failures == 1, "the layer is left out from then on"
    assert graphs.joins == (slot if part == "_forward" else 3 - slot), "of three that are forward before one goes back"
    (warning,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("WARNING")]
    assert warning == (
        f"WARNING: {name} runs without CUDA graphs: {PARTS[part]} cannot be captured (RuntimeError: {FAILURE})"
    )


def test_gradients_that_no_graph_adds_are_counted() -> None:
    """Buckets of gradients are reduced when all of theirs were added."""
    shapes: list[torch.Size] = []

    def counted(self: GradientBuckets, parameter: Tensor) -> None:
        shapes.append(parameter.shape)
        accumulated(self, parameter)

    accumulated, flags = GradientBuckets.accumulated, "--global-batch-size 4"
    with mock.patch.object(GradientBuckets, "accumulated", counted):
        refused = RecordedGraphs(Refused(names_of("vgg_dvs")[1], "_differentiate"))
        with_and_without("vgg_dvs", flags, graphs=refused, asked="auto")
    half = len(shapes) // 2
    assert Counter(shapes[:half]) == Counter(shapes[half:])


def test_statistics_of_a_capture_that_fails_are_not_taken() -> None:
    failures: list[ParallelBatchNorm] = []

    def refused(self: ParallelBatchNorm, *arguments: Any) -> None:
        record(self, *arguments)
        if is_recording() and self not in failures:
            failures.append(self)
            raise RuntimeError(FAILURE)

    record = ParallelBatchNorm.record
    with mock.patch.object(ParallelBatchNorm, "record", refused):
        with_and_without("spikformer", UNEVEN, asked="auto")
    assert len(failures) > 1


@pytest.mark.parametrize("part", PARTS)
def test_a_capture_that_fails_is_an_error_where_graphs_must_be(part: str) -> None:
    name = names_of("vgg_dvs")[1]
    words = re.escape(f"{name} cannot have CUDA graphs: {PARTS[part]} cannot be captured (RuntimeError: {FAILURE})")
    with pytest.raises(PipelineError, match=words):
        with_and_without("vgg_dvs", UNEVEN, graphs=RecordedGraphs(Refused(name, part)))


def test_all_layers_may_fail(capfd) -> None:
    graphs = RecordedGraphs(lambda work: 0)
    with recorded_graphs(graphs):
        found, tensors = trained("spikformer", f"{UNEVEN} --cuda-graphs auto", 3)
        expected, others = trained("spikformer", UNEVEN, 3)
    assert found == expected and all(torch.equal(value, others[name]) for name, value in tensors.items())
    assert capfd.readouterr().err.count("runs without CUDA graphs: its forward") == len(names_of("spikformer"))


def test_what_is_captured_holds_no_parameter() -> None:
    """Autograd remembers the stream on which a parameter was used first, as long as a graph with it is held."""
    made: list[LayerGraphs] = []

    def known(self: LayerGraphs, *arguments: Any) -> None:
        init(self, *arguments)
        made.append(self)

    init = LayerGraphs.__init__
    with mock.patch.object(LayerGraphs, "__init__", known), recorded_graphs():
        trained("spikformer", "--global-batch-size 2 --cuda-graphs on", 3)
    held = [leaf for each in made for output in each.outputs for leaf in leaves_of(output.grad_fn)]
    own = {leaf for each in made for leaf in (*each.leaves.values(), *each.inputs.tensors)}
    learnt = {parameter for each in made for parameter in each.leaves}
    assert any(leaf.data_ptr() in {each.data_ptr() for each in learnt} for leaf in held), "norms and biases"
    assert not learnt.intersection(held) and own.issuperset(leaf for leaf in held if leaf.numel() > 1)


def leaves_of(node: Any) -> set[Tensor]:
    """The tensors that autograd would add to."""
    seen, ahead, found = set(), [node], set()
    while ahead:
        node = ahead.pop()
        if node is not None and node not in seen:
            seen.add(node)
            found |= {node.variable} if hasattr(node, "variable") else set()
            ahead += [before for before, _ in node.next_functions]
    return found


def random_steps(seed: int, chunks: int, graphs: RecordedGraphs | None) -> list[tuple[float, list[Tensor]]]:
    """Losses, gradients and buffers of steps of a random network in chunks of one rank."""
    model = describe(Random(seed=seed))
    count = len(model.layers)
    bounds = [range(i * count // chunks, (i + 1) * count // chunks) for i in range(chunks)]
    plan, found = plan_schedule("interleaved", 1, chunks), []
    context = BuildContext(cast_weights=CastWeights(stay=graphs is not None), neuron_backend="torch")
    try:
        state, options = initialize_model_parallel(1, 1), None if graphs is None else GraphOptions(graphs, False)
        engine = DistributedModel(model, state, context, bounds, plan, options=ModelOptions(graphs=options))
        for step in range(3):
            random = torch.Generator().manual_seed(step)
            images = torch.rand(4, *model.input_shape, generator=random)
            labels = torch.randint(CLASSES, (4,), generator=random)
            samples = [range(4 * step + i, 4 * step + i + 2) for i in (0, 2)]
            batches = [MicroBatchInput(images[i : i + 2], labels[i : i + 2], 2, samples[i // 2]) for i in (0, 2)]
            loss = engine.forward_backward(batches, 4)
            engine.merge_statistics(2)
            tensors = [e.tensor if e.tensor.grad is None else e.tensor.grad for e in engine.tensors]
            found.append((loss, [each.clone() for each in tensors]))
        return found
    finally:
        destroy_model_parallel()


@pytest.mark.parametrize("seed", [3, *(pytest.param(seed, marks=pytest.mark.matrix) for seed in range(10))])
def test_random_networks(seed: int) -> None:
    """Skips, bundles, layers that share tensors. Their classes are vouched for here."""
    with mock.patch("megasnn.pipeline.graphs.KNOWN", ("megasnn", "torch", "tests")), recorded_graphs() as graphs:
        found, expected = (random_steps(seed, 3, each) for each in (graphs, None))
    assert graphs.replays > 0
    for (loss, tensors), (other, others) in zip(found, expected, strict=True):
        assert loss == other and all(map(torch.equal, tensors, others))


def forgetful(outputs: Any, inputs: Any, grads: Any, **options: Any) -> Any:
    return gradients(outputs, inputs, grads, **{**options, "retain_graph": False})


@contextmanager
def in_one_slot(self: ChunkGraphs, micro_batch: int) -> Iterator[None]:
    with begun(self, micro_batch):
        assert self._pass is not None
        self._pass = self._pass._replace(slot=0)
        yield


gradients, begun = torch.autograd.grad, ChunkGraphs.begun
WRONG = {
    "memory is freed": ("pipeline.layer_graphs.torch.autograd.grad", forgetful),
    "one slot for all": ("pipeline.graphs.ChunkGraphs.begun", in_one_slot),
}


def one_pool(self: RecordedGraphs) -> Pool:
    if not self.pools:
        self.pools.append(Pool())
    return self.pools[0]


def in_pool_of_pass(self: LayerGraphs, grads: Any, passing: MicroBatchPass) -> Any:
    with mock.patch.object(self.room, "of_weights", passing.pool):
        return made_backward(self, grads, passing)


made_backward = LayerGraphs._made_backward
WRONG_POOLS = {
    "all": ("tests.recorded_graphs.RecordedGraphs.pool", one_pool),
    "weight gradients": ("megasnn.pipeline.layer_graphs.LayerGraphs._made_backward", in_pool_of_pass),
}


def differs(what: str, model: str, flags: str) -> bool:
    with mock.patch(*WRONG_POOLS[what]):
        try:
            with_and_without(model, flags)
        except AssertionError:
            return True
        return False


@pytest.mark.parametrize(("what", "flags"), [
    ("all", f"--global-batch-size 7 {PIPELINE} 1f1b {LAYOUT} 2|2"),
    ("all", f"--global-batch-size 8 {PIPELINE} zb1p {LAYOUT} 2|2"),
    ("weight gradients", f"--global-batch-size 8 {PIPELINE} zb1p {LAYOUT} 2|2"),
])  # fmt: skip
def test_memory_that_replays_in_another_order_must_not_share(ranks, what: str, flags: str) -> None:
    assert any(ranks(2, differs, what, "vgg_dvs", flags))


@pytest.mark.parametrize("what", WRONG)
def test_what_a_graph_must_not_do_is_seen(what: str) -> None:
    target, wrong = WRONG[what]
    flags = "--global-batch-size 4 --precision bf16 --pipeline-schedule gpipe"
    with mock.patch(f"megasnn.{target}", wrong), pytest.raises(AssertionError):
        with_and_without("vgg_dvs", flags)


def test_what_is_taken_from_the_host_is_refused() -> None:
    """Keys that are drawn while a graph is made, as one of them."""
    with mock.patch("megasnn.layers.dropout.RefilledKeys.entered", lambda self: nullcontext()):
        with pytest.raises(PipelineError, match="not permitted when stream is capturing: lift_fresh"):
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
