"""Entry of a run from a command line: reads and checks the flags, then trains."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from megasnn.checkpoint.folder import ChosenCheckpoint, choose_checkpoint
from megasnn.checkpoint.format import Metadata
from megasnn.common.files import CheckpointError, in_message
from megasnn.common.launcher import report_to_torchrun, take_ranks, torchrun_reports
from megasnn.config import ConfigError, PretrainConfig, flags_between, from_dict, parse, validate
from megasnn.config.checks import refusal
from megasnn.config.cli import Values
from megasnn.config.data import GivenDatasets
from megasnn.config.validate import device_problems
from megasnn.config.values import samples_from
from megasnn.models.model import Model, run_config
from megasnn.models.registry import MODELS
from megasnn.telemetry.callback import Callback

SECONDS_TO_REPORT = 3.0
"""Wait of silent ranks before they end: torchrun ends all ranks, the one that reports the error too, after one."""


def pretrain(
    model: str | type[Model],
    argv: Sequence[str] | None = None,
    *,
    dataset: Any = None,
    valid_dataset: Any = None,
    callbacks: Sequence[Callback] = (),
) -> int:
    """Trains a model with flags; returns the exit status (see `megasnn.training.run`), 2 for wrong flags.

    Args:
        model: a class, or a name in the registry (megasnn/models/registry.py). A new class is registered.
        argv: flags, without the program's name; required in a notebook. None: this process's flags; the process then
            ends with the exit status, so this call is a whole script.
        dataset: map-style data set to train on, in place of --data-path: `dataset[index]` gives `(inputs, target)`.
        valid_dataset: the same to evaluate on, in place of --valid-data-path.
        callbacks: called during the run.
    Raises:
        ValueError: the registry has no such name, or another model of this name; callbacks of another type; a data set
            without length or without samples by index; no `argv` in a notebook.
        SystemExit: after the help, and always without `argv`.
    """
    model_class = _registered(model)
    if not isinstance(callbacks, Sequence) or not all(isinstance(each, Callback) for each in callbacks):
        raise ValueError(f"give a list of instances of subclasses of megasnn.Callback, not {callbacks!r}")
    if argv is None and "kernel_launcher" in Path(sys.argv[0]).name:
        raise ValueError('in a notebook give the flags: pretrain(..., argv=["--train-iters", "100"])')
    flags = sys.argv[1:] if argv is None else argv
    given = GivenDatasets(dataset, valid_dataset)
    if not given.is_empty:
        _require_map_style(given)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # Names of files that are not UTF-8 are written as they are.
            stream.reconfigure(errors="surrogateescape")

    status = _check_and_run(model_class, flags, callbacks, given)
    if argv is None:
        sys.exit(status)
    return status


def _registered(model: str | type[Model]) -> type[Model]:
    if isinstance(model, str):
        return MODELS[model]
    if MODELS.setdefault(model.name, model) is not model:
        raise ValueError(
            f"the name {model.name!r} of {model.__name__} is that of another model; give it another `name`"
        )
    return model


def _require_map_style(given: GivenDatasets) -> None:
    """Raises ValueError for a data set without length or samples by index. Imports torch, as the data sets do."""
    from megasnn.data.map_dataset import require_map_style

    for argument, each in {"dataset": given.train, "valid_dataset": given.valid}.items():
        if each is not None:
            require_map_style(each, argument)


def _check_and_run(
    model: type[Model], flags: Sequence[str], callbacks: Sequence[Callback], given: GivenDatasets
) -> int:
    if wrong := refusal(take_ranks):
        sys.stderr.write(f"{wrong[0]}\n")
        return 2
    rank = os.environ.get("RANK", "0")
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    # One rank of each machine reports, since command lines of machines may differ.
    reports = os.environ.get("LOCAL_RANK", "0") == "0"
    try:
        config, checkpoint = configuration_and_checkpoint(model, flags, reports, reads_files=given.is_empty)
        config, given = with_datasets(config, given)
        validate(config, world_size)
        # From here on torch is imported, which takes seconds: wrong flags have been refused before.
        refuse_unbuildable(config)
        refuse_other_device(config)
    except ConfigError as error:
        if reports and torchrun_reports():
            report_to_torchrun(str(error))
        elif reports:
            sys.stderr.write(f"[rank {rank}] {error}\n")
        elif "TORCHELASTIC_RUN_ID" in os.environ:
            time.sleep(SECONDS_TO_REPORT)
        return 2
    from megasnn import training  # imports torch, after the flags are checked

    return training.run(config, callbacks, checkpoint, given)


def configuration(model: type[Model], argv: Sequence[str], console_outputs: bool = True) -> PretrainConfig:
    """Configuration of a run of this model, not yet validated; see `configuration_and_checkpoint`."""
    return configuration_and_checkpoint(model, argv, console_outputs)[0]


def configuration_and_checkpoint(
    model: type[Model], argv: Sequence[str], console_outputs: bool = True, reads_files: bool = True
) -> tuple[PretrainConfig, ChosenCheckpoint | None]:
    """Configuration of a run, not yet validated, and the checkpoint of --load that completes it.

    Dimensions and neuron: flags first, then --config, then the checkpoint. An evaluation and --finetune take the
    preprocessing of samples in the same order. Rank 0 prints the flags taken from the checkpoint.

    Args:
        reads_files: False where data sets in Python make the samples.
    Returns:
        the configuration; the checkpoint that the run will load, None without one that can be read.
    Raises:
        ConfigError, SystemExit: as `parse`.
    """
    flags = parse(run_config(model), argv, console_outputs, model.recipes())
    checkpoint = _checkpoint_of(flags)
    checkpoint_values = {} if checkpoint is None else _checkpoint_values(model, flags, checkpoint.metadata)
    if not reads_files:
        checkpoint_values = {part: values for part, values in checkpoint_values.items() if part != "data"}
    if not checkpoint_values:
        return flags, checkpoint
    config = parse(run_config(model), argv, console_outputs, model.recipes(), checkpoint_values)
    saved_shape = from_dict(run_config(model), {"model": checkpoint_values["model"]}).model.input_shape
    shape = config.model.input_shape
    channels = shape[-3:-2]
    if len(saved_shape) != len(shape) or saved_shape[-3:-2] != channels:
        # Events after images, or other channels: the checkpoint's normalisation does not apply to them.
        config = replace(config, data=flags.data)
    taken = list[str]()
    for of_part in flags_between(flags, config).values():
        taken += map(in_message, of_part)
    if taken and os.environ.get("RANK", "0") == "0":
        print(f"--load {in_message(flags.checkpoint.load)} gives {' '.join(taken)}")
    return config, checkpoint


def _checkpoint_of(flags: PretrainConfig) -> ChosenCheckpoint | None:
    options = flags.checkpoint
    if options.load is None or options.loads_weights:
        return None
    try:
        return choose_checkpoint(Path(options.load), options.ckpt_step)
    # Also a folder that may not be read, and a name that is too long. The start of the run reports it, or does
    # without --load.
    except (CheckpointError, OSError):
        return None


def _checkpoint_values(model: type[Model], flags: PretrainConfig, saved: Metadata) -> Values:
    """Values from a checkpoint: dimensions, neuron and, for an evaluation or --finetune, preprocessing.

    Empty for another model, or without a configuration.
    """
    if saved.config is None or saved.model not in (None, model.name):
        return {}
    values: dict[str, Any] = {part: saved.config.get(part) for part in ("model", "neuron")}
    if flags.training.evaluate_only or flags.checkpoint.finetune:
        values["data"] = samples_from(saved.extra, flags.training.evaluate_only)
    return {} if refusal(from_dict, run_config(model), values) else values


def with_datasets(config: PretrainConfig, given: GivenDatasets) -> tuple[PretrainConfig, GivenDatasets]:
    """Names the data sets in the configuration. An evaluation needs no training data.

    Raises:
        ConfigError: flags for samples of files beside them; no data set for training; one that was given before.
    """
    path = config.data.data_path
    if given.is_empty:
        if config.data.is_in_python:
            raise ConfigError(
                [f"--data-path {in_message(path)} was a data set in Python: give it to pretrain(..., dataset=...)"]
            )
        return config, given
    if given.train is None:
        if not config.training.evaluate_only:
            raise ConfigError(["valid_dataset alone is for --evaluate-only: give pretrain(..., dataset=...), too"])
        given = GivenDatasets(given.valid, given.valid)
    from megasnn.data.map_dataset import dataset_title

    valid = None if given.valid is None else dataset_title(given.valid)
    data = config.data.with_datasets(dataset_title(given.train), valid)
    return replace(config, data=data), given


def refuse_unbuildable(config: PretrainConfig) -> None:
    """Raises ConfigError if the model cannot be built, or its samples are not in shards of this kind. Imports torch."""
    from megasnn.data.datasets import sample_format
    from megasnn.data.tokens.dataset import require_token_flags
    from megasnn.engine.build import model_problems
    from megasnn.training.data import arrays_of, token_inputs

    wrong = model_problems(config)
    if config.data.is_in_python:
        pass
    elif token_inputs(config.model) is not None:
        wrong = wrong or refusal(require_token_flags, config.data)
    else:
        wrong = wrong or refusal(arrays_of, config.model)
        if not wrong:
            evaluates = config.training.evaluate_only
            arrays = arrays_of(config.model)
            wrong = refusal(sample_format, config.data, config.model.input_shape, evaluates, arrays)
    if wrong:
        raise ConfigError(wrong)


def refuse_other_device(config: PretrainConfig) -> None:
    """Raises ConfigError if this rank has no GPU and the flags need one. Imports torch.

    Ranks have not joined yet. Limits of a GPU itself show when it is used, after that.
    """
    from megasnn.engine.build import require_kernels
    from megasnn.parallel.process_group import choose_device

    parallel = config.parallel
    if wrong := refusal(choose_device, parallel.device):
        raise ConfigError(wrong)
    device, reason = choose_device(parallel.device)
    if device.type != "cpu":
        return
    if wrong := device_problems(config, device.type):
        why = f"--device {parallel.device} comes to the CPU here: {reason or 'torch is built without CUDA'}"
        raise ConfigError(f"{problem} ({why})" for problem in wrong)
    if wrong := refusal(require_kernels, config, device):
        raise ConfigError(wrong)
