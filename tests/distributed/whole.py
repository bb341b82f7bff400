"""What the tests of sharded layers share: groups over all ranks, layers with given global weights, whole tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megasnn.layers import BuildContext
from megasnn.parallel.sharding import ShardedTensor, materialise, sharded_tensors
from megasnn.parallel_state import Group, alone
from megasnn.random import philox, philox_key


def everybody(name: str = "tp") -> Group:
    """The group of all ranks."""
    size = dist.get_world_size()
    return alone(name) if size == 1 else Group(name, tuple(range(size)), dist.get_rank(), dist.group.WORLD)


def context(group: Group, dtype: torch.dtype = torch.float64) -> BuildContext:
    return BuildContext(group, dtype, dtype)


def nothing(tensor: Tensor, generator: torch.Generator) -> None:
    """An initialiser for weights that the test sets."""


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def spikes(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return (random(*shape, seed=seed) > 0.3).to(dtype)


def drawn(purpose: str, name: str, sample: int, count: int, seed: int = 0) -> Tensor:
    """The first numbers in [0, 1) that a layer of dropout draws for a sample."""
    low, high = philox_key(seed, purpose, name)
    words = torch.stack(philox(torch.arange(-(-count // 4)), 0, 0, 0, sample ^ low, high), dim=1)
    return (words.flatten()[:count] >> 8).double() / 2**24


def mine(x: Tensor, group: Group, dim: int = 2, blocks: int = 1) -> Tensor:
    """This rank's channels of a whole tensor, of each block."""
    parts = [block.chunk(group.size, dim)[group.rank] for block in x.chunk(blocks, dim)]
    return torch.cat(parts, dim).clone()


def channels_last(x: Tensor) -> Tensor:
    """[T, N, C, *space] with channels last in memory."""
    return x.movedim(2, -1).contiguous().movedim(-1, 2)


def build(layers: dict[str, nn.Module], weights: dict[str, Tensor]) -> list[ShardedTensor]:
    """Gives memory to layers, and the given global values to their tensors (those not given keep initial ones)."""
    materialise(layers.items(), torch.device("cpu"), seed=0)
    tensors = list(sharded_tensors(layers.items()))
    with torch.no_grad():
        for entry in tensors:
            if entry.name in weights:
                entry.tensor.copy_(entry.shard.cut(weights[entry.name].to(entry.tensor.dtype)))
    return tensors


@torch.no_grad()
def fill_mantissas(module: nn.Module) -> None:
    """Gives weights that were drawn in float32 all 53 bits of float64, as training does after a step.

    Sums of spikes with float32 values are exact in float64, in any order: what rounds otherwise would not show.
    """
    for parameter in module.parameters():
        parameter.mul_(1.1)


def digests(values: Mapping[str, Tensor]) -> dict[str, str]:
    """Of the bits of each tensor."""
    return {name: hashlib.sha1(value.detach().numpy().tobytes()).hexdigest() for name, value in values.items()}


Part = tuple[str, tuple[int, ...], list[tuple[tuple[int, ...], Tensor]]]


def parts(tensors: Sequence[ShardedTensor], gradients: bool = False) -> list[Part]:
    """(name, global shape, [(offset, values)]) of what this rank holds."""
    return [
        (
            e.name,
            e.shard.global_shape,
            [
                (piece.global_offset, piece.of_local(e.tensor.grad if gradients else e.tensor).detach().clone())
                for piece in e.shard.pieces()
            ],
        )
        for e in tensors
        if not gradients or e.tensor.grad is not None
    ]


def assemble(ranks: Sequence[list[Part]]) -> dict[str, Tensor]:
    """Whole tensors from all ranks' parts. What several ranks hold must be equal bits, and no element may lack."""
    whole: dict[str, Tensor] = {}
    written: dict[str, Tensor] = {}
    for held in ranks:
        for name, shape, boxes in held:
            for offset, values in boxes:
                full = whole.setdefault(name, torch.zeros(shape, dtype=values.dtype))
                seen = written.setdefault(name, torch.zeros(shape, dtype=torch.bool))
                box = tuple(slice(start, start + length) for start, length in zip(offset, values.shape, strict=True))
                assert not seen[box].any() or torch.equal(full[box], values), f"ranks differ in {name}"
                full[box] = values
                seen[box] = True
    assert all(seen.all() for seen in written.values())
    return whole
