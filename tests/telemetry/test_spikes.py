"""Rates, silent and saturated neurons; rasters of a few neurons."""

from __future__ import annotations

import pytest
import torch

from megasnn.telemetry.spikes import (
    RASTER_NEURONS,
    RASTER_SAMPLES,
    RasterRecorder,
    SpikeRecorder,
    mean_spikes,
    position_in_model,
)


def enabled() -> SpikeRecorder:
    recorder = SpikeRecorder()
    recorder.enabled = True
    return recorder


def test_rate_silent_and_saturated_by_hand():
    spikes = torch.zeros(2, 3, 4)  # T, N, C: each neuron is presented 6 times
    spikes[:, :, 0] = 1  # saturated
    spikes[0, 0, 1] = 1  # fires once
    spikes[:, 1:, 2] = 1  # fires 4 times; neuron 3 is silent
    recorder = enabled()
    recorder.observe("layer", spikes)
    (layer,) = recorder.reduce(None, ())
    assert layer.name == "layer"
    assert layer.firing_rate == pytest.approx((6 + 1 + 4 + 0) / 24, rel=1e-12)
    assert (layer.silent, layer.saturated) == (0.25, 0.25)
    assert mean_spikes([layer]) == {
        "spikes/firing_rate": layer.firing_rate,
        "spikes/silent": 0.25,
        "spikes/saturated": 0.25,
    }


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.uint8, torch.bool])
def test_counts_are_exact_in_every_type_and_forgotten_once_they_are_taken(dtype):
    spikes = torch.ones(300, 4, 2)
    spikes[0, 0, 0] = 0  # 1199 of 1200: bfloat16 sums could not tell
    recorder = enabled()
    for part in spikes.split((3, 1), dim=1):  # micro-batches of different size count by sample
        recorder.observe("layer", part.to(dtype))
    recorder.enabled = False
    recorder.observe("layer", spikes)
    (layer,) = recorder.reduce(None, ())
    assert layer.firing_rate == pytest.approx(2399 / 2400, rel=1e-12) and layer.saturated == 0.5
    assert recorder.reduce(None, ()) == []


def test_rasters_have_a_few_neurons_of_the_first_samples() -> None:
    generator = torch.Generator().manual_seed(0)
    first, second = ((torch.rand(3, n, 4, 5, 5, generator=generator) < 0.3).float() for n in (6, 2))
    recorder = RasterRecorder()
    recorder.observe("b.neuron", first)
    recorder.enabled = True
    recorder.observe("b.neuron", first)
    recorder.observe("b.neuron", second)
    recorder.observe("a.neuron", second[..., 0, 0])
    found = recorder.take()
    assert list(found) == ["b.neuron", "a.neuron"] and found["a.neuron"].shape == (2, 4, 3)
    raster = found["b.neuron"]
    assert raster.shape == (RASTER_SAMPLES, RASTER_NEURONS, 3)
    every = first[:, :RASTER_SAMPLES].flatten(2).permute(1, 2, 0).bool().numpy()
    assert (raster[:, 0] == every[:, 0]).all() and (raster[:, -1] == every[:, -1]).all()
    assert recorder.take() == {}
    assert [position_in_model(name, ["a", "b"]) for name in ("a", "b.neuron", "bc")] == [0, 1, 2]
