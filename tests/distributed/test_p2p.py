"""Tensors between two ranks: any shape, memory order, type and content; a descriptor travels once for each kind."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch._lazy.ts_backend
import torch.distributed as dist
from torch import Tensor

from megasnn.kernels import spike_codec as codec
from megasnn.kernels.spike_codec import Content, bits_of, remember_bits
from megasnn.parallel.traffic import statistics
from megasnn.parallel_state import alone
from megasnn.pipeline.edges import without_graph
from megasnn.pipeline.p2p import Receiver, Sender, TensorDescriptor
from tests.distributed.whole import everybody, random, spikes

CPU = torch.device("cpu")


def _tensors() -> list[tuple[object, Tensor, Content]]:
    """(key, tensor, content) in the order of sending: several kinds, each more than once, in turns."""
    image = random(2, 3, 5, 4, 6)
    kinds = [
        ("scalar", lambda s: random(seed=s), Content.DENSE),
        ("row", lambda s: random(7, seed=s), Content.DENSE),
        ("contiguous", lambda s: image + s, Content.DENSE),
        ("channels last", lambda s: (image + s).movedim(2, -1).contiguous().movedim(-1, 2), Content.DENSE),
        ("samples first", lambda s: (image + s).transpose(0, 1).contiguous().transpose(0, 1), Content.DENSE),
        ("slice", lambda s: (image + s)[:, 1:, :, ::2], Content.DENSE),
        ("eight dims", lambda s: random(1, 2, 1, 3, 1, 2, 1, 2, seed=s).permute(7, 0, 3, 2, 5, 4, 1, 6), Content.DENSE),
        ("spikes", lambda s: spikes(3, 5, 7, seed=s).transpose(0, 2), Content.SPIKES),
        ("spikes bf16", lambda s: spikes(3, 5, 7, seed=s, dtype=torch.bfloat16), Content.SPIKES),
        ("counts", lambda s: torch.arange(256.0).roll(s).view(4, 8, 8).permute(2, 0, 1), Content.COUNTS),
        ("float32", lambda s: random(3, 4, seed=s, dtype=torch.float32), Content.DENSE),
        ("bfloat16", lambda s: random(3, 4, seed=s, dtype=torch.bfloat16), Content.DENSE),
        ("int64", lambda s: torch.arange(s, s + 6), Content.DENSE),
        ("int32", lambda s: torch.arange(s, s + 6, dtype=torch.int32), Content.DENSE),
        ("mask", lambda s: spikes(3, 5, 7, seed=s).bool(), Content.SPIKES),
        (("stream", 3), lambda s: spikes(2, 3, 9, seed=s), Content.SPIKES),
        (("stream", 1), lambda s: spikes(2, 1, 9, seed=s), Content.SPIKES),  # the last, smaller micro-batch
    ]
    return [(key, make(turn), content) for turn in range(3) for key, make, content in kinds]


def _exchange(announce_early: bool) -> tuple[int, int, int]:
    """Both ranks send all tensors to each other at the same time, before they receive any."""
    group = everybody("pipeline")
    peer, sent = 1 - group.rank, _tensors()
    sender, receiver = Sender(peer, group, CPU), Receiver(peer, group, CPU, CPU)
    statistics.reset()
    messages = 0
    start = dist.isend

    def counted(*args, **kwargs):
        nonlocal messages
        messages += 1
        return start(*args, **kwargs)

    dist.isend = counted
    try:
        with statistics.counting():
            for key, tensor, content in sent:
                sender.send(key, tensor, content, "forward")
            if announce_early:
                receiver.post(sent[0][0])
            for index, (key, tensor, _) in enumerate(sent):
                if not announce_early:
                    receiver.post(key)
                got = receiver.receive(key)
                if announce_early and index + 1 < len(sent):
                    receiver.post(sent[index + 1][0])
                assert torch.equal(got, tensor) and got.dtype == tensor.dtype and got.shape == tensor.shape, key
                # As dense as it was, in the same memory order.
                order = sorted(range(tensor.ndim), key=lambda dim: -tensor.stride(dim))
                assert got.permute(order).is_contiguous(), key
            sender.wait()
    finally:
        dist.isend = start
    traffic = statistics.read()
    statistics.reset()
    ((_, sent_once),) = traffic.items()
    return messages, sent_once.calls, sent_once.bytes


@pytest.mark.parametrize("announce_early", [True, False])
def test_any_tensor_arrives_as_it_was(ranks, announce_early) -> None:
    tensors = _tensors()
    kinds = len({key for key, _, _ in tensors})
    size = {
        Content.DENSE: lambda t: t.numel() * t.itemsize,
        Content.SPIKES: lambda t: -(-t.numel() // 8),
        Content.COUNTS: lambda t: t.numel(),
    }
    expected = sum(size[content](tensor) for _, tensor, content in tensors)
    for messages, calls, sent in ranks(2, _exchange, announce_early):
        assert messages == len(tensors) + kinds  # one descriptor for each kind
        assert calls == len(tensors) and sent == expected


def _refusals() -> list[str]:
    group = everybody("pipeline")
    sender = Sender(1 - group.rank, group, CPU)
    receiver = Receiver(1 - group.rank, group, CPU, CPU)
    messages = []
    sender.send("a", random(2, 3), Content.DENSE, "forward")
    for key, tensor, content in [
        ("a", random(3, 2), Content.DENSE),  # another shape under a known key
        ("a", random(2, 3, dtype=torch.float32), Content.DENSE),
        ("a", random(3, 2).T.requires_grad_(), Content.DENSE),
        ("b", random(*[1] * 9), Content.DENSE),
        ("c", torch.zeros(2, dtype=torch.complex64), Content.DENSE),
        ("d", torch.tensor([0.0, 0.5, 1.0]), Content.SPIKES),
        ("e", torch.tensor([1.0, 256.0]), Content.COUNTS),
        ("f", torch.tensor([1.0, float("nan")]), Content.COUNTS),
        ("g", torch.tensor([1.0, -0.0]), Content.SPIKES),
    ]:
        with pytest.raises(ValueError) as raised:
            sender.send(key, tensor, content, "forward")
        messages.append(str(raised.value))
    # Nothing of all that was sent: the link still works.
    sender.send("a", random(2, 3, seed=1), Content.DENSE, "forward")
    for seed in range(2):
        receiver.post("a")
        assert torch.equal(receiver.receive("a"), random(2, 3, seed=seed))
    sender.wait()
    return messages


def test_what_cannot_travel_exactly_is_refused_before_anything_is_sent(ranks) -> None:
    for shape, dtype, order, dims, complex_, *unfit in ranks(2, _refusals):
        assert "changed its shape from (2, 3) to (3, 2); micro-batches" in shape
        assert "changed its type from torch.float64 to torch.float32, its sent_as from" in dtype
        assert "changed its memory order from (0, 1) to (1, 0), its need of a gradient from False to True;" in order
        assert "let the layer return one shape, type and memory order" in order
        assert "9 dimensions" in dims and "complex64" in complex_
        half, large, nan, minus = unfit
        assert "takes 0 and 1" in half and "256" in large and "nan" in nan and "-0.0" in minus
        assert all("said to hold" in message for message in unfit)


def _from_another_device() -> None:
    """Tensors of torch's lazy backend, which is on the CPU, but which Gloo takes as little as those of a GPU."""
    torch._lazy.ts_backend.init()
    lazy, group = torch.device("lazy"), everybody("pipeline")
    sender = Sender(1 - group.rank, group, CPU)
    receiver = Receiver(1 - group.rank, group, CPU, lazy)
    values = [spikes(3, 5, 7, seed=seed, dtype=torch.float32) for seed in range(3)]
    for seed, value in enumerate(values):
        sender.send("key", value.to(lazy), Content.SPIKES, "forward")
        receiver.post("key")
        got = receiver.receive("key")
        assert got.device.type == "lazy" and torch.equal(got.cpu(), values[seed])
    sender.wait()


