"""Dropout and drop path follow from seed, name and the samples' positions: not from ranks or the cut into
micro-batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megasnn.layers import BuildContext, DropPath, ParallelDropout, apply_layer
from megasnn.parallel_state import Group
from tests.distributed.whole import drawn, state_of

T, C, P = 3, 40, 0.25
KINDS = pytest.mark.parametrize("kind", [ParallelDropout, DropPath])


def drop(kind: Any, group: Group | None = None, seed: int = 0, name: str = "a", p: float = P) -> Any:
    return kind(p, name, BuildContext(state_of(group or Group("tp")), seed=seed))


def masks(layer: Any, samples: range, channels: int = C) -> Tensor:
    return apply_layer(layer, torch.ones(T, len(samples), channels, 2), samples)


@KINDS
def test_masks_do_not_depend_on_the_cut_of_samples_and_channels(kind: Any) -> None:
    whole = masks(drop(kind), range(10, 40))
    parts = [masks(drop(kind), span) for span in (range(10, 11), range(11, 25), range(25, 40))]
    assert torch.equal(torch.cat(parts, dim=1), whole)
    for ranks in (4, 8):  # 8 cut where four numbers belong together
        group = tuple(range(ranks))
        parts = [masks(drop(kind, Group("tp", group, rank)), range(10, 40), C // ranks) for rank in group]
        assert torch.equal(torch.cat(parts, dim=2), whole)


@KINDS
def test_everything_in_the_key_matters_and_a_share_p_is_dropped(kind: Any) -> None:
    one = masks(drop(kind), range(50))
    others = (
        masks(drop(kind, seed=1), range(50)),
        masks(drop(kind, name="b"), range(50)),
        masks(drop(kind), range(50, 100)),
    )
    assert all(not torch.equal(one, other) for other in others)
    values = masks(drop(kind), range(4000 if kind is DropPath else 200))
    assert values.unique().tolist() == pytest.approx([0.0, 1 / (1 - P)])
    assert (values == 0).float().mean().item() == pytest.approx(P, abs=0.03)


def test_samples_and_time_steps_are_independent_of_each_other_and_a_path_is_one() -> None:
    one, path = masks(drop(ParallelDropout), range(4)), masks(drop(DropPath), range(30))
    assert not torch.equal(one[:, 0], one[:, 1]) and not torch.equal(one[0], one[1])
    assert torch.equal(path, path[:1, :, :1, :1].expand(path.shape))
    numbers = [drawn("drop path", "a", sample, 1) for sample in range(30)]
    assert torch.equal(path[0, :, 0, 0] > 0, torch.cat(numbers) >= P)


@pytest.mark.parametrize("space", [(), (6,), (3, 2)])
def test_what_is_kept_is_a_fact_of_the_key_whatever_the_memory_order(space: tuple[int, ...]) -> None:
    x, layer = torch.ones(T, 2, C, *space), drop(ParallelDropout)
    y = apply_layer(layer, x, range(5, 7))
    assert torch.equal(apply_layer(layer, x.movedim(2, -1).contiguous().movedim(-1, 2), range(5, 7)), y)
    numbers = [drawn("dropout", "a", sample, y[:, 0].numel()) for sample in (5, 6)]
    expected = [(each >= P).view(T, *space, C).movedim(-1, 1) for each in numbers]
    assert torch.equal(y > 0, torch.stack(expected, dim=1))


def test_windows_draw_what_all_time_steps_draw_at_once() -> None:
    """With --bptt-steps: a step is dropped as it would be without windows, and not as its place in the window is."""
    windows = ParallelDropout(P, "a", BuildContext(time_steps=2, stateful=True))
    x, samples = torch.randn(6, 4, C, 3), range(4, 8)
    expected = apply_layer(drop(ParallelDropout), x, samples)
    for _ in range(2):
        assert torch.equal(torch.cat([apply_layer(windows, part, samples) for part in x.split(2)]), expected)
        windows.forget()
    # An input of one step stands for all of them, and SpikingJelly's dropout drops the same at each.
    assert torch.equal(*(apply_layer(windows, x[:1], samples) for _ in range(2)))
    jelly = ParallelDropout(P, "a", BuildContext(time_steps=2, stateful=True), same_at_all_steps=True)
    first, second = (apply_layer(jelly, torch.ones(2, 4, C, 3), samples) for _ in range(2))
    assert torch.equal(first, second)


@KINDS
def test_gradients_go_through_the_same_mask_and_evaluation_drops_nothing(kind: Any) -> None:
    x = torch.ones(T, 8, C, requires_grad=True)
    y = apply_layer(drop(kind), x, range(8))
    y.sum().backward()
    assert torch.equal(x.grad, y.detach()) and 0 < (y > 0).double().mean() < 1
    assert drop(kind).eval()(x) is x and apply_layer(drop(kind, p=0.0), x, None) is x


@KINDS
def test_missing_positions_and_rates_outside_the_range_are_refused(kind: Any) -> None:
    for samples in (None, range(3)):
        with pytest.raises(ValueError, match="a: .* needs the positions of 2 samples"):
            apply_layer(drop(kind), torch.ones(1, 2, 3), samples)
    for p in (-0.1, 1.0):
        with pytest.raises(ValueError, match=f"a: .* got {p}"):
            drop(kind, p=p)
