"""Small VGGs of SpikingJelly's beside ours, with dropout, drop path and other losses."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from spikingjelly.activation_based import functional, layer, surrogate
from spikingjelly.activation_based.examples.memopt.models import CIFAR10DVSVGG, VGGBlock
from torch import Tensor, nn

from megasnn.layers import DropPath
from megasnn.layers.layer import Layer
from megasnn.layers.layer import layer as named
from megasnn.models.losses import mse_sum, tet_sum
from megasnn.models.vgg_dvs.model import VggDvs, parse_channels
from tests.distributed.whole import drawn
from tests.parity.beside import Case
from tests.parity.spikingjelly_reference import with_other_norms

SHARE = 0.05  # of TET
SEED = 5  # of what is left out


@dataclass(frozen=True, kw_only=True)
class Small(VggDvs):
    """Each kind of step: with pooling and without, to fewer channels than half (there the cheaper style is by row) and
    more; and samples left out in front of the classifier."""

    channels: str = "8,8,P,32,8,P,16,P"
    image_size: int = 16
    time_steps: int = 3
    num_classes: int = 5
    dropout: float = 0.0
    drop_path: float = 0.0
    dialects = VggDvs.dialects  # those beside that class

    def layers(self) -> Iterable[Layer]:
        *features, classifier = super().layers()
        yield from features
        if self.drop_path:
            yield named("drop", DropPath(self.drop_path, "drop"))
        yield classifier


def data() -> tuple[Tensor, Tensor]:
    """Event counts [N, T, 2, H, W] and labels."""
    generator = torch.Generator().manual_seed(3)
    frames = torch.poisson(torch.full((11, *Small().input_shape), 0.7, dtype=torch.float64), generator=generator)
    return frames, torch.randint(0, Small().num_classes, (11,), generator=generator)


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
        kept = torch.cat([drawn("drop path", "drop", coordinates, 1, SEED) for coordinates in places]) >= self.p
        return x * kept.view(1, -1, 1) / (1 - self.p)


class SmallVgg(nn.Module):
    """CIFAR10DVSVGG with other channels: its blocks, its classifier, its forward but for the first two axes."""

    def __init__(self, model: Small) -> None:
        super().__init__()
        options = dict(tau=1.333, decay_input=False, detach_reset=True, surrogate_function=surrogate.ATan())
        blocks, inputs = [], model.in_channels
        for channels, pool in parse_channels(model.channels)[0]:
            blocks.append(VGGBlock(inputs, channels, 3, 1, 1, pool, step_mode="m", **options))
            inputs = channels
        self.features = nn.Sequential(*blocks, layer.AvgPool2d(2))
        linear = nn.Linear(inputs * 2**2, model.num_classes)
        masks = [_Paths(model.drop_path)] * (model.drop_path > 0) + [_Masks(model.dropout)] * (model.dropout > 0)
        self.classifier = nn.Sequential(*([nn.Sequential(*masks)] if masks else []), linear)
        functional.set_step_mode(self, "m")

    def forward(self, x: Tensor) -> Tensor:
        return CIFAR10DVSVGG.forward(self, x.transpose(0, 1))


def _tet(logits: Tensor, labels: Tensor) -> Tensor:
    """As the paper's program writes it, for a mean over the samples."""
    each = sum(F.cross_entropy(step, labels) for step in logits) / len(logits)
    return len(labels) * ((1 - SHARE) * each + SHARE * F.mse_loss(logits, torch.ones_like(logits)))


def _mse(logits: Tensor, labels: Tensor) -> Tensor:
    return len(labels) * F.mse_loss(logits.mean(0), F.one_hot(labels, Small().num_classes).double())


def _case(model: Small) -> Case:
    theirs = partial(with_other_norms, partial(SmallVgg, model), biases=(0.1, 0.6))
    return Case(model, theirs, batch=data, sizes=(3, 3, 3, 2), firing=0.5)


PLAIN, DROPOUT, DROP_PATH = _case(Small()), _case(Small(dropout=0.3)), _case(Small(dropout=0.3, drop_path=0.4))
LOSSES = {
    "tet": replace(DROPOUT, loss=(partial(tet_sum, share=SHARE), _tet)),
    "mse": replace(DROPOUT, loss=(mse_sum, _mse)),
}
