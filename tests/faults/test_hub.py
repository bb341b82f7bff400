"""The hub of the watch, with ranks that are plain connections: strangers, absent ranks, several failures at once."""

from __future__ import annotations

import socket

import pytest

from megasnn import fault


def join(hub: fault._Hub, rank: int, token: str | None = None) -> fault._Link:
    link = fault._Link(socket.create_connection(("localhost", hub.port), timeout=10))
    link.send({"rank": rank, "token": hub.token if token is None else token})
    return link


@pytest.fixture
def ranks():
    hub = fault._Hub(3)
    links = [join(hub, rank) for rank in (2, 0, 1)]
    assert [link.receive() for link in links] == [{"ready": 3}] * 3
    yield [links[1], links[2], links[0]]
    for link in links:
        link.close()


def test_all_are_told_when_all_are_done(ranks) -> None:
    for rank in (1, 0):
        ranks[rank].send({"done": rank})
    ranks[2].socket.settimeout(0.2)
    assert ranks[2].receive() is None  # not yet
    ranks[2].socket.settimeout(10)
    ranks[2].send({"done": 2})
    assert [link.receive() for link in ranks] == [{"done": 3}] * 3


def test_only_the_first_failure_is_told(ranks) -> None:
    ranks[0].send({"done": 0})
    ranks[2].send({"failed": 2, "why": "ValueError: first\nwith two lines, ü"})
    assert ranks[0].receive() == {"failed": 2, "why": "ValueError: first\nwith two lines, ü"}
    ranks[1].send({"failed": 1, "why": "second"})
    assert all(link.receive()["failed"] == 2 for link in ranks[1:])


@pytest.mark.parametrize("done_before", [False, True])
def test_a_rank_that_goes_without_a_word_has_failed(ranks, done_before) -> None:
    if done_before:
        ranks[1].send({"done": 1})
    ranks[1].close()
    for rank in (0, 2):
        assert ranks[rank].receive() == {"failed": 1, "why": fault.GONE}


def test_strangers_are_ignored(monkeypatch) -> None:
    monkeypatch.setattr(fault, "HELLO_SECONDS", 0.2)
    hub = fault._Hub(1)
    silent = socket.create_connection(("localhost", hub.port))
    with socket.create_connection(("localhost", hub.port)) as scanner:
        scanner.sendall(b"GET / HTTP/1.1\r\n\r\n")
    other_run = join(hub, 0, token="of another run")
    assert join(hub, 0).receive() == {"ready": 1}
    assert other_run.receive() is None
    silent.close()


def test_a_rank_that_never_comes_is_named(monkeypatch) -> None:
    monkeypatch.setattr(fault, "CONNECT_SECONDS", 0.3)
    hub = fault._Hub(3)
    assert join(hub, 1).receive() == {"failed": 0, "why": "ranks [0, 2] did not join in time"}
