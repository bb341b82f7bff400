"""`plan` and `apply`: a cluster's best layout, the reasons against others, and the file that runs it.

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

from megasnn.common.files import quantity, write_whole
from megasnn.common.grid import micro_batch_counts
from megasnn.config import ConfigError, PretrainConfig
from megasnn.config.checks import flag
from megasnn.config.data import SAMPLE
from megasnn.config.training import LENGTHS
from megasnn.config.values import to_json
from megasnn.pipeline.cost_model import layers_per_chunk
from megasnn.planner.candidates import Candidate, Layout, Prefer, with_layout
from megasnn.planner.costs_file import Analysis, CutAxis, cost_differences
from megasnn.planner.machines import GB, Cluster
from megasnn.planner.predict import Predicted
from megasnn.planner.search import PlanError, Search

SIMULATIONS = 20
NOT_PLANNED = ("memory_budget", "pipeline_model_parallel_layout", "weight_gradients", "bptt_steps")
LARGEST_SIZE = 64  # samples of a chosen micro-batch
SIZES = 5  # micro-batch sizes to choose from
SHOWN = 12  # candidates
WAYS: tuple[tuple[CutAxis, str], ...] = (
    ("tensor", "tensor"),
    ("samples", "context by samples"),
    ("rows", "context by rows"),
    ("tokens", "context by tokens"),
)


@dataclass(frozen=True)
class Plan:
    """The chosen layout, and the reasons.

    Attributes:
        bytes: the largest rank's memory, with the allocator's unused blocks.
        largest_micro_batch: most samples in a micro-batch within the memory.
        candidates: all considered layouts, best first.
        seconds: planning time.
        advice: other settings worth a change.
        warnings: reasons to doubt the figures.
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
        """A run's configuration with this plan's layout and layers by chunk."""
        return with_layout(config, self.layout, self.predicted.bounds)


def plan(
    analysis: Analysis,
    config: PretrainConfig,
    cluster: Cluster,
    prefer: Prefer = "speed",
    simulations: int = SIMULATIONS,
    micro_batch_sizes: Sequence[int] = (),
) -> Plan:
    """Estimates all layouts with the configuration's own layout flags, and simulates the best.

    Args:
        prefer: the fastest step; the smallest peak memory on a rank; or room for the largest micro-batches. The latter
            two exclude layouts slower than one device, if one device has enough memory.
        simulations: number of fitting layouts to simulate.
        micro_batch_sizes: sizes to choose from; by default the configuration's own.
    Raises:
        ConfigError: a configuration or cluster without any suitable layout.
        PlanError: costs of another model, or no layout fits.
        ValueError: an unknown `prefer`.
    """
    begin = time.monotonic()
    if prefer not in get_args(Prefer):
        raise ValueError(f"prefer={prefer!r} is none of {', '.join(get_args(Prefer))}")
    if wrong := problems(config, cluster):
        raise ConfigError(wrong)
    if other := cost_differences(analysis, config):
        raise PlanError(
            f"the costs file does not match this run: {'; '.join(other)}; analyze this model (--costs with a new file)"
        )
    if _is_of_another(analysis, cluster):
        # Another device's seconds cannot be scaled to this one.
        analysis = replace(analysis, timed=())
    search = Search(analysis, config, cluster, prefer, micro_batch_sizes or (config.training.micro_batch_size,))
    chosen, predicted, considered, simulated = search.best(simulations)
    others = sorted((each for each in considered if each != chosen), key=search.rank)
    candidates = [chosen]
    candidates += [search.with_reason(each, chosen) for each in others]
    return Plan(
        layout=chosen.layout,
        predicted=predicted,
        bytes=chosen.bytes,
        largest_micro_batch=search.largest_micro_batch(chosen),
        cluster=cluster,
        prefer=prefer,
        candidates=tuple(candidates),
        simulated=simulated,
        seconds=time.monotonic() - begin,
        advice=tuple(_advice(with_layout(config, chosen.layout), chosen.layout, cluster)),
        warnings=tuple(_warnings(analysis, config, cluster)),
    )


def sizes_to_choose(config: PretrainConfig, ranks: int) -> tuple[int, ...]:
    """Micro-batch sizes to choose from: powers of two that divide the global batch.

    The first is nearest to one micro-batch a device.
    """
    batch = config.training.global_batch_size
    powers = [1 << power for power in range(LARGEST_SIZE.bit_length())]
    able = [size for size in powers if batch % size == 0]
    able.sort(key=lambda size: abs(math.log2(size * ranks / batch)))
    return tuple(able[:SIZES])


