from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megasnn.telemetry.spikes import (
    RASTER_NEURONS,
    RASTER_SAMPLES,
    LayerSpikes,
    RasterRecorder,
    SpikeRecorder,
    mean_spikes,
)


@contextmanager
def recording(recorder: SpikeRecorder) -> Iterator[None]:
    recorder.enabled = True
    yield
    recorder.enabled = False


SHAPES = {"stem.neuron": (4, 3, 3), "block.qkv": (8, 5), "head.neuron": (2,)}


def test_rate_silent_and_saturated_by_hand():
    spikes = torch.zeros(2, 3, 4)  # T, N, C: each neuron is presented 6 times
    spikes[:, :, 0] = 1  # saturated
    spikes[0, 0, 1] = 1  # fires once
    spikes[:, 1:, 2] = 1  # fires 4 times; neuron 3 is silent
    recorder = SpikeRecorder()
    with recording(recorder):
        recorder.observe("layer", spikes)
    (layer,) = recorder.reduce(None, (), None, [])
    assert layer.name == "layer"
    assert layer.firing_rate == pytest.approx((6 + 1 + 4 + 0) / 24, rel=1e-12)
    assert (layer.silent, layer.saturated) == (0.25, 0.25)


def test_micro_batches_of_different_size_count_by_sample():
    recorder = SpikeRecorder()
    with recording(recorder):
        recorder.observe("layer", torch.ones(2, 3, 1, dtype=torch.bool))
        recorder.observe("layer", torch.zeros(2, 1, 1, dtype=torch.bool))
    assert recorder.reduce(None, (), None, []) == [LayerSpikes("layer", 0.75, 0.0, 0.0)]
    assert recorder.reduce(None, (), None, []) == [], "counts must be forgotten after reduce"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.uint8, torch.bool])
def test_counts_are_exact_in_every_type(dtype):
    spikes = torch.ones(300, 4, 2)
    spikes[0, 0, 0] = 0  # 1199 of 1200: bfloat16 sums could not tell
    recorder = SpikeRecorder()
    with recording(recorder):
        recorder.observe("layer", spikes.to(dtype))
    (layer,) = recorder.reduce(None, (), None, [])
    assert layer.firing_rate == pytest.approx(2399 / 2400, rel=1e-12) and layer.saturated == 0.5


def test_nothing_is_counted_outside_recording():
    recorder = SpikeRecorder()
    recorder.observe("layer", torch.ones(1, 1, 1))
    with recording(recorder):
        pass
    recorder.observe("layer", torch.ones(1, 1, 1))
    assert recorder.reduce(None, (), None, []) == []


def test_order_of_the_network_and_a_layer_it_lacks():
    recorder = SpikeRecorder()
    with recording(recorder):
        for name in ("b.fc.neuron", "b", "a.neuron"):
            recorder.observe(name, torch.ones(1, 1, 1))
    found = recorder.reduce(None, (), None, ["a", "x", "b"])
    assert [layer.name for layer in found] == ["a.neuron", "b.fc.neuron", "b"]


def test_scalars_for_tensorboard():
    layers = [LayerSpikes("a", 0.5, 0.25, 0.125), LayerSpikes("b", 0.25, 0.75, 0.0)]
    assert mean_spikes(layers) == {
        "spikes/firing_rate": 0.375,
        "spikes/silent": 0.5,
        "spikes/saturated": 0.0625,
    }
    assert mean_spikes([]) == {}


def _spikes(name: str) -> Tensor:
    """All spikes of a layer, ``[T 3, N 5, C, ...]``: about a third, some neurons silent, some saturated."""
    generator = torch.Generator().manual_seed(len(name))
    shape = SHAPES[name]
    spikes = (torch.rand(3, 5, *shape, generator=generator) < 0.3).float()
    kind = torch.rand(shape, generator=generator)
    return torch.where(kind < 0.2, torch.zeros(()), torch.where(kind > 0.8, torch.ones(()), spikes))


def _group(of_rank: list[list[int]]) -> dist.ProcessGroup | None:
    """This rank's group; every rank makes all of them, in the same order."""
    mine = None
    for members in of_rank:
        group = dist.new_group(members)
        if dist.get_rank() in members and len(members) > 1:
            mine = group
    return mine


