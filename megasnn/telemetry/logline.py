"""What a run records of its steps and evaluations, and the lines it prints of them.

A record goes to the JSON log as it is, to TensorBoard by `scalars_of`, and to the console in the shape people know from
Megatron-LM: what is looked at, within 160 characters.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Annotated, get_type_hints


def scalars_of(record: IterationRecord | EvaluationRecord) -> dict[str, float]:
    """The values of a record that TensorBoard shows, by the names of their cards, which the fields' types carry."""
    hints = get_type_hints(type(record), include_extras=True)
    cards = {name: hint.__metadata__[0] for name, hint in hints.items() if hasattr(hint, "__metadata__")}
    return {card: getattr(record, name) for name, card in cards.items()}


@dataclass(frozen=True)
class StepResult:
    """What a step came to, over all replicas.

    Attributes:
        loss: mean over the `samples`. correct: those of them whose class had the highest logit.
        grad_norm: of the gradient, before clipping. skipped: whether nothing was updated.
        not_finite: where a nan or infinity appeared first; None where none did, or where that was not found.
    """

    loss: float
    correct: float
    samples: int
    grad_norm: float
    learning_rate: float
    skipped: bool = False
    not_finite: str | None = None


@dataclass(frozen=True)
class IterationRecord:
    """What is known about the iterations since the last log line. The JSON log has all of it, the line what matters.

    Attributes:
        epoch: how often the training data have been gone through.
        elapsed_ms: milliseconds per iteration, the mean since the last line.
        loss: mean since the last line; nan when one of these iterations gave nan: it is shown, not skipped.
        accuracy: share of the training samples since the last line whose class had the highest logit.
        grad_norm: global gradient norm of the last iteration.
        samples_per_second: over all ranks.
        seconds_left: until the last iteration, at the recent pace.
        skipped_iterations: iterations without an optimizer step since the last line.
        nan_iterations: iterations with a loss that was not finite since the last line.
        skipped_samples: broken samples replaced by others since the run began, over all ranks.
    """

    iteration: int
    train_iters: int
    epoch: float
    consumed_samples: int
    elapsed_ms: Annotated[float, "time/iteration_ms"]
    learning_rate: Annotated[float, "training/learning_rate"]
    global_batch_size: int
    loss: Annotated[float, "training/loss"]
    accuracy: Annotated[float, "training/accuracy"]
    grad_norm: Annotated[float, "training/grad_norm"]
    samples_per_second: Annotated[float, "training/samples_per_second"]
    seconds_left: float
    skipped_iterations: int = 0
    nan_iterations: int = 0
    skipped_samples: Annotated[int, "data/skipped_samples"] = 0


def format_iteration(record: IterationRecord, throughput: bool = True, now: datetime | None = None) -> str:
    """One line for the console, parts separated by `` | ``; counts of what went wrong only where there are some.

    Args:
        throughput: whether samples per second are in it.
        now: the time to print; the present when None.
    """
    width = len(str(record.train_iters))
    parts = [f"{_stamp(now)} iteration {record.iteration:>{width}}/ {record.train_iters}", f"epoch: {record.epoch:.2f}"]
    if throughput:
        parts.append(f"samples/s: {record.samples_per_second:.1f}")
    parts += [
        f"learning rate: {record.learning_rate:.2E}",
        f"loss: {record.loss:.4f}",
        f"accuracy: {100 * record.accuracy:.1f} %",
        f"grad norm: {record.grad_norm:.3f}",
        f"ETA: {format_duration(record.seconds_left)}",
    ]
    counts = {
        "number of skipped iterations": record.skipped_iterations,
        "number of nan iterations": record.nan_iterations,
        "number of skipped samples": record.skipped_samples,
    }
    return " | ".join([*parts, *(f"{name}: {count}" for name, count in counts.items() if count)])


@dataclass(frozen=True)
class EvaluationRecord:
    """The result of one evaluation; `top1` and `top5` are shares of `samples`, between 0 and 1.

    Attributes:
        skipped_samples: broken samples for which others stood in, over all ranks.
    """

    iteration: int
    consumed_samples: int
    samples: int
    loss: Annotated[float, "validation/loss"]
    top1: Annotated[float, "validation/accuracy_top1"]
    top5: Annotated[float, "validation/accuracy_top5"]
    skipped_samples: Annotated[int, "data/skipped_validation_samples"] = 0


def format_evaluation(record: EvaluationRecord, now: datetime | None = None) -> str:
    """One line for the console; accuracies in per cent."""
    parts = [
        f"{_stamp(now)} validation at iteration {record.iteration}",
        f"validation samples: {record.samples}",
        f"validation loss: {record.loss:.4f}",
        f"top-1 accuracy: {100 * record.top1:.2f} %",
        f"top-5 accuracy: {100 * record.top5:.2f} %",
    ]
    if record.skipped_samples:
        parts.append(f"number of skipped samples: {record.skipped_samples}")
    return " | ".join(parts)


def format_duration(seconds: float) -> str:
    """Minutes and seconds as "2:03", with hours "1:02:03"; "2 days, 1:02:03" beyond a day."""
    whole = round(seconds)
    return f"{whole // 60}:{whole % 60:02}" if whole < 3600 else str(timedelta(seconds=whole))


def _stamp(now: datetime | None) -> str:
    return f"[{now or datetime.now():%m-%d %H:%M:%S}]"
