from __future__ import annotations

from datetime import datetime
from math import nan

from megasnn.telemetry.logline import (
    EvaluationRecord,
    IterationRecord,
    format_duration,
    format_evaluation,
    format_iteration,
)

NOW = datetime(2026, 2, 3, 4, 5, 6)
RECORD = dict(
    iteration=20,
    train_iters=200,
    epoch=0.8906,
    consumed_samples=1280,
    elapsed_ms=812.44,
    learning_rate=1e-3,
    global_batch_size=64,
    loss=2.3,
    accuracy=0.2547,
    grad_norm=1.2,
    samples_per_second=78.77,
    seconds_left=146.2,
)


def test_line_reads_as_in_megatron_and_fits_a_screen():
    line = format_iteration(IterationRecord(**RECORD), now=NOW)
    assert line == (
        "[02-03 04:05:06] iteration  20/ 200 | epoch: 0.89 | samples/s: 78.8 | learning rate: 1.00E-03 | "
        "loss: 2.3000 | accuracy: 25.5 % | grad norm: 1.200 | ETA: 2:26"
    )
    assert len(line) <= 160


def test_throughput_may_be_missing():
    assert "samples/s" not in format_iteration(IterationRecord(**RECORD), throughput=False, now=NOW)


def test_nan_is_shown_and_counted():
    record = IterationRecord(**{**RECORD, "loss": nan, "grad_norm": nan}, skipped_iterations=2, nan_iterations=3)
    line = format_iteration(record, now=NOW)
    assert "| loss: nan |" in line and "| grad norm: nan |" in line
    assert line.endswith("| number of skipped iterations: 2 | number of nan iterations: 3")


def test_what_went_wrong_is_counted_only_where_something_did():
    line = format_iteration(IterationRecord(**RECORD, skipped_samples=4), now=NOW)
    assert line.endswith("| number of skipped samples: 4")
    assert "number of" not in format_iteration(IterationRecord(**RECORD), now=NOW)


def test_durations():
    assert [format_duration(seconds) for seconds in (0.4, 61, 605, 3599.7, 3723, 90000)] == [
        "0:00", "1:01", "10:05", "1:00:00", "1:02:03", "1 day, 1:00:00",
    ]  # fmt: skip


def test_evaluation_line():
    line = format_evaluation(EvaluationRecord(100, 6400, 360, loss=0.25, top1=0.9166, top5=1.0), NOW)
    assert line == (
        "[02-03 04:05:06] validation at iteration 100 | validation samples: 360 | validation loss: 0.2500 | "
        "top-1 accuracy: 91.66 % | top-5 accuracy: 100.00 %"
    )
