"""The host's memory: freed blocks that are kept or given back, and copies to a GPU without the host waiting."""

from __future__ import annotations

import ctypes
import os
import sys

import torch
from torch import Tensor

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's numbers of what mallopt sets
_MOST_OF_INT, _MOST_OF_MMAP = 2**31 - 1, 32 * 1024 * 1024  # the largest values that it takes


def keep_free_memory() -> None:
    """Lets the C library keep memory that was freed, for what comes next; with glibc only.

    A step takes and frees the same blocks as the one before. By default glibc gives some of them back to the system,
    which then fills them with zeros anew, page by page: 25,000 of them in a step of 8 images, 8 % of its time. Decoding
    samples of events is a tenth faster. Blocks above 32 MiB, the most that glibc lets one set, still come and go. What
    the user has set by a variable ``MALLOC_...`` or GLIBC_TUNABLES stays.
    """
    if sys.platform != "linux" or any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    try:
        set_option = ctypes.CDLL(None).mallopt
    except AttributeError:
        return  # a C library other than glibc
    set_option(_MMAP_THRESHOLD, _MOST_OF_MMAP)
    set_option(_TRIM_THRESHOLD, _MOST_OF_INT)


def release_free_memory() -> None:
    """Gives memory that was freed back to the system, where the C library would keep it for the next tensors.

    Without that, tensors that fit into it are not seen in a peak that starts anew. What waits for the garbage collector
    is not freed yet.
    """
    if sys.platform == "linux":
        try:
            ctypes.CDLL(None).malloc_trim(0)
        except AttributeError:
            pass  # a C library other than glibc


def without_waiting(values: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device. A GPU copies it from pinned memory, in the order of its current stream."""
    if device.type != "cuda" or values.device.type != "cpu":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)
