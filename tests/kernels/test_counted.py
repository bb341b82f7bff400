"""A step of both models as a GPU would compute it, on tensors without values: launches and bytes of every unit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from megasnn import Engine
from megasnn.layers.unit import ConvNormNeuron
from megasnn.models.spikformer.dimensions import Spikformer
from megasnn.models.vgg_dvs.dimensions import VggDvs
from megasnn.pipeline.executor import MicroBatchInput
from tests.fake_gpu import OUTSIDE, Counted, fake_gpu
from tests.kernels.triton_process import without_triton

pytestmark = without_triton

MODELS = {"spikformer_ti": (Spikformer(variant="spikformer_ti", image_size=224), 8), "vgg_dvs": (VggDvs(), 128)}
MOST_FORWARD, MOST_BACKWARD = 15, 25  # launches
MOST_BYTES = 20  # of norm and neuron, forward and backward together, for a value in bfloat16
MOST_BYTES_POOLED = 53  # for a neuron, which pools from four values
# `add_` adds to gradients of weights, `add` sums up the gradients of what several layers take.
OF_PRODUCTS = ("convolution", "convolution_backward", "add_", "add", "avg_pool2d", "avg_pool2d_backward")
OF_BITS = ("pack_bits_kernel", "pack_counts_kernel", "unpack_bits_kernel", "average_bits_kernel")


@pytest.fixture(scope="module", params=MODELS)
def counted(request) -> Iterator[tuple[Engine, Counted]]:
    model, samples = MODELS[request.param]
    with Engine(model, micro_batch_size=samples, global_batch_size=samples, train_iters=1, precision="bf16") as engine:
        names = {unit: name for name, unit in units(engine)}
        shape = engine.distributed.model.input_shape
        with fake_gpu(names) as found:
            images = torch.empty(samples, *shape)
            if images.ndim == 4:
                images = images.contiguous(memory_format=torch.channels_last)
            labels = torch.zeros(samples, dtype=torch.long)
            engine.distributed.forward_backward([MicroBatchInput(images, labels, samples, range(samples))], samples)
        yield engine, found


def units(engine: Engine) -> Iterator[tuple[str, ConvNormNeuron]]:
    for chunk in engine.distributed.chunks.values():
        for name, layer in chunk.named_layers():
            for path, module in layer.named_modules(prefix=name):
                if isinstance(module, ConvNormNeuron):
                    yield path, module


def test_launches_of_a_unit(counted) -> None:
    engine, found = counted
    assert set(found.neurons) == {name for name, _ in units(engine)} and OUTSIDE not in found.neurons
    for name in found.neurons:
        assert 6 <= found.forward[name].count <= MOST_FORWARD, name
        assert 12 <= found.backward[name].count <= MOST_BACKWARD, name


def test_bytes_of_norm_and_neuron(counted) -> None:
    """For a neuron and step; where pooling leaves fewer neurons than values, for a value that is normalised."""
    _, found = counted
    for name, values in found.values.items():
        moved = sum(
            work[name].bytes_of(lambda operator: operator not in (*OF_PRODUCTS, *OF_BITS))
            for work in (found.forward, found.backward)
        )
        least = 46 / 4 if values > found.neurons[name] else 14
        assert least * values <= moved <= MOST_BYTES * values, (name, moved / values)
        if values > found.neurons[name]:
            assert moved <= MOST_BYTES_POOLED * found.neurons[name], (name, moved / found.neurons[name])


def test_the_host_waits_once(counted) -> None:
    """Where it reads what the step came to."""
    _, found = counted
    places = {wait.split()[0] for wait in found.waits}
    assert len(places) == 1 and places.pop().startswith("engine/distributed_model.py:")