def problems(config: PretrainConfig, cluster: Cluster) -> list[str]:
    """Problems on every layout, and flags outside the planner's choice. Needs no costs."""
    wrong = cluster.problems()
    for part in (config.parallel, config.training):
        default = type(part)()
        for name in NOT_PLANNED:
            value = getattr(part, name, None)
            if value != getattr(default, name, None):
                wrong.append(f"{flag(name)} {value} is not planned: give it to the run")
    if config.training.cuda_graphs == "on" and cluster.machine.graph_start is None:
        wrong.append(
            f"--cuda-graphs on: there are no figures of {cluster.machine.name} with graphs; give it to the run"
        )
    for checked in (config.neuron, config.training, config.optimizer, config.data, config.checkpoint):
        wrong += checked.problems()
    return wrong


def _advice(config: PretrainConfig, layout: Layout, cluster: Cluster) -> Iterator[str]:
    """On settings outside the planner's choice."""
    batch = config.training.global_batch_size
    micro_batch = config.training.micro_batch_size
    replicas = layout.grid.replicas
    stages = layout.grid.pp
    count = micro_batch_counts(batch, micro_batch, replicas).most
    if stages > 1 and count < 4 * stages:
        # The largest size that divides the batch and gives four micro-batches a stage.
        most = batch // (replicas * 4 * stages)
        able = [size for size in range(1, most + 1) if batch % (size * replicas) == 0]
        if able and able[-1] < micro_batch:
            yield (
                f"{quantity(count, 'micro-batch')} for {stages} stages: about four a stage hide the bubble. "
                f"--micro-batch-size {able[-1]} would give them, and norms would see {able[-1]} samples and not "
                f"{micro_batch}"
            )
    if layout.ranks < cluster.ranks:
        yield (
            f"{layout.ranks} of {cluster.ranks} devices are used: with --global-batch-size {batch} in micro-batches of "
            f"{micro_batch} more would not help"
        )


def _is_of_another(analysis: Analysis, cluster: Cluster) -> bool:
    """True if the layers were not measured on the planned device."""
    return analysis.machine is None or analysis.machine.name != cluster.machine.name


def _warnings(analysis: Analysis, config: PretrainConfig, cluster: Cluster) -> Iterator[str]:
    if config.checkpoint.async_save and cluster.machine.kind == "cpu":
        yield "--async-save copies weights and optimizer state; the figures do not include them: leave memory for that"
    if not _is_of_another(analysis, cluster):
        return
    where = "not measured"
    if analysis.machine is not None:
        where = f"measured on {analysis.machine.name}, which is not used (leave --device-name out for that)"
    yield f"layers were {where}, and the plan is for {cluster.machine.name}: {cluster.machine.source}"


def apply(found: Plan, config: PretrainConfig, path: Path) -> str:
    """Writes the plan for `--config`, and returns the command that runs it on each node."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, to_json(found.configuration(config)))
    return command(found, config, path)


def command(found: Plan, config: PretrainConfig, path: Path) -> str:
    """The command that runs a plan's file, on each node."""
    ranks = found.layout.ranks
    of_node = found.cluster.ranks_of_node
    run = f"{_program(config)} --config {shlex.quote(str(path))}"
    if found.layout.has_graphs:
        run += " --cuda-graphs on"
    if all(getattr(config.training, name) is None for name in LENGTHS):
        # A run needs a length, and a plan does not.
        run += " --train-epochs N"
    if config.data.data_path == SAMPLE:
        run += " --data-path SHARDS"
    # The ranks of one node need no address to meet at.
    where = "--standalone"
    if ranks > of_node:
        meet = "--rdzv-id JOB --rdzv-backend c10d --rdzv-endpoint FIRST_NODE:PORT_OF_THE_JOB"
        where = f"--nnodes {-(-ranks // of_node)} {meet}"
    return f"torchrun {where} --nproc-per-node {min(ranks, of_node)} {run}"


