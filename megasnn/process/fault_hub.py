"""The hub of the fault watch: one process that keeps a connection to every rank and passes on what one of them says.

One hub serves thousands of ranks. It raises the limit on open files where that is needed, and waits for all
connections together: one that is silent, slow or of a stranger holds up no other.
"""

from __future__ import annotations

import json
import os
import resource
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Iterable

CONNECT_SECONDS = 60.0
# A connection that has not said by then which rank it is, or says more than this, is a stranger's.
HELLO_SECONDS = 5.0
HELLO_BYTES = 4096
# How long the hub tries to pass on a message to ranks that do not take it.
TELL_SECONDS = 5.0
# What the process of rank 0 may open beside the connections to the ranks: files, and connections of its own.
OTHER_FILES = 256
ACCEPTED_AT_ONCE = 64
GONE = "ended without a word (killed, or out of memory?)"


def make_room(connections: int) -> None:
    """Raises the limit on open files where so many more do not fit. Raises OSError where the system forbids it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        opened = len(os.listdir("/dev/fd"))
    except OSError:  # a small container may not have it
        opened = OTHER_FILES
    needed = opened + connections + OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    # What is not of the watch keeps the room it had, as far as that is possible.
    wanted = soft + connections if hard == resource.RLIM_INFINITY else min(soft + connections, hard)
    try:
        if wanted < needed:
            raise ValueError(f"at most {hard} are allowed")
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except ValueError as error:
        raise OSError(
            f"a connection to each of {connections} ranks takes {needed} open files, and {soft} are allowed ({error}); "
            f"start it where `ulimit -n` is {needed} or more (`ulimit -Hn` shows the most that it can be set to)"
        ) from error
    sys.stderr.write(
        f"[rank 0] a connection to each of {connections} ranks: the limit on open files is raised from {soft} to "
        f"{wanted}\n"
    )


class Link:
    """One end of a connection, and messages over it: a JSON object on a line each."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket, self._received = connection, b""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # Probes after 5 s of silence, 3 s apart; after 3 without an answer the machine counts as gone.
        for option, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 3), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, option):
                self.socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    def send(self, message: dict) -> None:
        """Nothing happens when the other side is gone: the thread that receives finds out."""
        try:
            self.socket.sendall(_line(message))
        except OSError:
            pass

    def send_some(self, data: bytes) -> bytes:
        """Sends what can be sent without waiting, and returns the rest; nothing of it when the other side is gone."""
        try:
            return data[self.socket.send(data) :]
        except BlockingIOError:
            return data
        except OSError:
            return b""

    def receive(self) -> dict | None:
        """The next message; None when the other side is gone, talks nonsense, or is silent beyond the time allowed."""
        while not self.has_message:
            if not self.fill():
                return None
        line, _, self._received = self._received.partition(b"\n")
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            return None
        return message if isinstance(message, dict) else None

    @property
    def has_message(self) -> bool:
        return b"\n" in self._received

    @property
    def pending_bytes(self) -> int:
        """Received, and not yet taken as messages."""
        return len(self._received)

    def fill(self) -> bool:
        """Takes what has come; False when the other side is gone, or silent beyond the time allowed."""
        try:
            data = self.socket.recv(65536)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self._received += data
        return len(data) > 0

    def close(self) -> None:
        self.socket.close()


def _line(message: dict) -> bytes:
    return json.dumps(message).encode() + b"\n"


