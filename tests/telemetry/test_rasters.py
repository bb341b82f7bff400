from __future__ import annotations

import numpy as np
import torch

from megasnn.telemetry.rasters import NEURONS, SAMPLES, RasterRecorder, raster_picture


def spikes(*shape: int) -> torch.Tensor:
    return (torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.3).float()


def test_a_few_neurons_of_the_first_samples_of_the_first_micro_batch() -> None:
    recorder, first = RasterRecorder(), spikes(3, 6, 4, 5, 5)
    recorder.observe("a.neuron", first)
    recorder.enabled = True
    recorder.observe("a.neuron", first)
    recorder.observe("a.neuron", spikes(3, 2, 4, 5, 5))
    raster = recorder.take(None, ["a"])["a.neuron"]
    assert raster.shape == (SAMPLES, NEURONS, 3) and raster.any() and not raster.all()
    every = first[:, :SAMPLES].flatten(2).permute(1, 2, 0).bool().numpy()
    assert np.array_equal(raster[:, 0], every[:, 0]) and np.array_equal(raster[:, -1], every[:, -1])
    assert recorder.take(None, ["a"]) == {}


def test_layers_come_in_the_order_of_the_model_and_small_ones_whole() -> None:
    recorder = RasterRecorder()
    recorder.enabled = True
    for name in ("blocks.10.mlp.neuron", "blocks.2.mlp.neuron", "stem.neuron", "blocks.1.attention.neuron"):
        recorder.observe(name, spikes(2, 1, 3))
    rasters = recorder.take(None, ["stem", "blocks.1.attention", "blocks.2.mlp", "blocks.10.mlp"])
    assert [name.rsplit(".", 1)[0] for name in rasters] == [
        "stem",
        "blocks.1.attention",
        "blocks.2.mlp",
        "blocks.10.mlp",
    ]
    assert rasters["stem.neuron"].shape == (1, 3, 2)


def test_a_picture_has_a_row_for_each_neuron_and_a_column_for_each_step() -> None:
    raster = np.zeros((2, 3, 4), bool)
    raster[1, 2, 0] = True  # the second sample's third neuron at the first step
    picture = raster_picture(raster)
    assert picture.shape == (12, 36) and picture.dtype == np.uint8
    assert np.argwhere(picture[::4, ::4] == 0).tolist() == [[2, 5]]
    assert set(np.unique(picture[:, 16:20])) == {160} and (picture == 255).sum() == 16 * (24 - 1)
