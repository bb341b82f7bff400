"""What a run takes from the costs file of its plan, instead of measuring its layers."""

from __future__ import annotations

from pathlib import Path

from megasnn.config import PretrainConfig
from megasnn.grid import Grid
from megasnn.pipeline.costs import PipelineCosts
from megasnn.planner.analysis import read, whose
from megasnn.planner.bounds import Bounds
from megasnn.planner.cluster import Cluster
from megasnn.planner.layout import Layout


def planned_costs(config: PretrainConfig, grid: Grid, ranks_of_node: int, machine: str) -> PipelineCosts:
    """The costs of `--layer-costs` on a grid, as the planner has them: the same order of actions follows from them.

    Args:
        machine: the device of this rank, as costs files name it.
    Raises:
        ValueError: a file that cannot be read, or of another model or device; one without seconds, or without a size.
    """
    path = config.parallel.layer_costs
    assert path is not None, "it was asked for"
    named, advice = f"--layer-costs {path}", "measure it here (tools/plan.py --measure), or leave the flag out"
    analysis = read(Path(path))
    if (other := whose(analysis, config)) is not None:
        raise ValueError(f"{named} is {other}; {advice}")
    if analysis.machine is None or not analysis.timed:
        raise ValueError(f"{named} has no seconds: it was made without --measure; {advice}")
    if analysis.machine.name != machine:
        raise ValueError(f"{named} was measured on {analysis.machine.name}, and this is {machine}; {advice}")
    cluster = Cluster(grid.world_size, ranks_of_node, analysis.machine)
    layout = Layout(grid, config.parallel.context_cut(config.training.micro_batch_size))
    try:
        return Bounds(analysis, config, cluster).costs(layout)
    except ValueError as error:
        raise ValueError(f"{named} does not have this layout: {error}; {advice}") from None
