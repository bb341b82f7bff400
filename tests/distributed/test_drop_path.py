"""Drop path follows from seed, name and the samples' positions: the same for all time steps, channels and ranks."""

from __future__ import annotations

import pytest
import torch

from megasnn.layers import BuildContext, DropPath
from megasnn.layers.whole import apply_layer
from megasnn.parallel_state import Group, alone
from megasnn.random import Draws

P = 0.25


def drop_path(group: Group | None = None, seed: int = 0, name: str = "a", p: float = P) -> DropPath:
    return DropPath(p, name, BuildContext(group or alone("tensor"), seed=seed))


def factors(layer: DropPath, samples: range) -> torch.Tensor:
    """What each sample is multiplied by."""
    y = layer(torch.ones(3, len(samples), 4, 2, 2), samples)
    assert torch.equal(y, y[:1, :, :1, :1, :1].expand(y.shape)), "time steps, channels and pixels alike"
    return y[0, :, 0, 0, 0]


def test_no_cut_matters_and_all_tensor_parallel_ranks_agree() -> None:
    whole = factors(drop_path(), range(10, 40))
    parts = [factors(drop_path(), span) for span in (range(10, 11), range(11, 25), range(25, 40))]
    assert torch.equal(torch.cat(parts), whole)
    assert all(torch.equal(factors(drop_path(Group("tensor", (0, 1), rank)), range(10, 40)), whole) for rank in (0, 1))
    kept = [Draws(0, "drop path", "a", sample).unit() >= P for sample in range(10, 40)]
    assert (whole > 0).tolist() == kept


def test_everything_in_the_key_matters() -> None:
    one = factors(drop_path(), range(50))
    others = (factors(drop_path(seed=1), range(50)), factors(drop_path(name="b"), range(50)))
    assert all(not torch.equal(one, other) for other in (*others, factors(drop_path(), range(50, 100))))


def test_a_share_p_is_dropped_and_the_mean_stays() -> None:
    values = factors(drop_path(), range(4000))
    assert values.unique().tolist() == pytest.approx([0.0, 1 / (1 - P)])
    assert values.mean().item() == pytest.approx(1.0, abs=0.03)


def test_gradients_go_to_what_was_kept() -> None:
    x = torch.ones(2, 8, 3, requires_grad=True)
    y = drop_path()(x, range(8))
    y.sum().backward()
    assert torch.equal(x.grad, y.detach()) and 0 < (y > 0).double().mean() < 1


def test_nothing_is_dropped_in_evaluation_or_with_p_zero() -> None:
    x = torch.randn(2, 3, 4)
    assert drop_path().eval()(x) is x and apply_layer(drop_path(p=0.0), x, None) is x
    assert drop_path().draws and not drop_path(p=0.0).draws


def test_missing_positions_and_rates_outside_the_range_are_refused() -> None:
    for samples in (None, range(3)):
        with pytest.raises(ValueError, match="a: drop path needs the positions of 2 samples"):
            drop_path()(torch.ones(1, 2, 3), samples)
    for p in (-0.1, 1.0):
        with pytest.raises(ValueError, match="a: the rate of drop path must be"):
            drop_path(p=p)
