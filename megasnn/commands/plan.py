"""Choose a layout for a model on given machines: which axes, which schedule, how long a step takes, whether it fits.

    python tools/plan.py spikformer --variant spikformer_s --global-batch-size 512 --gpus 64 --memory 80GB
    torchrun --standalone --nproc-per-node 2 tools/plan.py spikformer --gpus 2 --measure --costs costs.json

The model comes first; all flags of a run of it are taken, besides those below. Nothing is trained.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated

from megasnn.config import PretrainConfig
from megasnn.config.checks import ConfigError, above, at_least, flag
from megasnn.config.cli import command_line
from megasnn.config.fields import name_in
from megasnn.files import write_whole
from megasnn.models.registry import MODELS
from megasnn.planner.analysis import Analysis, read, write
from megasnn.planner.apply import apply
from megasnn.planner.candidates import Prefer
from megasnn.planner.cluster import Cluster
from megasnn.planner.energy import energy, measured_rates
from megasnn.planner.machines import AUTO, DEVICES, Machine, with_memory
from megasnn.planner.plan import Plan, plan, problems
from megasnn.planner.report import as_json, cuts, table
from megasnn.pretraining import configuration

UNITS = {"KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}


@dataclass(frozen=True)
class Options:
    """Choose a layout for a model on given machines; flags of a run (python -m megasnn MODEL --help) are taken too."""

    gpus: int = 1
    """Devices that there are: GPUs, or with --measure on a CPU processes."""
    gpus_per_node: int = 8
    """Of them on each node."""
    memory: str | None = None
    """What each of them may need, as 80GB; by default what the device has."""
    device_name: Annotated[str, name_in(DEVICES)] = AUTO
    """The device, from the table; auto is the one that was measured, and h100 where none was."""
    prefer: Prefer = "speed"
    """The fastest step; the smallest peak of a rank's memory; or room for the largest micro-batches."""
    spread: float = 0.0
    """By how much the speed of ranks differs, as a part of it: 0.02 is a standard deviation of 2 %."""
    rates: Path | None = None
    """The log.jsonl of a run of this model: its firing rates give synaptic operations and joules."""
    measure: bool = False
    """Measure the layers on this device, and under torchrun its links."""
    costs: Path | None = None
    """The costs file: read where it is there, otherwise written; with --measure always written."""
    output: Path | None = None
    """Write the configuration that --config takes here."""
    json: Path | None = None
    """Write all of the plan here, for programs."""
    picture: Path | None = None
    """Draw the winner's step here, .svg or .png; beside it NAME-ranks.svg, time against the number of devices."""


