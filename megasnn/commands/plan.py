"""Choose a layout for a model on given machines: which axes, which schedule, how long a step takes, whether it fits.

    python tools/plan.py spikformer --image-size 224 --global-batch-size 512 --gpus 64 --memory 80GB
    torchrun --standalone --nproc-per-node 2 tools/plan.py spikformer --gpus 2 --measure --costs costs.json

The model comes first; all flags of a run of it are taken, besides those below. Where neither a flag nor --config says
the size of micro-batches, it is chosen, too. Nothing is trained.
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
from megasnn.planner.costs import Analysis, read, write
from megasnn.planner.machines import AUTO_DEVICE, DEVICES, Cluster, Machine
from megasnn.planner.plan import apply, cuts, plan, problems, sizes_to_choose, table
from megasnn.pretraining import configuration

SAYS_SIZE = ("--micro-batch-size", "--config")


@dataclass(frozen=True)
class PlanOptions:
    """Choose a layout for a model on given machines; flags of a run (python -m megasnn MODEL --help) are taken too."""

    gpus: int = 1
    """Devices that there are: GPUs, or with --measure on a CPU processes."""
    gpus_per_node: int = 8
    """Of them on each node."""
    memory: str | None = None
    """What each of them may need, as 80GB; by default what the device has."""
    device_name: Annotated[str, name_in(DEVICES)] = AUTO_DEVICE
    """The device, from the table; auto is the one that was measured, and h100 where none was."""
    prefer: Prefer = "speed"
    """The fastest step; the smallest peak of a rank's memory; or room for the largest micro-batches."""
    measure: bool = False
    """Measure the layers on this device, and under torchrun its links."""
    costs: Path | None = None
    """The costs file: read where it is there, otherwise written; with --measure always written."""
    output: Path | None = None
    """Write the configuration that --config takes here."""


def make_plan(arguments: Sequence[str] | None = None) -> None:
    """Raises ValueError for what cannot be planned."""
    options, theirs = tyro.cli(PlanOptions, args=arguments, return_unknown_args=True)
    if wrong := at_least(options, 1, "gpus", "gpus_per_node"):
        raise ConfigError(wrong)
    if not theirs or theirs[0].startswith("-"):
        raise ValueError(f"name a model first: {', '.join(MODELS)}")
    model, flags = MODELS[theirs[0]], theirs[1:]
    config = configuration(model, flags)
    known = None if options.measure or options.costs is None or not options.costs.exists() else read(options.costs)
    sizes: tuple[int, ...] = ()
    if options.prefer == "speed" and not any(word.partition("=")[0] in SAYS_SIZE for word in flags):
        sizes = sizes_to_choose(config, options.gpus)
        config = replace(config, training=replace(config.training, micro_batch_size=max(sizes)))
    of_node = min(options.gpus, options.gpus_per_node)
    if not options.measure:  # before a model is analysed, which takes long; with it the device is not known yet
        machine = _machine(options, config, known)
        if wrong := problems(config, Cluster(options.gpus, of_node, machine)):
            raise ConfigError(wrong)
    analysis = known or _analysis(options, config)
    if os.environ.get("RANK", "0") != "0":
        return
    cluster = Cluster(options.gpus, of_node, _machine(options, config, analysis))
    found = plan(analysis, config, cluster, options.prefer, micro_batch_sizes=sizes)
    if options.device_name == AUTO_DEVICE and analysis.machine is None:
        print(f"the devices are taken for {cluster.machine.name}: --device-name names others, --measure this one")
    print(cuts(analysis, options.gpus))
    print(table(found))
    if options.output is not None:
        print(f"run it: {apply(found, config, options.output)}")
    else:
        print("run it: --output FILE writes the configuration of this plan, and tells the command that takes it")


def _machine(options: PlanOptions, config: PretrainConfig, analysis: Analysis | None) -> Machine:
    """Raises ValueError for a precision that the device has not, or a memory that is no size."""
    if options.device_name == AUTO_DEVICE and analysis is not None and analysis.machine is not None:
        machine = analysis.machine
    else:
        name = "h100" if options.device_name == AUTO_DEVICE else options.device_name
        machine, precision = DEVICES[name], config.training.precision
        if precision not in machine.operations:
            known = ", ".join(machine.operations)
            raise ValueError(f"--precision {precision}: {name} is known for {known}; take another --device-name")
    return machine if options.memory is None else replace(machine, memory=_bytes(options.memory))


def _bytes(text: str) -> float:
    try:
        if text[-1:].isdigit():
            raise ValueError("no unit")
        return float(TypeAdapter(ByteSize).validate_python(text))
    except ValueError:
        raise ValueError(f"--memory {text!r} is no size with a unit; it looks like 80GB or 500MB") from None


def _analysis(options: PlanOptions, config: PretrainConfig) -> Analysis:
    from megasnn.planner.analyze import analyze  # torch: the model has to be built

    analysis = analyze(config, options.measure)
    if options.costs is not None and os.environ.get("RANK", "0") == "0":
        write(analysis, options.costs)
    return analysis


def main(arguments: Sequence[str] | None = None) -> int:
    return run_tool("plan", lambda: make_plan(arguments))


if __name__ == "__main__":
    sys.exit(main())
