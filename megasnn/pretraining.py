"""Entry of a run from a command line: flags are read, checked, and trained with."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from megasnn.checkpoint.folder import first_legible
from megasnn.common.files import in_message
from megasnn.common.launcher import take_ranks
from megasnn.config import ConfigError, PretrainConfig, flags_between, from_dict, parse, validate
from megasnn.config.checks import refusal
from megasnn.config.cli import Values
from megasnn.config.validate import device_problems
from megasnn.config.values import samples_from
from megasnn.models.model import Model, run_config
from megasnn.models.registry import MODELS
from megasnn.telemetry.callback import Callback

SECONDS_TO_SPEAK = 3.0
"""Wait of ranks that leave the message to another one: torchrun ends all ranks as soon as one has ended."""


def pretrain(model: str | type[Model], argv: Sequence[str] | None = None, *, callbacks: Sequence[Callback] = ()) -> int:
    """Trains a model as the flags say; the exit status (see `megasnn.training.run`), 2 for wrong flags.

    Args:
        model: its class, or its name in the table (megasnn/models/registry.py). A class that it lacks is put in.
        argv: flags, without the program's name; a notebook has to give them. None: those of this process, which then
            ends with the exit status, so that a script needs no more than this call.
        callbacks: are told what happens in the run.
    Raises:
        ValueError: the registry does not know the name, or knows another model by it; callbacks of another type; no
            `argv` in a notebook.
        SystemExit: after the help, and without `argv` always.
    """
    chosen = _in_table(model)
    if not isinstance(callbacks, Sequence) or not all(isinstance(each, Callback) for each in callbacks):
        raise ValueError(f"give a list of instances of subclasses of megasnn.Callback, not {callbacks!r}")
    if argv is None and "kernel_launcher" in Path(sys.argv[0]).name:
        raise ValueError('in a notebook give the flags: pretrain(..., argv=["--train-iters", "100"])')
    flags = sys.argv[1:] if argv is None else argv
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="surrogateescape")  # names of files that are not UTF-8 are written as they are

    status = _train(chosen, flags, callbacks)
    if argv is None:
        sys.exit(status)
    return status


def _train(model: type[Model], flags: Sequence[str], callbacks: Sequence[Callback]) -> int:
    """Reads the flags, then trains. What is wrong with them is told by the first rank of each machine, since each has a
    command line of its own, before torch is imported where that can be."""
    if wrong := refusal(take_ranks):
        sys.stderr.write(f"{wrong[0]}\n")
        return 2
    rank, world_size = os.environ.get("RANK", "0"), int(os.environ.get("WORLD_SIZE", "1"))
    speaks = os.environ.get("LOCAL_RANK", "0") == "0"
    try:
        config = configuration(model, flags, speaks)
        validate(config, world_size)
        refuse_unbuildable(config)
        refuse_other_device(config)
    except ConfigError as error:
        if speaks and (report := os.environ.get("TORCHELASTIC_ERROR_FILE")):
            details = {"message": str(error), "timestamp": int(time.time())}
            Path(report).write_text(json.dumps(details))  # torchrun prints it last
        elif speaks:
            sys.stderr.write(f"[rank {rank}] {error}\n")
        elif "TORCHELASTIC_RUN_ID" in os.environ:
            time.sleep(SECONDS_TO_SPEAK)
        return 2
    from megasnn import training  # torch, once the flags are right

    return training.run(config, callbacks)


def _in_table(model: str | type[Model]) -> type[Model]:
    if isinstance(model, str):
        return MODELS[model]
    if MODELS.setdefault(model.name, model) is not model:
        raise ValueError(
            f"the name {model.name!r} of {model.__name__} is that of another model; give it another `name`"
        )
    return model


def refuse_unbuildable(config: PretrainConfig) -> None:
    """Raises ConfigError when the layers of the model cannot be built or do not fit together, or when no shard holds
    what it takes, as the flags of the data say. Imports torch."""
    from megasnn.data.datasets import sample_format
    from megasnn.engine.build import model_problems
    from megasnn.training.data import arrays_of

    data, shape, evaluates = config.data, config.model.input_shape, config.training.evaluate_only
    wrong = model_problems(config) or refusal(arrays_of, config.model)
    if wrong or (wrong := refusal(sample_format, data, shape, evaluates, arrays_of(config.model))):
        raise ConfigError(wrong)


def refuse_other_device(config: PretrainConfig) -> None:
    """Raises ConfigError when this rank has no GPU and the flags need one: the device is known before ranks join. What
    a GPU cannot do is found out by using it, after that. Imports torch."""
    from megasnn.engine.build import require_kernels
    from megasnn.parallel.process_group import choose_device

    parallel = config.parallel
    if wrong := refusal(choose_device, parallel.device):
        raise ConfigError(wrong)
    device, why = choose_device(parallel.device)
    if device.type != "cpu":
        return
    if wrong := device_problems(config, device.type):
        why = f"--device {parallel.device} comes to the CPU here: {why or 'torch is built without CUDA'}"
        raise ConfigError(f"{problem} ({why})" for problem in wrong)
    if wrong := refusal(require_kernels, config, device):
        raise ConfigError(wrong)


def configuration(model: type[Model], argv: Sequence[str], console_outputs: bool = True) -> PretrainConfig:
    """The configuration of a run that trains this model, not yet validated; rank 0 says what it takes from --load.

    The checkpoint of --load gives the dimensions and the neuron that neither a flag nor the file of --config gives, and
    to an evaluation and to --finetune how samples are made.

    Raises:
        as `parse`.
    """
    flags = parse(run_config(model), argv, console_outputs, model.recipes())
    saved = _saved_values(model, flags)
    if not saved:
        return flags
    config = parse(run_config(model), argv, console_outputs, model.recipes(), saved)
    before = from_dict(run_config(model), {"model": saved["model"]}).model.input_shape
    now = config.model.input_shape
    if (len(before), before[-3:-2]) != (len(now), now[-3:-2]):
        # Events after images, or other channels: the checkpoint's normalisation does not apply to them.
        config = replace(config, data=flags.data)
    from_checkpoint = [each for of_part in flags_between(flags, config).values() for each in of_part]
    if from_checkpoint and os.environ.get("RANK", "0") == "0":
        print(f"--load {in_message(flags.checkpoint.load)} gives {' '.join(map(in_message, from_checkpoint))}")
    return config


def _saved_values(model: type[Model], flags: PretrainConfig) -> Values:
    """Dimensions and neuron of the checkpoint to load, and for an evaluation or --finetune what makes its samples;
    empty where it does not say them, or there is none of this model. A damaged checkpoint is reported when it is
    loaded."""
    options = flags.checkpoint
    if options.load is None or options.loads_weights:
        return {}
    try:
        found = first_legible(Path(options.load), options.ckpt_step)
    except OSError:  # a folder that may not be read, a name that is too long
        return {}
    if found is None or found.config is None or found.model not in (None, model.name):
        return {}
    values: dict[str, Any] = {part: found.config.get(part) for part in ("model", "neuron")}
    if flags.training.evaluate_only or options.finetune:
        values["data"] = samples_from(found.extra, flags.training.evaluate_only)
    return {} if refusal(from_dict, run_config(model), values) else values
