"""A bar on standard error that counts bytes, where there is somebody to look at it."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from tqdm import tqdm

from megasnn.convert.source import TensorInfo


def byte_bar(title: str, tensors: Iterable[TensorInfo]) -> tqdm:
    """For work on these tensors; `update(info.bytes)` after each."""
    tqdm.set_lock(threading.RLock())  # by default one between processes, which is left over when one is killed
    total = sum(info.bytes for info in tensors)
    return tqdm(total=total, desc=title, unit="B", unit_scale=True, unit_divisor=1024, disable=None, dynamic_ncols=True)
