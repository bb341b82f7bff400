"""`plan` and `apply`: the layout to take on a cluster, the reasons against all others, and the file that runs it.

Reads a costs file, and needs no torch.
"""

from __future__ import annotations

import math
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import isinf
from pathlib import Path
from typing import get_args

from megasnn.common.files import write_whole
from megasnn.common.grid import micro_batch_counts
from megasnn.config import ConfigError, PretrainConfig
from megasnn.config.checks import flag
from megasnn.config.data import SAMPLE
from megasnn.config.training import LENGTHS
from megasnn.config.values import to_json
from megasnn.pipeline.cost_model import layers_per_chunk
from megasnn.planner.candidates import Candidate, Layout, Prefer, with_layout
from megasnn.planner.costs import Analysis, CutAxis, cost_differences
from megasnn.planner.machines import GB, Cluster
from megasnn.planner.predict import Predicted
from megasnn.planner.search import PlanError, Search

SIMULATIONS = 20
NOT_PLANNED = (
    *("memory_budget", "pipeline_model_parallel_layout", "weight_gradients"),
    *("bptt_steps", "cuda_graphs"),
)
LARGEST, CHOICES = 64, 5  # samples of a micro-batch that is chosen, and of how many sizes
SHOWN = 12  # candidates
WAYS: tuple[tuple[CutAxis, str], ...] = (
    ("tensor", "tensor"),
    ("samples", "context by samples"),
    ("rows", "context by rows"),
)


@dataclass(frozen=True)
class Plan:
    """Layout to take, and why.

    Attributes:
        layout: to take. predicted: its step.
        bytes: that its largest rank needs, with what an allocator keeps. largest_micro_batch: samples of the largest
            micro-batch that would fit.
        candidates: all that were looked at, the one that was taken first, then the others from the best one on.
        simulated: how many of them were simulated. seconds: that planning took.
        advice: what would help and is not the planner's to change. warnings: what makes the figures doubtful.
    """

    layout: Layout
    predicted: Predicted
    bytes: float
    largest_micro_batch: int
    cluster: Cluster
    prefer: Prefer
    candidates: tuple[Candidate, ...]
    simulated: int
    seconds: float
    advice: tuple[str, ...]
    warnings: tuple[str, ...]

    def configuration(self, config: PretrainConfig) -> PretrainConfig:
        """Configuration of a run on the layout of the plan, with the cut that was planned."""
        return with_layout(config, self.layout, self.predicted.bounds)


def plan(
    analysis: Analysis,
    config: PretrainConfig,
    cluster: Cluster,
    prefer: Prefer = "speed",
    simulations: int = SIMULATIONS,
    micro_batch_sizes: Sequence[int] = (),
) -> Plan:
    """Looks at all layouts by estimates, and simulates the best of them.

    Flags of layouts that the configuration gives are kept: only layouts with these are looked at.

    Args:
        prefer: the fastest step; the smallest peak of a rank's memory; or room for the largest micro-batches. The
            latter two take nothing that is slower than one device, where that fits.
        simulations: of layouts that fit, at most.
        micro_batch_sizes: to choose from; by default that of the configuration, which defines what is computed.
    Raises:
        ConfigError: what no layout can be right for. PlanError: costs of another model, or no layout that fits.
    """
    begin = time.monotonic()
    if prefer not in get_args(Prefer):
        raise ValueError(f"prefer={prefer!r} is none of {', '.join(get_args(Prefer))}")
    if wrong := problems(config, cluster):
        raise ConfigError(wrong)
    if other := cost_differences(analysis, config):
        raise PlanError(f"these costs do not serve: {'; '.join(other)}; analyze this model (--costs with a new file)")
    if _is_of_another(analysis, cluster):
        analysis = replace(analysis, timed=())  # seconds of one device say nothing of another
    search = Search(analysis, config, cluster, prefer, micro_batch_sizes or (config.training.micro_batch_size,))
    chosen, predicted, looked_at, simulated = search.best(simulations)
    rest = sorted((each for each in looked_at if each != chosen), key=search.rank)
    return Plan(
        layout=chosen.layout,
        predicted=predicted,
        bytes=chosen.bytes,
        largest_micro_batch=search.largest_micro_batch(chosen),
        cluster=cluster,
        prefer=prefer,
        candidates=(chosen, *(search.with_reason(each, chosen) for each in rest)),
        simulated=simulated,
        seconds=time.monotonic() - begin,
        advice=tuple(_advice(with_layout(config, chosen.layout), chosen.layout, cluster)),
        warnings=tuple(_warnings(analysis, config, cluster)),
    )


