"""A keyed checksum of a tensor's bits: one 64-bit number, the same on every device, without waiting for the device.

The bits are read as 32-bit words, in the order in which they lie in memory. Each is multiplied by an odd random 64-bit
number that belongs to its place, and the products are added up modulo 2^64. An odd number has an inverse there, so that
every change of a single word, and with it every single flipped bit, changes the sum. Any other change, such as two
swapped elements, goes unseen with a probability of about 2^-32 at most.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from megasnn.random import keyed_generator

ROW = 1 << 16  # words that are multiplied at once: on a CPU the products then stay in its cache
ROWS_ON_GPU = 64


def checksum(tensor: Tensor) -> Tensor:
    """The sum over a tensor of any shape and type, as an int64 number (shape []) on its device.

    Tensors of equal bits in another order of memory (strides) have other sums.

    Raises:
        ValueError: the tensor's elements do not lie side by side in memory.
    """
    return _keyed_sum(_words(in_memory_order(tensor)), level=0)


def in_memory_order(tensor: Tensor) -> Tensor:
    """The elements in one dimension, as a view, in the order of memory: of channels-last kernels too.

    Raises:
        ValueError: they do not lie side by side.
    """
    tensor = tensor.detach()
    ordered = tensor.permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True))
    if not ordered.is_contiguous():
        raise ValueError(f"a tensor of shape {list(tensor.shape)} and strides {list(tensor.stride())} has gaps")
    return ordered.view(-1)


def _words(flat: Tensor) -> Tensor:
    """int32 words; types narrower than that are copied when they end in the middle of one."""
    data = flat.view(torch.uint8)
    if data.numel() % 4 or data.storage_offset() % 4:
        data = torch.nn.functional.pad(data, (0, -data.numel() % 4)).clone()
    return data.view(torch.int32)


def _keyed_sum(values: Tensor, level: int) -> Tensor:
    """Rows of the integers `values` [n] are summed up, and then the rows' sums, with other keys on each level."""
    keys = _keys(level, values.device)
    if len(values) <= ROW:
        return (values * keys[: len(values)]).sum()
    whole = len(values) // ROW * ROW
    at_once = ROWS_ON_GPU if values.is_cuda else 1
    sums = [(part * keys).sum(1) for part in values[:whole].view(-1, ROW).split(at_once)]
    if whole < len(values):
        sums.append(_keyed_sum(values[whole:], level).reshape(1))
    return _keyed_sum(torch.cat(sums), level + 1)


@lru_cache(maxsize=16)
def _keys(level: int, device: torch.device) -> Tensor:
    """Odd numbers over the whole range of int64, [ROW]."""
    generator = keyed_generator("replica checksum", level)
    least, most = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
    return torch.randint(least, most, (ROW,), generator=generator, dtype=torch.int64).bitwise_or_(1).to(device)
