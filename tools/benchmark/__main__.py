"""`python -m tools.benchmark [CASE] [FLAGS]`; `--help` after a case lists its flags.

    python -m tools.benchmark                  # training steps of layouts, beside SpikingJelly's own model
    python -m tools.benchmark --weak           # the same with as many samples for each rank (weak scaling)
    python -m tools.benchmark --capacity       # the largest micro-batch of a layout within a memory limit
    python -m tools.benchmark --pipeline       # every schedule, beside its simulation and one rank
    python -m tools.benchmark --plans          # layouts, beside the planner's predictions
    python -m tools.benchmark --data           # the loader, beside a plain PyTorch DataLoader
    python -m tools.benchmark --kernels        # norm and neuron, relative to a copy of their input
    python -m tools.benchmark --lengths        # spiking attention against the number of tokens
    python -m tools.benchmark --host           # Python's part of a step on a GPU, also beside another checkout

Prints a table, and appends a JSON line per row to `--output`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

CASES = {
    "--weak": ("regimes", "Weak"),
    "--capacity": ("regimes", "Capacity"),
    "--pipeline": ("layouts", "Schedules"),
    "--plans": ("plans", "Plans"),
    "--data": ("data", "Loading"),
    "--kernels": ("kernels", "Kernels"),
    "--lengths": ("lengths", "Lengths"),
    "--host": ("host", "Host"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0; 1 if a rank failed, 2 for contradictory flags, with the error on stderr."""
    import tyro

    from tools.benchmark.harness import run
    from tools.benchmark.ranks import RankError

    words = list(sys.argv[1:] if arguments is None else arguments)
    module, name = "layouts", "Layouts"
    if words and words[0] in CASES:
        module, name = CASES[words.pop(0)]
    case = getattr(import_module(f"tools.benchmark.{module}"), name)
    try:
        run(tyro.cli(case, args=words, description=f"{case.__doc__}\n\n{__doc__}"))
    except RankError as error:
        print(f"\nerror: {error}", file=sys.stderr)
        return 1
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    # No import at the top: rank processes import this file, and must set their threads before torch is imported.
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    sys.exit(main())
