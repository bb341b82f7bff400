"""Two float64 steps of both models beside plain PyTorch on the CPU. `-m gpu` runs them on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megasnn.engine import Engine
from megasnn.models.model import Model
from megasnn.models.spikformer.model import Spikformer
from megasnn.models.vgg_dvs.model import VggDvs

GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))
DEVICES = [pytest.param("cpu", id="cpu"), pytest.param("cuda", id="gpu", marks=GPU)]
SAMPLES = 6
FLAGS: dict[str, Any] = {
    "micro_batch_size": 3,
    "global_batch_size": SAMPLES,
    "precision": "fp64",
    "lr": 1e-2,
    "train_iters": 2,
}
CLOSE = 1e-9
MODELS: dict[str, Model] = {
    "spikformer": Spikformer(embed_dim=32, depth=2, num_heads=4, patch_size=4, image_size=16, num_classes=5),
    "vgg_dvs": VggDvs(channels="8,P,16,P", image_size=16, time_steps=4, num_classes=5),
}


def trained(model: Model, device: str, backend: str) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of two steps with AdamW, and weights and buffers afterwards."""
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(SAMPLES, *model.input_shape, generator=generator)
    labels = torch.randint(0, model.num_classes, (SAMPLES,), generator=generator)
    with Engine(model, device=device, neuron_backend=backend, **FLAGS) as engine:
        losses = [engine.train_step(images, labels).loss for _ in range(2)]
        return losses, engine.state_dict()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODELS)
def test_two_steps(name: str, device: str) -> None:
    wanted_losses, wanted = trained(MODELS[name], "cpu", "torch")
    losses, tensors = trained(MODELS[name], device, "auto")
    assert losses == pytest.approx(wanted_losses, rel=CLOSE)
    assert tensors.keys() == wanted.keys()
    for tensor_name, expected in wanted.items():
        scale = max(float(expected.double().abs().max()), 1.0)
        difference = float((tensors[tensor_name].double() - expected.double()).abs().max())
        assert difference <= CLOSE * scale, tensor_name
