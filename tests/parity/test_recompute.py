"""Layer by layer, and with forwards that are computed again, a step has the same bits as without: loss, gradients,
running statistics, spikes that are told of, samples that are right, and what tensor parallel ranks send each other."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megasnn.models.build import describe_model
from megasnn.models.model import Model
from megasnn.models.vgg_dvs.model import VggDvs
from megasnn.parallel.traffic import Traffic, traffic
from megasnn.schedule.passes import RECOMPUTE
from tests.models.networks import Bundles, Tied, UNet
from tests.parity.networks import CalledAgain
from tests.parity.ranks import Bits, Layout, bits_of, built, inputs_of, model_config

SAMPLES, MICRO_BATCH, SEED = 7, 2, 5
MODELS: dict[str, Model] = {
    "spikformer": model_config(),
    "vgg": VggDvs(channels="8,8,P,32,8,P,16,P", image_size=16, time_steps=3, num_classes=5),
    "unet": UNet(),
    "bundles": Bundles(),
    "tied": Tied(),
    "called-again": CalledAgain(),
}
Step = tuple[Bits, list[int], Traffic]
"""Bits, spikes of each neuron, and the traffic of the tensor parallel group."""


def _step(model: Model, layout: Layout) -> Step:
    with built(describe_model(model), layout, torch.float32, seed=SEED) as engine:
        spikes: list[int] = []
        for _, neuron in engine.neurons():
            neuron.observer = lambda fired: spikes.append(int(fired.sum()))
        generator = torch.Generator().manual_seed(3)
        images = 2 * torch.randn(SAMPLES, *model.input_shape, generator=generator)
        labels = torch.randint(0, model.num_classes, (SAMPLES,), generator=generator)
        traffic.reset()
        with traffic.counting():
            bits = bits_of(engine, inputs_of(engine, images, labels, MICRO_BATCH), SAMPLES)
        return bits, sorted(spikes), traffic.by_group["tp"]


def _both(name: str, layout: Layout, modes: list[str]) -> list[Step]:
    """A step as it is, and then, layer by layer, one in each mode."""
    return [_step(MODELS[name], replace(layout, recompute=recompute)) for recompute in (None, *modes)]


CASES = [
    *((name, Layout(), [*RECOMPUTE]) for name in MODELS),
    ("spikformer", Layout(tensor=2), ["always"]),
    ("vgg", Layout(tensor=2), ["except-last"]),
    ("called-again", Layout(tensor=2), ["always"]),
    ("spikformer", Layout(data=2), ["always"]),
    ("tied", Layout(1, 1, 2, "zbv"), ["always"]),
    ("bundles", Layout(1, 1, 2, "interleaved"), ["except-last"]),
    ("vgg", Layout(1, 1, 2, "zb1p"), ["never", "always"]),
    ("unet", Layout(1, 1, 2, "gpipe"), ["always"]),
    ("vgg", Layout(1, 2, 2, "1f1b"), ["always"]),
    ("spikformer", Layout(2, 1, 2, "v-half"), ["always"]),
]


def _name(case: tuple[str, Layout, list[str]]) -> str:
    name, each, _ = case
    return f"{name}-d{each.data}t{each.tensor}p{each.pipeline}-{each.schedule}"


@pytest.mark.parametrize("case", CASES, ids=_name)
def test_no_bit_changes(ranks, case: tuple[str, Layout, list[str]]) -> None:
    name, layout, modes = case
    found = ranks(layout.world_size, _both, name, layout, modes)
    assert any(sum(spikes) for (_, spikes, _), *_ in found), "some neurons fire"
    for plain, *others in found:
        assert layout.tensor == 1 or plain[2].calls
        for mode, step in zip(modes, others, strict=True):
            assert step == plain, mode
