"""Check of cut layers on random numbers: what is accepted computes the same with a rank's channels."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import Tensor, nn

from megasnn.layers import BuildContext, ConvNormNeuron, MeanLinear, ParallelLinear
from megasnn.models.build import describe
from megasnn.models.cut_check import MixedChannels, check_layer
from megasnn.models.layer import Layer, layer
from megasnn.models.model import Model
from megasnn.parallel.sharding import Cut
from megasnn.parallel_state import Group
from tests.models.networks import between

SHAPE = (2, 3, 8, 4, 6)
Function = Callable[[Tensor], Tensor]


class Block(nn.Module):
    def __init__(self, *functions: Function) -> None:
        super().__init__()
        self.functions = functions

    def forward(self, x: Tensor) -> Tensor:
        for function in self.functions:
            x = function(x)
        return x


def followed(block: nn.Module, shape: tuple[int, ...], ranks: int = 2) -> Cut | None:
    """How the block's output is cut where channels (dimension 2) are. Raises MixedChannels."""
    given = torch.empty(shape, device="meta", requires_grad=True)
    cuts = check_layer("a", block, block, [(given, [Cut(2)])], ranks)
    assert cuts is not None
    return cuts[0]


def assert_same(block: nn.Module, cut: Cut | None, x: Tensor, ranks: int = 2) -> None:
    whole = block(x)
    for rank in range(ranks):
        part = block(x.chunk(ranks, 2)[rank])
        expected = whole
        if cut is not None:
            blocks = whole.unflatten(cut.dim, (cut.blocks, ranks, -1))
            expected = blocks.select(cut.dim + 1, rank).flatten(cut.dim, cut.dim + 1)
        assert torch.allclose(part, expected, rtol=1e-12, atol=1e-12)


# Ways to mix channels [T, N, C, H, W]; each gave other numbers with tensor parallelism, or was refused by its name.
def shuffle(x: Tensor, groups: int = 2) -> Tensor:
    return x.view(*x.shape[:2], groups, -1, *x.shape[3:]).transpose(2, 3).reshape(x.shape)


