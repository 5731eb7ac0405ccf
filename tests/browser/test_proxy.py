"""The studio below a path of a reverse proxy on another port. An SSH tunnel is the same without the path."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

from playwright.sync_api import expect

from browser.conftest import OpenPage
from browser.studio_process import Studio, studio, wait_for
from unit.studio.logs import locked, started, step, write_run


@contextmanager
def proxied(served: Studio) -> Iterator[Studio]:
    """The same studio at the address of a proxy, which passes on the `Host` header and does not buffer."""
    upstream = urlsplit(served.link).port

    class Proxy(BaseHTTPRequestHandler):
        def forward(self) -> None:
            connection = http.client.HTTPConnection("127.0.0.1", upstream, timeout=60)
            length = int(self.headers.get("content-length", 0))
            headers = {**self.headers, "x-forwarded-proto": "http"}
            connection.request(self.command, self.path, self.rfile.read(length) or None, headers)
            answer = connection.getresponse()
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("connection", "transfer-encoding"):
                    self.send_header(name, value)
            self.send_header("connection", "close")
            self.end_headers()
            try:
                while part := answer.read1(65536):
                    self.wfile.write(part)
                    self.wfile.flush()
            except OSError:  # the browser closed the page, or the studio ended
                pass
            finally:
                connection.close()

        do_GET = do_POST = do_PUT = forward  # noqa: N815 - the names that the library calls

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield Studio(served.root, served.link.replace(f":{upstream}/", f":{server.server_address[1]}/"))
        finally:
            server.shutdown()


def test_pages_streams_and_buttons_work_below_a_prefix(tmp_path: Path, open_page: OpenPage) -> None:
    run = write_run(tmp_path / "runs" / "cats", [started(), step(1)], begin=time.time())
    with (
        locked(run), studio(tmp_path / "runs", "--control", "--prefix", "/tools/studio") as served,
        proxied(served) as outside,
    ):  # fmt: skip
        assert outside.address.endswith("/tools/studio/")
        page = open_page(outside)
        page.get_by_role("link", name="cats").click()
        expect(page.locator("[data-tile=step] .tile-value")).to_have_text("1")
        expect(page.locator(".connection")).to_contain_text("live")
        write_run(run, [step(2), step(3)], begin=time.time())
        expect(page.locator("[data-tile=step] .tile-value")).to_have_text("3", timeout=5_000)
        page.get_by_role("button", name="Save now").click()
        page.get_by_role("dialog").get_by_role("button", name="Save now").click()
        wait_for((run / "save-now").is_file, "the request", 10)
        cookies = page.context.cookies()
        assert [one["path"] for one in cookies] == ["/tools/studio"]