def sizes_to_choose(config: PretrainConfig, ranks: int) -> tuple[int, ...]:
    """Sizes of micro-batches that divide the global batch, powers of two; first what gives each device one, then the
    nearest."""
    batch = config.training.global_batch_size
    found = [1 << power for power in range(LARGEST.bit_length()) if batch % (1 << power) == 0]
    return tuple(sorted(found, key=lambda size: abs(math.log2(size * ranks / batch)))[:CHOICES])


def problems(config: PretrainConfig, cluster: Cluster) -> list[str]:
    """Problems that no layout can mend, or that the planner does not plan for; needs no costs."""
    wrong = cluster.problems()
    for part in (config.parallel, config.training):
        changed = [name for name in NOT_PLANNED if getattr(part, name, None) != getattr(type(part)(), name, None)]
        wrong += [f"{flag(name)} {getattr(part, name)} is not planned: give it to the run" for name in changed]
    parts = config.neuron, config.training, config.optimizer, config.data, config.checkpoint
    return wrong + [problem for part in parts for problem in part.problems()]


def _advice(config: PretrainConfig, layout: Layout, cluster: Cluster) -> Iterator[str]:
    """Advice on what is not the planner's to change."""
    training, grid = config.training, layout.grid
    count = micro_batch_counts(training.global_batch_size, training.micro_batch_size, grid.replicas)[0]
    stages = grid.pp
    if stages > 1 and count < 4 * stages:
        # Of the sizes that divide the batch, the largest that gives four micro-batches a stage.
        most = training.global_batch_size // (grid.replicas * 4 * stages)
        able = [size for size in range(1, most + 1) if training.global_batch_size % (size * grid.replicas) == 0]
        if able and able[-1] < training.micro_batch_size:
            yield (
                f"{count} micro-batch(es) for {stages} stages are few, about four a stage hide the bubble: "
                f"--micro-batch-size {able[-1]} would give them, and norms would see {able[-1]} samples and not "
                f"{training.micro_batch_size}"
            )
    if layout.ranks < cluster.ranks:
        yield (
            f"{cluster.ranks - layout.ranks} of {cluster.ranks} devices are left out: with --global-batch-size "
            f"{training.global_batch_size} in micro-batches of {training.micro_batch_size} they would not help"
        )


def _is_of_another(analysis: Analysis, cluster: Cluster) -> bool:
    """True where layers were not measured on the device that a plan is for."""
    return analysis.machine is None or analysis.machine.name != cluster.machine.name


def _warnings(analysis: Analysis, config: PretrainConfig, cluster: Cluster) -> Iterator[str]:
    if config.checkpoint.async_save and cluster.machine.kind == "cpu":
        yield "--async-save copies weights and optimizer state, which is not in the figures: leave memory for that"
    if not _is_of_another(analysis, cluster):
        return
    where = "not measured"
    if analysis.machine is not None:
        where = f"measured on {analysis.machine.name}, which is not used (leave --device-name out for that)"
    yield f"layers were {where}, and the plan is for {cluster.machine.name}: {cluster.machine.source}"


