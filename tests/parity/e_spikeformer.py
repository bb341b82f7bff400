"""E-SpikeFormer written down again with torch's modules and SpikingJelly's integer LIF, by the names of its published
weights: the truth for `megasnn.models.e_spikeformer`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from spikingjelly.activation_based import neuron
from torch import Tensor, nn

LARGEST = 4


class Spikes(nn.Module):
    """Potentials of T frames after each other, `[T * N, ...]` -> counts divided by `norm`."""

    def __init__(self, steps: int, norm: int = LARGEST) -> None:
        super().__init__()
        self.steps, self.norm, self.node = steps, norm, neuron.ILIFNode(step_mode="m")

    def forward(self, x: Tensor) -> Tensor:
        return self.node(x.unflatten(0, (self.steps, -1))).flatten(0, 1) / self.norm


def conv_norm(inputs: int, outputs: int, kernel: int = 1, **options: Any) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False, **options)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs))


class Downsampling(nn.Module):
    def __init__(self, sizes: tuple[int, int], kernel: int, stride: int, spikes: nn.Module) -> None:
        super().__init__()
        self.encode_conv = nn.Conv2d(*sizes, kernel, stride, kernel // 2)
        self.encode_bn, self.spikes = nn.BatchNorm2d(sizes[1]), spikes

    def forward(self, x: Tensor) -> Tensor:
        return self.encode_bn(self.encode_conv(self.spikes(x)))


class Separable(nn.Module):
    def __init__(self, dim: int, kernel: int, steps: int) -> None:
        super().__init__()
        self.pwconv1, self.pwconv2 = conv_norm(dim, 2 * dim), conv_norm(2 * dim, dim)
        self.dwconv = conv_norm(2 * dim, 2 * dim, kernel, groups=2 * dim)
        self.fire = nn.ModuleList(Spikes(steps) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for fire, unit in zip(self.fire, (self.pwconv1, self.dwconv, self.pwconv2), strict=True):
            x = unit(fire(x))
        return x


class ConvBlock(nn.Module):
    def __init__(self, dim: int, ratio: int, steps: int) -> None:
        super().__init__()
        self.Conv, self.fire = Separable(dim, 7, steps), nn.ModuleList(Spikes(steps) for _ in range(2))
        self.conv1, self.bn1 = conv_norm(dim, ratio * dim, 3)
        self.conv2, self.bn2 = conv_norm(ratio * dim, dim, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.Conv(x)
        return x + self.bn2(self.conv2(self.fire[1](self.bn1(self.conv1(self.fire[0](x))))))


class Mlp(nn.Module):
    def __init__(self, dim: int, ratio: int, steps: int) -> None:
        super().__init__()
        self.fc1_conv, self.fc1_bn = nn.Conv1d(dim, ratio * dim, 1), nn.BatchNorm1d(ratio * dim)
        self.fc2_conv, self.fc2_bn = nn.Conv1d(ratio * dim, dim, 1), nn.BatchNorm1d(dim)
        self.fire = nn.ModuleList(Spikes(steps) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc1_bn(self.fc1_conv(self.fire[0](x.flatten(2))))
        return self.fc2_bn(self.fc2_conv(self.fire[1](y))).view_as(x)


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int, steps: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_conv, self.k_conv, self.v_conv = conv_norm(dim, dim), conv_norm(dim, dim), conv_norm(dim, 4 * dim)
        self.proj_conv, self.fire = conv_norm(4 * dim, dim), nn.ModuleList(Spikes(steps) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.fire[0](x)
        q, k, v = (  # [T * N, heads, d, tokens]
            fire(unit(x)).flatten(2).unflatten(1, (self.heads, -1))
            for fire, unit in zip(self.fire[1:4], (self.q_conv, self.k_conv, self.v_conv), strict=True)
        )
        weights = torch.einsum("nhdl,nhdm->nhlm", q, k) * 2 * q.shape[2] ** -0.5
        y = torch.einsum("nhlm,nhdm->nhdl", weights, v).flatten(1, 2)
        return self.proj_conv(self.fire[4](y.unflatten(2, x.shape[2:])))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, ratio: int, steps: int) -> None:
        super().__init__()
        self.conv, self.attn = Separable(dim, 3, steps), Attention(dim, heads, steps)
        self.mlp = Mlp(dim, ratio, steps)

    def forward(self, x: Tensor) -> Tensor:
        for part in (self.conv, self.attn, self.mlp):
            x = x + part(x)
        return x


class Published(nn.Module):
    """`[T, N, C, H, W]` -> logits `[T, N, classes]`."""

    def __init__(
        self, dims: Sequence[int], depths: Sequence[int], heads: int, ratio: int, steps: int, classes: int
    ) -> None:
        super().__init__()
        half, (first, second, third, last) = dims[0] // 2, dims
        self.downsample1_1 = Downsampling((3, half), 7, 2, nn.Identity())
        self.ConvBlock1_1 = nn.Sequential(ConvBlock(half, ratio, steps))
        self.downsample1_2 = Downsampling((half, first), 3, 2, Spikes(steps))
        self.ConvBlock1_2 = nn.Sequential(ConvBlock(first, ratio, steps))
        self.downsample2 = Downsampling((first, second), 3, 2, Spikes(steps))
        self.ConvBlock2_1 = nn.Sequential(ConvBlock(second, ratio, steps))
        self.ConvBlock2_2 = nn.Sequential(ConvBlock(second, ratio, steps))
        self.downsample3 = Downsampling((second, third), 3, 2, Spikes(steps))
        self.block3 = nn.Sequential(*(Block(third, heads, ratio, steps) for _ in range(depths[0])))
        self.downsample4 = Downsampling((third, last), 3, 1, Spikes(steps))
        self.block4 = nn.Sequential(*(Block(last, heads, ratio, steps) for _ in range(depths[1])))
        self.fire, self.head = Spikes(steps, norm=1), nn.Linear(last, classes)

    def forward(self, frames: Tensor) -> Tensor:
        x = frames.flatten(0, 1)
        for name, part in self.named_children():
            if name not in ("fire", "head"):
                x = part(x)
        return self.head(self.fire(x.mean((2, 3)))).unflatten(0, frames.shape[:2])
