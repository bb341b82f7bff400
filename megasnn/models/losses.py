"""Losses on logits `[T, N, classes]`, summed over samples: micro-batches add up without weights.

Labels are class indices `[N]` or `[N, 1]`, or probabilities `[N, classes]`. Other shapes, and indices outside the
classes, raise ValueError; in a step, at its end (megasnn/common/checks.py).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megasnn.common.bundle import Bundle, logits_of
from megasnn.common.checks import check_value


def cross_entropy_sum(logits: Bundle, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Cross-entropy of the logits' mean over time."""
    mean = _widened(logits).mean(0)
    return F.cross_entropy(mean, _target(mean, labels), reduction="sum", label_smoothing=label_smoothing)


def tet_sum(logits: Bundle, labels: Tensor, label_smoothing: float = 0.0, share: float = 1e-3) -> Tensor:
    """Temporal efficient training (Deng et al. 2022, arXiv 2202.11946, equations 8 to 10).

    (1 - share) times the mean over time of each step's cross-entropy, plus `share` times all logits' mean squared
    distance from 1.

    Args:
        share: lambda in the paper; its phi is 1.
    """
    wide = _widened(logits)
    steps = len(wide)
    target = _target(wide[0], labels)
    repeated = target.repeat(steps, *[1] * (target.ndim - 1))
    entropy = F.cross_entropy(wide.flatten(0, 1), repeated, reduction="sum", label_smoothing=label_smoothing) / steps
    distance = (wide - 1).square().mean(dim=(0, 2)).sum()
    return (1 - share) * entropy + share * distance


def mse_sum(logits: Bundle, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Squared distance from the logits' mean over time to the one-hot label, averaged over classes."""
    rates = _widened(logits).mean(0)
    target = _target(rates, labels)
    if not target.is_floating_point():
        # torch's own one_hot reads the labels' maximum, for which a GPU makes the host wait.
        classes = torch.arange(rates.shape[1], device=target.device)
        target = (target.unsqueeze(1) == classes).to(rates.dtype)
    wanted = target * (1 - label_smoothing) + label_smoothing / rates.shape[1]
    return (rates - wanted).square().mean(1).sum()


@torch.no_grad()
def correct_predictions(logits: Tensor, labels: Tensor, top: tuple[int, ...] = (1, 5)) -> Tensor:
    """By k in `top`, number of samples with the label among the k highest mean logits.

    The result is on the logits' device. With probabilities the label is the most probable class.
    """
    mean = logits.float().mean(0)
    # Mixed labels are probabilities: the larger share counts as the class.
    wanted = labels.argmax(1) if labels.is_floating_point() else labels
    # topk refuses more classes than there are.
    ranked = mean.topk(min(max(top), mean.shape[1]), dim=1).indices == wanted.reshape(-1, 1)
    return torch.stack([ranked[:, :k].any(dim=1).sum() for k in top])


def _widened(output: Bundle) -> Tensor:
    logits = logits_of(output)
    # Sums of exponentials need float32.
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits


def _target(logits: Tensor, labels: Tensor) -> Tensor:
    """`[N]` indices or `[N, classes]` probabilities, for logits `[N, classes]`."""
    samples, classes = logits.shape
    if labels.is_floating_point():
        if labels.shape != logits.shape:
            raise ValueError(f"soft labels must be [{samples}, {classes}] like the logits, got {list(labels.shape)}")
        return labels.to(logits.dtype)
    if labels.shape == (samples, 1):
        labels = labels.squeeze(1)
    if labels.shape != (samples,):
        raise ValueError(f"class labels must be [{samples}] or [{samples}, 1], got {list(labels.shape)}")
    check_value(
        ((labels < 0) | (labels >= classes)).any(),
        f"labels must be from 0 to {classes - 1} with --num-classes {classes}",
        lambda: f"got labels from {int(labels.min())} to {int(labels.max())}",
    )
    # A GPU ends the process at a class outside the logits.
    return labels.clamp(0, classes - 1)
