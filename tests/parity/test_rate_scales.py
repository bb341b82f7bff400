"""Rates of layers and of named parameters, options of optimizers: SpikingJelly's model under torch's own optimizers.

timm's rule is written here once more, over SpikingJelly's names: the stem is group 0, block i group i + 1, the head the
last; a group's factor is decay ** (last - group) (timm/optim/_param_groups.py, `param_groups_layer_decay`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from spikingjelly.activation_based import functional
from spikingjelly.activation_based.model.spikformer import Spikformer as TheirSpikformer
from torch import Tensor, nn

from megasnn import Engine
from megasnn.config import OptimizerConfig
from megasnn.layers import ConvNormNeuron
from megasnn.layers.layer import Layer, layer
from megasnn.models.build import describe_model
from megasnn.models.spikformer.model import Spikformer
from megasnn.optim.scales import learning_rate_scales
from tests.models.networks import between
from tests.parity.ranks import TOLERANCE, error
from tests.parity.spikingjelly_reference import DIMS, IMAGE_SIZE, data, with_other_norms

DEPTH = DIMS["depths"]
MODEL = Spikformer(
    image_size=IMAGE_SIZE, in_channels=3, num_classes=5, patch_size=4, embed_dim=32, depth=DEPTH, num_heads=4,
    mlp_ratio=2, time_steps=3,
)  # fmt: skip
LR, DECAY, LAYER_DECAY, STEPS, SAMPLES = 1e-2, 0.1, 0.7, 3, 8
FLAGS: dict[str, Any] = {
    **{"micro_batch_size": 4, "global_batch_size": SAMPLES, "train_iters": STEPS, "precision": "fp64"},
    **{"lr": LR, "lr_decay_style": "constant", "weight_decay": DECAY, "clip_grad": 0.0},
    **{"layer_decay": LAYER_DECAY, "lr_scale": "head.*=3, *.mlp.*=0.5, blocks.1.*=2"},
}
Optimizer = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
OPTIONS: dict[str, tuple[dict[str, Any], Optimizer]] = {
    "adamw": (
        {"adam_beta1": 0.8, "adam_beta2": 0.95, "adam_eps": 1e-4},
        lambda groups: torch.optim.AdamW(groups, betas=(0.8, 0.95), eps=1e-4),
    ),
    "sgd": (
        {"sgd_momentum": 0.7, "sgd_nesterov": True},
        lambda groups: torch.optim.SGD(groups, momentum=0.7, nesterov=True),
    ),
    "plain sgd": ({"optimizer": "sgd", "sgd_momentum": 0.0}, torch.optim.SGD),
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tensor": (2, {"tensor_model_parallel_size": 2}),
    "pipeline": (2, {"pipeline_model_parallel_size": 2, "pipeline_schedule": "1f1b"}),
    "optimizer": (2, {"use_distributed_optimizer": True}),
    "weights": (2, {"weight_parallel_size": 2}),
}


def their_scale(name: str) -> float:
    """timm's factor of a parameter of SpikingJelly's, times those of the patterns."""
    group = {"patch_embed": 0, "head": DEPTH + 1}.get(name.partition(".")[0])
    group = int(name.split(".")[1]) + 1 if group is None else group
    scale = LAYER_DECAY ** (DEPTH + 1 - group)
    for part, factor in (("head.", 3), (".mlp.", 0.5), ("blocks.1.", 2)):
        if part in name:
            scale *= factor
    return scale


@cache
def reference(kind: str) -> tuple[dict[str, Tensor], dict[str, Tensor], list[float]]:
    """SpikingJelly's model before and after the steps, by our names, and the losses."""
    model = with_other_norms(lambda: TheirSpikformer(img_size_h=IMAGE_SIZE, img_size_w=IMAGE_SIZE, **DIMS))
    before = MODEL.from_spikingjelly({name: value.clone() for name, value in model.state_dict().items()})
    groups = [
        {"params": [each], "lr": LR * their_scale(name), "weight_decay": DECAY * (each.ndim > 1)}
        for name, each in model.named_parameters()
    ]
    optimizer = OPTIONS[kind][1](groups)
    images, labels = data(SAMPLES)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses.append(0.0)
        for part, of_part in zip(images.split(4), labels.split(4), strict=True):
            functional.reset_net(model)
            loss = F.cross_entropy(model(part).mean(0), of_part, reduction="sum") / SAMPLES
            loss.backward()
            losses[-1] += loss.item()
        optimizer.step()
    return before, MODEL.from_spikingjelly(model.state_dict()), losses


def trained(kind: str, start: dict[str, Tensor], layout: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    options = {"optimizer": kind, **OPTIONS[kind][0]}
    with Engine(MODEL, **FLAGS, **options, **layout) as engine:
        engine.load_state_dict(start)
        losses = [engine.train_step(*data(SAMPLES)).loss for _ in range(STEPS)]
        return losses, engine.state_dict()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", OPTIONS)
def test_three_steps_equal_torchs(ranks, kind: str, layout: str) -> None:
    before, after, losses = reference(kind)
    size, flags = LAYOUTS[layout]
    for found, weights in ranks(size, trained, kind, before, flags):
        assert found == pytest.approx(losses, rel=TOLERANCE)
        for name in (entry.name for entry in describe_model(MODEL).tensors if entry.is_parameter):
            assert error(weights[name], after[name]) < TOLERANCE, name
            assert not torch.equal(weights[name], before[name]), name


def test_a_layer_of_a_smaller_rate_moves_less() -> None:
    """One step of Adam moves each element by about the rate."""
    before = reference("adamw")[0]
    flags = {**FLAGS, "lr_scale": None, "weight_decay": 0.0, "layer_decay": 0.1}
    with Engine(MODEL, **flags) as engine:
        engine.load_state_dict(before)
        engine.train_step(*data(SAMPLES))
        after = engine.state_dict()
    for name, rate in (("head.bias", LR), ("blocks.1.mlp.fc2.conv.weight", LR / 10)):
        moved = (after[name] - before[name]).abs()
        assert moved.median().item() == pytest.approx(rate, rel=1e-3)


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--lr-scale heads\.\*=10 matches no trained parameter .* head\.bias"):
        Engine(MODEL, **{**FLAGS, "lr_scale": "heads.*=10"})


def with_a_pool() -> Iterable[Layer]:
    yield layer("pool", nn.MaxPool2d(2))
    yield layer("next", ConvNormNeuron(4, 4))


def test_a_layer_without_parameters_is_no_layer_group() -> None:
    """timm numbers groups of parameters, too."""
    scales = learning_rate_scales(OptimizerConfig(layer_decay=0.5), describe_model(between(with_a_pool)))
    assert (scales["stem.conv.weight"], scales["next.norm.bias"], scales["head.weight"]) == (0.25, 0.5, 1.0)


def test_a_rate_of_ones_own_is_scaled_too() -> None:
    with Engine(MODEL, lr_schedule=lambda step: LR, micro_batch_size=4, lr_scale="head.*=0", layer_decay=0.5) as engine:
        before = engine.state_dict()
        engine.train_step(*data(SAMPLES, torch.float32))
        after = engine.state_dict()
    assert torch.equal(after["head.weight"], before["head.weight"])
    assert not torch.equal(after["blocks.0.mlp.fc1.conv.weight"], before["blocks.0.mlp.fc1.conv.weight"])
