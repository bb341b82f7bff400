"""Classifier of the VGG for event cameras."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from megasnn.layers import ParallelDropout, ParallelLinear, WholeImages


class Classifier(nn.Module):
    """Average pooling, dropout and a linear layer: spikes -> logits `[T, N, num_classes]`."""

    def __init__(self, features: int, num_classes: int, pool: int, dropout: float) -> None:
        super().__init__()
        self.pool = pool
        self.dropout = ParallelDropout(dropout, "classifier.dropout")
        self.linear = ParallelLinear(features, num_classes)
        self.whole_images = WholeImages(pool)

    def forward(self, x: Tensor) -> Tensor:
        x = self.whole_images(x)
        pooled = F.avg_pool2d(x.flatten(0, 1), self.pool).unflatten(0, x.shape[:2])
        # Features are ordered by channel: a rank's channels are neighbouring columns of the weight.
        return self.linear(self.dropout(pooled.flatten(2)))
