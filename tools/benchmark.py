"""Time a training step of MegaSNN's layouts and of SpikingJelly's own model, side by side in one run.

    python tools/benchmark.py
    python tools/benchmark.py --model spikformer_ti --rounds 6 --steps 4
    python tools/benchmark.py --rows megasnn megasnn:8 pp2 pp2:16 --global-batch-size 16
    python tools/benchmark.py --device cuda --precision bf16 --image-size 224 --global-batch-size 64

A step includes AdamW. Rows take turns, a few steps each and then all of them again, so that a machine whose speed
drifts slows all rows alike; every rank is a process of its own that sleeps while another row is measured.

Other parts have benchmarks of their own; the first flag chooses one, and --help behind it lists its flags:

    python tools/benchmark.py --readers                      # event recordings and frames, beside SpikingJelly's
    python tools/benchmark.py --pipeline                     # every schedule, beside its simulation and one rank
    python tools/benchmark.py --data                         # the loader, beside PyTorch's DataLoader
    python tools/benchmark.py --checkpoint                   # save, load and conversion, beside cp

Prints a table and appends one JSON line per row to benchmark.jsonl; a later run of the same configuration on the same
kind of machine shows how its figures have changed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from megasnn.benchmark.checkpoints import CheckpointBenchmark, run_checkpoints
from megasnn.benchmark.config import BenchmarkConfig
from megasnn.benchmark.loading import LoadingBenchmark, run_loading
from megasnn.benchmark.pipeline import PipelineBenchmark, run_pipelines
from megasnn.benchmark.processes import RowError
from megasnn.benchmark.readers import ReaderBenchmark, run_readers
from megasnn.benchmark.run import run
from megasnn.config.cli import command_line
from megasnn.process.terminal import keep_going

# By the first flag: the flags behind it, and what measures. Each has a docstring for --help.
OTHERS: dict[str, tuple[type, Callable[[Any], object]]] = {
    "--checkpoint": (CheckpointBenchmark, run_checkpoints),
    "--data": (LoadingBenchmark, run_loading),
    "--readers": (ReaderBenchmark, run_readers),
    "--pipeline": (PipelineBenchmark, run_pipelines),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0; 1 when a rank failed, 2 when the flags do not go together, after saying so on stderr."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    flags, measure = OTHERS.get(arguments[0], (None, None)) if arguments else (None, None)
    try:
        if flags is not None and measure is not None:
            measure(command_line(flags, arguments[1:]))
        else:
            run(command_line(BenchmarkConfig, arguments, description=__doc__))
    except RowError as error:
        print(f"\nerror: {error}", file=sys.stderr)
        return 1
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    keep_going()
    sys.exit(main())
