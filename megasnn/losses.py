"""Losses on logits `[T, N, classes]`, as sums over the samples: a micro-batch's share needs no further weight."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def cross_entropy_sum(logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Cross-entropy of the logits' mean over time, summed over the samples.

    Args:
        logits: `[T, N, classes]`; reduced precision is raised to float32.
        labels: class indices `[N]` or `[N, 1]`, or probabilities `[N, classes]`.
    Raises:
        ValueError: labels of another shape, or indices outside the classes.
    """
    mean = (logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits).mean(0)
    samples, classes = mean.shape
    if labels.is_floating_point():
        if labels.shape != mean.shape:
            raise ValueError(f"soft labels must be [{samples}, {classes}] like the logits, got {list(labels.shape)}")
        return F.cross_entropy(mean, labels.to(mean.dtype), reduction="sum", label_smoothing=label_smoothing)
    if labels.shape == (samples, 1):
        labels = labels.squeeze(1)
    if labels.shape != (samples,):
        raise ValueError(f"class labels must be [{samples}] or [{samples}, 1], got {list(labels.shape)}")
    if labels.numel() and not (0 <= int(labels.min()) and int(labels.max()) < classes):
        raise ValueError(f"labels from {int(labels.min())} to {int(labels.max())} with --num-classes {classes}")
    return F.cross_entropy(mean, labels, reduction="sum", label_smoothing=label_smoothing)


def correct_predictions(logits: Tensor, labels: Tensor, top: tuple[int, ...] = (1, 5)) -> list[int]:
    """How many samples have their label among the k highest logits (mean over time), for each k in `top`."""
    mean = logits.float().mean(0)
    ranked = mean.topk(min(max(top), mean.shape[1]), dim=1).indices == labels.reshape(-1, 1)
    return [int(ranked[:, :k].any(dim=1).sum()) for k in top]
