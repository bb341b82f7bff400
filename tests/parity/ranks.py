"""Steps of a model on every rank of a layout, and their parts of tensors, put together and compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from spikingjelly.activation_based import neuron
from torch import Tensor, nn

from megasnn.checkpoint.load import load_globals_into
from megasnn.common.bundle import Bundle, logits_of
from megasnn.common.grid import ContextCut, micro_batch_counts, micro_batch_sizes, micro_batches_of
from megasnn.config import ParallelConfig, PretrainConfig, TrainingConfig
from megasnn.config.optimizer import OptimizerConfig
from megasnn.engine.assemble import assemble_model
from megasnn.engine.model import DistributedModel
from megasnn.engine.step_sums import StepFigures
from megasnn.kernels import NeuronSpec
from megasnn.layers import BuildContext, Numerics
from megasnn.layers.facts import facts
from megasnn.layers.weight_grad import CastWeights
from megasnn.models.build import describe_model
from megasnn.models.description import ModelDescription
from megasnn.models.losses import correct_predictions
from megasnn.models.model import Model
from megasnn.models.spikformer.model import Spikformer
from megasnn.optim.build import build_optimizer
from megasnn.parallel.sharding import own_span
from megasnn.parallel_state import destroy_model_parallel, initialize_model_parallel
from megasnn.pipeline.graph_capture import Capture
from megasnn.pipeline.microbatch_state import MicroBatchInput
from megasnn.pipeline.plan import PipelinePlan, shared_weights
from megasnn.schedule import plan_schedule
from megasnn.schedule.partition import balanced_bounds
from megasnn.schedule.passes import NEVER
from tests import parts
from tests.distributed import whole
from tests.parity.spikingjelly_reference import DIMS, IMAGE_SIZE

SIZES = (2, 2, 1)
"""Of the micro-batches of small models; the last one is smaller."""
IMAGE_CUTS: tuple[ContextCut, ...] = ("samples", "rows")
"""Of micro-batches of images: those of tokens are for sequences."""
TOLERANCE = 1e-9
SGD = OptimizerConfig("sgd", lr=0.05, weight_decay=0.0, clip_grad=0.0)


@dataclass(frozen=True)
class Layout:
    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    schedule: str = "1f1b"
    chunks: int | None = None  # per pipeline rank; by default what the schedule stands for
    weight: int = 1  # replicas that share one copy of the weights
    scatters: bool = False  # gradients after every micro-batch
    recompute: str | None = None  # layer by layer; None: chunk by chunk, unless replicas share weights
    context: int = 1  # ranks that share a micro-batch
    cut: ContextCut = "samples"

    @property
    def world_size(self) -> int:
        return self.data * self.tensor * self.pipeline * self.context


def name_of(layout: Layout) -> str:
    weight = f"-wp{layout.weight}" if layout.weight > 1 else ""
    context = f"-cp{layout.context}{layout.cut}" if layout.context > 1 else ""
    options = "-scatters" * layout.scatters + (f"-{layout.recompute}" if layout.recompute else "")
    return f"dp{layout.data}-tp{layout.tensor}-pp{layout.pipeline}{context}-{layout.schedule}{weight}{options}"


LAYOUTS = [
    Layout(tensor=2),
    Layout(pipeline=2),
    Layout(2, 1, 1),
    Layout(1, 1, 4, "gpipe"),
    Layout(2, 2, 2, "zbv"),
]


@dataclass
class RankStep:
    """One rank's part of a step; weights are those behind the optimizer.

    rank: its place in the pipeline, among the replicas, among those that share a micro-batch, and along tensor
    parallelism.
    """

    rank: tuple[int, int, int, int]
    loss: float
    norm: float
    logits: list[Tensor] = field(default_factory=list)
    spikes: int = 0
    weights: list[parts.Part] = field(default_factory=list)
    gradients: list[parts.Part] = field(default_factory=list)
    buffers: list[parts.Part] = field(default_factory=list)


@dataclass
class Bits:
    """What a rank holds after a step and an evaluation, tensors as digests by name."""

    loss: float
    norm: float
    correct: float
    evaluated: list[float]
    tensors: dict[str, str]


def model_config() -> Spikformer:
    return Spikformer(
        embed_dim=DIMS["embed_dims"],
        depth=DIMS["depths"],
        num_heads=DIMS["num_heads"],
        mlp_ratio=DIMS["mlp_ratio"],
        patch_size=DIMS["patch_size"],
        image_size=IMAGE_SIZE,
        in_channels=DIMS["in_channels"],
        time_steps=DIMS["T"],
        num_classes=DIMS["num_classes"],
    )


def images(model: Model, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """A global batch with labels."""
    generator = torch.Generator().manual_seed(7)
    values = scale * torch.randn(sum(SIZES), *model.input_shape, generator=generator, dtype=torch.float64)
    return values, torch.randint(0, model.num_classes, (sum(SIZES),), generator=generator)


# --- on a rank of an initialised world


@contextmanager
def built(
    model: ModelDescription,
    layout: Layout,
    dtype: torch.dtype = torch.float64,
    *,
    backend: str = "auto",
    seed: int = 0,
    bounds: Sequence[range] | None = None,
    zero1: bool = False,
    graphs: Capture | None = None,
) -> Iterator[DistributedModel]:
    """A model with keyed initial values.

    Args:
        bounds: layers of each chunk; as many in each where none are given.
    """
    state = initialize_model_parallel(tp=layout.tensor, pp=layout.pipeline, dp_shard=layout.weight, cp=layout.context)
    try:
        casts = CastWeights()
        numerics = Numerics(dtype, dtype, backend)
        context = BuildContext(state, numerics, layout.cut, seed=seed, cast_weights=casts)
        plan = plan_schedule(layout.schedule, layout.pipeline, layout.chunks)
        bounds = bounds or even_bounds(len(model.layers), len(plan.placement))
        if layout.recompute is not None or layout.weight > 1:
            plan = plan.in_segments(bounds, layout.recompute or NEVER)
        layers = model.build(context)
        if layout.weight > 1:
            modules = [each.module for each in layers]
            shared = shared_weights(modules, plan.segment_bounds(bounds), state.dp_shard.size, layout.scatters)
            plan = plan.sharing(shared, [])
        parallel = ParallelConfig(use_distributed_optimizer=zero1)
        config = PretrainConfig(model_config(), training=TrainingConfig(seed=seed), parallel=parallel)
        pipeline = PipelinePlan(tuple(bounds), plan, 1)
        made = assemble_model(config, model, layers, context, pipeline, lambda: False)
        for chunk in made.chunks.values():
            if graphs is not None:
                chunk.capture_graphs(graphs)
        yield made
    finally:
        destroy_model_parallel()


def even_bounds(layers: int, chunks: int) -> list[range]:
    """As many layers in each chunk; of more chunks than layers, the last ones have none."""
    bounds = balanced_bounds([1.0] * layers, min(layers, chunks))
    return [*bounds, *[range(layers, layers)] * (chunks - len(bounds))]


def inputs_of(engine: DistributedModel, x: Tensor, labels: Tensor, micro_batch_size: int) -> list[MicroBatchInput]:
    """This rank's share of a global batch: of its replica's micro-batches the samples that it has."""
    replicas, sharing = engine.state.dp, engine.context.sample_group
    sizes, batches = micro_batch_sizes(len(labels), micro_batch_size), []
    for i in micro_batches_of(len(sizes), replicas.size, replicas.rank):
        own, start = own_span(sizes[i], sharing.sizes, sharing.rank), sum(sizes[:i])
        samples = range(start + own.start, start + own.stop)
        part = slice(samples.start, samples.stop)
        values = x[part] if engine.takes_inputs else None, labels[part] if engine.gives_logits else None
        batches.append(MicroBatchInput(*values, len(own), samples, total_size=sizes[i]))
    return batches


def forward_backward(engine: DistributedModel, micro_batches: Sequence[MicroBatchInput], samples: int) -> StepFigures:
    """Computes the figures of a step, which it returns, and the reduced gradients."""
    return engine.read(engine.run(micro_batches, samples))


def evaluated(engine: DistributedModel, micro_batches: Sequence[MicroBatchInput]) -> list[float]:
    """Returns the sums of an evaluation over all replicas: losses, samples, correct in top 1, in top 5."""
    totals = torch.zeros(4, dtype=torch.float64)

    def count(output: Bundle, labels: Tensor) -> None:
        totals[0] += engine.loss.training_loss(output, labels)
        totals[1] += len(labels)
        totals[2:] += correct_predictions(logits_of(output), labels)

    engine.evaluate(micro_batches, count)
    return engine.sum_over_replicas(totals).tolist()


def bits_of(engine: DistributedModel, micro_batches: Sequence[MicroBatchInput], samples: int) -> Bits:
    """Takes a step, and evaluates behind it."""
    found = forward_backward(engine, micro_batches, samples)
    engine.running_statistics.merge(len(micro_batches))
    tensors = whole.digests(tensors_of(engine))
    return Bits(found.loss, found.grad_norm, found.values["metrics"][0], evaluated(engine, micro_batches), tensors)


def tensors_of(engine: DistributedModel) -> dict[str, Tensor]:
    """Gradients where there are some, and otherwise values; of this rank's tensors by name."""
    return {each.name: each.tensor if each.tensor.grad is None else each.tensor.grad for each in engine.tensors}


