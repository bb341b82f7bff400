"""Ranks that share images by rows, from Python: a single sample over several ranks."""

from __future__ import annotations

from dataclasses import replace

import torch

from megasnn import Engine
from megasnn.models.vgg_dvs.dimensions import VggDvs
from tests.engine.test_engine import MODEL

MODELS = (
    replace(MODEL, image_size=16),
    VggDvs(channels="8,8,P,16", image_size=16, time_steps=2, num_classes=10),
)


def losses_of_one_sample() -> list[list[float]]:
    """Of steps on one sample by four ranks, in float32."""
    found = []
    for model in MODELS:
        images = torch.rand(1, *model.input_shape, generator=torch.Generator().manual_seed(3))
        flags = {"micro_batch_size": 1, "global_batch_size": 1, "train_iters": 10, "lr": 1e-2}
        layout = {"context_parallel_size": 4, "lr_decay_style": "constant", "deterministic": True}
        with Engine(model, **flags, **layout) as engine:
            found.append([engine.train_step(images, torch.tensor([3])).loss for _ in range(10)])
    return found


def test_a_sample_on_four_ranks(ranks) -> None:
    """Rows are what auto shares where there are fewer samples than ranks. The loss falls, and two runs give the same
    bits."""
    first, second = ranks(4, losses_of_one_sample), ranks(4, losses_of_one_sample)
    assert first == second and all(each == first[0] for each in first)
    for falling in first[0]:
        assert falling[-1] < 0.8 * falling[0]
