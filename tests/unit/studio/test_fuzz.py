"""Random requests: none is answered with an error of the server, and none leaves the studio's folder."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from starlette.routing import Route

from gracetune.studio.server import routes
from unit.studio.clients import HOST, StudioClient, client_of
from unit.studio.logs import small_run

PARTS = (
    "", ".", "..", "%2e%2e", "%00", "%ff", "a", "0", "-1", "é", "%F0%9F%90%88", "x" * 300, "*", "~", "{id}", "logs",
    "events.jsonl", "<script>", "'", "%22", "%0d%0a", ";", "\\", "samples", "items", "caption",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 2**70, 1e308, "", "a", "x" * 2000, "\0", "\ud800", "../../etc/passwd", "/dev/zero", "~root", [],
    {}, [[]] * 20, {"a": {"b": [1]}}, "gracetune: 1\nname: [", "!!python/object:os.system [x]", "&a [*a]", "{}",
)  # fmt: skip
KEYS = ("config", "text", "was", "file_name", "name", "start", "folder", "model", "preset", "trigger", "steps", "x")
HEADERS = (
    {}, {"range": "bytes=-1"}, {"range": "bytes=9999999999999999999-"}, {"range": "x" * 100}, {"if-none-match": "*"},
    {"content-type": "text/plain"}, {"accept": "*/*;q=x"}, {"host": "evil"}, {"origin": "null"}, {"cookie": "a=b; ;="},
    {"content-length": "99999999999"}, {"x-forwarded-proto": "\x01"}, {"sec-fetch-site": "cross-site"},
)  # fmt: skip
SLOW = ("refresh", "/new/", "stream", "machine")
"""They start other programs, or never end."""


def templates(client: StudioClient) -> list[str]:
    """The paths of all routes."""
    return [one.path for one in routes(client.studio) if isinstance(one, Route)]


def request_of(chance: random.Random, paths: list[str], known: list[str]) -> tuple[str, str, dict[str, Any]]:
    path = chance.choice(paths)
    while "{" in path:
        head, _, rest = path.partition("{")
        path = head + chance.choice((*known, *PARTS)).replace("{", "(") + rest.partition("}")[2]
    path += chance.choice(("", "", "/", "/" + chance.choice(PARTS)))
    names = ("points", "lines", "run", "offset", "limit", "sort", "token", "x")
    values = (*known, *PARTS, "9" * 30)
    pairs = [f"{chance.choice(names)}={chance.choice(values)}" for _ in range(chance.randint(0, 2))]
    more: dict[str, Any] = {"headers": chance.choice(HEADERS)}
    method = chance.choice(("GET", "GET", "HEAD", "POST", "PUT", "DELETE", "PATCH"))
    if method in ("POST", "PUT"):
        body = {chance.choice(KEYS): chance.choice(VALUES) for _ in range(chance.randint(0, 3))}
        more |= chance.choice(({"json": body}, {"json": chance.choice(VALUES)}, {"content": chance.randbytes(50)}))
    return method, path + ("?" + "&".join(pairs) if pairs else ""), more


def run_fuzz(folder: Path, count: int, seed: int) -> None:
    small_run(folder / "root" / "one")
    run = small_run(folder / "root" / "two", outcome="interrupted")
    (run / "config.yaml").write_text("gracetune: 1\nname: two\n")
    (run / "samples").mkdir()
    (run / "samples" / "a.png").write_bytes(b"x" * 100)
    (folder / "outside.txt").write_text("do not show this")
    client = client_of(folder / "root")
    known = [one["id"] for one in client.get("runs")["runs"]] + ["samples/a.png", "stop", "resume"]
    paths, chance = templates(client), random.Random(seed)
    for number in range(count):
        method, path, more = request_of(chance, paths, known)
        if any(slow in path for slow in SLOW):
            continue
        try:
            reply = client.http.request(method, f"http://{HOST}{path}", **more)
        except (UnicodeError, ValueError):  # the client itself cannot send it
            continue
        assert reply.status_code < 500, (seed, number, method, path, more, reply.text)
        assert "do not show this" not in reply.text
        if reply.status_code >= 400 and reply.headers.get("content-type") == "application/json" and method != "HEAD":
            assert set(reply.json()["error"]) == {"found", "expected", "hint"}, path


def test_random_requests_are_answered(tmp_path: Path) -> None:
    run_fuzz(tmp_path, 400, seed=1)


@pytest.mark.full
def test_five_thousand_random_requests_are_answered(tmp_path: Path) -> None:
    run_fuzz(tmp_path, 5000, seed=2)