def is_whole(layer: nn.Module) -> bool:
    """Tells whether every tensor parallel rank computes all of a layer."""
    call = facts(layer).call
    return call is not None and call.group is not None


def record_step(
    engine: DistributedModel, x: Tensor, labels: Tensor, micro_batch_size: int, observes: bool = True
) -> RankStep:
    """This rank's part of a step on the whole batch, and all that it came to.

    Args:
        observes: spikes are counted.
    """
    state, batches = engine.state, inputs_of(engine, x, labels, micro_batch_size)
    fired: list[int] = []
    counts = engine.context.counts_logits  # of what has no space, which ranks that share rows have alike

    def count(spikes: Tensor) -> None:
        fired.append(int(spikes.sum()) if spikes.ndim > 3 or counts else 0)

    repeated = {  # computed by every tensor parallel rank
        node
        for chunk in engine.chunks.values()
        for layer in chunk.layers
        if is_whole(layer) and state.tp.rank > 0
        for node in layer.modules()
    }
    for _, each in engine.neurons():
        each.observer = count if observes and each not in repeated else None
    hooks = [
        node.register_forward_hook(lambda _module, _inputs, spikes: fired.append(int(spikes.sum())))
        for chunk in engine.chunks.values()
        for node in chunk.modules()
        if isinstance(node, (neuron.BaseNode, neuron.SimpleBaseNode)) and node not in repeated
    ]
    logits: list[Tensor] = []
    inner = engine.loss.training_loss

    def keeping(y: Bundle, target: Tensor) -> Tensor:
        if counts:
            logits.append(logits_of(y).detach().clone())
        return inner(y, target)

    engine.loss.training_loss = keeping
    found = forward_backward(engine, batches, len(labels))
    engine.loss.training_loss = inner
    for hook in hooks:
        hook.remove()
    engine.running_statistics.merge(micro_batch_counts(len(labels), micro_batch_size, state.dp.size).most)
    coordinates = state.coordinates
    rank = coordinates.pp, state.dp.rank, coordinates.cp, coordinates.tp
    result = RankStep(rank, found.loss, found.grad_norm, logits, sum(fired))
    for each in engine.owned:
        trains = each.is_parameter and each.tensor.requires_grad
        assert (each.tensor.grad is not None) == trains, each.name
    result.gradients = parts.gradients(engine.owned)
    result.buffers = parts.parts([each for each in engine.owned if not each.is_parameter])
    return result


