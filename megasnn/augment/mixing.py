"""Mixup and cutmix: each sample is mixed with another one in its micro-batch, images and labels alike.

Seed and position determine the mixing, so the stages with images and with labels need no communication.
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
    """Mixing for one micro-batch.

    Attributes:
        share: each sample's own weight; its partner has the rest.
        partners: each partner's position.
        box: rows and columns taken from the partner in cutmix; None for mixup.
    """

    share: float
    partners: list[int]
    box: tuple[slice, slice] | None


@dataclass(frozen=True)
class Mixing:
    """Mixup (Zhang et al. 2017, arXiv 1710.09412) or cutmix (Yun et al. 2019, arXiv 1905.04899), as in timm.

    All samples of a micro-batch use one mixing ratio. With both, each micro-batch uses one of them, at equal odds.

    Attributes:
        mixup_alpha, cutmix_alpha: for the share's beta distribution; None disables it.
        until: position from which on nothing is mixed; None: mixes always.
    """

    seed: int
    mixup_alpha: float | None
    cutmix_alpha: float | None
    classes: int
    size: tuple[int, int]
    until: int | None = None

    def plan(self, first: int, count: int) -> Mix | None:
        """Mixing for `count` samples from position `first` on; None: no mixing."""
        if self.until is not None and first >= self.until:
            return None
        # Keyed by position alone, so that the first and the last stage draw the same.
        draws = keyed_numbers(self.seed, "mixing", first)
        cuts = self.mixup_alpha is None or (self.cutmix_alpha is not None and bool(draws.integers(2)))
        alpha = self.cutmix_alpha if cuts else self.mixup_alpha
        if alpha is None:
            return None
        share = draws.beta(alpha, alpha)
        # A circle through all samples, so that none is its own partner.
        order = draws.permutation(count).tolist()
        partners = [0] * count
        for sample, partner in zip(order, order[1:] + order[:1], strict=True):
            partners[sample] = partner
        if not cuts:
            return Mix(share, partners, None)
        height, width = self.size
        rows = _span(height, math.sqrt(1 - share), draws)
        columns = _span(width, math.sqrt(1 - share), draws)
        # The border may cut the box, so the share follows from its true area.
        area = (rows.stop - rows.start) * (columns.stop - columns.start)
        return Mix(1 - area / (height * width), partners, (rows, columns))

    def images(self, images: Tensor, first: int) -> Tensor:
        """Mixes the images `[n, C, H, W]` from position `first` on."""
        mix = self.plan(first, len(images))
        if mix is None:
            return images
        others = _chosen(images, mix.partners)
        if mix.box is None:
            return images * mix.share + others * (1 - mix.share)
        rows, columns = mix.box
        mixed = images.clone()
        mixed[..., rows, columns] = others[..., rows, columns]
        return mixed

    def labels(self, labels: Tensor, first: int) -> Tensor:
        """Class indices `[n]` -> mixed probabilities `[n, classes]`, float64; `first` as for `images`."""
        import torch

        mix = self.plan(first, len(labels))
        probabilities = torch.nn.functional.one_hot(labels.reshape(-1), self.classes).double()
        if mix is None:
            return probabilities
        return probabilities * mix.share + _chosen(probabilities, mix.partners) * (1 - mix.share)


def _chosen(values: Tensor, positions: list[int]) -> Tensor:
    import torch

    from megasnn.common.memory import copy_without_waiting

    return values[copy_without_waiting(torch.tensor(positions), values.device)]


def _span(side: int, share: float, draws: np.random.Generator) -> slice:
    """A box's rows or columns around a random middle, cut at the border."""
    half = int(side * share) // 2
    middle = int(draws.integers(side))
    return slice(max(0, middle - half), min(side, middle + half))
