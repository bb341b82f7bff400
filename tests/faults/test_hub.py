"""The hub of the watch, with ranks that are plain connections: strangers, absent ranks, several failures at once."""

from __future__ import annotations

import re
import resource
import socket
import time
from multiprocessing.connection import Connection
from threading import Thread
from unittest import mock

import pytest

from megasnn.process import fault, fault_hub
from tests.forking import forking


def join(hub: fault_hub.Hub, rank: int, token: str | None = None) -> fault_hub.Link:
    link = fault_hub.Link(socket.create_connection(("localhost", hub.port), timeout=10))
    link.send({"rank": rank, "token": hub.token if token is None else token})
    return link


@pytest.fixture
def three():
    hub = fault_hub.Hub(3)
    links = [join(hub, rank) for rank in (2, 0, 1)]
    assert [link.receive() for link in links] == [{"ready": 3}] * 3
    yield [links[1], links[2], links[0]]
    for link in links:
        link.close()


def test_all_are_told_when_all_are_done(three) -> None:
    for rank in (1, 0):
        three[rank].send({"done": rank})
    three[2].socket.settimeout(0.2)
    assert three[2].receive() is None  # not yet
    three[2].socket.settimeout(10)
    three[2].send({"done": 2})
    assert [link.receive() for link in three] == [{"done": 3}] * 3


def test_only_the_first_failure_is_told(three) -> None:
    three[0].send({"done": 0})
    three[2].send({"failed": 2, "why": "ValueError: first\nwith two lines, ü"})
    assert three[0].receive() == {"failed": 2, "why": "ValueError: first\nwith two lines, ü"}
    three[1].send({"failed": 1, "why": "second"})
    assert all(link.receive()["failed"] == 2 for link in three[1:])


@pytest.mark.parametrize("done_before", [False, True])
def test_a_rank_that_goes_without_a_word_has_failed(three, done_before) -> None:
    if done_before:
        three[1].send({"done": 1})
    three[1].close()
    for rank in (0, 2):
        assert three[rank].receive() == {"failed": 1, "why": fault_hub.GONE}


def test_strangers_are_ignored(monkeypatch) -> None:
    monkeypatch.setattr(fault_hub, "HELLO_SECONDS", 0.2)
    hub = fault_hub.Hub(1)
    silent = socket.create_connection(("localhost", hub.port))
    with socket.create_connection(("localhost", hub.port)) as scanner:
        scanner.sendall(b"GET / HTTP/1.1\r\n\r\n")
    other_run = join(hub, 0, token="of another run")
    assert join(hub, 0).receive() == {"ready": 1}
    assert other_run.receive() is None
    silent.close()


def test_a_rank_that_never_comes_is_named(monkeypatch) -> None:
    monkeypatch.setattr(fault_hub, "CONNECT_SECONDS", 0.3)
    hub = fault_hub.Hub(3)
    assert join(hub, 1).receive() == {"failed": 0, "why": "ranks [0, 2] did not join in time"}


def test_strangers_hold_up_nobody() -> None:
    """Each of them may be silent for HELLO_SECONDS; together they may be no longer."""
    hub = fault_hub.Hub(2)
    strangers = [socket.create_connection(("localhost", hub.port)) for _ in range(20)]
    nonsense = (b"{", b"[1]\n", b"null\n", b"\xff\n", b"[" * 3000 + b"\n", b"x" * 9000)
    for stranger, said in zip(strangers, nonsense, strict=False):
        stranger.sendall(said)
    for hello in ({"rank": "1"}, {"rank": 2}, {"rank": -1}, {}):
        link = fault_hub.Link(socket.create_connection(("localhost", hub.port), timeout=10))
        link.send({**hello, "token": hub.token})
        assert link.receive() is None
    began = time.monotonic()
    late = fault_hub.Link(socket.create_connection(("localhost", hub.port), timeout=10))
    late.socket.sendall(b'{"rank": 0, ')
    other = join(hub, 1)
    late.socket.sendall(f'"token": "{hub.token}"}}\n'.encode())
    assert [link.receive() for link in (late, other)] == [{"ready": 2}] * 2
    assert time.monotonic() - began < fault_hub.HELLO_SECONDS / 2
    for stranger in strangers:
        stranger.close()


