"""The published recipes: three steps of a run that loads one by its name, and the same by torch's own optimizers.

The optimizers, their parameter groups and their rates are written here once more, from what was published
(docs/recipes.md says where), and the models are SpikingJelly's. What is fed is ours: the samples as a run has changed
and mixed them.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from spikingjelly.activation_based import functional, layer, neuron, surrogate
from spikingjelly.activation_based.model.qkformer import QKFormer
from spikingjelly.activation_based.model.spikformer import Spikformer
from torch import Tensor, nn

from megasnn.config import PretrainConfig, validate
from megasnn.data import RankBatch
from megasnn.engine.trainer import Trainer
from megasnn.models.registry import MODELS
from megasnn.parallel_state import destroy_model_parallel, initialize_model_parallel
from megasnn.pipeline.microbatch_state import MicroBatchInput
from megasnn.pretraining import configuration
from megasnn.telemetry.records import StepResult
from megasnn.training.loop import TrainingRun
from tests.data.shard_files import write_shard
from tests.parity.zoo import their_sew_resnet

STEPS, SAMPLES, CLASSES = 3, 4, 5
SMALL = (
    f"--num-classes {CLASSES} --time-steps 2 --precision fp64 --micro-batch-size 2 --global-batch-size {SAMPLES} "
    f"--num-workers 0 --exit-interval {STEPS} --eval-iters 0"
).split()
TRANSFORMER = "--embed-dim 32 --mlp-ratio 2"


@dataclass(frozen=True)
class Published:
    """
    Attributes:
        flags: dimensions for a CPU.
        reference: makes SpikingJelly's model of these dimensions.
        optimizer: as the publication makes it; takes the model.
        rate: of an epoch, from 0. An epoch has one step here.
        smoothing: of the labels.
    """

    flags: str
    reference: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    rate: Callable[[int], float]
    smoothing: float = 0.0


def _adamw(lr: float, weight_decay: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """timm's groups: biases and whatever has one dimension do not decay."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        named = list(model.named_parameters())
        still = [p for name, p in named if p.ndim == 1 or name.endswith(".bias")]
        decayed = [p for name, p in named if p.ndim > 1 and not name.endswith(".bias")]
        groups = [{"params": still, "weight_decay": 0.0}, {"params": decayed, "weight_decay": weight_decay}]
        return torch.optim.AdamW(groups, lr=lr)

    return make


def _timm(lr: float, warmup_lr: float, epochs: int, warmup: int = 20, min_lr: float = 1e-5) -> Callable[[int], float]:
    """timm's cosine, in whole epochs: linear from warmup_lr, then as if the cosine had begun with the training."""

    def rate(epoch: int) -> float:
        if epoch < warmup:
            return warmup_lr + epoch * (lr - warmup_lr) / warmup
        return min_lr + (lr - min_lr) * (1 + math.cos(math.pi * min(epoch, epochs) / epochs)) / 2

    return rate


def _spikformer(patch_size: int, image_size: int) -> Callable[[], nn.Module]:
    size = dict(img_size_h=image_size, img_size_w=image_size, patch_size=patch_size)
    model = dict(T=2, in_channels=3, num_classes=CLASSES, embed_dims=32, num_heads=4, mlp_ratio=2.0, depths=1)
    return lambda: Spikformer(**size, **model)


class _Small(nn.Module):
    """A patch embedding of the authors' model for CIFAR, with SpikingJelly's layers and names."""

    def __init__(self, inputs: int, outputs: int, begins: bool) -> None:
        super().__init__()
        middle = outputs // 2 if begins else outputs
        self.conv1, self.bn1, self.lif1 = _unit(inputs, middle, 3)
        self.conv2, self.bn2, self.lif2 = _unit(middle, outputs, 3)
        self.pool = nn.Identity() if begins else layer.MaxPool2d(3, stride=2, padding=1, step_mode="m")
        self.shortcut = nn.Sequential(*_unit(middle if begins else inputs, outputs, 1, stride=1 if begins else 2))
        self.begins = begins

    def forward(self, x: Tensor) -> Tensor:
        y = self.lif1(self.bn1(self.conv1(x)))
        beside = self.shortcut(y if self.begins else x)
        return self.lif2(self.pool(self.bn2(self.conv2(y)))) + beside


def _unit(inputs: int, outputs: int, size: int, stride: int = 1) -> tuple[nn.Module, nn.Module, nn.Module]:
    conv = layer.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False, step_mode="m")
    return conv, layer.BatchNorm2d(outputs, step_mode="m"), neuron.LIFNode(detach_reset=True, step_mode="m")


