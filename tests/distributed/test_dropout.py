"""Dropout follows from seed, name and the samples' positions: not from ranks or the cut into micro-batches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megasnn.layers import BuildContext, ParallelDropout
from megasnn.layers.whole import apply_layer
from megasnn.parallel_state import Group, alone
from megasnn.random import Draws

T, C = 3, 40
P = 0.25


def dropout(group: Group | None = None, seed: int = 0, name: str = "a", p: float = P) -> ParallelDropout:
    return ParallelDropout(p, name, BuildContext(group or alone("tensor"), seed=seed))


def masks(layer: ParallelDropout, samples: range, channels: int = C) -> Tensor:
    return layer(torch.ones(T, len(samples), channels, 2), samples)


def test_masks_do_not_depend_on_the_cut_of_samples_and_channels() -> None:
    whole = masks(dropout(), range(10, 16))
    parts = [masks(dropout(), span) for span in (range(10, 11), range(11, 15), range(15, 16))]
    assert torch.equal(torch.cat(parts, dim=1), whole)
    for ranks in (4, 8):  # 8 cut where four numbers belong together
        group = tuple(range(ranks))
        parts = [masks(dropout(Group("tensor", group, rank)), range(10, 16), C // ranks) for rank in group]
        assert torch.equal(torch.cat(parts, dim=2), whole)


@pytest.mark.parametrize("space", [(), (6,), (3, 2)])
def test_what_is_kept_is_a_fact_of_the_key_whatever_the_memory_order(space: tuple[int, ...]) -> None:
    x = torch.ones(T, 2, C, *space)
    y = dropout()(x, range(5, 7))
    assert torch.equal(dropout()(x.movedim(2, -1).contiguous().movedim(-1, 2), range(5, 7)), y)
    numbers = [Draws(0, "dropout", "a", sample).words(y[:, 0].numel()) / 2**32 for sample in (5, 6)]
    expected = [torch.from_numpy(each >= P).view(T, *space, C).movedim(-1, 1) for each in numbers]
    assert torch.equal(y > 0, torch.stack(expected, dim=1))


def test_windows_draw_what_all_time_steps_draw_at_once() -> None:
    """With --bptt-steps: a step is dropped as it would be without windows, and not as its place in the window is."""
    windows = ParallelDropout(P, "a", BuildContext(time_steps=2, carries=True))
    x, samples = torch.randn(6, 4, C, 3), range(4, 8)
    expected = dropout()(x, samples)
    for _ in range(2):
        assert torch.equal(torch.cat([windows(part, samples) for part in x.split(2)]), expected)
        windows.forget()
    # An input of one step stands for all of them, and SpikingJelly's dropout drops the same at each.
    assert torch.equal(windows(x[:1], samples), windows(x[:1], samples))
    jelly = ParallelDropout(P, "a", BuildContext(time_steps=2, carries=True), same_at_all_steps=True)
    first, second = (jelly(torch.ones(2, 4, C, 3), samples) for _ in range(2))
    assert torch.equal(first, second)


def test_everything_in_the_key_matters() -> None:
    one = masks(dropout(), range(4))
    others = masks(dropout(seed=1), range(4)), masks(dropout(name="b"), range(4)), masks(dropout(), range(4, 8))
    assert all(not torch.equal(one, other) for other in others)
    # Samples, and the time steps of one, are independent of each other.
    assert not torch.equal(one[:, 0], one[:, 1]) and not torch.equal(one[0], one[1])


def test_a_share_p_is_dropped_and_the_mean_stays() -> None:
    values = masks(dropout(), range(200))
    assert values.unique().tolist() == pytest.approx([0.0, 1 / (1 - P)])
    assert (values == 0).float().mean().item() == pytest.approx(P, abs=0.01)
    assert values.mean().item() == pytest.approx(1.0, abs=0.02)


def test_gradients_go_through_the_same_mask() -> None:
    x = torch.ones(T, 2, C, requires_grad=True)
    y = dropout()(x, range(2))
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())


def test_nothing_is_dropped_in_evaluation_or_with_p_zero() -> None:
    x = torch.randn(T, 2, C)
    assert dropout().eval()(x) is x and apply_layer(dropout(p=0.0), x, None) is x


@pytest.mark.parametrize("samples", [None, range(3)])
def test_training_without_the_right_positions_is_refused(samples: range | None) -> None:
    with pytest.raises(ValueError, match="a: dropout needs the positions of 2 samples"):
        dropout()(torch.ones(T, 2, C), samples)


@pytest.mark.parametrize("p", [-0.1, 1.0])
def test_p_outside_its_range_is_refused(p: float) -> None:
    with pytest.raises(ValueError, match="--dropout must be"):
        dropout(p=p)
