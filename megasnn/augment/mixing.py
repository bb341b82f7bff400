"""Mixup and cutmix: each sample of a micro-batch is mixed with another one of it, images and labels alike.

Everything follows from the seed and the position of the micro-batch's first sample. So the stage that has the images
and the one that has the labels mix the same, without a message between them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from megasnn.common.random import keyed_numbers

if TYPE_CHECKING:
    from torch import Tensor


class Mix(NamedTuple):
    """Mixing of one micro-batch.

    Attributes:
        share: of each sample itself; the rest is its partner's.
        partners: the place of each sample's partner.
        box: what cutmix takes from the partner, as rows and columns; None for mixup.
    """

    share: float
    partners: list[int]
    box: tuple[slice, slice] | None


@dataclass(frozen=True)
class Mixing:
    """Mixup (Zhang et al. 2017, arXiv 1710.09412) or cutmix (Yun et al. 2019, arXiv 1905.04899), as timm does it: one
    share for a micro-batch, and where both are asked for, each for half of the micro-batches.

    Attributes:
        mixup_alpha, cutmix_alpha: of the beta distribution of the share; None leaves it out.
        classes: of the labels.
        size: height and width of the images, which the share of a cut depends on where there are no images.
        until: the position from which on nothing is mixed; None for never.
    """

    seed: int
    mixup_alpha: float | None
    cutmix_alpha: float | None
    classes: int
    size: tuple[int, int]
    until: int | None = None

    def plan(self, first: int, count: int) -> Mix | None:
        """Mixing of the micro-batch of `count` samples from position `first` on; None where it stays as it is."""
        if self.until is not None and first >= self.until:
            return None
        draws = keyed_numbers(self.seed, "mixing", first)
        cuts = self.mixup_alpha is None or (self.cutmix_alpha is not None and bool(draws.integers(2)))
        alpha = self.cutmix_alpha if cuts else self.mixup_alpha
        if alpha is None:
            return None
        share = draws.beta(alpha, alpha)
        order = draws.permutation(count).tolist()  # a circle through all samples: nobody is his own partner
        partners = [partner for _, partner in sorted(zip(order, order[1:] + order[:1], strict=True))]
        if not cuts:
            return Mix(share, partners, None)
        box = tuple(_span(side, math.sqrt(1 - share), draws) for side in self.size)
        area = math.prod(span.stop - span.start for span in box)
        return Mix(1 - area / math.prod(self.size), partners, (box[0], box[1]))

    def images(self, images: Tensor, first: int) -> Tensor:
        """`[n, C, H, W]` of the samples from position `first` on, mixed."""
        mix = self.plan(first, len(images))
        if mix is None:
            return images
        others = _chosen(images, mix.partners)
        if mix.box is None:
            return images * mix.share + others * (1 - mix.share)
        mixed = images.clone()
        mixed[..., mix.box[0], mix.box[1]] = others[..., mix.box[0], mix.box[1]]
        return mixed

    def labels(self, labels: Tensor, first: int) -> Tensor:
        """Class indices `[n]` of these samples -> probabilities `[n, classes]`, float64, mixed as the images are."""
        import torch

        mix = self.plan(first, len(labels))
        wanted = torch.nn.functional.one_hot(labels.reshape(-1), self.classes).double()
        return wanted if mix is None else wanted * mix.share + _chosen(wanted, mix.partners) * (1 - mix.share)


def _chosen(values: Tensor, positions: list[int]) -> Tensor:
    import torch

    from megasnn.common.memory import without_waiting

    return values[without_waiting(torch.tensor(positions), values.device)]


def _span(side: int, share: float, draws: np.random.Generator) -> slice:
    """Rows or columns of a box of this share of the side about a random middle, as far as they lie inside."""
    half, middle = int(side * share) // 2, int(draws.integers(side))
    return slice(max(0, middle - half), min(side, middle + half))