def test_messages_go_through_the_host_where_the_transport_takes_none_from_the_device(ranks) -> None:
    ranks(2, _from_another_device)


@pytest.mark.parametrize("content", Content)
def test_what_a_gpu_reads_from_the_host_is_received_into_pinned_memory(content, monkeypatch) -> None:
    asked, empty = [], torch.empty

    def without_gpu(*sizes, pin_memory=False, **options):
        asked.append(pin_memory)
        return empty(*sizes, **options)

    monkeypatch.setattr(torch, "empty", without_gpu)
    descriptor = TensorDescriptor.of(torch.ones(3, 5), content)
    for device in (CPU, torch.device("cuda")):
        receiver = Receiver(1, alone("pipeline"), CPU, device)
        monkeypatch.setattr(receiver, "_start", lambda buffer: None)
        receiver._known["key"] = descriptor
        receiver.post("key")
    assert asked == [False, True]


def _with_bits() -> None:
    group = everybody("pipeline")
    sender, receiver = Sender(1 - group.rank, group, CPU), Receiver(1 - group.rank, group, CPU, CPU)
    values = spikes(2, 3, 5, 4, 4).movedim(2, -1).contiguous().movedim(-1, 2)
    remember_bits(values, codec.pack_bits(values))
    with mock.patch.object(codec, "pack_bits", None):
        sender.send("key", values, Content.SPIKES, "forward")
        assert torch.equal(receiver.receive("key"), values)
        with pytest.raises(TypeError):
            sender.send("key", values + 0, Content.SPIKES, "forward")
    sender.wait()


