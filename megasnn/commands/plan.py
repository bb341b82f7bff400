"""Choose the layout and schedule of a run for given machines, with the time of a step and the memory of a rank.

    python tools/plan.py spikformer --image-size 224 --global-batch-size 512 --gpus 64 --memory 80GB
    torchrun --standalone --nproc-per-node 2 tools/plan.py spikformer --gpus 2 --measure --costs costs.json

The model comes first. All flags of a run are accepted besides those below. Without --micro-batch-size and --config the
planner also chooses the size of micro-batches. Nothing is trained.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro
from pydantic import ByteSize, TypeAdapter

from megasnn.commands.flags import name_in, run_tool
from megasnn.config import PretrainConfig
from megasnn.config.checks import ConfigError, at_least
from megasnn.models.registry import MODELS
from megasnn.planner.candidates import Prefer
from megasnn.planner.costs_file import Analysis, read, write
from megasnn.planner.machines import AUTO_DEVICE, DEVICES, Cluster, Machine
from megasnn.planner.plan import apply, cuts, plan, problems, sizes_to_choose, table
from megasnn.pretraining import configuration

SIZE_FLAGS = ("--micro-batch-size", "--config")  # with one of them the size of micro-batches is fixed
ASSUMED_DEVICE = "h100"


@dataclass(frozen=True)
class PlanOptions:
    """Choose a layout for a model on given machines. Flags of a run (python -m megasnn MODEL --help) work too."""

    gpus: int = 1
    """Number of devices: GPUs, or processes with --measure on a CPU."""
    gpus_per_node: int = 8
    """Devices on each node."""
    memory: str | None = None
    """Memory to use on each device, such as 80GB; by default all it has."""
    device_name: Annotated[str, name_in(DEVICES)] = AUTO_DEVICE
    """Device of the table. auto is the measured device, or h100 without a measurement."""
    prefer: Prefer = "speed"
    """Goal: the fastest step, the smallest peak memory of a rank, or the largest possible micro-batches."""
    measure: bool = False
    """Measure the layers on this device; under torchrun also the links between ranks."""
    costs: Path | None = None
    """Costs of the layers: read if the file exists, otherwise written; always written with --measure."""
    output: Path | None = None
    """File for the configuration of the plan, for --config of a run."""


def make_plan(arguments: Sequence[str] | None = None) -> None:
    """Plans a run and prints the plan on the first rank.

    Raises ValueError for flags that no run or no plan accepts, and ConfigError for several such flags at once.
    """
    options, run_flags = tyro.cli(PlanOptions, args=arguments, return_unknown_args=True)
    if wrong := at_least(options, 1, "gpus", "gpus_per_node"):
        raise ConfigError(wrong)
    if not run_flags or run_flags[0].startswith("-"):
        raise ValueError(f"name a model first: {', '.join(MODELS)}")
    model, *flags = run_flags
    config = configuration(MODELS[model], flags)
    sizes: tuple[int, ...] = ()
    is_size_fixed = any(flag.partition("=")[0] in SIZE_FLAGS for flag in flags)
    if options.prefer == "speed" and not is_size_fixed:
        sizes = sizes_to_choose(config, options.gpus)
        config = replace(config, training=replace(config.training, micro_batch_size=max(sizes)))
    analysis = None
    if options.costs is not None and options.costs.exists() and not options.measure:
        analysis = read(options.costs)
    if not options.measure:
        # Analysing a model takes long, so refuse before it. With --measure the device is not known yet.
        if wrong := problems(config, _cluster(options, config, analysis)):
            raise ConfigError(wrong)
    if analysis is None:
        analysis = _new_analysis(options, config)
    if os.environ.get("RANK", "0") == "0":
        _print_plan(options, config, analysis, sizes)


def _print_plan(options: PlanOptions, config: PretrainConfig, analysis: Analysis, sizes: tuple[int, ...]) -> None:
    cluster = _cluster(options, config, analysis)
    found = plan(analysis, config, cluster, options.prefer, micro_batch_sizes=sizes)
    if options.device_name == AUTO_DEVICE and analysis.machine is None:
        name = cluster.machine.name
        print(f"the plan assumes {name} devices: give --device-name for others, or --measure for this one")
    print(cuts(analysis, options.gpus))
    print(table(found))
    if options.output is not None:
        print(f"run it: {apply(found, config, options.output)}")
    else:
        print("run it: give --output FILE to write the configuration of this plan and print its command")


def _cluster(options: PlanOptions, config: PretrainConfig, analysis: Analysis | None) -> Cluster:
    machine = _machine(options, config, analysis)
    # Fewer devices than a node has all lie in one node.
    return Cluster(options.gpus, min(options.gpus, options.gpus_per_node), machine)


def _machine(options: PlanOptions, config: PretrainConfig, analysis: Analysis | None) -> Machine:
    """Raises ValueError for a precision without figures for the device, or a --memory that is no size."""
    if options.device_name == AUTO_DEVICE and analysis is not None and analysis.machine is not None:
        machine = analysis.machine
    else:
        name = ASSUMED_DEVICE if options.device_name == AUTO_DEVICE else options.device_name
        machine = DEVICES[name]
        precision = config.training.precision
        if precision not in machine.operations:
            known = ", ".join(machine.operations)
            raise ValueError(f"--precision {precision}: {name} has figures for {known}; take another --device-name")
    if options.memory is None:
        return machine
    return replace(machine, memory=_bytes(options.memory))


def _bytes(text: str) -> float:
    try:
        # pydantic would read a number without a unit as bytes.
        if text[-1:].isdigit():
            raise ValueError("no unit")
        return float(TypeAdapter(ByteSize).validate_python(text))
    except ValueError:
        raise ValueError(f"--memory {text!r} is no size with a unit; it looks like 80GB or 500MB") from None


def _new_analysis(options: PlanOptions, config: PretrainConfig) -> Analysis:
    # Imported here because it needs torch, which a plan from a costs file does not.
    from megasnn.planner.analyze import analyze

    analysis = analyze(config, options.measure)
    if options.costs is not None and os.environ.get("RANK", "0") == "0":
        write(analysis, options.costs)
    return analysis


def main(arguments: Sequence[str] | None = None) -> int:
    return run_tool("plan", lambda: make_plan(arguments))


if __name__ == "__main__":
    sys.exit(main())
