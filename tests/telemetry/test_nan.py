"""The first tensor that is not finite; the layer in whose output one appears is found in tests/engine/test_step.py."""

from __future__ import annotations

from math import inf, nan

import torch

from megasnn.engine.debug import first_non_finite


def test_first_bad_tensor_with_its_counts() -> None:
    named = [
        ("fine", torch.ones(3)),
        ("whole numbers", torch.ones(3, dtype=torch.int64)),
        ("bad", torch.tensor([nan, 1.0, inf, -inf])),
        ("worse", torch.full((2,), nan)),
    ]
    found = first_non_finite(named)
    assert found is not None and found.startswith("bad: 1 nan and 2 infinite of 4")
    assert first_non_finite(named[:2]) is None
