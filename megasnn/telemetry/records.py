"""Records of steps, log lines and evaluations, and their text on the console."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, get_type_hints

COLUMNS = 100
"""Longest log line on a terminal."""
_ACCURACIES = {"accuracy": "accuracy", "top1": "top-1 accuracy", "top5": "top-5 accuracy"}
_CARDS = {"top1": "accuracy_top1", "top5": "accuracy_top5"}
_SHOWN_AS = {"perplexity": ("perplexity", 2), "bits_per_byte": ("bits/byte", 4), "tokens_per_second": ("tokens/s", 0)}
"""Title and digits of a language model's metrics."""
_LARGEST_EXPONENT = 700.0


@dataclass(frozen=True)
class TextUnits:
    """Units of a language model's samples.

    Attributes:
        tokens: of each sample.
        bytes_per_token: of the text, over the whole data set; None if unknown.
    """

    tokens: int
    bytes_per_token: float | None

    def figures(self, loss: float) -> dict[str, float]:
        """Perplexity, and bits per byte if known. loss: mean cross-entropy of a token, in nats."""
        # exp raises OverflowError above 709.
        found = {"perplexity": math.exp(loss) if loss < _LARGEST_EXPONENT else math.inf}
        if self.bytes_per_token is not None:
            found["bits_per_byte"] = loss / math.log(2) / self.bytes_per_token
        return found


@dataclass(frozen=True)
class RunOutline:
    """Length, folders and start of a run.

    Attributes:
        directory, log_directory: for TensorBoard and log.jsonl; None disables each.
        continued: (iteration, consumed samples) at the checkpoint.
        train_units, valid_units: of a language model's data.
    """

    iterations: int
    epoch_samples: int
    directory: str | Path | None = None
    log_directory: str | Path | None = None
    continued: tuple[int, int] | None = None
    train_units: TextUnits | None = None
    valid_units: TextUnits | None = None


@dataclass(frozen=True)
class StepResult:
    """An optimizer step's result, over all replicas.

    Attributes:
        loss: mean over samples.
        sums: summed metrics by name; "top1" in a classification.
        grad_norm: before clipping.
        skipped: no parameter was updated.
        not_finite: where the first nan or infinity arose, as a text for the log.
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
        """Means over samples."""
        return {name: value / self.samples for name, value in self.sums.items()}

    @property
    def correct(self) -> float:
        """Number of samples classified right. Raises KeyError without a "top1" metric."""
        return self.sums["top1"]


@dataclass(frozen=True)
class IterationRecord:
    """Figures since the last log line. Annotations name the TensorBoard cards.

    Attributes:
        epoch: passes through the training data so far.
        elapsed_ms: mean per iteration.
        loss: mean; nan if one iteration had nan.
        metrics: means by name; "accuracy" (top-1, 0 to 1) in a classification.
        learning_rate, global_batch_size, grad_norm: at the last iteration.
        skipped_iterations: without an update.
        nan_iterations: without a finite loss.
        skipped_samples: broken samples replaced since the run began, on all ranks.
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
    """An evaluation's result.

    Attributes:
        loss: mean over samples.
        metrics: means by name; "top1" in a classification, and "top5" with more than five classes.
        skipped_samples: broken samples, not among `samples`.
        operations: of a run's evaluation, by TensorBoard name: "validation/effective_macs", "validation/effective_acs"
            and "validation/energy_mj", means per sample. An Engine does not count them.
    """

    iteration: int
    consumed_samples: int
    samples: int
    loss: Annotated[float, "validation/loss"]
    metrics: Annotated[Mapping[str, float], "validation"]
    skipped_samples: Annotated[int, "data/skipped_validation_samples"] = 0
    operations: Mapping[str, float] = field(default_factory=dict)

    @property
    def top1(self) -> float:
        """Share classified right, 0 to 1. Raises AttributeError if it was not computed."""
        return self._metric("top1")

    @property
    def top5(self) -> float:
        """Share with the class among the five highest logits. Raises AttributeError like `top1`."""
        return self._metric("top5")

    def _metric(self, name: str) -> float:
        if name not in self.metrics:
            known = ", ".join(self.metrics) or "nothing"
            raise AttributeError(f"{name} was not computed; `metrics` has {known}")
        return self.metrics[name]


