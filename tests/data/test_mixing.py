"""Mixup and cutmix: who is mixed with whom, how much, and that labels follow images."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megasnn.augment.mixing import Mixing
from megasnn.losses.sums import cross_entropy_sum

BOTH = Mixing(seed=1, mixup_alpha=0.5, cutmix_alpha=1.0, classes=7, size=(12, 16))
MIXUP, CUTMIX = replace(BOTH, cutmix_alpha=None), replace(BOTH, mixup_alpha=None)
images = torch.randn(7, 3, 12, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
labels = torch.arange(7)


def test_each_sample_has_another_one_for_a_partner() -> None:
    for first in range(0, 300, 7):
        partners = BOTH.plan(first, 7).partners
        assert sorted(partners) == list(range(7)) and all(own != other for own, other in enumerate(partners))
    assert len({tuple(BOTH.plan(first, 7).partners) for first in range(40)}) > 35
    assert BOTH.plan(0, 1).partners == [0], "alone in the last micro-batch of an epoch"


def test_mixup_and_cutmix_take_turns_and_draw_their_shares() -> None:
    plans = [BOTH.plan(first, 4) for first in range(2000)]
    mixed, cut = [p for p in plans if p.box is None], [p for p in plans if p.box is not None]
    assert 900 < len(mixed) < 1100
    assert np.var([p.share for p in mixed]) == pytest.approx(1 / 8, rel=0.1), "of the beta distribution of 0.5"
    for plan in cut:
        rows, columns = plan.box
        assert 0 <= rows.start <= rows.stop <= 12 and 0 <= columns.start <= columns.stop <= 16
        assert plan.share == 1 - (rows.stop - rows.start) * (columns.stop - columns.start) / (12 * 16)
    assert all(MIXUP.plan(first, 4).box is None and CUTMIX.plan(first, 4).box is not None for first in range(50))


@pytest.mark.parametrize("mixing", [MIXUP, CUTMIX])
def test_labels_tell_how_much_of_whom_is_in_an_image(mixing: Mixing) -> None:
    for first in range(20):
        plan, mixed, wanted = mixing.plan(first, 7), mixing.images(images, first), mixing.labels(labels, first)
        for own, other in enumerate(plan.partners):
            if plan.box is None:
                expected = plan.share * images[own] + (1 - plan.share) * images[other]
            else:
                expected = images[own].clone()
                expected[(slice(None), *plan.box)] = images[other][(slice(None), *plan.box)]
                taken = (mixed[own] == images[other]).double().mean().item()
                assert wanted[own, other].item() == pytest.approx(taken)
            torch.testing.assert_close(mixed[own], expected)
            assert wanted[own, own].item() == pytest.approx(plan.share) and wanted[own].sum().item() == pytest.approx(1)


def test_smoothing_is_combined_as_timm_does() -> None:
    """There both labels are smoothed, and then mixed."""
    logits = torch.randn(4, 7, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    plan = MIXUP.plan(5, 7)
    smooth = 0.9 * F.one_hot(labels, 7).double() + 0.1 / 7
    target = plan.share * smooth + (1 - plan.share) * smooth[plan.partners]
    expected = -(target * logits.mean(0).log_softmax(1)).sum()
    torch.testing.assert_close(cross_entropy_sum(logits, MIXUP.labels(labels, 5), label_smoothing=0.1), expected)


def test_only_seed_and_position_decide() -> None:
    assert BOTH.plan(14, 7) == replace(BOTH).plan(14, 7)
    assert BOTH.plan(14, 7) != BOTH.plan(21, 7) and BOTH.plan(14, 7) != replace(BOTH, seed=2).plan(14, 7)


def test_mixing_ends_at_its_epoch() -> None:
    mixing = replace(BOTH, until=100)
    assert mixing.plan(99, 7) is not None and mixing.plan(100, 7) is None
    assert mixing.images(images, 100) is images
    assert torch.equal(mixing.labels(labels.view(-1, 1), 100), torch.eye(7, dtype=torch.float64))
