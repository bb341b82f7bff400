"""What is copied to a GPU, when, and who waits for it: on a device that only notes it."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager

import pytest
import torch

from megasnn import pinned
from megasnn.data import feed as feeding
from tests.data.shard_files import loader, open_all, write_shards

GPU = torch.device("cpu")  # takes its place


class Device:
    """Notes what is asked of a GPU. Streams and events are names; `streams` has the current one of each thread."""

    def __init__(self, monkeypatch) -> None:
        self.notes: list[tuple[str, str]] = []
        self._current = threading.local()
        monkeypatch.setattr(feeding, "without_waiting", self._copy)
        for name in ("Stream", "Event", "stream", "set_device", "current_stream"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: self.note("keep", stream.name))

    def note(self, what: str, where: str) -> None:
        self.notes.append((what, where))

    def _copy(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        assert device == GPU
        self.note("copy", self.current)
        return tensor.clone(memory_format=torch.preserve_format)

    @property
    def current(self) -> str:
        return getattr(self._current, "name", "computing")

    def set_device(self, device: torch.device) -> None:
        assert device == GPU

    @contextmanager
    def stream(self, stream: Stream):
        self._current.name = stream.name
        yield
        self._current.name = "computing"

    def Stream(self, device: torch.device) -> Stream:
        return Stream(self, "feeding")

    def current_stream(self, device: torch.device) -> Stream:
        return Stream(self, self.current)

    def Event(self) -> Event:
        return Event(self)


class Stream:
    def __init__(self, device: Device, name: str) -> None:
        self.device, self.name = device, name

    def wait_event(self, event: Event) -> None:
        assert event.recorded == "feeding"
        self.device.note("wait", self.name)


class Event:
    def __init__(self, device: Device) -> None:
        self.device, self.recorded = device, ""

    def record(self, stream: Stream) -> None:
        self.recorded = stream.name
        self.device.note("event", stream.name)


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_are_copied_on_a_stream_of_their_own_and_computing_waits_for_them(tmp_path, monkeypatch, workers):
    dataset = open_all(write_shards(tmp_path, samples=12, per_shard=6))
    options = {"global_batch_size": 4, "micro_batch_size": 4}
    expected = list(loader(dataset, **options).batches(0, 3))
    device = Device(monkeypatch)
    fed = loader(dataset, pin_for=GPU, num_workers=workers, **options).batches(0, 3)
    first = next(fed)
    copying = [("copy", "feeding"), ("copy", "feeding"), ("event", "feeding")]
    handing_over = [("wait", "computing"), ("keep", "computing"), ("keep", "computing")]
    assert device.notes[:3] == copying and [note for note in device.notes if note[1] == "computing"] == handing_over
    if workers == 0:
        assert device.notes == copying + handing_over
    else:
        end = time.monotonic() + 30
        while len(device.notes) < 9:  # the next batch is copied before it is asked for
            assert time.monotonic() < end, device.notes
            time.sleep(0.01)
    found = [first, *fed]
    for batch, other in zip(found, expected, strict=True):
        for micro, its in zip(batch.micro_batches, other.micro_batches, strict=True):
            assert torch.equal(micro.images, its.images) and torch.equal(micro.labels, its.labels)
            assert micro.images.stride() == its.images.stride()


def test_nothing_is_different_without_a_gpu(tmp_path, monkeypatch):
    device = Device(monkeypatch)
    dataset = open_all(write_shards(tmp_path, samples=12, per_shard=6))
    (batch,) = loader(dataset).batches(0, 1)
    assert batch.micro_batches[0].arrived is None and not device.notes


def test_numbers_go_to_a_gpu_from_pinned_memory(monkeypatch):
    values, copies = torch.arange(3), []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: copies.append("pin") or tensor)
    monkeypatch.setattr(
        torch.Tensor, "to", lambda tensor, device, **options: copies.append((device, options)) or tensor
    )
    pinned.without_waiting(values, torch.device("cuda", 1))
    assert copies == ["pin", (torch.device("cuda", 1), {"non_blocking": True})]
    pinned.without_waiting(values, torch.device("cpu"))
    assert copies[2:] == [(torch.device("cpu"), {})]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_gpu_is_given_the_same_batches(tmp_path, workers):
    dataset = open_all(write_shards(tmp_path, samples=60, per_shard=20))
    device = torch.device("cuda", 0)
    expected = list(loader(dataset).batches(0, 12))
    for batch, other in zip(loader(dataset, pin_for=device, num_workers=workers).batches(0, 12), expected, strict=True):
        for micro, its in zip(batch.micro_batches, other.micro_batches, strict=True):
            assert micro.images.device == micro.labels.device == device
            assert torch.equal(micro.images.cpu(), its.images) and torch.equal(micro.labels.cpu(), its.labels)
