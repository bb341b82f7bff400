"""From the configuration to what is built: the model of a window, its types, its cut into chunks, its graphs."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from megasnn.augment.mixing import Mixing
from megasnn.batching import micro_batches_of
from megasnn.config import PretrainConfig
from megasnn.config.parallel import ParallelConfig
from megasnn.config.serialise import to_dict
from megasnn.config.training import TrainingConfig
from megasnn.config.validate import no_graphs
from megasnn.engine.distributed_model import DistributedModel, SampleLoss
from megasnn.engine.split_products import choose_products
from megasnn.grid import ContextCut
from megasnn.kernels.backends import BACKENDS, backend_for
from megasnn.layers import BuildContext
from megasnn.layers.cast_weights import CastWeights
from megasnn.losses import LOSSES
from megasnn.models.building import describe
from megasnn.models.description import ModelDescription
from megasnn.optim import is_frozen
from megasnn.parallel_state import (
    ParallelState,
)
from megasnn.pipeline.capture import Capture, CudaCapture, GraphOptions
from megasnn.pipeline.chunk import describe_tensors
from megasnn.pipeline.kept_costs import code_of
from megasnn.pipeline.order import PipelineRequest
from megasnn.pipeline.p2p import WireOptions
from megasnn.pipeline.plan import PipelinePlan, plan_pipeline
from megasnn.precisions import PRECISIONS
from megasnn.process.fault import placed
from megasnn.schedule.partition import layout_to_bounds
from megasnn.schedule.refine import NEVER
from megasnn.telemetry.timers import Timers


def window_count(config: PretrainConfig) -> int:
    """In how many windows each sample is shown; 1 without --bptt-steps."""
    return config.training.windows(config.model.time_steps)


def described_model(config: PretrainConfig) -> ModelDescription:
    """What is built: the model, with the time steps of one window.

    Raises:
        ValueError: with --bptt-steps, a model that depends on the number of time steps otherwise, or has a module that
            cannot keep its state.
    """
    spec, steps = config.neuron.spec, config.training.bptt_steps
    whole = describe(config.model, spec)
    if steps is None or steps == config.model.time_steps:
        return whole
    model: Any = config.model
    of_window = describe(replace(model, time_steps=steps), spec)
    of_window.build(BuildContext(carries=True))
    shapes, expected = (
        {entry.name: entry.shard.global_shape for entry in describe_tensors(each, BuildContext())}
        for each in (of_window, whole)
    )
    if different := [name for name, shape in expected.items() if shapes.get(name) != shape]:
        raise ValueError(
            f"{different[0]} depends on --time-steps {config.model.time_steps}: the model cannot be shown windows of "
            f"--bptt-steps {steps}"
        )
    return of_window


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


def build_context(
    state: ParallelState,
    precision: str,
    neuron_backend: str,
    seed: int = 0,
    carries: bool = False,
    cut: ContextCut = "samples",
) -> BuildContext:
    """What layers are built with.

    Args:
        state: whose groups the layers are cut over, or held again by.
        precision: as in `--precision`.
        neuron_backend: as in `--neuron-backend`.
        seed: of dropout.
        carries: whether neurons go on from one micro-batch to the next.
        cut: how ranks share a micro-batch.
    """
    types = PRECISIONS[precision]
    weights, products = getattr(torch, types.weights), getattr(torch, types.products)
    return BuildContext(
        state.tensor,
        weights,
        products,
        neuron_backend,
        seed,
        data=state.data,
        weight=state.weight,
        context=state.context,
        cut=cut,
        carries=carries,
    )


def require_kernels(config: PretrainConfig, device: torch.device) -> None:
    """Raises ValueError where this device has not the `--neuron-backend` that is asked for."""
    name = config.neuron.neuron_backend
    if name not in BACKENDS.also:
        products = getattr(torch, PRECISIONS[config.training.precision].products)
        backend_for(name, torch.empty(1, 1, 1, dtype=products, device=device), config.neuron.spec)


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
    costs_kept_as: tuple[str, ...] | None = None,
) -> PipelinePlan:
    """The layers and the place of each chunk, and the schedules. Collective.

    Args:
        costs_kept_as: see PipelineRequest.
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
        recompute=parallel.recompute,
        memory_budget=None if parallel.memory_budget is None else 1e6 * parallel.memory_budget,
        offloads=parallel.offload_activations,
        costs_kept_as=costs_kept_as,
        weight_limit=None if parallel.weight_memory_limit is None else 1e6 * parallel.weight_memory_limit,
        scatters=parallel.weight_gradients == "scattered",
        rows_have_owners=parallel.use_distributed_optimizer,
    )
    return plan_pipeline(model, request, context, state, wire_options(parallel))


