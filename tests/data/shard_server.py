"""An HTTP server for shards that fails as it is told to."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote


class Server(ThreadingHTTPServer):
    """
    Attributes:
        statuses: answers to the next requests, instead of what is asked for.
        cuts: bytes after which the next connections end.
        silent: seconds without a byte in the middle of a shard.
        leads_to: the address that it answers with in place of a shard.
        has_length: whether the size of a file is in the header.
        version: headers of every answer, such as an ETag.
        asked: the shards whose content was asked for. authorizations: the header of that name in each request.
    """

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder, self.leads_to, self.silent, self.has_length = folder, "", 0.0, True
        self.statuses, self.cuts, self.asked, self.authorizations = [], [], [], []
        self.version: dict[str, str] = {}

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/{name}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        server, path = self.server, self.server.folder / unquote(self.path.lstrip("/").partition("?")[0])
        server.authorizations.append(self.headers.get("Authorization"))
        server.asked.append(path.name)
        content = path.read_bytes() if path.is_file() else b""
        status = server.statuses.pop(0) if server.statuses else 200 if path.is_file() else 404
        content = content if status == 200 and not server.leads_to else b""
        self.send_response(302 if server.leads_to else status)
        if server.leads_to:
            self.send_header("Location", server.leads_to)
        if server.has_length:
            self.send_header("Content-Length", str(len(content)))
        for name, value in self.server.version.items():
            self.send_header(name, value)
        self.end_headers()
        cut = server.cuts.pop(0) if content and server.cuts else len(content)
        with suppress(BrokenPipeError, ConnectionResetError):  # the client has had enough
            self.wfile.write(content[: min(cut, 100)])
            self.wfile.flush()
            time.sleep(server.silent)
            self.wfile.write(content[100:cut])

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """Serves the files of a folder while the context lasts."""
    server = Server(folder)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
