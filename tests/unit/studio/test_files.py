"""Files of a run: parts, types, and everything that must not be sent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from unit.studio.clients import StudioClient, client_of
from unit.studio.logs import small_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "secret.txt").write_text("outside")
    return small_run(tmp_path / "root" / "run")


def url(client: StudioClient, path: str) -> str:
    return f"/api/runs/{client.get('runs')['runs'][0]['id']}/files/{path}"


def test_whole_files_parts_and_unchanged_ones(run: Path) -> None:
    (run / "clip.mp4").write_bytes(bytes(range(256)) * 8)
    client = client_of(run.parent)
    address = url(client, "clip.mp4")
    whole = client.http.get(address)
    assert whole.status_code == 200
    assert whole.headers["content-type"] == "video/mp4"
    assert whole.content == bytes(range(256)) * 8
    for wanted, content, shown in (
        ("bytes=0-9", whole.content[:10], "bytes 0-9/2048"),
        ("bytes=2000-", whole.content[2000:], "bytes 2000-2047/2048"),
        ("bytes=-48", whole.content[-48:], "bytes 2000-2047/2048"),
        ("bytes=2040-9999", whole.content[2040:], "bytes 2040-2047/2048"),
    ):
        part = client.http.get(address, headers={"range": wanted})
        assert (part.status_code, part.content) == (206, content)
        assert part.headers["content-range"] == shown
    for ignored in ("bytes=-", "items=0-1", "bytes=0-1,5-6", "bytes=a-b"):
        assert client.http.get(address, headers={"range": ignored}).status_code == 200
    for wrong in ("bytes=2048-", "bytes=9-3"):
        assert client.http.get(address, headers={"range": wrong}).status_code == 416
    assert client.http.get(address, headers={"if-none-match": whole.headers["etag"]}).status_code == 304
    head = client.http.head(address)
    assert (head.status_code, head.content, head.headers["content-length"]) == (200, b"", "2048")
    stale = client.http.get(address, headers={"range": "bytes=0-1", "if-range": '"other"'})
    assert stale.status_code == 200


def test_files_of_a_run_are_not_trusted(run: Path) -> None:
    """A script or a page in a run's folder must not act with the studio's rights."""
    for name in ("evil.js", "evil.svg", "evil.html", "evil.css", "a.safetensors", "a.txt"):
        (run / name).write_text("<script>alert(1)</script>")
    client = client_of(run.parent)
    kinds = {}
    for name in ("evil.js", "evil.svg", "evil.html", "evil.css", "a.safetensors", "a.txt"):
        reply = client.http.get(url(client, name))
        assert reply.headers["content-security-policy"].startswith("sandbox")
        assert reply.headers["x-content-type-options"] == "nosniff"
        kinds[name] = (reply.headers["content-type"].split(";")[0], "content-disposition" in reply.headers)
    download = ("application/octet-stream", True)
    assert kinds == {
        "evil.js": download, "evil.svg": download, "evil.css": download, "a.safetensors": download,
        "evil.html": ("text/html", False), "a.txt": ("text/plain", False),
    }  # fmt: skip


@pytest.mark.parametrize(
    "path",
    [
        "../../secret.txt", "..%2f..%2fsecret.txt", "%2e%2e/%2e%2e/secret.txt", "/etc/passwd", "%2fetc%2fpasswd",
        "link", "linked/secret.txt", "logs", "", "pipe", "device", "nothing", "a%00b", "%ff", "x" * 5000,
        "logs/..%2f../../secret.txt", "loop", "%2e%2e", ".", "secret.yaml", ".env", "shown.txt", ".studio/queue/a.json",
    ],
)  # fmt: skip
def test_nothing_outside_the_run_and_nothing_hidden_is_sent(path: str, run: Path) -> None:
    (run / "link").symlink_to(run.parent.parent / "secret.txt")
    (run / "linked").symlink_to(run.parent.parent)
    (run / "device").symlink_to("/dev/zero")
    (run / "loop").symlink_to("loop")
    (run / ".studio" / "queue").mkdir(parents=True)  # where `gracetune watch RUN --control` keeps its own files
    for hidden in (".env", ".studio/queue/a.json"):
        (run / hidden).write_text("outside")
    (run / "shown.txt").symlink_to(run / ".env")
    os.mkfifo(run / "pipe")
    (run / "secret.yaml").write_text("outside")
    (run / "secret.yaml").chmod(0o600)  # how a run marks a config with secrets
    client = client_of(run.parent)
    reply = client.http.get(url(client, path))
    assert reply.status_code in (404, 401)
    assert "outside" not in reply.text
    assert "root:" not in reply.text


def test_links_inside_the_run_and_odd_names_work(run: Path) -> None:
    name = "a b#c?d%é.txt"
    (run / name).write_text("inside")
    (run / "inner").symlink_to(run / name)
    client = client_of(run.parent)
    assert client.http.get(url(client, "a%20b%23c%3Fd%25%C3%A9.txt")).text == "inside"
    assert client.http.get(url(client, "inner")).text == "inside"


def test_a_huge_file_is_sent_in_pieces(run: Path) -> None:
    with (run / "huge.safetensors").open("wb") as file:
        file.truncate(1 << 40)  # sparse
    client = client_of(run.parent)
    part = client.http.get(url(client, "huge.safetensors"), headers={"range": "bytes=-4"})
    assert (part.status_code, part.content) == (206, b"\0" * 4)
    (output,) = client.get(url(client, "")[5:].split("/files")[0])["outputs"]
    assert output["bytes"] == 1 << 40


def test_no_descriptor_is_left_open(run: Path) -> None:
    (run / "a.png").write_bytes(b"x" * 100)
    client = client_of(run.parent)
    address = url(client, "a.png")
    client.http.get(address)
    before = len([*Path("/proc/self/fd").iterdir()])
    for headers in ({}, {"range": "bytes=500-"}, {"range": "bytes=0-3"}, {"if-none-match": "x"}):
        for _ in range(5):
            client.http.get(address, headers=headers)
            client.http.head(address)
    assert len([*Path("/proc/self/fd").iterdir()]) == before
