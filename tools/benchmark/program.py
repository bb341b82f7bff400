"""Time a training step of MegaSNN's layouts and of SpikingJelly's own model, side by side in one run.

    python tools/benchmark
    python tools/benchmark --model spikformer_ti --rounds 6 --steps 4
    python tools/benchmark --rows megasnn megasnn:8 pp2 pp2:16 --global-batch-size 16
    python tools/benchmark --device cuda --precision bf16 --image-size 224 --global-batch-size 64

A step includes AdamW. Rows take turns, a few steps each and then all of them again, so that a machine whose speed
drifts slows all rows alike; every rank is a process of its own that sleeps while another row is measured.

Other parts have benchmarks of their own; the first flag chooses one, and --help behind it lists its flags:

    python tools/benchmark --pipeline                     # every schedule, beside its simulation and one rank
    python tools/benchmark --data                         # the loader, beside PyTorch's DataLoader
    python tools/benchmark --kernels                      # norm and neuron, in copies of their input
    python tools/benchmark --plans                        # steps of layouts, beside what the planner foresees
    python tools/benchmark --checkpoint                   # save, load and conversion, beside cp

Prints a table and appends one JSON line per row to benchmark.jsonl; a later run of the same configuration on the same
kind of machine shows how its figures have changed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from megasnn.config.cli import command_line
from tools.benchmark.checkpoints import CHECKPOINTS
from tools.benchmark.harness import Case, run
from tools.benchmark.kernels import KERNELS
from tools.benchmark.layouts import LAYOUTS
from tools.benchmark.loading import LOADING
from tools.benchmark.pipeline import PIPELINE
from tools.benchmark.plans import PLANS
from tools.benchmark.ranks import RankError

OTHERS: dict[str, Case[Any]] = {
    "--checkpoint": CHECKPOINTS,
    "--data": LOADING,
    "--kernels": KERNELS,
    "--pipeline": PIPELINE,
    "--plans": PLANS,
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
