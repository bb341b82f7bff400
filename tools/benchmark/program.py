"""Time a training step of MegaSNN's layouts and of SpikingJelly's own model, side by side in one run.

    python tools/benchmark
    python tools/benchmark --model spikformer_ti --rounds 6 --steps 4
    python tools/benchmark --rows megasnn megasnn:8 pp2 pp2:16 --global-batch-size 16
    python tools/benchmark --device cuda --precision bf16 --image-size 224 --global-batch-size 64

A step includes AdamW. Rows take turns, a few steps each and then all of them again, so that a machine whose speed
drifts slows all rows alike; every rank is a process of its own that sleeps while another row is measured.

Other parts have benchmarks of their own; the first flag chooses one, and --help behind it lists its flags:

    python tools/benchmark --readers                      # event recordings and frames, beside SpikingJelly's
    python tools/benchmark --pipeline                     # every schedule, beside its simulation and one rank
    python tools/benchmark --rehearsal                    # schedules on ranks that sleep, over links that take time
    python tools/benchmark --data                         # the loader, beside PyTorch's DataLoader
    python tools/benchmark --kernels                      # norm and neuron, in copies of their input
    python tools/benchmark --memory                       # what a step takes, beside SpikingJelly and predictions
    python tools/benchmark --capacity                     # the largest micro-batch that fits, by trying and foreseen
    python tools/benchmark --plans                        # steps of layouts, beside what the planner foresees
    python tools/benchmark --fit-device                   # the table of devices, fitted to half of measured layouts
    python tools/benchmark --sleeping-plans               # the same of 4, 8 and 16 ranks that sleep, and the plan
    python tools/benchmark --checkpoint                   # save, load and conversion, beside cp
    python tools/benchmark --scale                        # what grows with ranks, stages and micro-batches

Prints a table and appends one JSON line per row to benchmark.jsonl; a later run of the same configuration on the same
kind of machine shows how its figures have changed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from megasnn.config.cli import command_line
from tools.benchmark.capacity import CAPACITY
from tools.benchmark.checkpoints import CHECKPOINTS
from tools.benchmark.devices import DEVICES
from tools.benchmark.harness import Case, run
from tools.benchmark.kernels import KERNELS
from tools.benchmark.layouts import LAYOUTS
from tools.benchmark.loading import LOADING
from tools.benchmark.memory import MEMORY
from tools.benchmark.pipeline import PIPELINE
from tools.benchmark.plans import PLANS
from tools.benchmark.plans_asleep import SLEEPING_PLANS
from tools.benchmark.ranks import RankError
from tools.benchmark.readers import READERS
from tools.benchmark.rehearsal import REHEARSAL
from tools.benchmark.scale import SCALE

OTHERS: dict[str, Case[Any]] = {
    "--capacity": CAPACITY,
    "--checkpoint": CHECKPOINTS,
    "--data": LOADING,
    "--fit-device": DEVICES,
    "--kernels": KERNELS,
    "--memory": MEMORY,
    "--readers": READERS,
    "--pipeline": PIPELINE,
    "--plans": PLANS,
    "--rehearsal": REHEARSAL,
    "--scale": SCALE,
    "--sleeping-plans": SLEEPING_PLANS,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0; 1 when a rank failed, 2 when the flags do not go together, after saying so on stderr."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    other = OTHERS.get(arguments[0]) if arguments else None
    try:
        if other is not None:
            run(other, command_line(other.flags, arguments[1:]))
        else:
            run(LAYOUTS, command_line(LAYOUTS.flags, arguments, description=__doc__))
    except RankError as error:
        print(f"\nerror: {error}", file=sys.stderr)
        return 1
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0
