"""Products of float32 out of products of TF32, which tensor cores multiply several times as fast.

TF32 has 11 significant bits, float32 24. An operand that needs more is split into pieces of 11 bits, and the products
of the pieces are added up. Spikes and small counts need no more bits than TF32 has, so that a product with them takes
two products of TF32. Where both operands are split it takes three: that of the two small pieces is left out, which is
smaller than what float32 rounds off.

On a CPU nothing rounds operands: there the same computation shows what tensor cores give that round no sums.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megasnn.kernels.layout import is_dense
from megasnn.kernels.tensor_cores import rounding_products
from megasnn.kernels.triton.available import usable_on

SIGNIFICANT_BITS = 11
_DROPPED_BITS = 24 - SIGNIFICANT_BITS


def pieces(values: Tensor, count: int) -> list[Tensor]:
    """Pieces of 11 significant bits each, the largest first.

    Two of them add up to the values but for the last bit, three exactly; TF32 has nothing smaller than 2^-136, which
    concerns values below 2^-112. What is not finite does not become finite; a value that rounds to infinity, within
    2^-12 of the largest, does not stay finite.
    """
    if count == 2 and usable_on(values.device) and is_dense(values):
        from megasnn.kernels.triton.split import two_pieces

        return two_pieces(values)
    half, kept = 1 << _DROPPED_BITS - 1, -1 << _DROPPED_BITS
    # The first one is rounded, so that the rest has a bit less. Rounded like this, the NaN of GPUs would become a zero:
    # the others are cut off.
    found = [(values.view(torch.int32) + half).bitwise_and_(kept).view(torch.float32)]
    rest = values
    while len(found) < count:
        rest = rest - found[-1]
        found.append(rest.view(torch.int32).bitwise_and(kept).view(torch.float32))
    return found


def piece_pairs(a: Tensor, b: Tensor, a_is_exact: bool) -> list[tuple[Tensor, Tensor]]:
    """Operands of TF32 products whose sum is the product of `a` and `b`, the smallest first.

    Args:
        a_is_exact: no value of `a` needs more than 11 significant bits.
    """
    large, small = pieces(b, 2)
    if a_is_exact:
        return [(a, small), (a, large)]
    a_large, a_small = pieces(a, 2)
    return [(a_small, large), (a_large, small), (a_large, large)]


def split_product(
    product: Callable[[Tensor, Tensor], Tensor],
    a: Tensor,
    b: Tensor,
    a_is_exact: bool,
    add: Callable[[Tensor, Tensor, Tensor], object] | None = None,
) -> Tensor:
    """`product(a, b)`, which is linear in both. Args: add: `add(total, a, b)` adds a product to `total`, if it can do
    that better than by a sum of tensors."""
    with rounding_products():
        first, *others = piece_pairs(a, b, a_is_exact)
        total = product(*first)
        for pair in others:
            if add is None:
                total += product(*pair)
            else:
                add(total, *pair)
    return total
