"""A pool of worker processes that act as ranks of a Gloo world.

Starting a rank costs seconds of imports, so the workers are forked from a server that has imported torch once, and
live until the test session ends. Each job gets a fresh process group over as many workers as it asks for.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import shutil
import tempfile
import time
import traceback
from typing import Any

TIMEOUT = 120.0
# What the server imports once. The first optimizer imports torch._dynamo, which takes longer than torch itself.
PRELOADED = ["torch", "torch._dynamo", "spikingjelly.activation_based.neuron", "megasnn.training"]


class RankError(AssertionError):
    """Raised in the test when a rank raised or died; holds what every rank said."""


class RankPool:
    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)
        self._workers: list[tuple[Any, Any]] = []
        self._jobs = 0
        self._folder = tempfile.mkdtemp(prefix="megasnn-ranks-")

    def run(self, world_size: int, function: Any, *args: Any, timeout: float = TIMEOUT) -> list[Any]:
        """Runs `function(*args)` on `world_size` ranks, each inside an initialised Gloo world.

        Raises:
            RankError: a rank raised, died, or did not finish within `timeout` seconds; the workers are replaced.
        """
        while len(self._workers) < world_size:
            self._workers.append(self._start())
        self._jobs += 1
        os.makedirs(self._folder, exist_ok=True)
        store = os.path.join(self._folder, f"store-{self._jobs}")
        for rank, (_, pipe) in enumerate(self._workers[:world_size]):
            pipe.send((rank, world_size, store, function, args))
        outcomes = self._collect(world_size, timeout)
        failed = [f"--- rank {rank}: {text}" for rank, (ok, text) in sorted(outcomes.items()) if not ok]
        if failed:
            self.close()
            raise RankError("\n".join(failed))
        return [outcomes[rank][1] for rank in range(world_size)]

    def _collect(self, world_size: int, timeout: float) -> dict[int, tuple[bool, Any]]:
        outcomes: dict[int, tuple[bool, Any]] = {}
        pipes = {pipe: rank for rank, (_, pipe) in enumerate(self._workers[:world_size])}
        deadline = time.monotonic() + timeout
        while pipes:
            ready = multiprocessing.connection.wait(list(pipes), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                outcomes.update({rank: (False, f"no answer within {timeout:g} s") for rank in pipes.values()})
                break
            for pipe in ready:
                rank = pipes.pop(pipe)
                try:
                    outcomes[rank] = pipe.recv()
                except EOFError:
                    outcomes[rank] = (False, "the process died")
            if any(not ok for ok, _ in outcomes.values()):
                deadline = min(deadline, time.monotonic() + 15.0)
        return outcomes

    def _start(self) -> tuple[Any, Any]:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        return process, ours

    def close(self) -> None:
        for process, pipe in self._workers:
            pipe.close()
            process.kill()
            process.join()
        self._workers.clear()
        shutil.rmtree(self._folder, ignore_errors=True)


def _serve(pipe: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        try:
            rank, world_size, store_path, function, args = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            store = dist.FileStore(store_path, world_size)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
            outcome = (True, function(*args))
        except BaseException:
            outcome = (False, traceback.format_exc())
        try:
            if dist.is_initialized():
                dist.destroy_process_group()
            pipe.send(outcome)
        except BaseException:
            pipe.send((False, traceback.format_exc()))
