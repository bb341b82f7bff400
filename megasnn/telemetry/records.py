"""Records of steps, log lines and evaluations, and how the console shows them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, get_type_hints

_ACCURACIES = {"accuracy": "accuracy", "top1": "top-1 accuracy", "top5": "top-5 accuracy"}
_CARDS = {"top1": "accuracy_top1", "top5": "accuracy_top5"}


@dataclass(frozen=True)
class RunOutline:
    """Facts about a run that its reports need beforehand.

    Attributes:
        iterations: of the whole run. epoch_samples: training samples of an epoch.
        directory: of TensorBoard; log_directory: of log.jsonl. None writes nothing.
        resumed: (iteration, consumed samples) from which the run continues.
    """

    iterations: int
    epoch_samples: int
    directory: str | Path | None = None
    log_directory: str | Path | None = None
    resumed: tuple[int, int] | None = None


@dataclass(frozen=True)
class StepResult:
    """Outcome of an optimizer step, over all replicas.

    Attributes:
        loss: mean over the `samples`.
        sums: of metrics, over the samples, by name; "top1" of a classification.
        grad_norm: of the gradient, before clipping. skipped: True when nothing was updated.
        not_finite: the first place with a nan or an infinity; None where there is none, or it was not found.
    """

    loss: float
    sums: Mapping[str, float]
    samples: int
    grad_norm: float
    learning_rate: float
    skipped: bool = False
    not_finite: str | None = None

    @property
    def metrics(self) -> dict[str, float]:
        """Means of the metrics over the samples."""
        return {name: value / self.samples for name, value in self.sums.items()}

    @property
    def correct(self) -> float:
        """Samples whose class had the highest logit."""
        return self.sums["top1"]


@dataclass(frozen=True)
class IterationRecord:
    """Figures of the iterations since the last log line. A field's annotation is its card in TensorBoard.

    Attributes:
        epoch: passes through the training data so far.
        elapsed_ms: milliseconds per iteration, mean.
        loss: mean; nan when one iteration gave nan.
        metrics: means over the training samples, by name; "accuracy", top-1, of a classification.
        grad_norm, learning_rate, global_batch_size: of the last iteration.
        samples_per_second: over all ranks. seconds_left: at the recent pace.
        skipped_iterations, nan_iterations: since the last line, without an update and with a loss that is not finite.
        skipped_samples: broken samples replaced by others since the run began, over all ranks.
    """

    iteration: int
    train_iters: int
    epoch: float
    consumed_samples: Annotated[int, "training/consumed_samples"]
    elapsed_ms: Annotated[float, "time/iteration_ms"]
    learning_rate: Annotated[float, "training/learning_rate"]
    global_batch_size: int
    loss: Annotated[float, "training/loss"]
    metrics: Annotated[Mapping[str, float], "training"]
    grad_norm: Annotated[float, "training/grad_norm"]
    samples_per_second: Annotated[float, "training/samples_per_second"]
    seconds_left: float
    skipped_iterations: int = 0
    nan_iterations: int = 0
    skipped_samples: Annotated[int, "data/skipped_samples"] = 0


@dataclass(frozen=True)
class EvaluationRecord:
    """Result of one evaluation.

    Attributes:
        metrics: means over the `samples`, by name; "top1" of a classification, and "top5" of more than five classes.
        top1, top5: those of `metrics`; an AttributeError where it has none.
        skipped_samples: broken samples, which are not among the `samples`, over all ranks.
    """

    iteration: int
    consumed_samples: int
    samples: int
    loss: Annotated[float, "validation/loss"]
    metrics: Annotated[Mapping[str, float], "validation"]
    skipped_samples: Annotated[int, "data/skipped_validation_samples"] = 0

    @property
    def top1(self) -> float:
        return self._metric("top1")

    @property
    def top5(self) -> float:
        return self._metric("top5")

    def _metric(self, name: str) -> float:
        if name not in self.metrics:
            raise AttributeError(f"no {name} was counted: `metrics` has {', '.join(self.metrics) or 'none'}")
        return self.metrics[name]


def record_values(record: IterationRecord | EvaluationRecord) -> dict[str, float]:
    """Returns all values of a record, its metrics among them."""
    values = {**vars(record)}
    metrics = values.pop("metrics")
    return {**values, **metrics}


def scalars_of(record: IterationRecord | EvaluationRecord) -> dict[str, float]:
    """Returns the values of a record for TensorBoard, by the names of their cards."""
    hints = get_type_hints(type(record), include_extras=True)
    cards = {name: hint.__metadata__[0] for name, hint in hints.items() if hasattr(hint, "__metadata__")}
    group = cards.pop("metrics")
    of_metrics = {f"{group}/{_CARDS.get(name, name)}": value for name, value in record.metrics.items()}
    return {**{card: getattr(record, name) for name, card in cards.items()}, **of_metrics}


def format_iteration(record: IterationRecord, now: datetime | None = None) -> str:
    """Formats the log line, in Megatron-LM's shape; counts of what went wrong only where there are some."""
    width = len(str(record.train_iters))
    parts = [f"{_stamp(now)} iteration {record.iteration:>{width}}/ {record.train_iters}", f"epoch: {record.epoch:.2f}"]
    parts += [
        f"samples/s: {record.samples_per_second:.1f}",
        f"learning rate: {record.learning_rate:.2E}",
        f"loss: {record.loss:.4f}",
        *_metrics(record, digits=1),
        f"grad norm: {record.grad_norm:.3f}",
        f"ETA: {format_duration(record.seconds_left)}",
    ]
    for name, count in (
        ("skipped iterations", record.skipped_iterations),
        ("nan iterations", record.nan_iterations),
        ("skipped samples", record.skipped_samples),
    ):
        if count:
            parts.append(f"number of {name}: {count}")
    return " | ".join(parts)


def format_evaluation(record: EvaluationRecord, now: datetime | None = None) -> str:
    """Formats an evaluation as one line; accuracies in per cent."""
    parts = [
        f"{_stamp(now)} validation at iteration {record.iteration}",
        f"validation samples: {record.samples}",
        f"validation loss: {record.loss:.4f}",
        *_metrics(record, digits=2),
    ]
    if record.skipped_samples:
        parts.append(f"number of skipped samples: {record.skipped_samples}")
    return " | ".join(parts)


def _metrics(record: IterationRecord | EvaluationRecord, digits: int) -> list[str]:
    """Accuracies of classes in per cent, and a model's own metrics as they are."""
    return [
        f"{_ACCURACIES[name]}: {100 * value:.{digits}f} %" if name in _ACCURACIES else f"{name}: {value:.4f}"
        for name, value in record.metrics.items()
    ]


def format_duration(seconds: float) -> str:
    """Formats seconds as "2:03", from an hour on as "1:02:03", from a day on as "2 days, 1:02:03"."""
    whole = round(seconds)
    return f"{whole // 60}:{whole % 60:02}" if whole < 3600 else str(timedelta(seconds=whole))


def _stamp(now: datetime | None) -> str:
    return f"[{now or datetime.now():%m-%d %H:%M:%S}]"
