"""What one end of a link sends, the other restores bit for bit, or it is refused; over a transport in memory."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megasnn import device_checks
from megasnn.device_checks import DeviceChecks, explained
from megasnn.kernels import spike_codec as codec
from megasnn.kernels.spike_codec import Content
from megasnn.parallel.traffic import statistics
from megasnn.parallel_state import Group
from megasnn.pipeline import p2p
from megasnn.pipeline.p2p import Receiver, Sender, WireOptions

CPU, PAIR = torch.device("cpu"), Group("pipeline", (0, 1))
BITS = {torch.float32: torch.int32, torch.float64: torch.int64, torch.bfloat16: torch.int16, torch.float16: torch.int16}
values = st.sampled_from([0.0, 1.0, 0.0, 1.0, -0.0, float("nan"), float("inf"), 2.0, 0.5, 255.0, 256.0, -1.0])


class _Posted:
    """A receive that copies the oldest message when it is waited for; sizes and types must agree, as in Gloo."""

    def __init__(self, content: deque[Tensor], buffer: Tensor) -> None:
        self._content, self._buffer = content, buffer

    def wait(self) -> None:
        message = self._content.popleft()
        assert (message.shape, message.dtype) == (self._buffer.shape, self._buffer.dtype)
        self._buffer.copy_(message)


@contextmanager
def _link(options: WireOptions | None = None) -> Iterator[tuple[Sender, Receiver]]:
    content: deque[Tensor] = deque()
    sent = mock.Mock(is_completed=lambda: True)

    def isend(message: Tensor, *_: object, **__: object) -> mock.Mock:
        content.append(message.clone())
        return sent

    with (
        mock.patch.object(p2p.dist, "isend", isend),
        mock.patch.object(p2p.dist, "irecv", lambda buffer, *_, **__: _Posted(content, buffer)),
    ):
        yield Sender(1, PAIR, CPU, options or WireOptions()), Receiver(0, PAIR, CPU, CPU)
        assert not content, "something was sent that nobody received"


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Of any memory order and content: few spikes among strangers and the other way round."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    count = torch.Size(shape).numel()
    dtype = draw(st.sampled_from(list(BITS)))
    kind = draw(st.sampled_from([values, st.sampled_from([0.0, 1.0]), st.integers(0, 255).map(float)]))
    content = torch.tensor(draw(st.lists(kind, min_size=count, max_size=count)), dtype=dtype).view(shape)
    return content.permute(draw(st.permutations(range(len(shape)))))


def _fits(tensor: Tensor, content: Content) -> bool:
    largest = {Content.DENSE: math.inf, Content.SPIKES: 1, Content.COUNTS: 255}[content]
    values = tensor.double().flatten().tolist()
    whole = (value.is_integer() and 0 <= value <= largest and math.copysign(1, value) > 0 for value in values)
    return content is Content.DENSE or all(whole)


@settings(max_examples=150, deadline=None)
@given(tensors(), st.sampled_from(list(Content)), st.integers(1, 3))
def test_every_value_arrives_with_all_its_bits_or_is_refused(tensor: Tensor, content: Content, times: int) -> None:
    with _link() as (sender, receiver):
        if not _fits(tensor, content):
            with pytest.raises(ValueError, match="takes"):
                sender.send("key", tensor, content, "forward")
            return
        for _ in range(times):
            receiver.post("key")
            sender.send("key", tensor, content, "forward")
            got = receiver.receive("key")
            assert got.dtype == tensor.dtype and got.shape == tensor.shape
            assert torch.equal(got.view(BITS[tensor.dtype]), tensor.contiguous().view(BITS[tensor.dtype]))


@pytest.mark.parametrize("runs_ahead", [False, True], ids=["as-on-a-cpu", "as-on-a-gpu"])
@pytest.mark.parametrize("value", [-0.0, float("nan"), 2.0, 0.5, 256.0, -1.0])
def test_in_a_step_what_does_not_fit_is_noted_and_its_message_keeps_its_size(value: float, runs_ahead: bool) -> None:
    fits, content = torch.ones(4, 20), Content.COUNTS if value in (0.5, 256.0) else Content.SPIKES
    unfit = fits.clone()
    unfit[2, 3] = value
    checks = DeviceChecks(CPU)
    statistics.reset()
    with (
        statistics.counting(),
        mock.patch.object(device_checks, "runs_ahead", lambda device: runs_ahead),
        mock.patch.object(codec, "_loops", (lambda: None) if runs_ahead else codec._loops),
        checks.collecting(),
        _link() as (sender, receiver),
    ):
        for number, tensor in enumerate((fits, unfit, fits)):
            receiver.post("key")
            with explained(f"number {number}: {{}}".format):
                sender.send("key", tensor, content, "forward")
            got = receiver.receive("key")
            assert torch.equal(got.view(torch.int32), tensor.view(torch.int32)) == (tensor is fits)
    traffic = statistics.read()
    statistics.reset()
    packed = 80 if content is Content.COUNTS else 10
    assert traffic["pipeline", "send", "forward"].bytes == 3 * packed
    assert traffic["pipeline", "send", "forward"].dense_bytes == 3 * 320
    assert checks.count().item() == 1
    (finding,) = checks.findings()
    assert finding.text.startswith("number 1: pack_")
    assert ("got values from" in finding.text) == (not runs_ahead)


def test_gradients_travel_as_narrow_as_asked_for() -> None:
    gradient = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    statistics.reset()
    with statistics.counting(), _link(WireOptions(gradient_dtype=torch.bfloat16)) as (sender, receiver):
        receiver.post("key")
        sender.send("key", gradient, Content.DENSE, "backward")
        got = receiver.receive("key")
    traffic = statistics.read()["backward", "send", "backward"]
    statistics.reset()
    assert got.dtype == torch.float32 and torch.equal(got, gradient.bfloat16().float())
    assert (traffic.bytes, traffic.dense_bytes) == (30, 60)
    with _link(WireOptions(gradient_dtype=torch.bfloat16)) as (sender, receiver):
        receiver.post("key")
        sender.send("key", gradient, Content.DENSE, "forward")
        assert torch.equal(receiver.receive("key"), gradient)