def apply(found: Plan, config: PretrainConfig, path: Path) -> str:
    """Writes the file that `--config` takes; returns the command that runs it, on several nodes that of each."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, to_json(found.configuration(config)))
    return command(found, config, path)


def command(found: Plan, config: PretrainConfig, path: Path) -> str:
    """The command that runs a plan from its file."""
    ranks, of_node = found.layout.ranks, found.cluster.ranks_of_node
    run = f"{_program(config)} --config {shlex.quote(str(path))}"
    if all(getattr(config.training, name) is None for name in LENGTHS):
        run += " --train-epochs N"
    if config.data.data_path == SAMPLE:
        run += " --data-path SHARDS"
    where = "--standalone"
    if ranks > of_node:
        meet = "--rdzv-id JOB --rdzv-backend c10d --rdzv-endpoint FIRST_NODE:PORT_OF_THE_JOB"
        where = f"--nnodes {-(-ranks // of_node)} {meet}"
    return f"torchrun {where} --nproc-per-node {min(ranks, of_node)} {run}"


def _program(config: PretrainConfig) -> str:
    """Program that trains the model: MegaSNN, or the script that it is defined in."""
    module = type(config.model).__module__
    if module.partition(".")[0] == "megasnn":
        return f"-m megasnn {config.model.name}"
    script = getattr(sys.modules.get(module), "__file__", None)
    return shlex.quote(str(script)) if script else "SCRIPT"


def cuts(analysis: Analysis, ranks: int) -> str:
    """Parts of the model that so many ranks can cut, along which axis, and why not."""
    lines = [f"{analysis.model}: {len(analysis.layers)} layers, "
             f"{sum(each.parameters for each in analysis.layers):,} parameters, "
             f"{sum(each.operations for each in analysis.layers):,} multiply-adds a sample"]  # fmt: skip
    lines.append(f"pipeline: up to {len(analysis.layers)} stages, a layer each")
    for axis, name in WAYS:
        sizes = {size: refused for size, refused in analysis.possible[axis].items() if size <= ranks}
        able = [str(size) for size, refused in sizes.items() if refused is None]
        lines.append(f"{name}: {', '.join(able) or 'none'}")
        why = dict[str, list[str]]()
        for size, refused in sizes.items():
            if refused is not None:
                why.setdefault(refused, []).append(str(size))
        lines += [f"  not {', '.join(found)}: {refused}" for refused, found in why.items()]
    return "\n".join(lines)


def table(plan: Plan) -> str:
    """The plan and the best of the others, aligned for people."""
    time, largest = plan.predicted.time, max(plan.predicted.memory, key=lambda each: each.total)
    cluster, layout = plan.cluster, plan.layout
    unused = 1e-6 * plan.bytes - largest.total
    lines = [
        f"plan for {cluster.ranks} x {cluster.machine.name}, {cluster.ranks_of_node} a node, preferring {plan.prefer}: "
        f"{layout}",
        f"  step {1e3 * time.total:.1f} ms = forward and backward {1e3 * time.pipeline:.1f} (ranks idle "
        f"{plan.predicted.idle:.1%}) + sums of gradients that are not hidden {1e3 * time.reduction:.1f} + loss and "
        f"norm of all ranks {1e3 * time.agreement:.1f} + optimizer {1e3 * time.update:.1f} "
        f"+ rows of owners {1e3 * time.sharing:.1f}",
        f"  memory of the largest rank {plan.bytes / GB:.2f} of {cluster.machine.memory / GB:.2f} GB: "
        f"{1e-6 * plan.bytes:.0f} MB = {largest.parts_text}"
        + (f" + what an allocator keeps unused {unused:.0f}" if unused >= 1 else ""),
        f"  {plan.predicted.micro_batches} micro-batch(es) a replica; the largest that would fit has about "
        f"{plan.largest_micro_batch} samples",
    ]
    if layout.grid.pp > 1:
        lines.append(f"  layers of each chunk {layers_per_chunk(plan.predicted.bounds)}")
    lines.append(
        f"  {len(plan.candidates)} layouts looked at in {plan.seconds:.1f} s, {plan.simulated} of them simulated"
    )
    lines += [f"advice: {each}" for each in plan.advice] + [f"WARNING: {each}" for each in plan.warnings]
    rows = [("layout", "step, ms", "GB", "", "why not"), *map(_row, plan.candidates[:SHOWN])]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for row in rows:
        cells = [text.ljust(width) for text, width in zip(row[:4], widths, strict=True)]
        lines.append("  ".join([*cells, row[4]]).rstrip())
    refused = Counter(each.reason for each in plan.candidates if isinf(each.seconds))
    lines += [f"{count} cannot be: {reason}" for reason, count in refused.most_common(SHOWN)]
    return "\n".join(lines)


def _row(each: Candidate) -> tuple[str, str, str, str, str]:
    name = str(each.layout)
    if isinf(each.seconds):
        return name, "-", "-", "", each.reason
    how = "simulated" if each.simulated else "about"
    return name, f"{1e3 * each.seconds:.1f}", f"{each.bytes / GB:.2f}", how, each.reason or "taken"