def graph_options(config: PretrainConfig, state: ParallelState) -> GraphOptions | None:
    """How layers become CUDA graphs; None where none do, which is told unless it was asked for.

    Raises:
        ValueError: `--cuda-graphs on` on a CPU.
    """
    asked = config.training.cuda_graphs
    if asked == "off":
        return None
    capture = capture_on(state.device)
    why = no_graphs(config) or (f"this rank computes on a {state.device.type.upper()}" if capture is None else None)
    if capture is not None and why is None:
        return GraphOptions(capture, asked == "on")
    if asked == "on":
        raise ValueError(f"--cuda-graphs on: {why}; use auto or off")
    if state.rank == 0:
        sys.stderr.write(f"WARNING: --cuda-graphs auto: no layer has CUDA graphs: {why}\n")
    return None


def capture_on(device: torch.device) -> Capture | None:
    """What makes graphs of a device; None where there are none."""
    return CudaCapture(device) if device.type == "cuda" else None


def micro_batch_counts(micro_batches: int, replicas: int) -> tuple[int, ...]:
    """How many of a global batch's micro-batches a replica may have, the largest number first."""
    counts = {len(micro_batches_of(micro_batches, replicas, replica)) for replica in (0, replicas - 1)}
    return tuple(sorted(counts, reverse=True))


def built(
    config: PretrainConfig,
    model: ModelDescription,
    state: ParallelState,
    plan: PipelinePlan | None,
    wants_to_stop: Callable[[], bool],
    timers: Timers | None = None,
) -> tuple[PipelinePlan, DistributedModel]:
    """Plans the pipeline, unless a plan is given, and builds this rank's part of the model. Collective.

    Args:
        wants_to_stop: as for the model.
        timers: take how long `plan` and `materialise` are.
    Raises:
        ValueError: a flag that is for GPUs, and this rank computes on a CPU.
    """
    if config.training.wait_after_actions and state.device.type != "cuda":
        raise ValueError("--wait-after-actions is for GPUs, and this rank computes on a CPU: leave it out")
    graphs, timers = graph_options(config, state), timers or Timers(state.device)
    training, parallel, windows = config.training, config.parallel, window_count(config)
    if training.evaluate_only:  # nothing is kept, and so nothing is computed again
        parallel = replace(parallel, recompute=NEVER, memory_budget=None)
    backend, seed, loss = config.neuron.neuron_backend, training.seed, sample_loss(training)
    cut = parallel.context_cut(training.micro_batch_size)
    context = build_context(state, training.precision, backend, seed, windows > 1, cut)
    graphed = CastWeights(stay=graphs is not None)
    context = replace(context, cast_weights=graphed, is_frozen=partial(is_frozen, config.optimizer))
    with placed("while measuring products"):
        context = replace(context, products=choose_products(training, model, context, state))
    counts = [windows * each for each in micro_batch_counts(training.micro_batches, state.data.size)]
    counts = counts[:1] if training.evaluate_only else counts  # of steps that there are not
    with placed("while planning the pipeline"), timers("plan"):
        profiles = config.logging.profile_pipeline
        key = None if parallel.memory_budget is None else _surroundings(config, model, context, state)
        size = context.largest_share(training.micro_batch_size)
        plan = plan or plan_of(model, parallel, size, counts, context, state, profiles, key)
    with placed("while building the model"), timers("materialise"):
        return plan, DistributedModel(
            model,
            state,
            context,
            plan.bounds,
            plan.schedules,
            seed,
            loss,
            wire_options(parallel),
            windows=windows,
            waits_after_actions=training.wait_after_actions,
            wants_to_stop=wants_to_stop,
            rows_have_owners=parallel.use_distributed_optimizer,
            graphs=graphs,
        )


def _surroundings(
    config: PretrainConfig, model: ModelDescription, context: BuildContext, state: ParallelState
) -> tuple[str, ...] | None:
    """All that the costs of layers depend on; None where some of it cannot be read."""
    named = model.named_layers(context)
    code = code_of([config.model, *(module for _, layer in named for module in layer.modules())])
    if code is None:
        return None
    tensors = [(each.name, *each.tensor.shape) for each in describe_tensors(model, context)]
    made = json.dumps([[name for name, _ in named], tensors])
    parts = to_dict(replace(config, parallel=replace(config.parallel, memory_budget=None)))
    device = torch.cuda.get_device_name(state.device) if state.device.type == "cuda" else platform.processor()
    sizes = state.world.size, torch.get_num_threads(), torch.__version__, device, platform.node()
    read = [parts[each] for each in ("model", "neuron", "training", "parallel")]
    flags = json.dumps([*read, config.optimizer.freeze])
    return flags, made, *code, *map(str, sizes)
