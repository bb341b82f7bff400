"""One training step of SpikingJelly's own Spikformer: the truth that every layout is compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib import get_data_path
from PIL import Image
from spikingjelly.activation_based import functional, neuron
from spikingjelly.activation_based.model.spikformer import Spikformer
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from megasnn.models.spikformer.weight_names import SPIKINGJELLY
from megasnn.models.weight_names import translated_tensors
from tests.distributed.whole import fill_mantissas

DIMS = dict(T=3, in_channels=3, patch_size=4, num_classes=5, embed_dims=32, num_heads=4, mlp_ratio=2.0, depths=2)
IMAGE_SIZE = 16


@dataclass
class ReferenceStep:
    """What the step gave, by SpikingJelly's names; weights are those behind the optimizer, where there is one."""

    state_before: dict[str, Tensor]
    loss: float
    logits: list[Tensor]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]
    firing: float
    spikes: int
    weights: dict[str, Tensor] = field(default_factory=dict)


def from_spikingjelly(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """A Spikformer's tensors by our names."""
    return translated_tensors(SPIKINGJELLY.to_ours(state_dict), state_dict)


@cache
def photograph() -> Tensor:
    """The photograph that comes with matplotlib, a JPEG, as `[3, height, width]` in float64."""
    with Image.open(Path(get_data_path(), "sample_data", "grace_hopper.jpg")) as image:
        return torch.from_numpy(np.array(image)).movedim(-1, 0).double() / 255


def photographs(samples: int, size: int) -> Tensor:
    """Square parts of the photograph, normalised, `[N, 3, size, size]` in float64.

    Real images have areas of one colour, in which neurons fire alike: what a convolution gives for the pixels of an
    area is equal, and the gradient of max pooling goes to the first of them, unless a sum was formed in another order
    at one of them.
    """
    whole, generator = photograph(), torch.Generator().manual_seed(7)
    parts = []
    for _ in range(samples):
        top, left = (int(torch.randint(0, side - size, (), generator=generator)) for side in whole.shape[1:])
        parts.append(whole[:, top : top + size, left : left + size])
    return (torch.stack(parts) - whole.mean()) / whole.std()


def data(samples: int = 11, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Photographs and labels."""
    labels = torch.randint(0, DIMS["num_classes"], (samples,), generator=torch.Generator().manual_seed(7))
    return photographs(samples, IMAGE_SIZE).to(dtype), labels


def with_other_norms(
    make: Callable[[], nn.Module],
    seed: int = 1,
    weights: tuple[float, float] = (0.8, 1.6),
    biases: tuple[float, float] = (0.2, 1.2),
) -> nn.Module:
    """A model with norm parameters away from their initial values, so that errors in them show; in float64."""
    torch.manual_seed(seed)
    model = make().double()
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            nn.init.uniform_(module.weight, *weights)
            nn.init.uniform_(module.bias, *biases)
    return model


def build() -> nn.Module:
    """A small Spikformer."""
    model = with_other_norms(lambda: Spikformer(img_size_h=IMAGE_SIZE, img_size_w=IMAGE_SIZE, **DIMS), seed=0)
    fill_mantissas(model)
    return model


def mean_over_time(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.mean(0), labels, reduction="sum")


def step(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    sizes: list[int],
    loss_sum: Callable[[Tensor, Tensor], Tensor] = mean_over_time,
) -> ReferenceStep:
    """Loss mean over all samples, micro-batch by micro-batch; norms' running statistics as if over all of them, call
    by call of those that a forward calls several times."""
    before = {name: value.detach().clone() for name, value in model.state_dict().items()}
    inputs: dict[str, list[Tensor]] = {}
    hooks = [
        module.register_forward_hook(
            lambda _m, args, _o, name=name: inputs.setdefault(name, []).append(args[0].detach().clone())
        )
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm)
    ]
    spikes: list[tuple[int, int]] = []
    hooks += [
        module.register_forward_hook(lambda _m, _a, out: spikes.append((int(out.sum()), out.numel())))
        for module in model.modules()
        if isinstance(module, (neuron.BaseNode, neuron.SimpleBaseNode))
    ]
    loss, logits = 0.0, []
    model.zero_grad()
    for x, y in zip(images.split(sizes), labels.split(sizes), strict=True):
        functional.reset_net(model)
        out = model(x)
        share = loss_sum(out, y) / len(labels)
        share.backward()
        loss += share.item()
        logits.append(out.detach())
    for hook in hooks:
        hook.remove()
    buffers = dict(before)
    for name, parts in inputs.items():
        channels, calls = len(before[f"{name}.weight"]), len(parts) // len(sizes)
        frames = [part if part.shape[1] == channels else part.flatten(0, 1) for part in parts]
        for call in range(calls):
            values = torch.cat([part.transpose(0, 1).flatten(1) for part in frames[call::calls]], dim=1)
            for kind, found in (("mean", values.mean(1)), ("var", values.var(1))):
                buffers[f"{name}.running_{kind}"] = 0.9 * buffers[f"{name}.running_{kind}"] + 0.1 * found
        buffers[f"{name}.num_batches_tracked"] = before[f"{name}.num_batches_tracked"] + calls
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    fired = sum(count for count, _ in spikes)
    firing = fired / sum(size for _, size in spikes)
    return ReferenceStep(before, loss, logits, gradients, buffers, firing, fired)