def take_steps(
    model: Model,
    layout: Layout,
    batch: tuple[Tensor, Tensor],
    count: int = 1,
    *,
    micro_batch_size: int = SIZES[0],
    weights: Path | None = None,
    options: OptimizerConfig = SGD,
    spec: NeuronSpec | None = None,
    loss: Callable[[Bundle, Tensor], Tensor] | None = None,
    **build: Any,
) -> list[RankStep]:
    """Steps on one batch, in its precision. A single one is up to the gradients.

    Args:
        weights: a file of torch's with those to begin at, by global names, which all ranks read from one memory;
            without it, steps begin at the keyed initial values.
        build: arguments of `built`.
    """
    steps = list[RankStep]()
    with built(describe_model(model, spec), layout, batch[0].dtype, **build) as engine:
        engine.loss.training_loss = loss or engine.loss.training_loss
        if weights is not None:
            values = torch.load(weights, mmap=True, weights_only=True)
            load_globals_into(engine.tensors, values, engine.state.world.handle)
        optimizer = build_optimizer(engine.owned, options, engine.state.holding_groups)
        for _ in range(count):
            steps.append(record_step(engine, *batch, micro_batch_size))
            if count > 1:
                engine.gradient_norm.clip(steps[-1].norm, options.clip_grad)
                optimizer.step()
                engine.refresh_copies()
                steps[-1].weights = parts.parts([each for each in engine.tensors if each.is_parameter])
    return steps


