"""What the configuration makes of a model: its neuron, its types, and how it is cut into chunks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megasnn.comm.group import Group
from megasnn.config import PretrainConfig
from megasnn.config.parallel import ParallelConfig
from megasnn.config.training import TrainingConfig
from megasnn.engine import SampleLoss
from megasnn.kernels import NeuronSpec
from megasnn.layers import BuildContext
from megasnn.losses import cross_entropy_sum, mse_sum, tet_sum
from megasnn.models.description import ModelDescription
from megasnn.parallel_state import ParallelState
from megasnn.partition import layout_to_bounds, placed_bounds
from megasnn.pipeline.costs import agreed_layer_costs
from megasnn.pipeline.p2p import WireOptions
from megasnn.schedule import ChunkCost, SchedulePlan, plan_schedule
from megasnn.schedule.generate import LOOK_AT_COSTS
from megasnn.schedule.memory import stage_shares

DTYPES = {"fp32": torch.float32, "bf16": torch.float32, "fp64": torch.float64}
WIRE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ImportWeights = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]


@dataclass(frozen=True)
class ModelProvider:
    """What a pretrain script hands to `pretrain`.

    Attributes:
        description: the layers.
        from_spikingjelly: a state_dict of SpikingJelly's model -> global tensors by name.
    """

    description: ModelDescription
    from_spikingjelly: ImportWeights


def neuron_spec(config: PretrainConfig) -> NeuronSpec:
    """The neuron that the configuration describes."""
    n = config.neuron
    return NeuronSpec(
        n.neuron, n.tau, n.v_threshold, n.v_reset, n.decay_input, n.detach_reset, n.surrogate, n.surrogate_alpha
    )


def sample_loss(training: TrainingConfig) -> SampleLoss:
    """(logits, labels) -> the sum of the samples' losses."""
    smoothing = training.label_smoothing
    if training.loss == "tet":
        return partial(tet_sum, label_smoothing=smoothing, share=training.tet_lambda, mean=training.tet_mean)
    return partial(mse_sum if training.loss == "mse" else cross_entropy_sum, label_smoothing=smoothing)


def build_context(tensor: Group, precision: str, neuron_backend: str, seed: int = 0) -> BuildContext:
    """What layers are built with.

    Args:
        tensor: the tensor-parallel group.
        precision: "fp32", "fp64", or "bf16": then weights stay in fp32 and products are taken in bfloat16.
        neuron_backend: as in `--neuron-backend`.
        seed: of dropout.
    """
    dtype = DTYPES[precision]
    return BuildContext(tensor, dtype, torch.bfloat16 if precision == "bf16" else dtype, neuron_backend, seed)


def wire_options(parallel: ParallelConfig) -> WireOptions:
    """How tensors travel between stages."""
    asked = parallel.pipeline_gradient_dtype
    return WireOptions(parallel.strict_wire, None if asked is None else WIRE_DTYPES[asked])


def cut_into_chunks(
    model: ModelDescription,
    parallel: ParallelConfig,
    micro_batch_size: int,
    micro_batches: int,
    context: BuildContext,
    state: ParallelState,
) -> tuple[list[range], SchedulePlan]:
    """The layers of each chunk, and the schedule with the place of each chunk. Collective.

    The layers are those of the explicit layout, or of the cut that balances the measured costs on the placement.

    Args:
        micro_batches: of a replica in a step.
    Raises:
        ValueError: the schedule cannot keep `--pipeline-memory-limit`.
    """
    units = [layer.unit for layer in model.layers]
    name, stages, chunks_per_rank = parallel.pipeline_schedule, state.pipeline.size, parallel.chunks_per_rank
    if chunks_per_rank is None and 2 * stages > len(model.layers):
        chunks_per_rank = 1
    limit = parallel.pipeline_memory_limit
    if stages == chunks_per_rank == 1:
        return [range(len(model.layers))], plan_schedule(name, 1, 1, micro_batches, None, limit)
    if parallel.layout is not None and name not in LOOK_AT_COSTS:
        plan = plan_schedule(name, stages, chunks_per_rank, micro_batches, None, limit)
        return layout_to_bounds(parallel.layout, units), plan
    seconds = agreed_layer_costs(model, micro_batch_size, context, state.device, state.world)

    def bounds_of(placement: tuple[int, ...]) -> list[range]:
        if parallel.layout is not None:
            return layout_to_bounds(parallel.layout, units)
        return placed_bounds(seconds, placement)

    def costs_of(placement: tuple[int, ...]) -> list[ChunkCost]:
        shares = stage_shares(placement)
        sums = [sum(seconds[span.start : span.stop]) for span in bounds_of(placement)]
        return [ChunkCost(cost / 3, cost * 2 / 3, activation=share) for cost, share in zip(sums, shares, strict=True)]

    plan = plan_schedule(name, stages, chunks_per_rank, micro_batches, costs_of, limit)
    return bounds_of(plan.placement), plan
