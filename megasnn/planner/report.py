"""A plan as people read it."""

from __future__ import annotations

from collections import Counter
from math import isinf

from megasnn.pipeline.cost_model import layers_per_chunk
from megasnn.planner.candidates import Candidate
from megasnn.planner.cost_file import Analysis, CutAxis
from megasnn.planner.machines import GB
from megasnn.planner.plan import Plan

SHOWN = 12  # candidates
WAYS: tuple[tuple[CutAxis, str], ...] = (
    ("tensor", "tensor"),
    ("samples", "context by samples"),
    ("rows", "context by rows"),
)


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
        f"{1e-6 * plan.bytes:.0f} MB = {largest.told}"
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
