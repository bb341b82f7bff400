"""A machine's rates, fitted to what was measured on it: for sizes that were not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from scipy.optimize import nnls

from megasnn.pipeline.cost_model import LinkCost
from megasnn.planner.analysis import Analysis, Timed
from megasnn.planner.costs import PARTS, Share, counted_costs, work_of
from megasnn.planner.machines import DEVICES, MOVED_IN_SUM, MOVED_IN_UPDATE, Machine
from megasnn.telemetry.memory import device_name


def fitted_machine(
    known: Analysis,
    timed: Sequence[Timed],
    device: torch.device,
    link: LinkCost | None,
    update: float,
    program: float | None,
) -> Machine:
    """The machine that seconds were measured on.

    Args:
        link: between two ranks; None where there was one, and the table of devices has to do.
        update: seconds that the optimizer takes for each byte of parameters.
        program: bytes of a rank without tensors; None: as the table says.
    """
    is_cpu = device.type == "cpu"
    base = DEVICES["cpu-core" if is_cpu else "h100"].machine(device_name(device), "fp32")
    operations, moved = rates(known, timed)
    return replace(
        base,
        operations=operations or base.operations,
        moved=moved or base.moved,
        least=0.0,
        start=0.0,
        alone=1.0,  # seconds are there of one rank, and of all at the same time
        update=update,
        summed=update * MOVED_IN_SUM / MOVED_IN_UPDATE if is_cpu else 0.0,  # both read and write in order
        within=link or base.within,
        program=base.program if program is None else program,
        memory=base.memory if is_cpu else float(torch.cuda.get_device_properties(device).total_memory),
        told=f"measured with {max(each.ranks for each in timed)} rank(s); rates fitted to that"
        + ("" if link else ", links from the table of devices"),
    )


def rates(known: Analysis, timed: Sequence[Timed]) -> tuple[float, float]:
    """Multiply-adds and bytes a second with which the seconds of whole layers come out best; 0 for what takes none."""
    table, seconds = [], []
    for each in timed:
        if each.tensor * each.context > 1:
            continue  # exchanges are a part of those
        share = Share(1, 1, "samples", each.samples, each.ranks)
        for number, cost in enumerate(counted_costs(known, share)):
            work = work_of(known.layers[number], cost, share, number == 0)
            for name in PARTS:
                table.append(work[name])
                seconds.append(getattr(each.seconds[number], name))
    weights = np.array(table)
    sizes = np.maximum(weights.max(axis=0), 1.0)
    found = nnls(weights / sizes, np.array(seconds))[0] / sizes
    operations, moved = (1 / float(each) if each > 0 else 0.0 for each in found)
    return operations, moved