def test_spikes_that_know_their_bits_travel_as_these(ranks) -> None:
    ranks(2, _with_bits)


def test_what_a_stage_hands_on_knows_its_bits_and_needs_a_gradient() -> None:
    values = spikes(2, 3, 8)
    bits = codec.pack_bits(values)
    given = without_graph(remember_bits(values.requires_grad_() * 1, bits))
    assert given.is_leaf and given.requires_grad and bits_of(given) is bits
    assert not without_graph(values.detach()).requires_grad


def _with_bits_of_another_order() -> None:
    group = everybody("pipeline")
    sender, receiver = Sender(1 - group.rank, group, CPU), Receiver(1 - group.rank, group, CPU, CPU)
    values = spikes(2, 3, 5, 4, 4)
    plan = TensorDescriptor.of(values.movedim(2, -1).contiguous().movedim(-1, 2), Content.SPIKES)
    remember_bits(values, codec.pack_bits(values))
    sender.send("key", values, plan, "forward")
    assert torch.equal(receiver.receive("key", planned=plan), values)
    sender.wait()


def test_spikes_that_know_their_bits_in_another_order_than_is_planned_are_packed_anew(ranks) -> None:
    ranks(2, _with_bits_of_another_order)


def _posted_together() -> None:
    group = everybody("pipeline")
    sender, receiver = Sender(1 - group.rank, group, CPU), Receiver(1 - group.rank, group, CPU, CPU)
    sizes = range(2, 5)
    plans = {size: TensorDescriptor.of(torch.empty(1, 1, size), Content.DENSE) for size in sizes}
    for size in sizes:
        receiver.post(size, plans[size])
    for size in sizes:
        sender.send(size, torch.full((1, 1, size), float(size)), plans[size], "forward")
    for size in sizes:
        assert torch.equal(receiver.receive(size, planned=plans[size]), torch.full((1, 1, size), float(size)))
    assert not receiver.is_posted
    sender.wait()


def test_several_tensors_may_be_posted_in_their_order(ranks) -> None:
    ranks(2, _posted_together)


def _planned() -> tuple[str, str]:
    """Without a descriptor; the tensor is brought into the order that is planned."""
    group = everybody("pipeline")
    sender, receiver = Sender(1 - group.rank, group, CPU), Receiver(1 - group.rank, group, CPU, CPU)
    pixels = random(2, 3, 4, 5, 6)
    plan = TensorDescriptor.of(pixels.movedim(2, -1).contiguous().movedim(-1, 2), Content.DENSE)
    with mock.patch.object(TensorDescriptor, "to_header", None):
        for early in (True, False):
            sender.send("key", pixels, plan, "forward")
            if early:
                receiver.post("key", plan)
                assert receiver.is_posted
            got = receiver.receive("key", planned=plan)
            assert torch.equal(got, pixels) and got.movedim(2, -1).is_contiguous()
        refused = []
        for other in (pixels[:, 1:], pixels.float()):
            with pytest.raises(ValueError) as raised:
                sender.send("key", other, plan, "forward")
            refused.append(str(raised.value))
    sender.wait()
    return refused[0], refused[1]


def test_what_is_planned_travels_without_a_descriptor_and_is_refused_where_it_differs(ranks) -> None:
    for shape, dtype in ranks(2, _planned):
        assert "is not what the dry run of its layer has shown; it changed its shape from (2, 3, 4, 5, 6) to" in shape
        assert "its type from torch.float64 to torch.float32" in dtype
