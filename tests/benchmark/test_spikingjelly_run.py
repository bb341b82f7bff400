"""SpikingJelly's own model, trained on two ranks by a recipe of MegaSNN."""

from __future__ import annotations

import subprocess
import sys

FLAGS = (
    "--channels 8,P,16 --image-size 16 --no-event-frames --in-channels 1 --time-steps 2 --device cpu --num-workers 0 "
    "--global-batch-size 16 --micro-batch-size 8 --train-iters 20 --lr 0.01 --log-interval 5 --label-smoothing 0.1"
)


def test_it_learns_the_digits_and_is_measured() -> None:
    start = "-m torch.distributed.run --standalone --nproc-per-node 2 -m tools.benchmark.spikingjelly_run"
    command = [sys.executable, *start.split(), *FLAGS.split()]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    lines = [line.split(" | ") for line in ended.stdout.splitlines() if line.startswith("iteration")]
    assert [line[0] for line in lines] == [f"iteration {number}" for number in (5, 10, 15, 20)]
    losses = [float(line[1].removeprefix("loss ")) for line in lines]
    assert losses[-1] < losses[0] and lines[-1][2].endswith(" samples/s")
    assert float(lines[-1][3].removeprefix("top-1 ").removesuffix("%")) > 15
