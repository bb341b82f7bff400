"""The lines a run prints, in the shape people know from Megatron-LM."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True)
class StageTraffic:
    """MB that all pipeline stages together send: activations forward, gradients backward, and both without packing.

    `unfit`: tensors since the last line with a value that their packed format cannot hold, which went dense.
    """

    forward: float
    forward_if_dense: float
    backward: float
    backward_if_dense: float
    unfit: int = 0


@dataclass(frozen=True)
class IterationRecord:
    """What one log line says about the iterations since the last one.

    Attributes:
        elapsed_ms: milliseconds per iteration, the mean since the last line.
        loss: mean since the last line; nan when one of these iterations gave nan: it is shown, not skipped.
        grad_norm: global gradient norm of the last iteration; None when it was not computed.
        samples_per_second: over all ranks; None leaves it out (``--log-throughput`` asks for it).
        skipped_iterations: iterations without an optimizer step since the last line.
        nan_iterations: iterations with a loss that was not finite since the last line.
        skipped_samples: broken samples replaced by others since the run began, over all ranks; None leaves it out.
        between_stages: what pipeline stages send each other in an iteration; None leaves it out.
    """

    iteration: int
    train_iters: int
    consumed_samples: int
    elapsed_ms: float
    learning_rate: float
    global_batch_size: int
    loss: float
    grad_norm: float | None = None
    samples_per_second: float | None = None
    skipped_iterations: int = 0
    nan_iterations: int = 0
    skipped_samples: int | None = None
    between_stages: StageTraffic | None = None


def format_iteration(record: IterationRecord, now: datetime | None = None) -> str:
    """One line for the console, parts separated by `` | ``.

    Args:
        now: the time to print; the present when None.
    """
    width = len(str(record.train_iters))
    parts = [
        f"{_stamp(now)} iteration {record.iteration:>{width}}/ {record.train_iters}",
        f"consumed samples: {record.consumed_samples}",
        f"elapsed time per iteration (ms): {record.elapsed_ms:.1f}",
    ]
    if record.samples_per_second is not None:
        parts.append(f"throughput (samples/s): {record.samples_per_second:.1f}")
    parts += [
        f"learning rate: {record.learning_rate:.3E}",
        f"global batch size: {record.global_batch_size}",
        f"loss: {record.loss:.6f}",
    ]
    if record.grad_norm is not None:
        parts.append(f"grad norm: {record.grad_norm:.3f}")
    parts += [
        f"number of skipped iterations: {record.skipped_iterations}",
        f"number of nan iterations: {record.nan_iterations}",
    ]
    if record.skipped_samples is not None:
        parts.append(f"number of skipped samples: {record.skipped_samples}")
    if record.between_stages is not None:
        parts.append(_between_stages(record.between_stages))
    return " | ".join(parts)


def _between_stages(traffic: StageTraffic) -> str:
    text = (
        f"between stages (MB): forward {traffic.forward:.4g} (dense {traffic.forward_if_dense:.4g}), "
        f"backward {traffic.backward:.4g} (dense {traffic.backward_if_dense:.4g})"
    )
    return text + (f", {traffic.unfit} tensor(s) did not fit and went dense" if traffic.unfit else "")


@dataclass(frozen=True)
class EvaluationRecord:
    """The result of one evaluation; `top1` and `top5` are shares of `samples`, between 0 and 1.

    Attributes:
        skipped_samples: broken samples for which others stood in, over all ranks; None leaves it out.
    """

    iteration: int
    consumed_samples: int
    samples: int
    loss: float
    top1: float
    top5: float
    skipped_samples: int | None = None


def format_evaluation(record: EvaluationRecord, now: datetime | None = None) -> str:
    """One line for the console; accuracies in per cent."""
    parts = [
        f"{_stamp(now)} validation at iteration {record.iteration}",
        f"consumed samples: {record.consumed_samples}",
        f"validation samples: {record.samples}",
        f"validation loss: {record.loss:.6f}",
        f"top-1 accuracy: {100 * record.top1:.2f} %",
        f"top-5 accuracy: {100 * record.top5:.2f} %",
    ]
    if record.skipped_samples is not None:
        parts.append(f"number of skipped samples: {record.skipped_samples}")
    return " | ".join(parts)


def _stamp(now: datetime | None) -> str:
    return f"[{(now or datetime.now()):%Y-%m-%d %H:%M:%S}]"
