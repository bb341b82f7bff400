"""A pool of worker processes that act as ranks of a Gloo world.

Starting a rank costs seconds of imports, so the workers are forked from a server that has imported torch once
(tests/forking.py), and live until the test session ends. Each job gets a fresh process group over as many workers as it
asks for.
"""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import shutil
import tempfile
from typing import Any

from tests.forking import forking
from tools.benchmark.ranks import RankProcesses, join_ranks

TIMEOUT = 120.0
GRACE_SECONDS = 15.0


class RankPool:
    def __init__(self) -> None:
        self._ranks = RankProcesses("the pool of ranks", PoolRank, [], context=forking())
        self._jobs = 0
        self._folder = tempfile.mkdtemp(prefix="megasnn-ranks-")

    def run(self, world_size: int, function: Any, *args: Any, timeout: float = TIMEOUT) -> list[Any]:
        """Runs `function(*args)` on `world_size` ranks, each inside an initialised Gloo world.

        Raises:
            RankError: a rank raised, died, or did not finish within `timeout` seconds; the workers are replaced.
        """
        self._ranks.start(range(len(self._ranks), world_size))
        self._ranks.ready(timeout)
        self._jobs += 1
        os.makedirs(self._folder, exist_ok=True)
        store = os.path.join(self._folder, f"store-{self._jobs}")
        results = self._ranks.call(
            "run", world_size, store, function, args, timeout=timeout, ranks=world_size, grace=GRACE_SECONDS
        )
        self._ranks.call("tidy", timeout=timeout, ranks=world_size)  # not before all of them have ended the job
        return [pickle.loads(each) for each in results]

    def close(self) -> None:
        self._ranks.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class PoolRank:
    """One worker of the pool; in its process."""

    def __init__(self, rank: int) -> None:
        import torch

        self._rank = rank
        torch.set_num_threads(1)

    def run(self, world_size: int, store: str, function: Any, args: tuple[Any, ...]) -> Any:
        import torch.distributed as dist

        join_ranks(store, self._rank, world_size)
        dist.barrier()  # a job without messages would end on one rank while another is still connecting to it
        result = function(*args)
        if dist.is_initialized():
            dist.destroy_process_group()
        return pickle.dumps(result)  # by value: tensors would go as descriptors of shared memory

    def tidy(self) -> None:
        """Frees the groups of a job that are held by circles of objects: each has a thread that wakes up all the time.

        What is left then, mostly what was imported, is not looked through again. Memory that the job has freed goes
        back to the system: otherwise each of eight ranks would keep that of the largest model that it ever held.
        """
        gc.collect()
        gc.freeze()
        if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:  # of the C library of Linux
            trim(0)