def _program(config: PretrainConfig) -> str:
    """MegaSNN, or the script that defines the model."""
    module = type(config.model).__module__
    if module.partition(".")[0] == "megasnn":
        return f"-m megasnn {config.model.name}"
    script = getattr(sys.modules.get(module), "__file__", None)
    return shlex.quote(str(script)) if script else "SCRIPT"


def cuts(analysis: Analysis, ranks: int) -> str:
    """Text: each axis' possible sizes, and the reasons against others."""
    count = len(analysis.layers)
    parameters = sum(each.parameters for each in analysis.layers)
    operations = sum(each.operations for each in analysis.layers)
    lines = [
        f"{analysis.model}: {quantity(count, 'layer')}, {parameters:,} parameters, "
        f"{operations:,} multiply-adds a sample",
        f"pipeline: up to {quantity(count, 'stage')}, a layer each",
    ]
    for axis, name in WAYS:
        if axis not in analysis.possible:
            continue
        able: list[str] = []
        why: dict[str, list[str]] = {}
        for size, refused in analysis.possible[axis].items():
            if size > ranks:
                continue
            if refused is None:
                able.append(str(size))
            else:
                why.setdefault(refused, []).append(str(size))
        lines.append(f"{name}: {', '.join(able) or 'none'}")
        lines += [f"  not {', '.join(sizes)}: {refused}" for refused, sizes in why.items()]
    return "\n".join(lines)


def table(plan: Plan) -> str:
    """Text: the plan and the best other candidates."""
    lines = _summary(plan)
    lines += [f"advice: {each}" for each in plan.advice]
    lines += [f"WARNING: {each}" for each in plan.warnings]
    rows = [("layout", "step, ms", "GB", "", "why not")]
    rows += [_row(each) for each in plan.candidates[:SHOWN]]
    widths = []
    for column in range(4):
        # The reason is last and needs no padding.
        widths.append(max(len(row[column]) for row in rows))
    for row in rows:
        cells = [text.ljust(width) for text, width in zip(row[:4], widths, strict=True)]
        lines.append("  ".join([*cells, row[4]]).rstrip())
    refused = Counter(each.reason for each in plan.candidates if isinf(each.seconds))
    lines += [f"{quantity(count, 'impossible layout')}: {reason}" for reason, count in refused.most_common(SHOWN)]
    return "\n".join(lines)


def _summary(plan: Plan) -> list[str]:
    """The chosen layout's parts of time and memory."""
    cluster = plan.cluster
    time = plan.predicted.time
    largest = max(plan.predicted.memory, key=lambda each: each.total)
    unused = 1e-6 * plan.bytes - largest.total
    unused_text = f" + memory that an allocator keeps unused {unused:.0f}" if unused >= 1 else ""
    lines = [
        f"plan for {cluster.ranks} x {cluster.machine.name}, {cluster.ranks_of_node} a node, preferring {plan.prefer}: "
        f"{plan.layout}",
        f"  step {1e3 * time.total:.1f} ms = forward and backward {1e3 * time.pipeline:.1f} (ranks idle "
        f"{plan.predicted.idle:.1%}) + exposed gradient sums {1e3 * time.reduction:.1f} + loss and "
        f"norm of all ranks {1e3 * time.agreement:.1f} + optimizer {1e3 * time.update:.1f} "
        f"+ updated shards {1e3 * time.sharing:.1f}",
        f"  memory of the largest rank {plan.bytes / GB:.2f} of {cluster.machine.memory / GB:.2f} GB: "
        f"{1e-6 * plan.bytes:.0f} MB = {largest.parts_text}{unused_text}",
        f"  {quantity(plan.predicted.micro_batches, 'micro-batch')} a replica; the largest that would fit has about "
        f"{quantity(plan.largest_micro_batch, 'sample')}",
    ]
    if plan.layout.grid.pp > 1:
        lines.append(f"  layers of each chunk {layers_per_chunk(plan.predicted.bounds)}")
    lines.append(
        f"  {len(plan.candidates)} layouts considered in {plan.seconds:.1f} s, {plan.simulated} of them simulated"
    )
    return lines


def _row(each: Candidate) -> tuple[str, str, str, str, str]:
    name = str(each.layout)
    if isinf(each.seconds):
        return name, "-", "-", "", each.reason
    how = "simulated" if each.simulated else "about"
    return name, f"{1e3 * each.seconds:.1f}", f"{each.bytes / GB:.2f}", how, each.reason or "taken"
