"""From the configuration to a model's neuron, its types, and its cut into chunks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from megasnn.augment.mixing import Mixing
from megasnn.batching import micro_batches_of
from megasnn.config import PretrainConfig
from megasnn.config.parallel import ParallelConfig
from megasnn.config.training import TrainingConfig
from megasnn.engine import SampleLoss
from megasnn.layers import BuildContext
from megasnn.losses import LOSSES
from megasnn.models.description import ModelDescription
from megasnn.parallel_state import ParallelState
from megasnn.pipeline.chunk import describe_tensors
from megasnn.pipeline.p2p import WireOptions
from megasnn.pipeline.plan import PipelinePlan, PipelineRequest, plan_pipeline
from megasnn.precisions import PRECISIONS
from megasnn.schedule.partition import layout_to_bounds


def parameter_names(model: ModelDescription) -> list[str]:
    """The global names of a model's parameters, in order; nothing is built for that."""
    return [entry.name for entry in describe_tensors(model, BuildContext()) if entry.is_parameter]


def sample_loss(training: TrainingConfig) -> SampleLoss:
    """(logits, labels) -> the sum of the samples' losses."""
    loss = LOSSES[training.loss]
    own = {argument: getattr(training, name) for name, argument in loss.flags.items()}
    return partial(loss.sum, label_smoothing=training.label_smoothing, **own)


def mixing_of(config: PretrainConfig, model: ModelDescription, epoch: int) -> Mixing | None:
    """How samples are mixed with each other; None where they are not. Args: epoch: samples of one."""
    data = config.data
    if not data.mixes:
        return None
    until = None if data.mixup_off_epoch is None else data.mixup_off_epoch * epoch
    height, width = model.input_shape[-2:]
    seed = config.training.seed
    return Mixing(seed, data.mixup_alpha, data.cutmix_alpha, model.num_classes, (height, width), until)


def build_context(state: ParallelState, precision: str, neuron_backend: str, seed: int = 0) -> BuildContext:
    """What layers are built with.

    Args:
        state: whose groups the layers are cut over, or held again by.
        precision: as in `--precision`.
        neuron_backend: as in `--neuron-backend`.
        seed: of dropout.
    """
    types = PRECISIONS[precision]
    weights, products = getattr(torch, types.weights), getattr(torch, types.products)
    return BuildContext(state.tensor, weights, products, neuron_backend, seed, data=state.data)


def wire_options(parallel: ParallelConfig) -> WireOptions:
    """How tensors travel between stages."""
    asked = parallel.pipeline_gradient_dtype
    return WireOptions(parallel.strict_wire, None if asked is None else getattr(torch, PRECISIONS[asked].products))


def plan_of(
    model: ModelDescription,
    parallel: ParallelConfig,
    micro_batch_size: int,
    micro_batches: Sequence[int],
    context: BuildContext,
    state: ParallelState,
    predicts: bool = False,
) -> PipelinePlan:
    """The layers and the place of each chunk, and the schedules. Collective.

    Args:
        micro_batches: the numbers of them that replicas have in a step, the largest first.
        predicts: whether the plan is to be simulated, and needs measured costs even with a fixed cut and order.
    Raises:
        ValueError: the schedule cannot keep `--pipeline-memory-limit`.
    """
    layout, units = parallel.layout, [layer.unit for layer in model.layers]
    request = PipelineRequest(
        schedule=parallel.pipeline_schedule,
        chunks_per_rank=parallel.chunks_per_rank,
        memory_limit=parallel.pipeline_memory_limit,
        bounds=None if layout is None else tuple(layout_to_bounds(layout, units)),
        micro_batch_size=micro_batch_size,
        micro_batches=tuple(micro_batches),
        predicts=predicts,
    )
    return plan_pipeline(model, request, context, state, wire_options(parallel))


def micro_batch_counts(micro_batches: int, replicas: int) -> tuple[int, ...]:
    """How many of a global batch's micro-batches a replica may have, the largest number first."""
    counts = {len(micro_batches_of(micro_batches, replicas, replica)) for replica in (0, replicas - 1)}
    return tuple(sorted(counts, reverse=True))
