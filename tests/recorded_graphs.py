"""Stands in for CUDA graphs on a CPU: the operators of torch that some work consists of, taken down and run again.

As a CUDA graph it
- computes nothing while it is made: what was there before has its old values again, and new memory holds nonsense;
- starts again what was started then, on the memory of then and with the numbers of then; no Python of the work runs;
- shares its pool: what was made in it and is held by nobody, by then, is used again for what is made later;
- leaves nothing elsewhere: before each replay all memory of all graphs that nobody holds is filled with nonsense;
- refuses what a GPU refuses meanwhile: to tell the host a value, to take one from the host, to end before an exchange
  between ranks that began in it has been waited for;
- exchanges nothing with other ranks while it is made, and in each replay what was exchanged then. Ranks have to replay
  graphs of the same capture, as NCCL demands: others are found before the exchange.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PythonCallbackWork, Work
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from megasnn.kernels import layout
from megasnn.kernels.philox import kept_by_tensors

NONSENSE = 0xFF  # in each byte: not a number, in every floating-point type
READS = {  # operations whose result the host has to know, be it only its size
    *("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "bincount"),
    *("_unique", "_unique2", "unique_dim", "unique_consecutive"),
}
_COMPUTES_NOTHING = ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "detach")


class _Memory:
    """What a tensor is, without keeping more of it than its memory."""

    def __init__(self, x: Tensor) -> None:
        self.storage, self.dtype = x.untyped_storage(), x.dtype
        self.place = x.storage_offset(), x.shape, x.stride()

    def tensor(self) -> Tensor:
        return torch.empty(0, dtype=self.dtype).set_(self.storage, *self.place)


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _there(value: Any) -> Any:
    return value.tensor() if isinstance(value, _Memory) else value


def _memory(value: Any) -> Any:
    return _Memory(value) if isinstance(value, Tensor) else value


def _tensors(*values: Any) -> list[Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, Tensor)]


class Pool:
    """Memory of graphs, by its address in torch."""

    def __init__(self) -> None:
        self.storages: dict[int, torch.UntypedStorage] = {}

    def place(self, tensors: list[Tensor]) -> list[torch.UntypedStorage]:
        """Moves new tensors into memory of the pool, which is returned: such as was given back, or their own."""
        moved: dict[int, torch.UntypedStorage] = {}
        for x in tensors:
            own = x.untyped_storage()
            if own._cdata not in moved:
                free = (each for each in self.storages.values() if each.nbytes() == own.nbytes() and not _is_held(each))
                moved[own._cdata] = storage = next(free, own)
                self.storages[storage._cdata] = storage
                _bytes(storage).copy_(_bytes(own))
            if moved[own._cdata] is not own:
                x.set_(moved[own._cdata], x.storage_offset(), x.shape, x.stride())
        return list(moved.values())


class _Recording(TorchDispatchMode):
    """
    Args:
        pool: gives the memory for what is made.
    Attributes:
        operators: (function, arguments, keywords, results) of what computes.
    """

    def __init__(self, pool: Pool) -> None:
        super().__init__()
        self._pool = pool
        self.operators: list[tuple[Any, Any, Any, list[_Memory]]] = []
        self.groups: list[Any] = []
        self._unjoined: list[str] = []
        self._made: dict[int, torch.UntypedStorage] = {}
        self._before: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, options = function.overloadpacket.__name__, kwargs or {}
        if name in READS or name == "lift_fresh":
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        given = tree_map(_memory, (args, options))
        if function.namespace == "c10d":
            self.operators.append((function, *given, []))
            return self._begun(function, args)
        for argument, value in zip(function._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for x in _tensors(value):
                    storage = x.untyped_storage()
                    if storage._cdata not in self._made and storage._cdata not in self._before:
                        self._before[storage._cdata] = storage, _bytes(storage).clone()
        result = function(*args, **options)
        if any(x.is_meta for x in _tensors(result)):
            return result  # a size that the host computes
        known = {x.untyped_storage()._cdata for x in _tensors(args, options)}
        fresh = [x for x in _tensors(result) if x.untyped_storage()._cdata not in known]
        self._made |= {each._cdata: each for each in self._pool.place(fresh)}
        if name not in _COMPUTES_NOTHING and (fresh or function._schema.is_mutable):
            self.operators.append((function, *given, [_Memory(x) for x in fresh]))
        return result

    def _begun(self, function: Any, args: Any) -> Any:
        """What an exchange returns that has only been taken down."""
        for each in args:
            if isinstance(each, torch.ScriptObject) and each._type().name() == "ProcessGroup":
                group = dist.ProcessGroup.unbox(each)
                if group not in self.groups:
                    self.groups.append(group)
        name = function.overloadpacket.__name__
        self._unjoined.append(name)

        def wait(timeout: Any) -> bool:
            if name in self._unjoined:
                self._unjoined.remove(name)
            return True

        work = Work.boxed(PythonCallbackWork(wait))
        return work if len(function._schema.returns) == 1 else (args[0], work)

    def require_joined(self) -> None:
        if self._unjoined:
            raise RuntimeError(f"capturing stream has unjoined work: {', '.join(self._unjoined)}")

    def undo(self) -> None:
        for storage, values in self._before.values():
            _bytes(storage).copy_(values)
        for storage in self._made.values():
            _bytes(storage).fill_(NONSENSE)

    def run(self, number: int) -> None:
        """Runs the operators again. Raises RuntimeError where another rank replays a graph of another number."""
        for group in self.groups:
            mine = torch.tensor([number])
            numbers = [torch.empty_like(mine) for _ in range(group.size())]
            group.allgather([numbers], [mine]).wait()
            if any(each != mine for each in numbers):
                raise RuntimeError(f"ranks replay graphs of different captures: {torch.cat(numbers).tolist()}")
        works: list[Any] = []
        for function, args, options, results in self.operators:
            args, options = tree_map(_there, args), tree_map(_there, options)
            if function.namespace == "c10d":
                found = function(*args, **options)
                works.append(Work.unbox(found if isinstance(found, torch.ScriptObject) else found[-1]))
                continue
            # An exchange has ended before anything is computed behind it.
            while works:
                works.pop(0).wait()
            known = {x.untyped_storage()._cdata for x in _tensors(args, options)}
            found = [x for x in _tensors(function(*args, **options)) if x.untyped_storage()._cdata not in known]
            for memory, value in zip(results, found, strict=True):
                memory.tensor().copy_(value)
        for work in works:
            work.wait()


class RecordedGraphs:
    """A `megasnn.pipeline.graph_capture.Capture`.

    Attributes:
        pools: all that were made. captures, replays: how often a graph was made, and started.
    """

    def __init__(self) -> None:
        self.pools: list[Pool] = []
        self.captures = self.replays = 0

    def pool(self) -> Pool:
        self.pools.append(Pool())
        return self.pools[-1]

    def memory(self) -> list[torch.UntypedStorage]:
        """Of all graphs."""
        return [storage for pool in self.pools for storage in pool.storages.values()]

    def __call__(self, work: Callable[[], None], pool: Pool) -> Callable[[], None]:
        self.captures += 1
        recording = _Recording(pool)
        try:
            with recording:
                work()
            recording.require_joined()
        finally:
            recording.undo()
        number = self.captures

        @torch.no_grad()
        def replay() -> None:
            self.replays += 1
            for storage in self.memory():
                if not _is_held(storage):
                    _bytes(storage).fill_(NONSENSE)
            recording.run(number)

        return replay


def _is_held(storage: torch.UntypedStorage) -> bool:
    """By somebody else than recordings, which share one object."""
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count > 1


def _empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device=device)


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """No compiled loops of the CPU, spikes that leave kernels as bits, and nothing read before the end of a step."""
    with (
        mock.patch("megasnn.kernels.spike_codec._by_numpy", lambda x: False),
        mock.patch("megasnn.kernels.philox._kept_by_loops", kept_by_tensors),
        mock.patch("megasnn.kernels.numba.spike_sums._work", lambda *_: None),
        mock.patch("megasnn.common.checks.runs_ahead", lambda device: True),
    ):
        yield


@contextmanager
def recorded_graphs(graphs: RecordedGraphs | None = None) -> Iterator[RecordedGraphs]:
    """Inside, Engines whose flags ask for CUDA graphs get these, and operators are those of a device."""
    graphs = graphs or RecordedGraphs()
    with ExitStack() as stack:
        for module in [each for each in sys.modules.values() if getattr(each, "empty", None) is layout.empty]:
            stack.enter_context(mock.patch.object(module, "empty", _empty))
        stack.enter_context(as_on_a_gpu())
        stack.enter_context(mock.patch("megasnn.engine.build.capture_on", lambda device: graphs))
        yield graphs
