"""How CUDA graphs are captured, on a torch.cuda that notes what it is told and refuses what the driver and torch 2.11
refuse."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from megasnn.pipeline.capture import CudaCapture

DEVICE = torch.device("cuda", 1)


class FakeCuda:
    """
    Attributes:
        told: what was done, in order.
        current: the stream that kernels are started on.
        recorded: pools that the allocator takes for being captured in; pinned: that of pinned memory.
        users: how many graphs a pool is kept for.
    """

    def __init__(self) -> None:
        self.told: list[str] = []
        self.current = self.default = "default"
        self.recorded, self.pinned, self.users = list[int](), list[int](), Counter[int]()
        self.pools = self.streams = 0
        self.captures = self.is_invalid = self.generator_is_captured = False
        self.mode = ""
        self.default_generators = [None, FakeGenerator(self)]

    def graph_pool_handle(self) -> int:
        self.pools += 1
        return self.pools

    def make_stream(self, device: torch.device) -> Any:
        fake = self

        class Stream:
            device_index = device.index
            name = f"stream {fake.streams}"

            def __init__(self) -> None:
                self.device = device

            def wait_stream(self, other: Any) -> None:
                fake.told.append(f"{self.name} waits for {other.name}")

        self.streams += 1
        return Stream()

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream.name
        try:
            yield
        finally:
            self.current = before

    def current_stream(self, device: torch.device) -> Any:
        assert device == DEVICE
        stream = self.make_stream(device)
        stream.name = self.current
        return stream

    def release(self, device: int, pool: int) -> None:
        assert device == DEVICE.index and self.users[pool]
        self.users[pool] -= 1

    def end_allocation(self, device: int, pool: int) -> None:
        assert device == DEVICE.index
        if pool not in self.recorded:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.recorded.remove(pool)


class FakeGenerator:
    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda

    def clone_state(self) -> str:
        return "a state that is not captured"

    def graphsafe_set_state(self, state: str) -> None:
        self._cuda.generator_is_captured = False


class FakeGraph:
    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda, self._pool = cuda, 0

    def capture_begin(self, pool: int, capture_error_mode: str = "global") -> None:
        cuda = self._cuda
        if pool in (*cuda.recorded, *cuda.pinned):
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        cuda.generator_is_captured = True
        cuda.recorded.append(pool)
        cuda.pinned.append(pool)
        cuda.users[pool] += 1
        if cuda.current == cuda.default:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        cuda.captures, cuda.is_invalid, cuda.mode, self._pool = True, False, capture_error_mode, pool
        cuda.told.append(f"begin on {cuda.current} in pool {pool}")

    def capture_end(self) -> None:
        cuda = self._cuda
        assert cuda.captures and cuda.current != cuda.default
        cuda.captures = False
        cuda.told.append("end")
        if cuda.is_invalid:  # torch 2.11 raises before it tells the allocator and the generator
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        cuda.recorded.remove(self._pool)
        cuda.pinned.remove(self._pool)
        cuda.generator_is_captured = False

    def replay(self) -> None:
        self._cuda.told.append(f"replay on {self._cuda.current}")


@pytest.fixture
def cuda(monkeypatch) -> FakeCuda:
    fake = FakeCuda()
    for name, value in {
        "graph_pool_handle": fake.graph_pool_handle,
        "Stream": fake.make_stream,
        "CUDAGraph": lambda: FakeGraph(fake),
        "stream": fake.stream,
        "current_stream": fake.current_stream,
        "default_generators": fake.default_generators,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", fake.end_allocation, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", fake.release, raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: pytest.fail("it waits for the device"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: fake.told.append("empty cache"))
    return fake


def looked_at(cuda: FakeCuda, found: list[Any]) -> Callable[[], None]:
    return lambda: found.append((cuda.captures, cuda.mode, gc.isenabled()))


@pytest.mark.parametrize("collects", [True, False])
def test_a_capture(cuda: FakeCuda, collects: bool) -> None:
    """On a stream of its own, in the pool asked for, by a thread that is strict with itself alone; Python frees
    nothing."""
    found: list[Any] = []
    try:
        if not collects:
            gc.disable()
        capture = CudaCapture(DEVICE)
        pools = [capture.pool(), capture.pool()]
        replays = [capture(looked_at(cuda, found), pools[index]) for index in (0, 1, 0)]
        assert gc.isenabled() == collects
    finally:
        gc.enable()
    assert found == [(True, "thread_local", False)] * 3 and cuda.current == cuda.default
    replays[0]()
    assert cuda.told == [
        *("begin on stream 0 in pool 1", "end"),
        *("begin on stream 0 in pool 2", "end"),
        *("begin on stream 0 in pool 1", "end"),
        "replay on default",
    ]


def fails(cuda: FakeCuda, by: type[BaseException], is_invalid: bool) -> Callable[[], None]:
    def work() -> None:
        cuda.is_invalid = is_invalid
        raise by("the cause")

    return work


@pytest.mark.parametrize("is_invalid", [True, False])
@pytest.mark.parametrize("by", [RuntimeError, KeyboardInterrupt])
def test_a_capture_that_fails(cuda: FakeCuda, by: type[BaseException], is_invalid: bool) -> None:
    """It tells its cause, and leaves nothing that keeps others from being captured, memory from being freed, or random
    numbers from being drawn. Its pool stays for what was captured in it before, and others take a new one."""
    capture = CudaCapture(DEVICE)
    pool = capture.pool()
    replay = capture(lambda: None, pool)
    with pytest.raises(by, match="the cause"):
        capture(fails(cuda, by, is_invalid), pool)
    assert gc.isenabled() and not cuda.captures and cuda.current == cuda.default
    assert not cuda.recorded and not cuda.generator_is_captured
    assert cuda.users[1] == (1 if is_invalid else 2), "a graph that is whole, though nobody wants it, lets go by itself"
    replay()
    capture(lambda: None, pool)()
    assert cuda.told[-4:] == ["replay on default", "begin on stream 0 in pool 2", "end", "replay on default"]


def test_a_capture_that_is_found_invalid_at_its_end(cuda: FakeCuda) -> None:
    def work() -> None:
        cuda.is_invalid = True

    capture = CudaCapture(DEVICE)
    with pytest.raises(RuntimeError, match="previous error during capture"):
        capture(work, capture.pool())
    assert gc.isenabled() and not cuda.recorded and not cuda.generator_is_captured


def test_what_is_cached_is_given_back_before(cuda: FakeCuda) -> None:
    CudaCapture(DEVICE).make_room()
    assert cuda.told == ["empty cache"]


def test_what_goes_backward_without_its_graph_is_waited_for(cuda: FakeCuda) -> None:
    CudaCapture(DEVICE).join()
    assert cuda.told == ["default waits for stream 0"]


def test_the_driver_captures_no_default_stream(cuda: FakeCuda, monkeypatch) -> None:
    monkeypatch.setattr(cuda, "default", "stream 0")
    capture = CudaCapture(DEVICE)
    with pytest.raises(RuntimeError, match="non-default stream"):
        capture(lambda: None, capture.pool())
    assert gc.isenabled() and not cuda.recorded
