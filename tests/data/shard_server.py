"""An HTTP server for shards that fails as it is told to."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote


@dataclass
class Faults:
    """What the server does wrong.

    Attributes:
        statuses: answers to the next requests, instead of what is asked for.
        cuts: bytes after which the next connections end; `always_cuts`: all of them. after_cut: called before they end.
        ranges, versions: whether parts can be asked for, and a file has an ETag.
        chunked: whole files come as one chunk, without a length in the header.
        claims: is added to the length in the header. more: bytes that follow a file, sent in chunks.
        silent: seconds without a byte in the middle of a file.
        leads_to: the address that it answers with in place of a file.
    """

    statuses: list[int] = field(default_factory=list)
    cuts: list[int] = field(default_factory=list)
    always_cuts: int | None = None
    after_cut: Callable[[], object] = lambda: None
    ranges: bool = True
    versions: bool = True
    chunked: bool = False
    claims: int = 0
    more: int = 0
    silent: float = 0.0
    leads_to: str = ""


@dataclass
class Server:
    """
    Attributes:
        asked: the paths that were asked for, index.json left out, each with where its range begins.
        authorizations: the header of that name in each request, None where it had none.
        sent: bytes of content. at_once: the most requests that were answered at the same time.
    """

    address: str
    folder: Path
    faults: Faults = field(default_factory=Faults)
    asked: list[tuple[str, int]] = field(default_factory=list)
    authorizations: list[str | None] = field(default_factory=list)
    sent: int = 0
    at_once: int = 0
    running: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def url(self, name: str) -> str:
        return f"{self.address}/{name}"


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """Serves the files of a folder while the context lasts."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            with server.lock:
                server.running += 1
                server.at_once = max(server.at_once, server.running)
            try:
                _answer(self, server)
            except (BrokenPipeError, ConnectionResetError):  # the client has had enough
                pass
            finally:
                with server.lock:
                    server.running -= 1

        def log_message(self, *args: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    server = Server(f"http://127.0.0.1:{http.server_address[1]}", folder)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


def _answer(handler: BaseHTTPRequestHandler, server: Server) -> None:
    faults, path = server.faults, server.folder / unquote(handler.path.lstrip("/").partition("?")[0])
    if path.name == "index.json":
        faults = Faults()
    content = path.read_bytes() if path.is_file() else None
    version = f'"{path.stat().st_mtime_ns}-{len(content)}"' if content is not None and faults.versions else None
    start = 0
    asked = handler.headers.get("Range")
    if asked and faults.ranges and handler.headers.get("If-Range") == version:
        start = int(asked.removeprefix("bytes=").rstrip("-"))
    with server.lock:
        server.authorizations.append(handler.headers.get("Authorization"))
        if path.name != "index.json":
            server.asked.append((path.name, start))
        status = faults.statuses.pop(0) if faults.statuses else 404 if content is None else 206 if start else 200
        cut = faults.cuts.pop(0) if faults.cuts else faults.always_cuts
    handler.send_response(302 if faults.leads_to else status)
    if faults.leads_to:
        handler.send_header("Location", faults.leads_to)
    if faults.leads_to or status >= 400 or content is None:
        handler.send_header("Content-Length", "0")
        handler.end_headers()
        return
    body = content[start:]
    if version:
        handler.send_header("ETag", version)
    if start:
        handler.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
    in_chunks = faults.chunked and not start
    if in_chunks:
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        handler.wfile.write(f"{len(body):x}\r\n".encode())
    elif faults.more:
        handler.end_headers()  # until the connection ends
        body += bytes(faults.more)
    else:
        handler.send_header("Content-Length", str(len(body) + faults.claims))
        handler.end_headers()
    body = body if cut is None else body[:cut]
    handler.wfile.write(body[:100])
    time.sleep(faults.silent)
    handler.wfile.write(body[100:])
    if cut is not None:
        faults.after_cut()
    elif in_chunks:
        handler.wfile.write(b"\r\n0\r\n\r\n")
    with server.lock:
        server.sent += len(body)
