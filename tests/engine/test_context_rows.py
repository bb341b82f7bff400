"""Ranks that share images by rows, from Python: a single sample over several ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megasnn import Engine
from megasnn.models.model import Model
from megasnn.models.vgg_dvs.dimensions import VggDvs
from tests.engine.test_engine import MODEL

MODELS: dict[str, Model] = {
    "spikformer": replace(MODEL, image_size=16),
    "vgg": VggDvs(channels="8,8,P,16", image_size=16, time_steps=2, num_classes=10),
}


def losses_of_one_sample(model: Model) -> list[float]:
    """Of steps on one sample by four ranks, in float32."""
    images = torch.rand(1, *model.input_shape, generator=torch.Generator().manual_seed(3))
    flags = {"micro_batch_size": 1, "global_batch_size": 1, "train_iters": 10, "lr": 1e-2, "lr_decay_style": "constant"}
    with Engine(model, **flags, context_parallel_size=4, deterministic=True) as engine:
        return [engine.train_step(images, torch.tensor([3])).loss for _ in range(8)]


@pytest.mark.parametrize("name", ["spikformer", pytest.param("vgg", marks=pytest.mark.matrix)])
def test_a_sample_on_four_ranks(ranks, name: str) -> None:
    """Rows are what auto shares where there are fewer samples than ranks. The loss falls, and two runs give the same
    bits."""
    first, second = (ranks(4, losses_of_one_sample, MODELS[name]) for _ in range(2))
    assert first == second and all(each == first[0] for each in first)
    assert first[0][-1] < 0.8 * first[0][0]
