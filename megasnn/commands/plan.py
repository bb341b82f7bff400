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
from typing import Annotated

from megasnn.config import PretrainConfig
from megasnn.config.checks import ConfigError, above, at_least, flag
from megasnn.config.cli import command_line
from megasnn.config.names import name_in
from megasnn.files.durable import write_whole
from megasnn.models.table import MODELS
from megasnn.planner.analysis import Analysis, read, write
from megasnn.planner.apply import apply
from megasnn.planner.cluster import Cluster, node_problems
from megasnn.planner.energy import energy, measured_rates
from megasnn.planner.machines import AUTO, DEVICES, Machine, with_memory
from megasnn.planner.plan import Plan, plan, problems
from megasnn.planner.report import as_json, cuts, table
from megasnn.planner.search import Prefer
from megasnn.pretraining import configuration
from megasnn.process.terminal import keep_going

UNITS = {"KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "": 1.0}


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
    """The costs file: read where it is there, otherwise written."""
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
    config = configuration(MODELS[theirs[0]], theirs[1:])
    if wrong := problems(config):  # before a model is analysed, which takes minutes where it is large
        raise ConfigError(wrong)
    analysis = _analysis(options, config)
    if os.environ.get("RANK", "0") == "0":
        _plan(options, config, analysis)


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The flags of `Options`, and all else."""
    kinds = {flag(each.name): each.type for each in fields(Options)}
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
    if not wrong:
        wrong += node_problems(options.gpus, options.gpus_per_node)
    if options.memory is not None:
        wrong += above(_Memory(_bytes(options.memory)), 0, "memory")
    for name in ("costs", "output", "json", "picture"):
        path = getattr(options, name)
        if path is not None and not path.absolute().parent.is_dir():
            wrong.append(f"{flag(name)} {path}: there is no folder {path.absolute().parent}")
        elif path is not None and path.is_dir():
            wrong.append(f"{flag(name)} {path} is a folder: name a file")
    if options.rates is not None and not options.rates.is_file():
        wrong.append(f"--rates {options.rates}: there is no such file; it is the log.jsonl of a run of this model")
    if wrong:
        raise ConfigError(wrong)


@dataclass(frozen=True)
class _Memory:
    memory: float


def _bytes(text: str) -> float:
    """Raises ValueError for what is no size."""
    number = text.upper().rstrip("BKMGT")
    unit = text.upper()[len(number) :]
    try:
        return float(number) * UNITS[unit]
    except (KeyError, ValueError):
        raise ValueError(f"--memory {text!r} is no size; it looks like 80GB or 500MB") from None


def _analysis(options: Options, config: PretrainConfig) -> Analysis:
    path = options.costs
    if path is not None and path.exists() and not options.measure:
        return read(path)
    from megasnn.planner.analyze import CONTEXT_SIZES, TENSOR_SIZES, analyze  # torch: the model has to be built

    parallel = config.parallel
    analysis = analyze(
        config,
        {*TENSOR_SIZES, parallel.tensor_model_parallel_size},
        {*CONTEXT_SIZES, parallel.context_parallel_size},
        measure=options.measure,
    )
    if path is not None and os.environ.get("RANK", "0") == "0":
        write(analysis, path)
    return analysis


def _machine(options: Options, config: PretrainConfig, analysis: Analysis) -> Machine:
    if options.device_name == AUTO and analysis.machine is not None:
        machine = analysis.machine
    else:
        name = "h100" if options.device_name == AUTO else options.device_name
        machine = DEVICES[name].machine(name, config.training.precision)
    return with_memory(machine, None if options.memory is None else _bytes(options.memory))


def _plan(options: Options, config: PretrainConfig, analysis: Analysis) -> None:
    machine = _machine(options, config, analysis)
    cluster = Cluster(options.gpus, min(options.gpus, options.gpus_per_node), machine, options.spread)
    found = plan(analysis, config, cluster, options.prefer)
    print(cuts(analysis))
    print(table(found))
    if options.rates is not None:
        print(energy(analysis, measured_rates(options.rates)))
    if options.output is not None:
        print(f"run it: {apply(found, config, options.output)}")
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
    keep_going()
    try:
        main()
    except ValueError as error:
        print(f"plan: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(program())
