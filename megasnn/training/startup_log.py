"""A run's introduction: lines before the first step, its configuration in files and TensorBoard."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence, Set
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch

from megasnn.common.files import quantity, write_whole
from megasnn.config import PretrainConfig, changed_flags, to_json, with_model_name
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
from megasnn.training.data import token_inputs


def log_folder(config: PretrainConfig) -> Path | None:
    """For configuration and JSON log: the checkpoints' folder, otherwise TensorBoard's."""
    folder = config.checkpoint.save or config.logging.tensorboard_dir
    return None if folder is None else Path(folder)


def introduce(config: PretrainConfig, engine: Engine, reporter: Reporter) -> None:
    """Logs model, layout and flags. Collective."""
    original = config
    config = _without_secrets(config)
    layers = engine.distributed.description.layers
    reporter.multiply_adds = sum(layer.operations for layer in layers)
    lines = [*_summary(config, engine), *_unused_neuron_flags(config, engine.distributed.description.neurons)]
    if engine.state.cp.size > 1:
        cut = engine.distributed.context.context_cut
        lines.append(f"context parallel: {engine.state.cp.size} ranks share each micro-batch by {cut}")
    lines += _flags(config)
    lines += _model(config, engine.distributed, engine.plan)
    for line in lines:
        reporter.line(line)
    record_configuration(config, engine, reporter)
    _draw_schedule(engine, reporter)
    file = _config_file(config)
    if file is not None and engine.state.rank == 0:
        with reporter.best_effort(f"writing {file}"):
            file.parent.mkdir(parents=True, exist_ok=True)
            # A run must start from this file again: it keeps whole URLs.
            write_whole(file, to_json(original))


def record_configuration(config: PretrainConfig, engine: Engine, reporter: Reporter) -> None:
    """Gives flags and start position to TensorBoard, callbacks and log.jsonl."""
    plan = engine.plan
    description = engine.distributed.description
    reporter.board.text("configuration", textwrap.indent(to_json(config), "    "))
    grid = {"data_parallel_size": engine.state.dp.size, "parameters": engine.distributed.parameters}
    flags: dict[str, bool | int | float | str] = {}
    for part in asdict(config).values():
        for name, value in part.items():
            if value is None:
                flags[name] = "none"
            else:
                flags[name] = value if isinstance(value, bool | int | float | str) else json.dumps(value)
    reporter.flags({**flags, **grid})
    costs = None
    if plan.costs is not None:
        by_layer = zip(description.layers, plan.costs.layers, strict=True)
        costs = {layer.name: asdict(cost) for layer, cost in by_layer}
    start = {
        "iteration": engine.iteration,
        "iterations": engine.length.iterations,
        "ranks": engine.state.world.size,
        **grid,
        "layout": layers_per_chunk(plan.bounds),
        "costs": costs,
        "config": with_model_name(config),
    }
    reporter.entry("start", start)


def _draw_schedule(engine: Engine, reporter: Reporter) -> None:
    plan = engine.plan
    # On one stage with whole weights, a schedule is a forward and a backward for each micro-batch.
    if engine.state.pp.size * engine.state.dp_shard.size == 1:
        return
    simulation = plan.simulation(plan.micro_batches)
    if simulation is not None:
        schedule = plan.schedules.training(plan.micro_batches)
        draw = partial(raster, schedule, simulation, "simulated")
        reporter.board.picture("pipeline/simulated", draw, engine.iteration)


def _without_secrets(config: PretrainConfig) -> PretrainConfig:
    data = config.data
    # More people read logs than config.json, and data URLs may hold passwords.
    valid = None if data.valid_data_path is None else shown_path(data.valid_data_path)
    return replace(config, data=replace(data, data_path=shown_path(data.data_path), valid_data_path=valid))


def _config_file(config: PretrainConfig) -> Path | None:
    folder = log_folder(config)
    # An evaluation does not replace the training's file.
    name = "evaluation_config.json" if config.training.evaluate_only else "config.json"
    return None if folder is None else folder / name


def _summary(config: PretrainConfig, engine: Engine) -> list[str]:
    """Model and hardware, length, data, neurons: one line each."""
    distributed = engine.distributed
    description = distributed.description
    state = distributed.state
    name = type(config.model).__name__
    frozen = distributed.parameters - distributed.trained_parameters
    frozen_text = f" ({frozen:,} of them frozen)" if frozen else ""
    ranks = f"{quantity(state.world.size, 'rank')} ({state.grid})"
    data = config.data.data_path
    if config.training.evaluate_only and config.data.valid_data_path:
        data = config.data.valid_data_path
    if data == SAMPLE:
        default = "scikit-learn's digits" if token_inputs(config.model) is None else "the help of Python"
        data = f"{default}, because there is no --data-path"
    neurons = []
    if description.kernel_neurons:
        sample = torch.empty(1, 1, 1, dtype=distributed.context.numerics.compute_dtype, device=state.device)
        backend = backend_for(config.neuron.neuron_backend, sample, config.neuron.spec)
        neurons.append(f"{', '.join(sorted(description.kernel_neurons))} by {backend.summary}")
    if description.plain_neurons:
        neurons.append(f"{', '.join(sorted(description.plain_neurons))} in plain PyTorch")
    return [
        f"{name} with {distributed.parameters:,} parameters{frozen_text} in "
        f"{quantity(len(description.layers), 'layer')} on {ranks}, {_device(state.device, config.parallel)}",
        _length(config, engine),
        f"data: {data}",
        f"neurons: {'; '.join(neurons) or 'none'}",
    ]


def _length(config: PretrainConfig, engine: Engine) -> str:
    training = config.training
    if training.evaluate_only:
        return "evaluating only"
    length = engine.length
    done = engine.iteration
    to_go = length.iterations - done
    epochs = engine.consumed_samples / length.epoch_samples + float(to_go / length.epoch)
    text = (
        f"{quantity(length.iterations, 'iteration')} of {quantity(training.global_batch_size, 'sample')} "
        f"({quantity(training.micro_batches, 'micro-batch')} of {training.micro_batch_size}): {epochs:.1f} epochs of "
        f"{quantity(length.epoch_samples, 'sample')}"
    )
    if done:
        text += f"; {quantity(done, 'iteration')} done, {to_go} to go"
    if length.left_over:
        text += f"; left out at the end: {quantity(length.left_over, 'sample')}, too few for a global batch"
    return text


def _unused_neuron_flags(config: PretrainConfig, neurons: Set[NeuronSpec]) -> list[str]:
    """Warns about neuron flags without effect: neurons in converted modules keep their own values."""
    default = config.model.neuron().spec
    flags = {"kind": "neuron", "alpha": "surrogate_alpha"}
    lines = []
    for name, value in vars(config.neuron.spec).items():
        if value != getattr(default, name) and all(getattr(each, name) != value for each in neurons):
            flag = f"--{flags.get(name, name).replace('_', '-')} {value}"
            theirs = ", ".join(sorted({str(getattr(each, name)) for each in neurons})) or "neurons of its own"
            lines.append(f"WARNING: {flag}: no neuron of {config.model.name} follows it; the model has {theirs}")
    return lines


def _device(device: torch.device, parallel: ParallelConfig) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    text = f"CPU with {quantity(threads, 'thread')} a rank"
    _, reason = choose_device(parallel.device)
    return f"{text} ({reason})" if reason else text


def _flags(config: PretrainConfig) -> list[str]:
    file = _config_file(config)
    where = f"; all are in {file}" if file is not None else ""
    changed = changed_flags(config)
    if not changed:
        return [f"all flags have their defaults{where}"]
    parts = [f"  {part:<12}{' '.join(flags)}" for part, flags in changed.items()]
    return [f"flags that differ from their defaults{where}:", *parts]


def _operations(layers: Sequence[LayerDescription]) -> str:
    return f"{1e-9 * sum(each.operations for each in layers):,.3g} G multiply-adds a sample"


def _model(config: PretrainConfig, distributed: DistributedModel, plan: PipelinePlan) -> list[str]:
    """Each chunk's layers, and the schedule; without a pipeline, the whole model's operations."""
    layers = distributed.description.layers
    placement = plan.schedules.placement
    if len(placement) == 1:
        return [_operations(layers), *plan.describe(config.parallel)]
    lines = [f"pipeline layout {layers_per_chunk(plan.bounds)}; chunks"]
    for index, (span, rank) in enumerate(zip(plan.bounds, placement, strict=True)):
        if not span:
            lines.append(f"  {index} on pipeline rank {rank}: empty")
            continue
        mine = layers[span.start : span.stop]
        parameters = sum(each.parameters for each in mine)
        lines.append(
            f"  {index} on pipeline rank {rank}: {mine[0].name} .. {mine[-1].name}, {parameters:,} parameters, "
            f"{_operations(mine)}"
        )
    return lines + plan.describe(config.parallel)
