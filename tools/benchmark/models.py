"""The models that the benchmark measures: ours, and SpikingJelly's own of the same dimensions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from spikingjelly.activation_based import functional, layer, surrogate
from spikingjelly.activation_based.examples.memopt.models import CIFAR10DVSVGG, VGGBlock
from spikingjelly.activation_based.model import spikformer
from torch import Tensor, nn

from megasnn.config import PretrainConfig
from megasnn.models.model import run_config
from megasnn.models.spikformer.dimensions import Spikformer
from megasnn.models.vgg_dvs.dimensions import VggDvs

Dimensions = Spikformer | VggDvs
ModelName = Literal["spikformer_ti", "spikformer_s", "spikformer_cifar10", "vgg_dvs"]
SpikingJellyName = Literal["spikformer_ti", "spikformer_s", "spikformer_cifar10", "cifar10_dvs_vgg"]

# Smaller images than those of the Spikformers for ImageNet: a step takes seconds on one core.
IMAGE_SIZES = {"spikformer_ti": 64, "spikformer_s": 64, "spikformer_cifar10": 32}


def dimensions_of(model: ModelName | SpikingJellyName) -> Dimensions:
    """Those that a model is measured with, by our name or by SpikingJelly's."""
    if model == "vgg_dvs" or model == "cifar10_dvs_vgg":
        return VggDvs()
    return Spikformer(variant=model, num_classes=10, image_size=IMAGE_SIZES[model])


def configuration(model: Dimensions, **parts: Any) -> PretrainConfig:
    """A run of this model, with the neurons that SpikingJelly's has."""
    return run_config(type(model))(model=model, **parts)


def spikingjelly_model(model: Dimensions) -> nn.Module:
    """SpikingJelly's, on images `[N, C, H, W]` or event frames `[N, T, C, H, W]`."""
    if isinstance(model, VggDvs):
        return _Vgg(model)
    return spikformer.Spikformer(
        T=model.time_steps,
        in_channels=model.in_channels,
        img_size_h=model.image_size,
        img_size_w=model.image_size,
        patch_size=model.patch_size,
        num_classes=model.num_classes,
        embed_dims=model.embed_dim,
        num_heads=model.num_heads,
        mlp_ratio=model.mlp_ratio,
        depths=model.depth,
    )


def tiny(model: Dimensions) -> Dimensions:
    """The same kind of model, of a few thousand parameters."""
    if isinstance(model, VggDvs):
        return replace(model, channels="8,P,8,P", image_size=8)
    return replace(model, embed_dim=32, depth=1, num_heads=2, image_size=2 * model.patch_size)


class _Vgg(nn.Module):
    """CIFAR10DVSVGG, whose channels and size are fixed, for other ones: its blocks, its classifier, its forward."""

    def __init__(self, model: VggDvs) -> None:
        super().__init__()
        neuron = dict(tau=1.333, decay_input=False, detach_reset=True, surrogate_function=surrogate.ATan())
        blocks: list[nn.Module] = []
        channels = model.in_channels
        for block in model.blocks:
            blocks.append(VGGBlock(channels, block.channels, 3, 1, 1, block.pool, step_mode="m", **neuron))
            channels = block.channels
        self.features = nn.Sequential(*blocks, *([layer.AvgPool2d(2)] if model.final_pool else []))
        linear = nn.Linear(channels * model.final_size**2, model.num_classes)
        self.classifier = nn.Sequential(nn.Dropout(model.dropout), linear)
        functional.set_step_mode(self, "m")

    def forward(self, frames: Tensor) -> Tensor:
        return CIFAR10DVSVGG.forward(self, frames)
