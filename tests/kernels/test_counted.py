"""A step of both models as a GPU would compute it, on tensors without values: launches of every unit."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from megasnn import Engine
from megasnn.layers.blocks import ConvNormNeuron
from megasnn.layers.dropout import drawing_for
from megasnn.models.spikformer.model import Spikformer
from megasnn.models.vgg_dvs.model import VggDvs
from megasnn.pipeline.microbatch_state import MicroBatchInput
from tests.fake_gpu import Counted, fake_gpu
from tests.kernels.triton_process import without_triton
from tests.parity.ranks import forward_backward
from tests.parity.zoo import CASES

pytestmark = without_triton

TINY = Spikformer(embed_dim=256, num_heads=8, patch_size=16, image_size=224, num_classes=1000)
MODELS = {"spikformer_ti": (TINY, 8), "vgg_dvs": (VggDvs(), 128)}
MOST_FORWARD, MOST_BACKWARD = 15, 20  # launches
LAUNCHES = 546  # of a step of the VGG, two micro-batches; 50 look whether statistics are finite, 10 make keys
LAUNCHES_OF_SPIKFORMER_8_512 = 1063  # of a micro-batch; docs/gpu.md and planner/machines.py reckon with them
WITH_NEURONS_ALONE = {
    "spikformer": Spikformer(image_size=32, patch_size=4, embed_dim=32, depth=2, num_heads=4, time_steps=2),
    "spike_driven": CASES["spike_driven"].model,
}
LAUNCHES_OF_NEURONS_ALONE = {"spikformer": (160, 0), "spike_driven": (239, 3)}  # of a forward, and which pack bits


@pytest.fixture(scope="module", params=MODELS)
def counted(request) -> Iterator[tuple[Engine, Counted]]:
    model, samples = MODELS[request.param]
    with Engine(model, micro_batch_size=samples, global_batch_size=samples, train_iters=1, precision="bf16") as engine:
        names = {unit: name for name, unit in units(engine)}
        shape = engine.distributed.description.input_shape
        with fake_gpu(names) as found:
            images = torch.empty(samples, *shape)
            if images.ndim == 4:
                images = images.contiguous(memory_format=torch.channels_last)
            labels = torch.zeros(samples, dtype=torch.long)
            forward_backward(engine.distributed, [MicroBatchInput(images, labels, samples, range(samples))], samples)
    yield engine, found  # closed: a process has one open Engine at a time


def units(engine: Engine) -> Iterator[tuple[str, ConvNormNeuron]]:
    for chunk in engine.distributed.chunks.values():
        for name, layer in chunk.named_layers():
            for path, module in layer.named_modules(prefix=name):
                if isinstance(module, ConvNormNeuron):
                    yield path, module


def test_launches_of_a_unit(counted) -> None:
    engine, found = counted
    for name, _ in units(engine):
        assert 6 <= found.forward[name].total() <= MOST_FORWARD, name
        assert 8 <= found.backward[name].total() <= MOST_BACKWARD, name


def test_the_host_waits_once(counted) -> None:
    """Where it reads what the step came to."""
    _, found = counted
    places = {wait.split()[0] for wait in found.waits}
    assert len(places) == 1 and places.pop().startswith("engine/model.py:")


def test_launches_of_a_step() -> None:
    """Of two micro-batches; kernels get the same numbers for other samples: none would be wrong in a CUDA graph."""
    model, samples = MODELS["vgg_dvs"]
    flags = {"micro_batch_size": samples, "global_batch_size": 2 * samples, "train_iters": 1, "precision": "bf16"}
    positions = partial(torch.zeros, samples, dtype=torch.int64)  # in memory that stays, as graphs have them
    with Engine(model, **flags) as engine, fake_gpu() as found, drawing_for(positions()):
        given = list[list[tuple[Any, ...]]]()
        images, labels = torch.empty(samples, *engine.distributed.description.input_shape), torch.zeros(samples).long()
        for step in range(2):
            for counts in (found.forward, found.backward, found.numbers):
                counts.clear()
            places = [range(i * samples, (i + 1) * samples) for i in range(2 * step, 2 * step + 2)]
            forward_backward(
                engine.distributed, [MicroBatchInput(images, labels, samples, e) for e in places], 2 * samples
            )
            given.append(list(found.numbers))
        launches = sum(work.total() for of in (found.forward, found.backward) for work in of.values())
    assert launches == LAUNCHES and given[0] == given[1]


def test_launches_that_the_planner_reckons_with() -> None:
    model = Spikformer(embed_dim=512, depth=8, num_heads=8, patch_size=16, image_size=224, time_steps=4)
    with Engine(model, micro_batch_size=8, global_batch_size=8, train_iters=1, precision="bf16") as engine:
        with fake_gpu() as found:
            images = torch.empty(8, *engine.distributed.description.input_shape).contiguous(
                memory_format=torch.channels_last
            )
            given = MicroBatchInput(images, torch.zeros(8).long(), 8, range(8))
            forward_backward(engine.distributed, [given], 8)
    launches = sum(work.total() for of in (found.forward, found.backward) for work in of.values())
    assert launches == LAUNCHES_OF_SPIKFORMER_8_512


@pytest.mark.parametrize("name", LAUNCHES_OF_NEURONS_ALONE)
def test_what_neurons_alone_give_is_not_packed_again(name: str) -> None:
    """Of one micro-batch. What is packed are products of spikes with spikes."""
    model, samples = WITH_NEURONS_ALONE[name], 4
    flags = {"micro_batch_size": samples, "global_batch_size": samples, "train_iters": 1, "precision": "bf16"}
    with Engine(model, **flags) as engine, fake_gpu() as found:
        images, labels = torch.empty(samples, *engine.distributed.description.input_shape), torch.zeros(samples).long()
        forward_backward(engine.distributed, [MicroBatchInput(images, labels, samples, range(samples))], samples)
    packs = sum(work["pack_bits_kernel"] for work in found.forward.values())
    launches = sum(work.total() for work in found.forward.values())
    assert (launches, packs) == LAUNCHES_OF_NEURONS_ALONE[name]
