"""Parts of global tensors that ranks hold, and the global tensors put together from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from megasnn.parallel.sharding import ShardedTensor

Part = tuple[str, tuple[int, ...], list[tuple[tuple[int, ...], Tensor]]]
"""Name, global shape, and values with their offsets."""


def parts(entries: Iterable[ShardedTensor], of: Callable[[Tensor], Tensor | None] = lambda x: x) -> list[Part]:
    """This rank's parts of some tensors, or of a state that belongs to each of them."""
    found = [(each, of(each.tensor)) for each in entries]
    return [
        (
            each.name,
            each.shard.global_shape,
            [(piece.global_offset, piece.of_local(value).detach().clone()) for piece in each.shard.pieces()],
        )
        for each, value in found
        if value is not None
    ]


def gradients(entries: Iterable[ShardedTensor]) -> list[Part]:
    return parts(entries, lambda x: x.grad)


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
