"""`apply`: the configuration file of a plan, and the command that runs it."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from megasnn.config import PretrainConfig
from megasnn.config.training import LENGTHS
from megasnn.config.values import to_json
from megasnn.files import write_whole
from megasnn.planner.layout import with_layout
from megasnn.planner.plan import Plan


def configuration(plan: Plan, config: PretrainConfig, costs: Path | None = None) -> PretrainConfig:
    """Of a run on the layout of the plan, with the cut that was planned. Args: costs: as in `Layout.parallel`."""
    return with_layout(config, plan.layout, plan.bounds, costs)


def apply(plan: Plan, config: PretrainConfig, path: Path, costs: Path | None = None) -> str:
    """Writes the file that `--config` takes; the command that runs it. Args: costs: as in `Layout.parallel`."""
    write_whole(path, to_json(configuration(plan, config, costs)))
    return command(plan, config, path)


def command(plan: Plan, config: PretrainConfig, path: Path) -> str:
    """The command that runs a plan; on several nodes, the one for each of them."""
    ranks, of_node = plan.layout.ranks, plan.cluster.ranks_of_node
    run = f"{_program(config)} --config {shlex.quote(str(path))}"
    if all(getattr(config.training, name) is None for name in LENGTHS):
        run += " --train-epochs N"
    if ranks == 1:
        return f"python {run}"
    if ranks <= of_node:
        return f"torchrun --standalone --nproc-per-node {ranks} {run}"
    nodes = -(-ranks // of_node)
    meet = "--rdzv-id NAME --rdzv-backend c10d --rdzv-endpoint FIRST_NODE:29500"
    return f"torchrun --nnodes {nodes} --nproc-per-node {of_node} {meet} {run}"


def _program(config: PretrainConfig) -> str:
    """What trains the model: MegaSNN, or the script that it is defined in."""
    module = type(config.model).__module__
    if module.partition(".")[0] == "megasnn":
        return f"-m megasnn {config.model.name}"
    script = getattr(sys.modules.get(module), "__file__", None)
    return shlex.quote(str(script)) if script else "SCRIPT"
