from __future__ import annotations

import numpy as np
import pytest

from megasnn.telemetry.heat_map import SpikeHistory
from megasnn.telemetry.spikes import LayerSpikes


def layers(*rates: float) -> list[LayerSpikes]:
    return [LayerSpikes(f"layer{place}", rate, 0.0, 0.0) for place, rate in enumerate(rates)]


def test_a_row_for_each_layer_and_darker_for_more() -> None:
    history = SpikeHistory()
    history.add(10, layers(0.1, 0.4))
    history.add(20, layers(0.4, 0.0))
    picture = history.picture()
    darkest = np.argwhere((picture == (8, 48, 107)).all(axis=2))
    rows = darkest[darkest[:, 0] >= 34]  # below the scale of shades
    first, second = rows[rows[:, 0] < 48], rows[rows[:, 0] >= 48]
    assert len(first) and len(second) and second[:, 1].max() < first[:, 1].min(), "early in one row, late in the other"
    assert picture.shape[0] == 34 + 2 * 14 + 44


def test_a_long_run_keeps_few_columns_from_beginning_to_end() -> None:
    history = SpikeHistory()
    for iteration in range(1, 10_001):
        history.add(iteration, layers(0.5))
    assert 50 < len(history) <= 120
    assert history._iterations[0] == 1 and history._iterations[-1] > 9_800
    assert len(set(np.diff(history._iterations))) == 1


def test_nothing_to_draw() -> None:
    history = SpikeHistory()
    history.add(1, [])
    assert len(history) == 0
    with pytest.raises(ValueError, match="without a single iteration"):
        history.picture()