def one_step(
    model: Model, layout: Layout, dtype: torch.dtype = torch.float64, micro_batch_size: int = SIZES[0]
) -> RankStep:
    """From the keyed initial values."""
    x, labels = images(model)
    (step,) = take_steps(model, layout, (x.to(dtype), labels), micro_batch_size=micro_batch_size)
    return step


# --- comparisons


def assemble(steps: list[RankStep], what: str) -> dict[str, Tensor]:
    """Global tensors from all ranks' parts; what several ranks hold must be the same bits on all of them."""
    return parts.assemble([getattr(step, what) for step in steps])


def logits_in_order(steps: list[RankStep]) -> list[Tensor]:
    """Of the first tensor rank with the last chunk, replica by replica: global micro-batch order. The samples of those
    that share a micro-batch come together."""
    shares: dict[tuple[int, ...], list[list[Tensor]]] = {}
    for step in steps:
        pipeline, replica, _, tensor = step.rank
        if tensor == 0 and step.logits:
            shares.setdefault((pipeline, replica), []).append(step.logits)
    return [torch.cat(parts, dim=1) for of_ranks in shares.values() for parts in zip(*of_ranks, strict=True)]


def error(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference of an element, relative to its size, or to a thousandth of the largest one where it is
    smaller: AdamW divides by an element's own size."""
    theirs = theirs.double()
    sizes = theirs.abs()
    floor = (sizes.max() * 1e-3).clamp_min(1e-300)
    return ((ours.double() - theirs).abs() / sizes.maximum(floor)).max().item()


def assert_equal(steps: list[RankStep], one: list[RankStep]) -> None:
    """Loss, norm, spikes, every gradient and buffer are those of one rank, to 1e-9 relative."""
    for step in steps:
        assert abs(step.loss - one[0].loss) < TOLERANCE * abs(one[0].loss)
        assert abs(step.norm - one[0].norm) < TOLERANCE * one[0].norm
    assert sum(step.spikes for step in steps) == one[0].spikes, "spikes flipped"
    for what in ("gradients", "buffers"):
        expected, found = assemble(one, what), assemble(steps, what)
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            # A bias before a norm has no gradient but what rounding leaves of it.
            assert error(found[name], value) < TOLERANCE or value.abs().max() < 1e-12, name


def assert_equal_to_one(
    ranks: Any, model: Model, layouts: Iterable[Layout], batch: tuple[Tensor, Tensor] | None = None, **options: Any
) -> RankStep:
    """Compares a step from the keyed initial values with that of one rank, and returns the latter.

    Args:
        batch: `images` of the model by default.
        options: arguments of `take_steps`.
    """
    one, *others = (
        ranks(each.world_size, partial(take_steps, model, each, batch or images(model), **options))
        for each in (Layout(), *layouts)
    )
    for found in others:
        assert_equal([step for (step,) in found], one[0])
    return one[0][0]
