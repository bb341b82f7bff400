"""When one rank fails, all ranks end within seconds, and each says why.

Every rank keeps a connection to a hub on rank 0 that carries nothing while all is well. A rank that fails sends its
message there, and the hub tells everybody. A rank that was killed cannot send, but the operating system closes its
connections, and keep-alive probes find a machine that is gone. There is no heartbeat: a rank that is merely slow is
never taken for dead. On every rank a thread listens, prints what it hears and ends the process, also while the main
thread is blocked in a collective.
"""

from __future__ import annotations

import json
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable

import torch.distributed as dist

CONNECT_SECONDS = 60.0
HELLO_SECONDS = 5.0
# A rank that was killed breaks connections of the others' collectives too. Their errors wait for the news of its death.
CAUSE_SECONDS = 0.3
# A launcher stops all ranks once the first one ends. First all others say why they end, then the one that failed
# prints its error and ends, then the others.
FAREWELL_SECONDS = 0.5
LAST_SECONDS = 1.5
GONE = "ended without a word (killed, or out of memory?)"


class FaultWatch:
    """Context manager around all that this rank does together with others. Nothing happens in a world of one process.

    Entering and leaving wait for all ranks. An error that leaves the block is told to all ranks first; it goes on to
    the caller, who prints it and ends the process with `os._exit`, since nothing that waits for other ranks may run
    any more. When another rank has failed, or is gone, this process prints that and exits with status 1.

    Attributes:
        place: says where this rank is, or None. It is told when another rank is gone: that one cannot say where it was.
    """

    def __init__(self) -> None:
        self.place: Callable[[], str | None] = lambda: None
        started = dist.is_initialized()
        self._rank, self._size = (dist.get_rank(), dist.get_world_size()) if started else (0, 1)
        self._failing = False
        self._answered = threading.Event()

    def __enter__(self) -> FaultWatch:
        if self._size > 1:
            self._hub = _Hub(self._size) if self._rank == 0 else None
            self._link = _join(self._hub, self._rank)
            threading.Thread(target=self._listen, name="megasnn-fault-watch", daemon=True).start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._size == 1:
            return
        if error is None:
            self._link.send({"done": self._rank})
            self._answered.wait()
            self._link.close()
        else:
            self._failing = True
            time.sleep(CAUSE_SECONDS)
            self._link.send({"failed": self._rank, "why": f"{type(error).__name__}: {error}"})
            self._answered.wait()
            time.sleep(FAREWELL_SECONDS)

    def _listen(self) -> None:
        """The hub sends one message: all are done, or the first failure."""
        message = self._link.receive() or {"failed": 0, "why": GONE}
        own = self._failing and message.get("failed") == self._rank
        if "done" in message or own:
            self._answered.set()
        else:
            place = self.place() if message["why"] == GONE else None
            here = "" if place is None else f"; here: {place}"
            tell_end(self._rank, f"stopping, because of rank {message['failed']}: {message['why']}{here}")
            time.sleep(LAST_SECONDS)
            os._exit(1)


_first = threading.Lock()


def is_ending() -> bool:
    """This process has told why it ends."""
    return _first.locked()


def tell_end(rank: int, text: str) -> None:
    """The first reason why this process ends is the one; what follows from it is not told."""
    if _first.acquire(blocking=False):
        sys.stderr.write(f"[rank {rank}] {text}\n")  # in one piece: all ranks speak at the same time


def _join(hub: _Hub | None, rank: int) -> _Link:
    """This rank's connection to the hub, once all ranks have theirs."""
    place = [None if hub is None else (hub.port, hub.token)]
    dist.broadcast_object_list(place, src=0)
    assert place[0] is not None
    port, token = place[0]
    host = "localhost" if rank == 0 else os.environ.get("MASTER_ADDR", "localhost")
    try:
        link = _Link(socket.create_connection((host, port), timeout=CONNECT_SECONDS))
    except OSError as error:
        raise ConnectionError(
            f"rank {rank} cannot reach rank 0 at {host}:{port} ({error}); MASTER_ADDR must name rank 0's host, and all "
            f"hosts must reach its ports"
        ) from error
    link.send({"rank": rank, "token": token})
    answer = link.receive()
    if answer is None or "failed" in answer:
        raise ConnectionError(f"the watch over all ranks did not start: {answer or f'no answer from {host}:{port}'}")
    link.wait_for_ever()
    return link


class _Link:
    """One end of a connection, and messages over it: a JSON object on a line each."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket, self._received = connection, b""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # Probes after 5 s of silence, 3 s apart; after 3 without an answer the machine counts as gone.
        for option, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 3), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, option):
                self.socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    def wait_for_ever(self) -> None:
        self.socket.settimeout(None)

    def send(self, message: dict) -> None:
        """Nothing happens when the other side is gone: who listens there finds out."""
        try:
            self.socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            pass

    def receive(self) -> dict | None:
        """The next message; None when the other side is gone, talks nonsense, or is silent beyond the time allowed."""
        try:
            while b"\n" not in self._received:
                data = self.socket.recv(65536)
                if not data:
                    return None
                self._received += data
            line, _, self._received = self._received.partition(b"\n")
            return json.loads(line)
        except (OSError, ValueError):
            return None

    def close(self) -> None:
        self.socket.close()


class _Hub:
    """On rank 0, in a thread: passes the first failure on to all ranks, and tells them when all are done."""

    def __init__(self, size: int) -> None:
        self._server = _server(backlog=size)
        self._size, self._links = size, dict[int, _Link]()
        self.port: int = self._server.getsockname()[1]
        self.token = secrets.token_hex(16)
        threading.Thread(target=self._serve, name="megasnn-fault-hub", daemon=True).start()

    def _serve(self) -> None:
        self._accept_all()
        absent = sorted(set(range(self._size)) - set(self._links))
        if absent:
            return self._tell_all({"failed": absent[0], "why": f"ranks {absent} did not join in time"})
        self._tell_all({"ready": self._size})
        self._tell_all(self._outcome())

    def _accept_all(self) -> None:
        deadline = time.monotonic() + CONNECT_SECONDS
        with self._server:
            while len(self._links) < self._size and (left := deadline - time.monotonic()) > 0:
                self._server.settimeout(left)
                try:
                    connection, _ = self._server.accept()
                except OSError:
                    return
                connection.settimeout(HELLO_SECONDS)
                link = _Link(connection)
                hello = link.receive()
                if isinstance(hello, dict) and hello.get("token") == self.token:
                    self._links[hello["rank"]] = link
                    link.wait_for_ever()

    def _outcome(self) -> dict:
        """Waits until all ranks are done, or one has failed or gone. Each sends one message."""
        with selectors.DefaultSelector() as selector:
            for rank, link in self._links.items():
                selector.register(link.socket, selectors.EVENT_READ, rank)
            working = set(self._links)
            while working:
                for key, _ in selector.select():
                    message = self._links[key.data].receive()
                    if message is None:
                        return {"failed": key.data, "why": GONE}
                    if "failed" in message:
                        return message
                    working.discard(key.data)
        return {"done": self._size}

    def _tell_all(self, message: dict) -> None:
        # Rank 0 last: it ends on what it hears, and the hub with it.
        for rank in sorted(self._links, reverse=True):
            self._links[rank].send(message)


def _server(backlog: int) -> socket.socket:
    """Listens on a free port of every address of this host, IPv6 included where there is one."""
    try:
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    except (OSError, ValueError):
        return socket.create_server(("", 0), backlog=backlog)
