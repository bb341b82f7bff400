"""An HTTP server for shards that fails as it is told to."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote


@dataclass
class Server:
    """
    Attributes:
        statuses: answers to the next requests for shards, instead of what is asked for.
        cuts: bytes after which the next connections end.
        silent: seconds without a byte in the middle of a shard.
        leads_to: the address that it answers with in place of a shard.
        has_length: whether the size of a file is in the header.
        asked: the shards whose content was asked for. authorizations: the header of that name in each request.
    """

    address: str
    folder: Path
    statuses: list[int] = field(default_factory=list)
    cuts: list[int] = field(default_factory=list)
    silent: float = 0.0
    leads_to: str = ""
    has_length: bool = True
    asked: list[str] = field(default_factory=list)
    authorizations: list[str | None] = field(default_factory=list)

    def url(self, name: str) -> str:
        return f"{self.address}/{name}"


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """Serves the files of a folder while the context lasts."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            try:
                _answer(self, server)
            except (BrokenPipeError, ConnectionResetError):  # the client has had enough
                pass

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
    path = server.folder / unquote(handler.path.lstrip("/").partition("?")[0])
    content = path.read_bytes() if path.is_file() else None
    server.authorizations.append(handler.headers.get("Authorization"))
    is_shard = path.name != "index.json"
    status = 404 if content is None else 200
    if is_shard:
        server.asked.append(path.name)
        status = 302 if server.leads_to else server.statuses.pop(0) if server.statuses else status
    handler.send_response(status)
    if status == 302:
        handler.send_header("Location", server.leads_to)
    if status != 200 or content is None:
        handler.send_header("Content-Length", "0")
        handler.end_headers()
        return
    if server.has_length:
        handler.send_header("Content-Length", str(len(content)))
    handler.end_headers()
    cut = server.cuts.pop(0) if is_shard and server.cuts else len(content)
    handler.wfile.write(content[: min(cut, 100)])
    handler.wfile.flush()
    if is_shard:
        time.sleep(server.silent)
    handler.wfile.write(content[100:cut])