class Hub:
    """On rank 0, in a thread: passes the first failure on to all ranks, and tells them when all are done."""

    def __init__(self, size: int) -> None:
        self._server = _server(backlog=max(size, 128))
        self._server.setblocking(False)
        self._size, self._links = size, dict[int, Link]()
        self.port: int = self._server.getsockname()[1]
        self.token = secrets.token_hex(16)
        threading.Thread(target=self._serve, name="megasnn-fault-hub", daemon=True).start()

    def _serve(self) -> None:
        self._accept_all()
        absent = sorted(set(range(self._size)) - set(self._links))
        if absent:
            more = f" and {len(absent) - 10} more" if len(absent) > 10 else ""
            return self._tell_all({"failed": absent[0], "why": f"ranks {absent[:10]}{more} did not join in time"})
        self._tell_all({"ready": self._size})
        self._tell_all(self._outcome())

    def _accept_all(self) -> None:
        """Accepts connections until all ranks have sent a greeting with the token, or the time is up."""
        deadline = time.monotonic() + CONNECT_SECONDS
        greeting = dict[Link, float]()  # until when each may say hello, the oldest first
        with self._server, selectors.DefaultSelector() as selector:
            selector.register(self._server, selectors.EVENT_READ)
            while len(self._links) < self._size and (now := time.monotonic()) < deadline:
                next_end = min(deadline, next(iter(greeting.values()), deadline))
                for key, _ in selector.select(max(0.0, next_end - now)):
                    if key.data is None:
                        for link in self._accepted():
                            greeting[link] = time.monotonic() + HELLO_SECONDS
                            selector.register(link.socket, selectors.EVENT_READ, link)
                    elif self._has_spoken(key.data):
                        selector.unregister(key.data.socket)
                        del greeting[key.data]
                        self._admit(key.data)
                while greeting and (oldest := next(iter(greeting))) and greeting[oldest] <= time.monotonic():
                    selector.unregister(oldest.socket)
                    del greeting[oldest]
                    oldest.close()
        for link in greeting:
            link.close()

    def _accepted(self) -> Iterable[Link]:
        """The connections that wait to be accepted."""
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                connection, _ = self._server.accept()
                connection.setblocking(False)
                link = Link(connection)
            except BlockingIOError:
                return
            except OSError:  # a stranger has gone again; or no more files can be opened until strangers are sent away
                time.sleep(0.01)
                return
            yield link

    @staticmethod
    def _has_spoken(link: Link) -> bool:
        """Whether nothing more is to be waited for: there is a whole line or too much, or the other side is gone."""
        return not link.fill() or link.has_message or link.pending_bytes > HELLO_BYTES

    def _admit(self, link: Link) -> None:
        """Keeps a connection whose greeting has the token and a rank, and closes any other."""
        hello = (link.receive() if link.has_message else None) or {}
        rank = hello.get("rank")
        if hello.get("token") == self.token and isinstance(rank, int) and 0 <= rank < self._size:
            self._links[rank] = link
        else:
            link.close()

    def _outcome(self) -> dict:
        """Waits until all ranks are done, or one has failed or gone. Each sends one message."""
        with selectors.DefaultSelector() as selector:
            for rank, link in self._links.items():
                selector.register(link.socket, selectors.EVENT_READ, rank)
            working = set(self._links)
            while working:
                for key, _ in selector.select():
                    link = self._links[key.data]
                    there = link.fill()
                    if link.has_message:
                        message = link.receive()
                        if message is None or "failed" in message:
                            return message or {"failed": key.data, "why": GONE}
                        working.discard(key.data)
                    elif not there:
                        return {"failed": key.data, "why": GONE}
        return {"done": self._size}

    def _tell_all(self, message: dict) -> None:
        others = [link for rank, link in self._links.items() if rank != 0]
        _send_to_all(others, message)
        # Rank 0 last: it ends on what it hears, and the hub with it.
        _send_to_all([link for rank, link in self._links.items() if rank == 0], message)


def _send_to_all(links: Iterable[Link], message: dict) -> None:
    """Sends to all that take it at once; the others have TELL_SECONDS together."""
    deadline, data = time.monotonic() + TELL_SECONDS, _line(message)
    with selectors.DefaultSelector() as selector:
        unsent = dict[Link, bytes]()
        for link in links:
            if rest := link.send_some(data):
                unsent[link] = rest
                selector.register(link.socket, selectors.EVENT_WRITE, link)
        while unsent and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                link = key.data
                unsent[link] = link.send_some(unsent[link])
                if not unsent[link]:
                    selector.unregister(link.socket)
                    del unsent[link]


def _server(backlog: int) -> socket.socket:
    """Listens on a free port of every address of this host, IPv6 included where there is one."""
    try:
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    except (OSError, ValueError):
        return socket.create_server(("", 0), backlog=backlog)