def record_values(record: IterationRecord | EvaluationRecord) -> dict[str, float]:
    """Flat: metrics and operations are among the values."""
    values = dict(vars(record))
    metrics = values.pop("metrics")
    operations = values.pop("operations", {})
    return {**values, **metrics, **operations}


def scalars_of(record: IterationRecord | EvaluationRecord) -> dict[str, float]:
    """By TensorBoard name, such as "training/loss"."""
    hints = get_type_hints(type(record), include_extras=True)
    # Fields without an annotation are drawn in no card.
    cards = {name: hint.__metadata__[0] for name, hint in hints.items() if hasattr(hint, "__metadata__")}
    group = cards.pop("metrics")
    scalars = {card: getattr(record, name) for name, card in cards.items()}
    for name, value in record.metrics.items():
        scalars[f"{group}/{_CARDS.get(name, name)}"] = value
    if isinstance(record, EvaluationRecord):
        scalars.update(record.operations)
    return scalars


def format_iteration(record: IterationRecord, now: datetime | None = None) -> str:
    """The log line in a file, as Megatron-LM's. Failures are counted only if there are some."""
    width = len(str(record.train_iters))
    parts = [
        f"{_stamp(now)} iteration {record.iteration:>{width}}/ {record.train_iters}",
        f"epoch: {record.epoch:.2f}",
        f"samples/s: {record.samples_per_second:.1f}",
        f"learning rate: {record.learning_rate:.2E}",
        f"loss: {record.loss:.4f}",
        *_metrics(record, digits=1),
        f"grad norm: {record.grad_norm:.3f}",
        f"ETA: {format_duration(record.seconds_left)}",
    ]
    return " | ".join([*parts, *(f"number of {name}: {count}" for name, count in _failures(record).items())])


def _failures(record: IterationRecord) -> dict[str, int]:
    counts = {
        "skipped iterations": record.skipped_iterations,
        "nan iterations": record.nan_iterations,
        "skipped samples": record.skipped_samples,
    }
    return {name: count for name, count in counts.items() if count}


def format_for_terminal(record: IterationRecord, now: datetime | None = None) -> str:
    """The log line within `COLUMNS`: parts without room are left out, norm and rate first, metrics last."""
    metrics = _metrics(record, digits=1)
    parts = {
        "iteration": f"{now or datetime.now():%H:%M:%S}  {record.iteration}/{record.train_iters}",
        "epoch": f"epoch {record.epoch:.2f}",
        "loss": f"loss {record.loss:.4f}",
        **{text: text.replace(":", "") for text in metrics},
        "failures": "  ".join(f"{count} {name}" for name, count in _failures(record).items()),
        "norm": f"norm {record.grad_norm:.3g}",
        "rate": f"lr {record.learning_rate:.2E}",
        "speed": f"{record.samples_per_second:.1f} samples/s",
        "left": f"{format_duration(record.seconds_left)} left",
    }
    line = "  ".join(filter(None, parts.values()))
    # The number of the iteration, the loss and the failures always stay.
    for name in ("norm", "rate", "epoch", "speed", "left", *reversed(metrics)):
        if len(line) <= COLUMNS:
            break
        del parts[name]
        line = "  ".join(filter(None, parts.values()))
    return line


def format_evaluation(record: EvaluationRecord, now: datetime | None = None) -> str:
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
    parts = []
    for name, value in record.metrics.items():
        if name in _ACCURACIES:
            parts.append(f"{_ACCURACIES[name]}: {100 * value:.{digits}f} %")
        else:
            title, shown = _SHOWN_AS.get(name, (name, 4))
            parts.append(f"{title}: {value:.{shown}f}")
    return parts


def format_duration(seconds: float) -> str:
    """As "2:03"; from an hour on "1:02:03", from a day on "2 days, 1:02:03"."""
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02}"
    return str(timedelta(seconds=whole))


def _stamp(now: datetime | None) -> str:
    return f"[{now or datetime.now():%m-%d %H:%M:%S}]"