def _data_and_tensor(samples_of_first: int) -> list[LayerSpikes]:
    """Ranks 0..3 are (dp 0, tp 0), (dp 0, tp 1), (dp 1, tp 0), (dp 1, tp 1)."""
    data, tensor = divmod(dist.get_rank(), 2)
    data_group, tensor_group = _group([[0, 2], [1, 3]]), _group([[0, 1], [2, 3]])
    recorder = SpikeRecorder()
    with recording(recorder):
        for name in SHAPES:
            shard = _spikes(name).chunk(2, dim=2)[tensor]
            mine = shard[:, :samples_of_first] if data == 0 else shard[:, samples_of_first:]
            for sample in mine.split(1, dim=1):
                recorder.observe(name, sample)
    return recorder.reduce(data_group, (tensor_group,), None, [])


def _alone() -> list[LayerSpikes]:
    recorder = SpikeRecorder()
    with recording(recorder):
        for name in SHAPES:
            recorder.observe(name, _spikes(name))
    return recorder.reduce(None, (), None, [])


def _same(one: list[LayerSpikes], other: list[LayerSpikes]) -> bool:
    return [layer.name for layer in one] == [layer.name for layer in other] and all(
        (a.silent, a.saturated) == (b.silent, b.saturated) and a.firing_rate == pytest.approx(b.firing_rate, rel=1e-12)
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("samples_of_first", [2, 5], ids=["uneven", "a rank without samples"])
def test_two_by_two_ranks_give_the_statistics_of_one(ranks, samples_of_first):
    alone = _alone()
    assert any(layer.silent > 0 for layer in alone) and any(layer.saturated > 0 for layer in alone)
    for layers in ranks(4, _data_and_tensor, samples_of_first):
        assert _same(layers, alone)


def _pipeline(order: list[str]) -> list[LayerSpikes]:
    """Rank 0 has the first and last layer, as with virtual stages; rank 1 the one between; rank 2 none."""
    names = list(SHAPES)
    mine: list[str] = [[names[0], names[2]], [names[1]], []][dist.get_rank()]
    recorder = SpikeRecorder()
    with recording(recorder):
        for name in mine:
            recorder.observe(name, _spikes(name))
    return recorder.reduce(None, (), dist.group.WORLD, order)


def test_pipeline_ranks_gather_the_layers_in_the_networks_order(ranks):
    for layers in ranks(3, _pipeline, list(SHAPES)):
        assert _same(layers, _alone())


def _unequal_shards() -> None:
    recorder = SpikeRecorder()
    with recording(recorder):
        recorder.observe("layer", torch.ones(1, 1, 2 + dist.get_rank()))
    with pytest.raises(ValueError, match="layer.*3.*2"):
        recorder.reduce(dist.group.WORLD, (), None, [])


def test_replicas_with_different_shards_are_refused_on_every_rank(ranks):
    ranks(2, _unequal_shards)


def test_rasters_have_a_few_neurons_of_the_first_samples_in_the_models_order() -> None:
    generator = torch.Generator().manual_seed(0)
    first, second = ((torch.rand(3, n, 4, 5, 5, generator=generator) < 0.3).float() for n in (6, 2))
    recorder = RasterRecorder()
    recorder.observe("b.neuron", first)
    recorder.enabled = True
    recorder.observe("b.neuron", first)
    recorder.observe("b.neuron", second)
    recorder.observe("a.neuron", second[..., 0, 0])
    found = recorder.take(None, ["a", "b"])
    assert list(found) == ["a.neuron", "b.neuron"] and found["a.neuron"].shape == (2, 4, 3)
    raster = found["b.neuron"]
    assert raster.shape == (RASTER_SAMPLES, RASTER_NEURONS, 3)
    every = first[:, :RASTER_SAMPLES].flatten(2).permute(1, 2, 0).bool().numpy()
    assert (raster[:, 0] == every[:, 0]).all() and (raster[:, -1] == every[:, -1]).all()
    assert recorder.take(None, ["a", "b"]) == {}
