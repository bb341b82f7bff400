"""The VGG's side of the parity tests: SpikingJelly's small network, and what a rank builds beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from spikingjelly.activation_based import functional, layer, surrogate
from spikingjelly.activation_based.examples.memopt.models import CIFAR10DVSVGG, VGGBlock
from torch import Tensor, nn

from megasnn.checkpoint.load import load_globals_into
from megasnn.kernels import NeuronSpec
from megasnn.layers import BuildContext, DropPath
from megasnn.losses.sums import cross_entropy_sum, mse_sum, tet_sum
from megasnn.models.build import describe
from megasnn.models.description import Built, LayerDescription, ModelDescription
from megasnn.models.layer import Layer
from megasnn.models.vgg_dvs.model import VggDvs, parse_channels
from megasnn.parallel_state import destroy_model_parallel
from megasnn.schedule import plan_schedule
from tests.distributed.whole import drawn
from tests.parity import spikingjelly_reference as reference
from tests.parity.ranks import Layout, RankStep, distributed, even_bounds, gathering, join, record_step

# Each kind of step: with pooling and without, to fewer channels than half (there the cheaper style is by row) and more.
CONFIG = VggDvs(channels="8,8,P,32,8,P,16,P", image_size=16, time_steps=3, num_classes=5)
CONVOLUTIONS, _ = parse_channels(CONFIG.channels)
NEURON = NeuronSpec(tau=1.333, decay_input=False, surrogate="atan")
SIZES = [3, 3, 3, 2]
SEED = 5
SHARE = 0.05  # of TET


@dataclass(frozen=True)
class Variant:
    """What of the model differs between tests."""

    dropout: float = 0.0
    drop_path: float = 0.0
    loss: str = "cross-entropy"


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross-entropy": cross_entropy_sum,
    "tet": partial(tet_sum, share=SHARE),
    "mse": mse_sum,
}


def data(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Event counts [N, T, 2, H, W] and labels."""
    generator = torch.Generator().manual_seed(3)
    shape = (sum(SIZES), CONFIG.time_steps, CONFIG.in_channels, CONFIG.image_size, CONFIG.image_size)
    frames = torch.poisson(torch.full(shape, 0.7), generator=generator).to(dtype)
    return frames, torch.randint(0, CONFIG.num_classes, (sum(SIZES),), generator=generator)


class _Masks(nn.Module):
    """Dropout in place of SpikingJelly's, with the masks that the key of each sample gives."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p, self.position = p, 0

    def forward(self, x: Tensor) -> Tensor:
        out = []
        for sample in x.unbind(1):
            uniform = drawn("dropout", "classifier.dropout", self.position, sample.numel(), SEED).view(sample.shape)
            out.append(sample * (uniform >= self.p) / (1 - self.p))
            self.position += 1
        return torch.stack(out, dim=1)


class _Paths(nn.Module):
    """Drop path in front of the classifier, as the key of each sample gives it."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p, self.position = p, 0

    def forward(self, x: Tensor) -> Tensor:
        places = range(self.position, self.position + x.shape[1])
        self.position = places.stop
        kept = torch.cat([drawn("drop path", "drop", place, 1, SEED) for place in places]) >= self.p
        return x * kept.view(1, -1, 1) / (1 - self.p)


class SmallVgg(nn.Module):
    """CIFAR10DVSVGG with other channels: its blocks, its classifier, its forward."""

    def __init__(self, dropout: float, drop_path: float) -> None:
        super().__init__()
        options = dict(tau=1.333, decay_input=False, detach_reset=True, surrogate_function=surrogate.ATan())
        blocks, inputs = [], CONFIG.in_channels
        for channels, pool in CONVOLUTIONS:
            blocks.append(VGGBlock(inputs, channels, 3, 1, 1, pool, step_mode="m", **options))
            inputs = channels
        self.features = nn.Sequential(*blocks, layer.AvgPool2d(2))
        linear = nn.Linear(inputs * 2**2, CONFIG.num_classes)
        masks = [*([_Paths(drop_path)] if drop_path else []), *([_Masks(dropout)] if dropout else [])]
        self.classifier = nn.Sequential(*([nn.Sequential(*masks)] if masks else []), linear)
        functional.set_step_mode(self, "m")

    forward = CIFAR10DVSVGG.forward


def build(dropout: float, drop_path: float) -> SmallVgg:
    """With norm parameters away from their initial values, so that errors in them show."""
    torch.manual_seed(1)
    model = SmallVgg(dropout, drop_path).double()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.8, 1.6)
            nn.init.uniform_(module.bias, 0.1, 0.6)
    return model


def _reference_loss(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    """The losses as their papers' programs write them, for a mean over the samples."""

    def tet(logits: Tensor, labels: Tensor) -> Tensor:
        each = sum(F.cross_entropy(step, labels) for step in logits) / len(logits)
        return len(labels) * ((1 - SHARE) * each + SHARE * F.mse_loss(logits, torch.ones_like(logits)))

    def mse(logits: Tensor, labels: Tensor) -> Tensor:
        return len(labels) * F.mse_loss(logits.mean(0), F.one_hot(labels, CONFIG.num_classes).double())

    return {"cross-entropy": reference.mean_over_time, "tet": tet, "mse": mse}[name]


def truth(variant: Variant, sizes: Sequence[int] = tuple(SIZES)) -> reference.ReferenceStep:
    """One step of SpikingJelly's network, on micro-batches of these sizes."""
    model, loss = build(variant.dropout, variant.drop_path), _reference_loss(variant.loss)
    return reference.step(model, *data(), list(sizes), loss)


def _with_drop_path(model: ModelDescription, p: float) -> ModelDescription:
    """With drop path before the classifier."""

    def build(context: BuildContext) -> list[Built]:
        *layers, last = model.build(context)
        return [*layers, Built(Layer("drop", DropPath(p, "drop", context), "drop"), *layers[-1][1:]), last]

    drop = LayerDescription("drop", "drop", model.layers[-2].entries)
    return replace(model, layers=(*model.layers[:-1], drop, model.layers[-1]), build=build)


def one_step(
    layout: Layout,
    variant: Variant,
    weights: dict[str, Tensor],
    dtype: torch.dtype = torch.float64,
    backend: str = "auto",
    micro_batch_size: int = SIZES[0],
) -> RankStep:
    """One of our steps, on every rank of an initialised world."""
    state = join(layout)
    try:
        config = VggDvs(
            channels=CONFIG.channels,
            image_size=CONFIG.image_size,
            time_steps=CONFIG.time_steps,
            num_classes=CONFIG.num_classes,
            dropout=variant.dropout,
        )
        model = describe(config, NEURON)
        if variant.drop_path:
            model = _with_drop_path(model, variant.drop_path)
        context = layout.build_context(state, dtype, backend, SEED)
        plan = plan_schedule(layout.schedule, layout.pipeline, layout.chunks)
        bounds = even_bounds(len(model.layers), len(plan.placement))
        plan = gathering(plan, model, bounds, context, layout)
        engine = distributed(model, state, context, bounds, plan)
        engine.loss = LOSSES[variant.loss]
        load_globals_into(engine.tensors, CONFIG.from_spikingjelly(weights), state.world.handle)
        return record_step(engine, state, *data(dtype), micro_batch_size)
    finally:
        destroy_model_parallel()
