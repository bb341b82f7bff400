"""The structure of the published Spikformer, as far as its state_dict and what it computes are concerned.

Written from the paper's description and the names of the published weights. The stem pools before the neuron, as
SpikingJelly does; the published code does it behind.
"""

from __future__ import annotations

import torch
from spikingjelly.activation_based import functional, neuron
from torch import Tensor, nn

QKV = ("q", "k", "v")


def lif(threshold: float = 1.0) -> neuron.LIFNode:
    return neuron.LIFNode(tau=2.0, v_threshold=threshold, detach_reset=True, step_mode="m")


class Named(nn.Module):
    """Adds convolution and norm under the published names; `unit` applies them to `[T, N, C, L or H, W]`."""

    def add(self, conv: str, norm: str, layer: nn.Module, channels: int) -> None:
        self.add_module(conv, layer)
        self.add_module(norm, nn.BatchNorm2d(channels) if isinstance(layer, nn.Conv2d) else nn.BatchNorm1d(channels))

    def unit(self, conv: str, norm: str, x: Tensor) -> Tensor:
        layer, flat = getattr(self, conv), x.flatten(0, 1)
        if isinstance(layer, nn.Linear):
            y = layer(flat.flatten(2).transpose(1, 2)).transpose(1, 2)
        elif isinstance(layer, nn.Conv1d):
            y = layer(flat.flatten(2))
        else:
            y = layer(flat)
        y = getattr(self, norm)(y)
        return y.unflatten(0, x.shape[:2])


def pointwise(kind: str, inputs: int, outputs: int, spatial: int, bias: bool) -> nn.Module:
    if kind == "cifar10":
        return nn.Linear(inputs, outputs)
    conv = nn.Conv2d if spatial == 2 else nn.Conv1d
    return conv(inputs, outputs, 1, bias=bias)


class Stem(Named):
    def __init__(self, channels: int, dim: int, pool_from: int) -> None:
        super().__init__()
        self.pool_from = pool_from
        sizes = [channels, dim // 8, dim // 4, dim // 2, dim]
        self.names = [(f"proj_conv{n or ''}", f"proj_bn{n or ''}") for n in range(4)]
        for (conv, norm), inputs, outputs in zip(self.names, sizes, sizes[1:], strict=False):
            self.add(conv, norm, nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), outputs)
        self.add("rpe_conv", "rpe_bn", nn.Conv2d(dim, dim, 3, padding=1, bias=False), dim)

    def forward(self, x: Tensor) -> Tensor:
        for stage, (conv, norm) in enumerate(self.names):
            x = self.unit(conv, norm, x)
            x = lif()(pool(x) if stage >= self.pool_from else x)
        return x + lif()(self.unit("rpe_conv", "rpe_bn", x))


def pool(x: Tensor) -> Tensor:
    return nn.functional.max_pool2d(x.flatten(0, 1), 3, 2, 1).unflatten(0, x.shape[:2])


class Attention(Named):
    def __init__(self, kind: str, dim: int, heads: int) -> None:
        super().__init__()
        self.kind, self.heads = ("linear" if kind == "cifar10" else "conv"), heads
        for part in QKV:
            self.add(f"{part}_{self.kind}", f"{part}_bn", pointwise(kind, dim, dim, 1, bias=False), dim)
        self.add(f"proj_{self.kind}", "proj_bn", pointwise(kind, dim, dim, 1, bias=True), dim)

    def forward(self, x: Tensor) -> Tensor:
        steps, samples, channels, height, width = x.shape
        heads = (steps, samples, self.heads, channels // self.heads, height * width)
        q, k, v = (lif()(self.unit(f"{part}_{self.kind}", f"{part}_bn", x)).reshape(heads) for part in QKV)
        attended = (q.transpose(-1, -2) @ k @ v.transpose(-1, -2) * 0.125).transpose(-1, -2)
        y = lif(0.5)(attended.reshape(steps, samples, channels, height * width))
        return lif()(self.unit(f"proj_{self.kind}", "proj_bn", y).flatten(3)).reshape(x.shape)


class MLP(Named):
    def __init__(self, kind: str, dim: int, hidden: int) -> None:
        super().__init__()
        self.kind = "linear" if kind == "cifar10" else "conv"
        for layer, inputs, outputs in ((1, dim, hidden), (2, hidden, dim)):
            self.add(f"fc{layer}_{self.kind}", f"fc{layer}_bn", pointwise(kind, inputs, outputs, 2, True), outputs)

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for layer in (1, 2):
            y = lif()(self.unit(f"fc{layer}_{self.kind}", f"fc{layer}_bn", y))
        return y.reshape(x.shape)


class Block(nn.Module):
    def __init__(self, kind: str, dim: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn, self.mlp = Attention(kind, dim, heads), MLP(kind, dim, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        return x + self.mlp(x)


class PublishedSpikformer(nn.Module):
    def __init__(self, kind: str, dim: int = 16, depth: int = 2, heads: int = 2) -> None:
        super().__init__()
        self.patch_embed = Stem(3, dim, pool_from=2 if kind == "cifar10" else 0)
        self.block = nn.ModuleList(Block(kind, dim, heads, 4 * dim) for _ in range(depth))
        self.head = nn.Linear(dim, 5)

    def forward(self, images: Tensor) -> Tensor:
        """Images `[N, C, H, W]` shown twice -> logits `[T, N, classes]`."""
        functional.reset_net(self)
        x = self.patch_embed(images.unsqueeze(0).repeat(2, 1, 1, 1, 1))
        for block in self.block:
            x = block(x)
        return self.head(x.flatten(3).mean(-1))


def published(kind: str) -> PublishedSpikformer:
    """With weights that make neurons fire, and running statistics of its own."""
    torch.manual_seed(1)
    model = PublishedSpikformer(kind).double()
    for name, value in model.named_parameters():
        value.data.add_(0.3 * torch.rand_like(value) if "bn" in name else 0.2 * torch.randn_like(value))
    with torch.no_grad():
        for _ in range(3):
            model.train()(torch.rand(4, 3, 32, 32, dtype=torch.float64))
    return model.eval()
