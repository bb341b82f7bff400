"""From the configuration to what is built: the model of a window, its types, its cut into chunks, its graphs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from megasnn.augment.mixing import Mixing
from megasnn.config import PretrainConfig
from megasnn.config.training import TrainingConfig
from megasnn.config.validate import no_graphs
from megasnn.engine.distributed_model import DistributedModel, SampleLoss
from megasnn.engine.faults import placed
from megasnn.engine.planning import plan_of, wire_options
from megasnn.grid import ContextCut
from megasnn.kernels.backends import BACKENDS, backend_for
from megasnn.kernels.products import can_be_sparse
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
from megasnn.pipeline.plan import PipelinePlan
from megasnn.precisions import PRECISIONS
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
    return partial(LOSSES[training.loss].sum, label_smoothing=training.label_smoothing)


def mixing_of(config: PretrainConfig, model: ModelDescription, epoch: int) -> Mixing | None:
    """How samples are mixed with each other; None where they are not. Args: epoch: samples of one."""
    data = config.data
    if not data.mixes:
        return None
    until = data.mixup_off_epoch * epoch if data.mixup_off_epoch else None
    height, width = model.input_shape[-2:]
    seed = config.training.seed
    return Mixing(seed, data.mixup_alpha or None, data.cutmix_alpha or None, model.num_classes, (height, width), until)


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
    """
    graphs, timers = graph_options(config, state), timers or Timers(state.device)
    training, parallel, windows = config.training, config.parallel, window_count(config)
    backend, seed, loss = config.neuron.neuron_backend, training.seed, sample_loss(training)
    cut = parallel.context_cut(training.micro_batch_size)
    context = build_context(state, training.precision, backend, seed, windows > 1, cut)
    graphed = CastWeights(stay=graphs is not None)
    context = replace(context, cast_weights=graphed, is_frozen=partial(is_frozen, config.optimizer))
    sparse = training.sparse_products == "auto" and can_be_sparse(state.device, context.compute_dtype)
    context = replace(context, sparse_products=sparse)
    with placed("while planning the pipeline"), timers("plan"):
        plan = plan or plan_of(config, model, context, state, windows)
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
            wants_to_stop=wants_to_stop,
            rows_have_owners=parallel.use_distributed_optimizer,
            graphs=graphs,
        )
