"""A web server of a folder, with or without ranges, passwords and signatures."""

from __future__ import annotations

import base64
import functools
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class WebServer:
    def __init__(
        self, folder: Path, *, ranges: bool = True, sizes: bool = True, password: str = "", query: str = ""
    ) -> None:
        """`password` is `user:password`; `query` what every address has to end with."""
        self.ranges, self.sizes, self.password, self.query = ranges, sizes, password, query
        self.break_after: list[int] = []
        self.sent = 0
        handler = functools.partial(_Folder, self, directory=str(folder))
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def web_server(folder: Path, **options: Any) -> Iterator[WebServer]:
    server = WebServer(folder, **options)
    try:
        yield server
    finally:
        server.close()


class _Folder(SimpleHTTPRequestHandler):
    disable_nagle_algorithm = True

    def __init__(self, web: WebServer, *values: Any, **options: Any) -> None:
        self._web = web
        super().__init__(*values, **options)

    def log_message(self, *_: Any) -> None: ...

    def do_HEAD(self) -> None:
        if self._allowed():
            self._file() if Path(self.translate_path(self.path)).is_file() else super().do_HEAD()

    def do_GET(self) -> None:
        if self._allowed():
            self._file() if Path(self.translate_path(self.path)).is_file() else super().do_GET()

    def _allowed(self) -> bool:
        wanted = base64.b64encode(self._web.password.encode()).decode()
        if self._web.password and self.headers.get("Authorization") != f"Basic {wanted}":
            self.send_error(401)
            return False
        if self._web.query and self.path.partition("?")[2] != self._web.query:
            self.send_error(403)
            return False
        return True

    def _file(self) -> None:
        data = Path(self.translate_path(self.path)).read_bytes()
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "") if self._web.ranges else None
        start, end = (int(found[1]), int(found[2] or len(data) - 1) + 1) if found else (0, len(data))
        self.send_response(206 if found else 200)
        if found:
            self.send_header("Content-Range", f"bytes {start}-{min(end, len(data)) - 1}/{len(data)}")
        chunk = data[start:end]
        if self._web.sizes:
            self.send_header("Content-Length", str(len(chunk)))
        self.send_header("ETag", f'"{len(data)}"')
        self.end_headers()
        if self.command == "HEAD":
            return
        stop = self._web.break_after.pop(0) if self._web.break_after and len(chunk) > 1 else None
        self.wfile.write(chunk if stop is None else chunk[:stop])
        self._web.sent += len(chunk) if stop is None else stop