def attention(x: Tensor, product: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    rows = x.flatten(3).flatten(0, 1)  # [T * N, C, H * W]
    return product(product(rows, rows.transpose(1, 2)).softmax(-1), rows).view(x.shape)


MIXING: dict[str, Function] = {
    "shuffle": shuffle,
    "shuffle by permute": lambda x: x.unflatten(2, (2, -1)).permute(0, 1, 3, 2, 4, 5).flatten(2, 3),
    "attention by matmul": lambda x: attention(x, torch.matmul),
    "attention by bmm": lambda x: attention(x, torch.bmm),
    "scaled dot product": lambda x: F.scaled_dot_product_attention(x.flatten(3), x.flatten(3), x.flatten(3)),
    "chunk": lambda x: torch.cat(x.chunk(2, 2)[::-1], 3),
    "unbind": lambda x: x.unbind(2)[0],
    "softmax": lambda x: x.softmax(2),
    "softmax behind permute": lambda x: x.permute(0, 1, 3, 4, 2).softmax(-1),
    "layer norm": lambda x: F.layer_norm(x, x.shape[2:]),
    "group norm": lambda x: F.group_norm(x.flatten(0, 1), 2).view(x.shape),
    "normalize": lambda x: F.normalize(x, dim=2),
    "norm": lambda x: x / x.norm(dim=2, keepdim=True),
    "cosine": lambda x: F.cosine_similarity(x, x + 1, dim=2).unsqueeze(2) * x,
    "glu": lambda x: F.glu(x, 2),
    "logsumexp": lambda x: x - x.logsumexp(2, keepdim=True),
    "first channel": lambda x: x * x[..., :1, :, :],
    "selected": lambda x: x - x.select(2, 0).unsqueeze(2),
    "index": lambda x: x[:, :, [0]] + x,
    "mean of all": lambda x: x - x.mean(),
    "mean": lambda x: x - x.mean(2, keepdim=True),
    "sum": lambda x: x.sum(2),
    "largest": lambda x: x / x.amax(2, keepdim=True),
    "largest with index": lambda x: x - x.max(2, keepdim=True).values,
    "cumulated": lambda x: x.cumsum(2),
    "flipped": lambda x: x.flip(2),
    "rolled flat": lambda x: x.roll(1),
    "padded": lambda x: F.pad(x, (0, 0, 0, 0, 1, 1)),
    "neighbours": lambda x: F.avg_pool1d(x.flatten(0, 1).flatten(2).transpose(1, 2), 3, 1, 1),
    "tokens of another size": lambda x: x.reshape(*x.shape[:2], -1, 4).softmax(2),
    "joined": lambda x: torch.cat((x, x), 2).softmax(3).sum(2),
    "outer product": lambda x: x.mean((3, 4)).unsqueeze(-1) * x.mean((3, 4)).unsqueeze(-2),
    "number of channels": lambda x: x * x.shape[2] ** -0.5,
    "number of elements": lambda x: x / x.numel(),
    "numbered": lambda x: x * torch.arange(x.shape[2], device=x.device).view(-1, 1, 1),
    "heads of other channels": lambda x: x.flatten(3).unflatten(2, (2, -1)).softmax(3),
    "distance": lambda x: torch.cdist(x.flatten(3), x.flatten(3)),
    "mean in place": lambda x: x.clone().sub_(x.mean(2, keepdim=True)),
}


@pytest.mark.parametrize("way", MIXING)
def test_what_mixes_channels_is_refused(way: str) -> None:
    with pytest.raises(MixedChannels):
        followed(Block(MIXING[way], torch.sin), SHAPE)


# What is right for a rank's channels, wherever they have come to.
RIGHT: dict[str, Function] = {
    "tokens": lambda x: x.flatten(3).softmax(3),
    "tokens first": lambda x: x.flatten(3).flatten(0, 1).transpose(1, 2).softmax(1),
    "heads": lambda x: x.flatten(3).unflatten(2, (-1, 2)).transpose(3, 4).softmax(3),
    "attention of heads": lambda x: attention_of_heads(x),
    "attention of torch": lambda x: F.scaled_dot_product_attention(*[x.flatten(3).unflatten(2, (-1, 2))] * 3),
    "over space": lambda x: x - x.mean((3, 4), keepdim=True),
    "over time": lambda x: x - x.amax(0, keepdim=True),
    "normalized space": lambda x: F.normalize(x.flatten(3), dim=3),
    "pools": lambda x: F.max_pool2d(F.avg_pool2d(x.flatten(0, 1), 2), 2),
    "adaptive": lambda x: F.adaptive_avg_pool2d(x.flatten(0, 1), 1).flatten(1),
    "interpolated": lambda x: F.interpolate(x.flatten(0, 1), scale_factor=2),
    "time step": lambda x: torch.stack([x[0], x[1] * x[0]]),
    "in place": lambda x: x.clone().mul_(2).add_(torch.ones(())),
    "written": lambda x: written(x),
    "chosen": lambda x: torch.where(x > 0, x, 0.5),
    "flipped": lambda x: x.flip(3).roll(1, 0),
    "joined in space": lambda x: torch.cat((x, x), 3),
    "double": lambda x: x.to(torch.float64),
    "every second": lambda x: x[:, :, ::2],
    "unfolded": lambda x: F.unfold(x.flatten(0, 1), 3, padding=1),
    "pixel unshuffle": lambda x: F.pixel_unshuffle(x.flatten(0, 1), 2),
    "interpolated channels": lambda x: F.interpolate(x.flatten(3).flatten(0, 1).transpose(1, 2), scale_factor=2),
    "permuted": lambda x: x.permute(2, 0, 1, 4, 3).contiguous(),
}


def attention_of_heads(x: Tensor) -> Tensor:
    heads = x.flatten(3).unflatten(2, (-1, 2)).transpose(-1, -2)  # [T, N, heads, L, 2]
    return ((heads @ heads.transpose(-1, -2)).softmax(-1) @ heads).transpose(3, 4).reshape(x.shape)


def written(x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for time in range(len(x)):
        y[time] = x[time] + y[time - 1]
    return y


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("way", RIGHT)
def test_what_is_right_for_a_ranks_channels_is_accepted(way: str, ranks: int) -> None:
    x = torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    block = Block(RIGHT[way], torch.relu)
    assert_same(block, followed(block, SHAPE, ranks), x, ranks)


FUNCTIONS: list[Function] = [
    *MIXING.values(),
    *RIGHT.values(),
    *(lambda x, a=a, b=b: x.transpose(a, b) for a in range(3) for b in (-1, -2)),
    *(lambda x, d=d: x.softmax(d) for d in range(-3, 3)),
    *(lambda x, d=d: x.mean(d) for d in range(-3, 3)),
    *(lambda x, d=d: x.flatten(d, d + 1) for d in range(3)),
    *(lambda x, d=d, n=n: x.unflatten(d, n) for d in range(4) for n in ((2, -1), (-1, 2))),
    lambda x: x.reshape(SHAPE) if x.numel() == torch.Size(SHAPE).numel() else x,
    lambda x: x.unsqueeze(2),
    lambda x: x.squeeze(),
    lambda x: x.movedim(0, -1),
    lambda x: x @ x.mT,
    lambda x: x.flatten().view(x.shape),
]


@settings(max_examples=250, deadline=None)
@given(st.lists(st.sampled_from(range(len(FUNCTIONS))), min_size=1, max_size=5), st.sampled_from([2, 4]))
def test_blocks_of_random_functions_are_refused_or_the_same(numbers: list[int], ranks: int) -> None:
    block = Block(*(FUNCTIONS[number] for number in numbers))
    x = torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    try:
        block(x)
    except (RuntimeError, ValueError, IndexError):
        return  # no network
    try:
        cut = followed(block, SHAPE, ranks)
    except (MixedChannels, RuntimeError, ValueError, IndexError):
        return
    assert_same(block, cut, x, ranks)


class MixedBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad - grad.mean(2, keepdim=True)


HIDDEN: dict[str, Function] = {
    "outputs": lambda x: x if x.is_meta else x - x.mean(2, keepdim=True),
    "gradients": MixedBackward.apply,
}
"""What the meta device does not show."""


class Hiding(ConvNormNeuron):
    def __init__(self, way: str) -> None:
        super().__init__(4, 4)
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        return HIDDEN[self.way](super().forward(x))


@dataclass(frozen=True, kw_only=True)
class Hidden(Model):
    image_size: int = 4
    time_steps: int = 2
    num_classes: int = 4
    way: str = ""

    def layers(self) -> Iterable[Layer]:
        yield layer("stem", ConvNormNeuron(3, 4))
        yield layer("hiding", Hiding(self.way))
        yield layer("head", MeanLinear(4, self.num_classes))


@pytest.mark.parametrize("way", HIDDEN)
def test_what_the_meta_device_does_not_show_is_found_on_random_numbers(way: str) -> None:
    described = describe(Hidden(way=way))
    with pytest.raises(MixedChannels, match="^hiding: .*--tensor-model-parallel-size 2"):
        described.build(BuildContext(Group("tp", (0, 1))))
    described.build(BuildContext())


class Gate(nn.Module):
    """Its factor has the shape of one channel, and its gradient that of all."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = ParallelLinear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.linear(x.mean((3, 4)))[..., None, None]


def test_what_all_ranks_have_whole_and_learn_from_meets_nothing_cut() -> None:
    described = describe(between(lambda: [layer("gate", Gate())], width=8))
    with pytest.raises(MixedChannels, match="^gate: gradients"):
        described.build(BuildContext(Group("tp", (0, 1))))


@pytest.mark.parametrize("size", [2, 4])
def test_the_check_says_how_the_inputs_of_whole_modules_are_cut(size: int) -> None:
    found = [
        check_layer("a", block, block, [(torch.empty(SHAPE, device="meta"), [cut])], size)
        for block in (nn.Sequential(nn.ReLU(), nn.Flatten(0, 1)), nn.Softmax(3))
        for cut in (Cut(2), Cut(2, 2) if size == 2 else None)
    ]
    assert found == [[Cut(1)], [Cut(1, 2) if size == 2 else None], [Cut(2)], [Cut(2, 2) if size == 2 else None]]
