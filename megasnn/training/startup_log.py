"""Lines that a run prints before the first step, and writes about itself to files and TensorBoard."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence, Set
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch

from megasnn.common.files import write_whole
from megasnn.config import PretrainConfig, changed_flags, to_dict, to_json, with_model_name
from megasnn.config.data import SAMPLE
from megasnn.config.parallel import ParallelConfig
from megasnn.data.remote import shown_path
from megasnn.engine import Engine
from megasnn.engine.model import DistributedModel
from megasnn.kernels.backends import backend_for
from megasnn.kernels.neuron_spec import NeuronSpec
from megasnn.models.description import LayerDescription
from megasnn.parallel.process_group import choose_device
from megasnn.pipeline.cost_model import layers_per_chunk
from megasnn.pipeline.plan import PipelinePlan
from megasnn.schedule.draw import raster
from megasnn.telemetry.reporter import Reporter


def log_folder(config: PretrainConfig) -> Path | None:
    """Folder of a run's configuration and JSON log: that of its checkpoints, otherwise that of its event files."""
    folder = config.checkpoint.save or config.logging.tensorboard_dir
    return None if folder is None else Path(folder)


def introduce(config: PretrainConfig, engine: Engine, reporter: Reporter) -> None:
    """Logs what is about to be trained and how. Collective."""
    original, config = config, _without_secrets(config)
    distributed, plan, state = engine.distributed, engine.plan, engine.state
    context = distributed.context
    lines = [
        *_summary(config, engine),
        *_unread(config, distributed.description.neurons),
    ]
    reporter.multiply_adds = sum(each.operations for each in distributed.description.layers)
    if state.cp.size > 1:
        lines.append(f"context parallel: {state.cp.size} ranks share each micro-batch by {context.cut}")
    for line in (*lines, *_flags(config), *_model(config, distributed, plan)):
        reporter.line(line)
    reporter.board.text("configuration", textwrap.indent(to_json(config), "    "))
    grid = {"data_parallel_size": state.dp.size, "parameters": distributed.parameters}
    flat = {name: value for of_part in to_dict(config).values() for name, value in of_part.items()}
    reporter.flags({**{name: "none" if value is None else value for name, value in flat.items()}, **grid})
    costs = None
    if plan.costs is not None:
        costs = {
            layer.name: asdict(cost)
            for layer, cost in zip(distributed.description.layers, plan.costs.layers, strict=True)
        }
    start = {
        **{"iteration": engine.iteration, "iterations": engine.length.iterations, "ranks": state.world.size},
        **grid,
        "layout": layers_per_chunk(plan.bounds),
        "costs": costs,
        "config": with_model_name(config),
    }
    reporter.entry("start", start)
    simulation = plan.simulation(plan.micro_batches) if state.pp.size * state.dp_shard.size > 1 else None
    if simulation is not None:
        schedule = plan.schedules.training(plan.micro_batches)
        draw = partial(raster, schedule, simulation, "simulated")
        reporter.board.picture("pipeline/simulated", draw, engine.iteration)
    file = _config_file(config)
    if file is not None and state.rank == 0:
        with reporter.best_effort(f"writing {file}"):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file, to_json(original))


def _without_secrets(config: PretrainConfig) -> PretrainConfig:
    """The configuration for logs, which more people read than config.json."""
    data = config.data
    valid = None if data.valid_data_path is None else shown_path(data.valid_data_path)
    return replace(config, data=replace(data, data_path=shown_path(data.data_path), valid_data_path=valid))


def _config_file(config: PretrainConfig) -> Path | None:
    """File of the configuration: a run that only evaluates leaves that of the training alone."""
    folder = log_folder(config)
    name = "evaluation_config.json" if config.training.evaluate_only else "config.json"
    return None if folder is None else folder / name