def main(arguments: Sequence[str] | None = None) -> None:
    argv = list(sys.argv[1:] if arguments is None else arguments)
    mine, theirs = _split(argv)
    options = command_line(Options, mine)
    _check(options)
    if not theirs or theirs[0].startswith("-"):
        raise ValueError(f"name a model first: {', '.join(MODELS)}")
    model, flags = MODELS[theirs[0]], theirs[1:]
    config = configuration(model, flags)
    known = None if options.measure or options.costs is None or not options.costs.exists() else read(options.costs)
    # Before a model is analysed, which takes minutes where it is large.
    if wrong := problems(config, options.gpus, options.gpus_per_node) + _machine_problems(options, config, known):
        raise ConfigError(wrong)
    rates = None if options.rates is None else measured_rates(options.rates)
    analysis = known or _analysis(options, config)
    if os.environ.get("RANK", "0") == "0":
        _plan(options, config, analysis, rates)


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The flags of `Options`, and all else."""
    kinds = {flag(each.name): each.type for each in fields(Options)}
    kinds |= {flag(f"no_{each.name}"): each.type for each in fields(Options) if each.type == "bool"}
    mine, theirs = list[str](), list[str]()
    place = 0
    while place < len(argv):
        name, equals, _ = argv[place].partition("=")
        if name in ("-h", "--help") and len(argv) == 1:
            mine.append(name)
        elif name in kinds:
            takes = 1 if equals or kinds[name] == "bool" else 2
            mine += argv[place : place + takes]
            place += takes - 1
        else:
            theirs.append(argv[place])
        place += 1
    return mine, theirs


def _check(options: Options) -> None:
    wrong = at_least(options, 1, "gpus", "gpus_per_node") + at_least(options, 0, "spread")
    if options.picture is not None and options.picture.suffix not in (".svg", ".png"):
        wrong.append(f"--picture {options.picture}: the name must end in .svg or .png")
    if options.memory is not None:
        wrong += above(_Memory(_bytes(options.memory)), 0, "memory")
    if options.measure and options.device_name != AUTO:
        wrong.append(f"--measure is of the device that is here: leave it, or --device-name {options.device_name}, out")
    wrong += _path_problems(options)
    if options.rates is not None and not options.rates.is_file():
        wrong.append(f"--rates {options.rates}: there is no such file; it is the log.jsonl of a run of this model")
    if wrong:
        raise ConfigError(wrong)


def _path_problems(options: Options) -> list[str]:
    paths = {flag(name): getattr(options, name) for name in ("costs", "output", "json", "picture")}
    named = {name: path for name, path in paths.items() if path is not None}
    wrong, seen = list[str](), dict[Path, str]()
    for name, path in named.items():
        folder = path.absolute().parent
        if not folder.is_dir():
            wrong.append(f"{name} {path}: there is no folder {folder}")
        elif path.is_dir():
            wrong.append(f"{name} {path} is a folder: name a file")
        elif (other := seen.setdefault(path.resolve(), name)) != name:
            wrong.append(f"{other} and {name} are both {path}: name two files")
        elif (name != "--costs" or options.measure or not path.exists()) and (why := _unwritable(folder)):
            wrong.append(f"{name} {path}: cannot write into {folder}: {why}")
    return wrong


def _unwritable(folder: Path) -> str | None:
    """Found out by writing: rights do not tell all."""
    try:
        with TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error.strerror


def _machine_problems(options: Options, config: PretrainConfig, known: Analysis | None) -> list[str]:
    """What cannot be on the device that the plan is for. Raises ValueError for a precision that it has not."""
    if options.measure:
        return []  # the device is not known yet
    machine = _machine(options, config, known)
    if machine.memory > machine.program:
        return []
    given = f"--memory {options.memory}: programs and libraries alone take {1e-9 * machine.program:.2f} GB of a rank"
    return [f"{given} on {machine.name}; name more"]


@dataclass(frozen=True)
class _Memory:
    memory: float


def _bytes(text: str) -> float:
    """Raises ValueError for what is no size."""
    number = text.upper().rstrip("BKMGT")
    unit = text.upper()[len(number) :]
    try:
        value, scale = float(number), UNITS.get(unit)
    except ValueError:
        value, scale = 0.0, None
    if scale is None:
        raise ValueError(f"--memory {text!r} is no size with a unit; it looks like 80GB or 500MB")
    return value * scale


def _analysis(options: Options, config: PretrainConfig) -> Analysis:
    from megasnn.planner.analyze import CONTEXT_SIZES, TENSOR_SIZES, analyze  # torch: the model has to be built

    parallel = config.parallel
    analysis = analyze(
        config,
        {*TENSOR_SIZES, parallel.tensor_model_parallel_size},
        {*CONTEXT_SIZES, parallel.context_parallel_size},
        measure=options.measure,
    )
    path = options.costs
    if path is not None and os.environ.get("RANK", "0") == "0":
        write(analysis, path)
    return analysis


def _machine(options: Options, config: PretrainConfig, analysis: Analysis | None) -> Machine:
    if options.device_name == AUTO and analysis is not None and analysis.machine is not None:
        machine = analysis.machine
    else:
        name = "h100" if options.device_name == AUTO else options.device_name
        machine = DEVICES[name].machine(name, config.training.precision)
    return with_memory(machine, None if options.memory is None else _bytes(options.memory))


def _plan(options: Options, config: PretrainConfig, analysis: Analysis, rates: dict[str, float] | None) -> None:
    used = None if rates is None else energy(analysis, rates)
    machine = _machine(options, config, analysis)
    cluster = Cluster(options.gpus, min(options.gpus, options.gpus_per_node), machine, options.spread)
    found = plan(analysis, config, cluster, options.prefer)
    print(cuts(analysis))
    print(table(found))
    if used is not None:
        print(used)
    if options.output is not None:
        costs = options.costs if analysis.machine is not None and analysis.machine.name == machine.name else None
        print(f"run it: {apply(found, config, options.output, costs)}")
    else:
        print("run it: --output FILE writes the configuration of this plan, and tells the command that takes it")
    if options.json is not None:
        write_whole(options.json, json.dumps(as_json(found)))
    if options.picture is not None:
        _draw(found, options.picture)


def _draw(found: Plan, path: Path) -> None:
    from megasnn.planner.pictures import draw

    for each in draw(found, path):
        print(f"drawn: {each}")


def program() -> int:
    """The program megasnn-plan."""
    try:
        main()
    except ValueError as error:
        print(f"plan: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(program())
