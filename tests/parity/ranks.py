"""What a rank does in the parity tests: build its part of the model, load SpikingJelly's weights, take one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import torch
from spikingjelly.activation_based import neuron
from torch import Tensor

from megasnn.batching import micro_batch_sizes, micro_batches_of
from megasnn.bundle import Bundle, logits_of
from megasnn.checkpoint.load import load_globals_into
from megasnn.config import ParallelConfig, PretrainConfig, TrainingConfig
from megasnn.engine.model import DistributedModel
from megasnn.grid import ContextCut
from megasnn.kernels import NeuronSpec
from megasnn.layers import BuildContext
from megasnn.layers.replicated import is_whole
from megasnn.models.build import describe
from megasnn.models.description import ModelDescription
from megasnn.models.spikformer.model import Spikformer
from megasnn.parallel.sharding import Shard, own_span
from megasnn.parallel_state import ParallelState, destroy_model_parallel, initialize_model_parallel
from megasnn.pipeline.graphs import Capture
from megasnn.pipeline.microbatch_state import MicroBatchInput
from megasnn.pipeline.plan import PipelinePlan, shared_weights
from megasnn.schedule import SchedulePlan, plan_schedule
from megasnn.schedule.partition import balanced_bounds
from tests.gradients import forward_backward, merge_statistics
from tests.parity.spikingjelly_reference import DIMS, IMAGE_SIZE, from_spikingjelly


@dataclass(frozen=True)
class Layout:
    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    schedule: str = "1f1b"
    chunks: int | None = None  # per pipeline rank; by default what the schedule stands for
    weight: int = 1  # replicas that share one copy of the weights
    scatters: bool = False  # gradients after every micro-batch
    recompute: str = "never"
    context: int = 1  # ranks that share a micro-batch
    cut: ContextCut = "samples"

    @property
    def world_size(self) -> int:
        return self.data * self.tensor * self.pipeline * self.context

    def build_context(
        self, state: ParallelState, dtype: torch.dtype, backend: str = "auto", seed: int = 0
    ) -> BuildContext:
        """What layers are built with on the grid of this layout."""
        groups = {"dp": state.dp, "dp_shard": state.dp_shard, "cp": state.cp}
        return BuildContext(state.tp, dtype, dtype, backend, seed, **groups, cut=self.cut)


@dataclass
class RankStep:
    """One rank's part of a step, with the description of every tensor; weights are those behind the optimizer.

    rank: its place in the pipeline, among the replicas, among those that share a micro-batch, and along tensor
    parallelism.
    """

    rank: tuple[int, int, int, int]
    loss: float
    norm: float
    logits: list[Tensor] = field(default_factory=list)
    spikes: int = 0
    weights: dict[str, tuple[Shard, Tensor]] = field(default_factory=dict)
    gradients: dict[str, tuple[Shard, Tensor]] = field(default_factory=dict)
    buffers: dict[str, tuple[Shard, Tensor]] = field(default_factory=dict)


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


@cache
def _described(spec: NeuronSpec) -> ModelDescription:
    """Once for all engines of a process: describing takes as long as building."""
    return describe(model_config(), spec)


def build_engine(
    state: ParallelState,
    schedule: str | SchedulePlan,
    dtype: torch.dtype,
    backend: str = "auto",
    spec: NeuronSpec | None = None,
    bounds: list[range] | None = None,
    rows_have_owners: bool = False,
    layout: Layout = Layout(),  # noqa: B008  (frozen)
) -> DistributedModel:
    model = _described(spec or NeuronSpec())
    context = layout.build_context(state, dtype, backend)
    plan = schedule if isinstance(schedule, SchedulePlan) else plan_schedule(schedule, state.pp.size)
    bounds = bounds or even_bounds(len(model.layers), len(plan.placement))
    plan = gathering(plan, model, bounds, context, layout)
    return distributed(model, state, context, bounds, plan, rows_have_owners=rows_have_owners)


def distributed(
    model: ModelDescription,
    state: ParallelState,
    context: BuildContext,
    bounds: Sequence[range],
    schedules: SchedulePlan,
    *,
    graphs: Capture | None = None,
    rows_have_owners: bool = False,
) -> DistributedModel:
    """A model on this rank by a plan of the test's own; initial values are those of the context's seed."""
    parallel = ParallelConfig(use_distributed_optimizer=rows_have_owners)
    config = PretrainConfig(model_config(), training=TrainingConfig(seed=context.seed), parallel=parallel)
    return DistributedModel(model, state, context, PipelinePlan(tuple(bounds), schedules, 1), config, graphs)


def even_bounds(layers: int, chunks: int) -> list[range]:
    """As many layers in each chunk; of more chunks than layers, the last ones have none."""
    bounds = balanced_bounds([1.0] * layers, min(layers, chunks))
    return [*bounds, *[range(layers, layers)] * (chunks - len(bounds))]


def join(layout: Layout) -> ParallelState:
    """The grid of a layout over an initialised world."""
    return initialize_model_parallel(tp=layout.tensor, pp=layout.pipeline, dp_shard=layout.weight, cp=layout.context)


def gathering(
    plan: SchedulePlan, model: ModelDescription, bounds: list[range], context: BuildContext, layout: Layout
) -> SchedulePlan:
    """The plan; layer by layer and with gathers, where replicas share weights."""
    if context.dp_shard.size == 1:
        return plan
    plan = plan.in_units(bounds, layout.recompute)
    weights = shared_weights(model, plan.unit_bounds(bounds), context, layout.scatters)
    return plan.sharing(weights, [])


def one_step(
    layout: Layout,
    weights: dict[str, Tensor] | None,
    images: Tensor,
    labels: Tensor,
    micro_batch_size: int,
    dtype: torch.dtype = torch.float64,
    backend: str = "auto",
    spec: NeuronSpec | None = None,
    bounds: list[range] | None = None,
) -> RankStep:
    """Runs on every rank of an initialised world. Without `weights`, keeps the initial values."""
    state = join(layout)
    try:
        plan = plan_schedule(layout.schedule, layout.pipeline, layout.chunks)
        engine = build_engine(state, plan, dtype, backend, spec, bounds, layout=layout)
        if weights is not None:
            load_globals_into(engine.tensors, from_spikingjelly(weights), state.world.handle)
        return record_step(engine, state, images, labels, micro_batch_size)
    finally:
        destroy_model_parallel()


def record_step(
    engine: DistributedModel,
    state: ParallelState,
    images: Tensor,
    labels: Tensor,
    micro_batch_size: int,
    observes: bool = True,
) -> RankStep:
    """This rank's part of a step on the whole batch, and all that it came to.

    Args:
        observes: spikes are counted.
    """
    sizes = micro_batch_sizes(len(labels), micro_batch_size)
    mine = micro_batches_of(len(sizes), state.dp.size, state.dp.rank)
    batches = []
    for i in mine:
        own, start = own_samples(engine, sizes[i]), sum(sizes[:i])
        samples = range(start + own.start, start + own.stop)
        part = slice(samples.start, samples.stop)
        x, y = images[part] if engine.takes_images else None, labels[part] if engine.gives_logits else None
        batches.append(MicroBatchInput(x, y, len(own), samples))
    fired: list[int] = []
    counts = engine.context.counts_logits  # of what has no space, which ranks that share rows have alike

    def count(spikes: Tensor) -> None:
        fired.append(int(spikes.sum()) if spikes.ndim > 3 or counts else 0)

    for _, each in engine.neurons():
        each.observer = count if observes else None
    hooks = [
        node.register_forward_hook(lambda _module, _inputs, spikes: fired.append(int(spikes.sum())))
        for chunk in engine.chunks.values()
        for layer in chunk.layers
        if not is_whole(layer) or state.tp.rank == 0
        for node in layer.modules()
        if isinstance(node, (neuron.BaseNode, neuron.SimpleBaseNode))
    ]
    logits: list[Tensor] = []
    inner = engine.loss

    def keeping(y: Bundle, target: Tensor) -> Tensor:
        if engine.context.counts_logits:
            logits.append(logits_of(y).detach().clone())
        return inner(y, target)

    engine.loss = keeping
    most = max(len(micro_batches_of(len(sizes), state.dp.size, r)) for r in range(state.dp.size))
    loss = forward_backward(engine, batches, len(labels))
    engine.loss = inner
    for hook in hooks:
        hook.remove()
    merge_statistics(engine, most)
    place = state.place
    replica = state.dp.rank, place.cp
    result = RankStep((place.pp, *replica, place.tp), loss, engine.norm, logits, sum(fired))
    for entry in engine.tensors if state.dp_shard.size == 1 else engine.owned:
        if entry.is_parameter and not entry.tensor.requires_grad:
            assert entry.tensor.grad is None
        elif entry.is_parameter:
            assert entry.tensor.grad is not None
            result.gradients[entry.name] = (_plain(entry.shard), entry.tensor.grad.clone())
        else:
            result.buffers[entry.name] = (_plain(entry.shard), entry.tensor.clone())
    return result


def own_samples(engine: DistributedModel, size: int) -> range:
    """Those of a micro-batch of so many samples that this rank has."""
    group = engine.context.sharing_samples
    return own_span(size, group.sizes, group.rank)


def weights_of(engine: DistributedModel) -> dict[str, tuple[Shard, Tensor]]:
    """This rank's parts of the parameters."""
    return {e.name: (_plain(e.shard), e.tensor.detach().clone()) for e in engine.tensors if e.is_parameter}


def _plain(shard: Shard) -> Shard:
    """Without the initialiser, which does not travel between processes."""
    return replace(shard, initialise=None)


def assemble(steps: list[RankStep], what: str) -> dict[str, Tensor]:
    """Global tensors from all ranks' parts; what several ranks hold must be the same bits on all of them."""
    whole: dict[str, Tensor] = {}
    written: dict[str, Tensor] = {}
    for step in steps:
        for name, (shard, local) in getattr(step, what).items():
            full = whole.setdefault(name, torch.zeros(shard.global_shape, dtype=local.dtype))
            seen = written.setdefault(name, torch.zeros(shard.global_shape, dtype=torch.bool))
            for piece in shard.pieces():
                if piece.of_global(seen).all():
                    assert torch.equal(piece.of_global(full), piece.of_local(local)), f"replicas of {name} differ"
                piece.of_global(full).copy_(piece.of_local(local))
                piece.of_global(seen).fill_(True)
    for name, seen in written.items():
        assert seen.all(), f"no rank holds some part of {name}"
    return whole