def _summary(config: PretrainConfig, engine: Engine) -> list[str]:
    distributed, length, done = engine.distributed, engine.length, engine.iteration
    training, state = config.training, distributed.state
    to_go = length.iterations - done
    epochs = engine.consumed_samples / length.epoch_samples + float(to_go / length.epoch)
    ranks, name = state.world.size, type(config.model).__name__.removesuffix("Config")
    where = f"{ranks} rank{'s' * (ranks > 1)} ({state.grid}), {_device(state.device, config.parallel)}"
    still = distributed.parameters - distributed.trained_parameters
    frozen = f" ({still:,} of them frozen)" if still else ""
    what = (
        "evaluating only"
        if training.evaluate_only
        else f"{length.iterations} iterations of {training.global_batch_size} samples ({training.micro_batches} "
        f"micro-batches of {training.micro_batch_size}): {epochs:.1f} epochs of {length.epoch_samples} samples"
        + (f"; {done} iterations are done, {to_go} to go" if done else "")
        + (f"; the last {length.left_over} samples fill no global batch and are left out" if length.left_over else "")
    )
    data = (training.evaluate_only and config.data.valid_data_path) or config.data.data_path
    if data == SAMPLE:
        data = "scikit-learn's digits, because there is no --data-path"
    spec = config.neuron.spec
    sample = torch.empty(1, 1, 1, dtype=distributed.context.numerics.compute_dtype, device=state.device)
    backend = backend_for(config.neuron.neuron_backend, sample, spec)
    kinds = ", ".join(sorted({each.kind for each in distributed.description.neurons})) or "of the model's own"
    layers, parameters = len(distributed.description.layers), distributed.parameters
    return [
        f"{name} with {parameters:,} parameters{frozen} in {layers} layers on {where}",
        what,
        f"data: {data}",
        f"neurons: {kinds} by {backend.summary}",
    ]


def _unread(config: PretrainConfig, neurons: Set[NeuronSpec]) -> list[str]:
    """Warns of flags of the neuron that no neuron of the model follows: those of converted modules keep their own."""
    wanted, usual = config.neuron.spec, config.model.neuron().spec
    names = {"kind": "neuron", "alpha": "surrogate_alpha"}
    lines = []
    for name, value in vars(wanted).items():
        if value != getattr(usual, name) and all(getattr(each, name) != value for each in neurons):
            flag = f"--{names.get(name, name).replace('_', '-')} {value}"
            theirs = ", ".join(sorted({str(getattr(each, name)) for each in neurons})) or "neurons of its own"
            lines.append(f"WARNING: {flag}: no neuron of {config.model.name} follows it; the model has {theirs}")
    return lines


def _device(device: torch.device, parallel: ParallelConfig) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads, (_, why) = torch.get_num_threads(), choose_device(parallel.device)
    return f"CPU with {threads} thread{'s' * (threads > 1)} a rank{f' ({why})' if why else ''}"


def _flags(config: PretrainConfig) -> list[str]:
    file = _config_file(config)
    kept = f"; all are in {file}" if file is not None else ""
    changed = changed_flags(config)
    if not changed:
        return [f"all flags have their defaults{kept}"]
    parts = (f"  {part:<12}{' '.join(flags)}" for part, flags in changed.items())
    return [f"flags that differ from their defaults{kept}:", *parts]


def _operations(layers: Sequence[LayerDescription]) -> str:
    return f"{1e-9 * sum(each.operations for each in layers):,.3g} G multiply-adds a sample"


def _model(config: PretrainConfig, distributed: DistributedModel, plan: PipelinePlan) -> list[str]:
    """Content of each chunk, and the schedule; without a pipeline, what the whole model computes."""
    layers, placement = distributed.description.layers, plan.schedules.placement
    if len(placement) == 1:
        return [_operations(layers), *plan.describe(config.parallel)]
    lines = [f"pipeline layout {layers_per_chunk(plan.bounds)}; chunks"]
    for index, (span, rank) in enumerate(zip(plan.bounds, placement, strict=True)):
        content = f"{layers[span.start].name} .. {layers[span.stop - 1].name}" if span else "empty"
        mine = layers[span.start : span.stop]
        sizes = f", {sum(each.parameters for each in mine):,} parameters, {_operations(mine)}" if mine else ""
        lines.append(f"  {index} on pipeline rank {rank}: {content}{sizes}")
    return lines + plan.describe(config.parallel)