def test_a_rank_that_takes_no_message_holds_up_nobody(monkeypatch) -> None:
    """The message is more than the system keeps for it; rank 0, which ends the hub, hears it last."""
    monkeypatch.setattr(fault_hub, "TELL_SECONDS", 1.0)
    hub = fault_hub.Hub(4)
    links = [join(hub, rank) for rank in range(4)]
    assert [link.receive() for link in links] == [{"ready": 4}] * 4
    message = {"failed": 3, "why": "x" * 10_000_000}
    Thread(target=links[3].send, args=(message,), daemon=True).start()
    for rank in (2, 0):  # rank 1 does not listen
        assert links[rank].receive() == message


def _hub_of_many(size: int, pipe: Connection) -> None:
    """A process with the usual limit on open files."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    started = fault._start_hub(size)
    pipe.send(started)
    pipe.recv()


def _many_ranks(place: tuple[int, str], ranks: range, pipe: Connection) -> None:
    """Stands in for these ranks. Tells when all have joined, fails or ends as told, and tells when all have heard."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    pipe.send("up")
    pipe.recv()
    links = {}
    for rank in ranks:
        links[rank] = fault_hub.Link(socket.create_connection(("localhost", place[0]), timeout=60))
        links[rank].send({"rank": rank, "token": place[1]})
    answers = {str(link.receive()) for link in links.values()}
    pipe.send((time.monotonic(), answers))
    while (act := pipe.recv()) is not None:
        if "failed" in act:
            links[act["failed"]].send(act)
        else:
            links.pop(act["killed"]).close()
    pipe.send((time.monotonic(), {str(link.receive()) for link in links.values()}, time.monotonic()))


@pytest.mark.parametrize("ends", ["failed", "killed"])
def test_4096_ranks(monkeypatch, ends) -> None:
    """Each has a connection of its own, in four processes; strangers come before them."""
    size = 4096
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < size + 2 * fault_hub.OTHER_FILES:
        pytest.skip("this machine does not allow so many open files")
    context = forking()

    def start(function, *arguments) -> Connection:
        ours, theirs = context.Pipe()
        context.Process(target=function, args=(*arguments, theirs), daemon=True).start()
        return ours

    def answer(pipe: Connection):
        assert pipe.poll(60)
        return pipe.recv()

    hub = start(_hub_of_many, size)
    place = answer(hub)
    assert isinstance(place, tuple), place
    helpers = [start(_many_ranks, place, range(first, first + size // 4)) for first in range(0, size, size // 4)]
    assert [answer(helper) for helper in helpers] == ["up"] * 4
    strangers = [socket.create_connection(("localhost", place[0])) for _ in range(50)]
    began = time.monotonic()
    for helper in helpers:
        helper.send("join")
    joined = [answer(helper) for helper in helpers]
    assert [answers for _, answers in joined] == [{str({"ready": size})}] * 4
    assert max(when for when, _ in joined) - began < 15
    helpers[2].send({ends: 2500} | ({"why": "injected"} if ends == "failed" else {}))
    told = time.monotonic()
    for helper in helpers:
        helper.send(None)
    heard = [answer(helper) for helper in helpers]
    why = "injected" if ends == "failed" else fault_hub.GONE
    assert [answers for _, answers, _ in heard] == [{str({"failed": 2500, "why": why})}] * 4
    assert max(when for *_, when in heard) - told < 5
    for stranger in strangers:
        stranger.close()
    hub.send(None)


@pytest.mark.parametrize("limits", [(1024, 4096), (1024, 1024)])
def test_too_few_open_files_are_refused(monkeypatch, limits) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits)
    why = fault._start_hub(4096)
    assert isinstance(why, str)
    needed = re.search(r"`ulimit -n` is (\d+) or more", why)
    assert needed and 4096 + fault_hub.OTHER_FILES < int(needed[1]) < 4096 + 2 * fault_hub.OTHER_FILES
    assert f"{limits[0]} are allowed (at most {limits[1]} are allowed)" in why


def _refused() -> str:
    with mock.patch.object(fault_hub, "OTHER_FILES", 10**9), pytest.raises(OSError) as caught, fault.FaultWatch():
        pass
    return str(caught.value)


def test_every_rank_is_told_that_the_watch_cannot_start(ranks) -> None:
    first, second = ranks(2, _refused)
    assert "the watch over all ranks cannot start: " in first and "ulimit -n" in first
    assert "the watch over all ranks cannot start: rank 0 says why" in second
