"""Losses as sums over samples, against formulas written out."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megasnn.models.losses import correct_predictions, cross_entropy_sum, mse_sum, tet_sum
from megasnn.models.sew_resnet.model import SewResNet
from megasnn.models.task import task_of

T, N, CLASSES = 4, 3, 5
LOSSES = [cross_entropy_sum, tet_sum, mse_sum]


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(T, N, CLASSES, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


LABELS = torch.tensor([1, 4, 0])


def test_tet_is_the_mean_of_each_steps_loss_and_the_distance_from_one(logits) -> None:
    entropy = sum(-logits[t, n].log_softmax(0)[LABELS[n]] for t in range(T) for n in range(N)) / T
    distance = sum((logits[:, n] - 1).square().sum() / (T * CLASSES) for n in range(N))
    torch.testing.assert_close(tet_sum(logits, LABELS, share=0.2), 0.8 * entropy + 0.2 * distance)
    torch.testing.assert_close(tet_sum(logits, LABELS, share=0), entropy)


def test_mse_is_the_distance_of_rates_from_the_label(logits) -> None:
    wanted = F.one_hot(LABELS, CLASSES).double()
    expected = ((logits.mean(0) - wanted) ** 2).sum() / CLASSES
    torch.testing.assert_close(mse_sum(logits, LABELS), expected)


@pytest.mark.parametrize("loss", LOSSES)
def test_label_smoothing_spreads_a_share_over_all_classes(logits, loss) -> None:
    smooth = 0.9 * F.one_hot(LABELS, CLASSES).double() + 0.1 / CLASSES
    torch.testing.assert_close(loss(logits, LABELS, label_smoothing=0.1), loss(logits, smooth))


@pytest.mark.parametrize("loss", LOSSES)
def test_forms_of_labels(logits, loss) -> None:
    """FEATURES 0.20: indices [N] and [N, 1], and probabilities, say the same; parts of a batch add up."""
    whole = loss(logits, LABELS)
    torch.testing.assert_close(loss(logits, LABELS[:, None]), whole)
    torch.testing.assert_close(loss(logits, F.one_hot(LABELS, CLASSES).double()), whole)
    torch.testing.assert_close(loss(logits[:, :1], LABELS[:1]) + loss(logits[:, 1:], LABELS[1:]), whole)
    reduced = loss(logits.bfloat16(), LABELS)
    assert reduced.dtype == torch.float32 and reduced.item() == pytest.approx(whole.item(), rel=0.05)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(
    "labels", [torch.tensor([0, 1, 5]), torch.tensor([-1, 0, 1]), torch.zeros(N, 4), torch.zeros(2)]
)
def test_labels_that_do_not_fit_are_refused(logits, loss, labels) -> None:
    with pytest.raises(ValueError, match="labels"):
        loss(logits, labels)


def test_a_sample_is_correct_where_its_mean_over_time_says_so() -> None:
    """The first sample is right on the mean although its last step is not, the second the other way round."""
    logits = torch.tensor([[[0.0, 9.0], [9.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]]])
    labels = torch.tensor([1, 1, 1])
    assert correct_predictions(logits, labels, (1,)) == correct_predictions(logits, labels[:, None], (1,)) == 2
    soft = torch.tensor([[0.3, 0.7], [0.4, 0.6], [0.9, 0.1]])
    assert correct_predictions(logits, soft, (1,)) == 1
    assert correct_predictions(logits.bfloat16(), labels, (1, 2)).tolist() == [2, 3]


def test_top_5_of_five_classes_is_not_counted() -> None:
    assert [task_of(SewResNet(num_classes=n)).evaluated for n in (5, 6)] == [("top1",), ("top1", "top5")]
