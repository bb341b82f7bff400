from __future__ import annotations

from datetime import datetime
from math import nan

from megasnn.telemetry.logline import (
    EvaluationRecord,
    IterationRecord,
    StageTraffic,
    format_evaluation,
    format_iteration,
)

NOW = datetime(2026, 2, 3, 4, 5, 6)
RECORD = dict(
    iteration=20,
    train_iters=100,
    consumed_samples=1280,
    elapsed_ms=812.44,
    learning_rate=1e-3,
    global_batch_size=64,
    loss=2.3,
)


def test_line_reads_as_in_megatron():
    line = format_iteration(IterationRecord(**RECORD, grad_norm=1.2), NOW)
    assert line == (
        "[2026-02-03 04:05:06] iteration  20/ 100 | consumed samples: 1280 | "
        "elapsed time per iteration (ms): 812.4 | learning rate: 1.000E-03 | global batch size: 64 | "
        "loss: 2.300000 | grad norm: 1.200 | number of skipped iterations: 0 | number of nan iterations: 0"
    )


def test_throughput_and_grad_norm_only_when_known():
    plain = format_iteration(IterationRecord(**RECORD), NOW)
    assert "throughput" not in plain and "grad norm" not in plain
    line = format_iteration(IterationRecord(**RECORD, samples_per_second=78.77), NOW)
    assert "| throughput (samples/s): 78.8 |" in line


def test_what_stages_send_each_other():
    line = format_iteration(IterationRecord(**RECORD, between_stages=StageTraffic(0.5, 16, 8, 16)), NOW)
    assert line.endswith("| between stages (MB): forward 0.5 (dense 16), backward 8 (dense 16)")
    line = format_iteration(IterationRecord(**RECORD, between_stages=StageTraffic(1, 2, 3, 4, unfit=5)), NOW)
    assert line.endswith("backward 3 (dense 4), 5 tensor(s) did not fit and went dense")


def test_nan_is_shown_and_counted():
    record = IterationRecord(**{**RECORD, "loss": nan}, grad_norm=nan, skipped_iterations=2, nan_iterations=3)
    line = format_iteration(record, NOW)
    assert "| loss: nan | grad norm: nan |" in line
    assert line.endswith("| number of skipped iterations: 2 | number of nan iterations: 3")


def test_evaluation_line():
    line = format_evaluation(EvaluationRecord(100, 6400, 360, loss=0.25, top1=0.9166, top5=1.0), NOW)
    assert line == (
        "[2026-02-03 04:05:06] validation at iteration 100 | consumed samples: 6400 | "
        "validation samples: 360 | validation loss: 0.250000 | "
        "top-1 accuracy: 91.66 % | top-5 accuracy: 100.00 %"
    )
