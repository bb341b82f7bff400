"""Tensors that are moved to the host's memory and back by a stream of its own, on stand-ins for streams and tensors
that note what waits for what."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from megasnn.pipeline.host_memory import HostMemory

DEVICE = torch.device("cuda", 0)


class FakeStream:
    """
    Attributes:
        done: what this stream has been given to do, or waits for, in order.
    """

    def __init__(self, name: str) -> None:
        self.name, self.done = name, list[str]()

    def wait_stream(self, other: FakeStream) -> None:
        self.done += [text for text in other.done if text not in self.done]


class FakeTensor:
    """
    Attributes:
        used_by: the streams for which its memory is kept when nobody holds it any more: that on which it was made, and
            those that were told.
    """

    nbytes = 8

    def __init__(self, cuda: FakeCuda, device: str, is_pinned: bool = False) -> None:
        self._cuda, self.device, self.is_pinned = cuda, device, is_pinned
        self.used_by = {cuda.current.name}

    def copy_(self, other: FakeTensor, non_blocking: bool = False) -> None:
        assert non_blocking and (self.is_pinned or other.is_pinned), "the host would wait"
        self._cuda.current.done.append(f"copy to {self.device}")
        self.used_by.add(self._cuda.current.name)
        self._cuda.copied.append((other, self._cuda.current.name))

    def record_stream(self, stream: FakeStream) -> None:
        self.used_by.add(stream.name)


class FakeCuda:
    """
    Attributes:
        copied: what was read, and by which stream.
    """

    def __init__(self) -> None:
        self.current = self.computing = FakeStream("computing")
        self.copying: FakeStream | None = None
        self.copied: list[tuple[FakeTensor, str]] = []

    def make_stream(self, device: torch.device) -> FakeStream:
        self.copying = FakeStream("copying")
        return self.copying

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def empty_like(self, x: FakeTensor, device: Any = None, pin_memory: bool = False) -> FakeTensor:
        return FakeTensor(self, "host" if device == "cpu" else "device", pin_memory)


@pytest.fixture
def cuda(monkeypatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(torch.cuda, "Stream", fake.make_stream)
    monkeypatch.setattr(torch.cuda, "stream", fake.stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: fake.current)
    monkeypatch.setattr(torch, "empty_like", fake.empty_like)
    return fake


def test_what_is_moved_out_is_there_before_it_is_copied_and_until_it_was(cuda: FakeCuda) -> None:
    host, tensor = HostMemory(DEVICE), FakeTensor(cuda, "device")
    cuda.computing.done.append("the tensor")
    place: Any = host.put(tensor)  # type: ignore[arg-type]
    assert place.is_pinned and place.device == "host" and cuda.current is cuda.computing
    assert cuda.copying is not None and cuda.copying.done == ["the tensor", "copy to host"]
    assert cuda.computing.done == ["the tensor"], "computing does not wait for the copy"
    assert cuda.copied == [(tensor, "copying")] and "copying" in tensor.used_by
    assert host.held == host.peak == 8


def test_what_is_moved_in_is_copied_before_it_is_used_and_there_until_it_was(cuda: FakeCuda) -> None:
    host = HostMemory(DEVICE)
    place: Any = host.put(FakeTensor(cuda, "device"))  # type: ignore[arg-type]
    cuda.computing.done.append("something else")
    tensor: Any = host.get(place)
    assert cuda.copying is not None and cuda.copying.done == ["copy to host", "copy to device"], "beside all else"
    assert tensor.device == "device" and tensor.used_by == {"copying", "computing"} and host.held == 0
    assert "copy to device" not in cuda.computing.done
    host.wait()
    assert "copy to device" in cuda.computing.done and host.peak == 8