def _qkformer() -> nn.Module:
    size = dict(embed_dims=32, num_heads=(2, 2, 2), depths=(1, 1, 1), mlp_ratio=2.0)
    model = QKFormer(T=2, num_classes=CLASSES, detach_reset=True, **size)
    channels = (3, 8, 16, 32)
    for stage in range(3):
        setattr(model, f"patch_embed{stage + 1}", _Small(channels[stage], channels[stage + 1], begins=stage == 0))
    return model


def _sew_resnet() -> nn.Module:
    model = their_sew_resnet(spiking_neuron=neuron.IFNode, surrogate_function=surrogate.ATan())
    model.register_forward_pre_hook(lambda _, inputs: inputs[0].expand(2, *inputs[0].shape))
    return model


def _cosine(lr: float, epochs: int) -> Callable[[int], float]:
    """torch's CosineAnnealingLR, once an epoch."""

    def rate(epoch: int) -> float:
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=lr)
        course = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)
        for _ in range(epoch):
            optimizer.step()
            course.step()
        return float(course.get_last_lr()[0])

    return rate


PUBLISHED = {
    "spikformer/cifar10": Published(
        f"{TRANSFORMER} --depth 1 --num-heads 4 --image-size 16",
        _spikformer(4, 16),
        _adamw(5e-4, 6e-2),
        _timm(5e-4, 1e-5, epochs=300),
        smoothing=0.1,
    ),
    "spikformer/imagenet": Published(
        f"{TRANSFORMER} --depth 1 --num-heads 4 --image-size 32",
        _spikformer(16, 32),
        _adamw(5e-4, 5e-2),
        _timm(5e-4, 1e-6, epochs=300),
        smoothing=0.1,
    ),
    "qkformer/cifar10": Published(
        f"{TRANSFORMER} --depths 1,1,1 --num-heads 2,2,2 --image-size 16",
        _qkformer,
        _adamw(1e-3, 6e-2),
        _timm(1e-3, 1e-5, epochs=400),
        smoothing=0.1,
    ),
    "sew_resnet/imagenet": Published(
        "--image-size 16",
        _sew_resnet,
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.0),
        _cosine(0.1, epochs=320),
    ),
}


Batches = list[list[tuple[Tensor, Tensor]]]
"""Images and labels of the micro-batches of each step."""


def shard(folder: Path, count: int = SAMPLES) -> Path:
    """An epoch: a few small photographs."""
    generator = np.random.default_rng(5)
    samples = {}
    for number in range(count):
        buffer = io.BytesIO()
        coarse = Image.fromarray(generator.integers(0, 256, (6, 6, 3), dtype=np.uint8))
        coarse.resize((40, 36), Image.Resampling.BICUBIC).save(buffer, "PNG")
        samples[f"s{number}"] = {"png": buffer.getvalue(), "cls": str(number % CLASSES).encode()}
    return write_shard(folder / "train.tar", samples)


def recipe(name: str, *flags: str) -> PretrainConfig:
    """The configuration that a command line with `--config name` gives."""
    return configuration(MODELS[name.partition("/")[0]], ["--config", name, *flags])


def train_recipe(name: str, *flags: str) -> tuple[Batches, list[float], dict[str, Tensor]]:
    """What a run of a recipe by its name trains on, its losses, and all tensors at the end."""
    config, step = recipe(name, *flags), Trainer.take_step
    batches, losses = list[list[Any]](), list[float]()

    def watched(self: Trainer, micro_batches: Sequence[MicroBatchInput], batch: RankBatch) -> StepResult:
        batches.append([(micro.inputs["images"], micro.targets) for micro in micro_batches])
        result = step(self, micro_batches, batch)
        losses.append(result.loss)
        return result

    validate(config, 1)
    state = initialize_model_parallel()
    try:
        with mock.patch.object(Trainer, "take_step", watched):
            run = TrainingRun(config, state)
            run.train()
        tensors = run.engine.state_dict()
        run.close()
        return batches, losses, tensors
    finally:
        destroy_model_parallel()


def train_published(published: Published, model: nn.Module, batches: Batches) -> list[float]:
    """Trains SpikingJelly's model on the same; the losses."""
    optimizer, losses = published.optimizer(model), list[float]()
    for epoch, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = published.rate(epoch)
        optimizer.zero_grad()
        losses.append(0.0)
        for images, labels in batch:
            functional.reset_net(model)
            logits = model(images)
            logits = logits if logits.ndim == 2 else logits.mean(0)
            targets = labels if labels.is_floating_point() else F.one_hot(labels.reshape(-1), CLASSES)
            targets = (1 - published.smoothing) * targets + published.smoothing / CLASSES
            loss = -(targets * logits.log_softmax(-1)).sum() / SAMPLES
            loss.backward()
            losses[-1] += loss.item()
        optimizer.step()
    return losses
