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
from megasnn.models.model import Model
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
FORWARD, BACKWARD = (4, 9), (7, 13)  # fewest and most launches
# Of a step of two micro-batches of the VGG 50 look whether statistics are finite, and 10 make keys. docs/gpu.md and
# planner/machines.py reckon with Spikformer's.
LAUNCHES = {
    "vgg_dvs": (VggDvs(), 128, 2, 436),
    "spikformer-8-512": (Spikformer(embed_dim=512, depth=8, num_heads=8, patch_size=16, image_size=224), 8, 1, 746),
}
# Of a forward of four samples, and which of them pack bits: those of products of spikes with spikes.
OF_NEURONS_ALONE = {
    "spikformer": (Spikformer(image_size=32, patch_size=4, embed_dim=32, depth=2, num_heads=4, time_steps=2), 129, 0),
    "spike_driven": (CASES["spike_driven"].model, 218, 3),
}


def opened(model: Model, samples: int, micro_batches: int = 1) -> Engine:
    sizes = {"micro_batch_size": samples, "global_batch_size": samples * micro_batches, "train_iters": 1}
    return Engine(model, **sizes, precision="bf16")


def step(engine: Engine, number: int = 0) -> None:
    """Forwards and backwards of a step."""
    training = engine.config.training
    size, samples = training.micro_batch_size, training.global_batch_size
    shape, order = (size, *engine.config.model.input_shape), torch.channels_last
    images = torch.empty(shape, memory_format=order if len(shape) == 4 else torch.contiguous_format)
    labels = torch.empty(size, dtype=torch.int64)
    starts = range(number * samples, (number + 1) * samples, size)
    given = [MicroBatchInput(images, labels, size, range(start, start + size)) for start in starts]
    forward_backward(engine.distributed, given, samples)


@pytest.fixture(scope="module", params=MODELS)
def counted(request) -> Iterator[tuple[Engine, Counted]]:
    with opened(*MODELS[request.param]) as engine, fake_gpu({unit: name for name, unit in units(engine)}) as found:
        step(engine)
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
        assert FORWARD[0] <= found.forward[name].total() <= FORWARD[1], name
        assert BACKWARD[0] <= found.backward[name].total() <= BACKWARD[1], name


def test_the_host_waits_once(counted) -> None:
    """Where it reads what the step came to."""
    _, found = counted
    (place,) = {wait.split()[0] for wait in found.waits}
    assert place.startswith("engine/step_sums.py:")


@pytest.mark.parametrize("name", LAUNCHES)
def test_launches_of_a_step(name: str) -> None:
    """Kernels get the same numbers for other samples: none would be wrong in a CUDA graph."""
    model, samples, micro_batches, launches = LAUNCHES[name]
    positions = partial(torch.zeros, samples, dtype=torch.int64)  # in memory that stays, as graphs have them
    given = list[list[tuple[Any, ...]]]()
    with opened(model, samples, micro_batches) as engine, fake_gpu() as found, drawing_for(positions()):
        for number in range(3):
            for counts in (found.forward, found.backward, found.numbers):
                counts.clear()
            step(engine, number)
            given.append(list(found.numbers))
    assert given[1] == given[2]  # the first step makes the copies of weights that later ones fill
    assert sum(work.total() for of in (found.forward, found.backward) for work in of.values()) == launches


@pytest.mark.parametrize("name", OF_NEURONS_ALONE)
def test_what_neurons_alone_give_is_not_packed_again(name: str) -> None:
    model, launches, packs = OF_NEURONS_ALONE[name]
    with opened(model, 4) as engine, fake_gpu() as found:
        step(engine)
    works = found.forward.values()
    assert (sum(work.total() for work in works), sum(work["pack_bits_kernel"] for work in works)) == (launches, packs)
