"""Plain web addresses: folders, single archives and lists of files, with passwords, signatures and limited servers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from gracetune.config import native
from gracetune.data.copies.errors import CopyError
from gracetune.redaction import Redactor
from gracetune.storage import transfer
from servers.web import web_server
from unit.data.copies.sample_sources import FROM_COLUMNS, QUICK, config, copies, encoded_image, fetched, shard, tar

pytest.importorskip("aiohttp", reason="http:// needs the optional aiohttp, which is not installed")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    folder = tmp_path / "site"
    (folder / "pets").mkdir(parents=True)
    (folder / "pets" / "a b.png").write_bytes(encoded_image(1))
    (folder / "pets" / "a b.txt").write_text("a cat")
    (folder / "0.tar").write_bytes(tar(shard(2) | {"noise.bin": os.urandom(30_000)}))
    return folder


def test_a_folder_and_an_archive(site: Path, tmp_path: Path) -> None:
    with web_server(site) as web:
        found = fetched(config(tmp_path, {"path": f"{web.url}/pets"}, {"path": f"{web.url}/0.tar"}))
    assert found["d0"] == {"a b.png": ("a cat",)}
    assert sorted(found["d1"].values()) == [("text 0",), ("text 1",)]


@pytest.mark.parametrize("options", [{"ranges": False}, {"ranges": False, "sizes": False}])
def test_servers_without_range_requests(site: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    with web_server(site, **options) as web:
        web.break_after += [9000] * (1 if options.get("sizes", True) else 9)
        if options.get("sizes", True):  # what a server cuts off without having said how long it is looks complete
            assert len(fetched(config(tmp_path, {"path": f"{web.url}/0.tar"}))["d0"]) == 2
        else:
            with pytest.raises(CopyError, match="a damaged archive"):
                fetched(config(tmp_path, {"path": f"{web.url}/0.tar"}))
            web.break_after.clear()
            assert len(fetched(config(tmp_path / "again", {"path": f"{web.url}/0.tar"}))["d0"]) == 2


def test_a_broken_connection_is_resumed(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "RANGE", 4096)
    with web_server(site) as web:
        web.break_after += [1000, 2000]
        assert len(fetched(config(tmp_path, {"path": f"{web.url}/0.tar"}))["d0"]) == 2
        assert web.sent <= (site / "0.tar").stat().st_size + 2 + 3000


def test_passwords_and_signatures_are_used_and_shown_nowhere(site: Path, tmp_path: Path) -> None:
    with web_server(site, password="me:s3cret") as web:
        address = web.url.replace("http://", "http://me:s3cret@")
        run = config(tmp_path, {"path": f"{address}/pets"})
        assert fetched(run)["d0"] == {"a b.png": ("a cat",)}
        with pytest.raises(CopyError) as rejected:
            copies(config(tmp_path, {"path": f"{web.url}/pets/"})).plans()
        assert "401" in str(rejected.value)
        assert "storage.user" in str(rejected.value)
    with web_server(site, query="sig=s3cret") as web:
        signed = config(tmp_path, {"path": f"{web.url}/0.tar?sig=s3cret"})
        assert len(fetched(signed)["d0"]) == 2
        with pytest.raises(CopyError) as rejected:
            copies(config(tmp_path / "other", {"path": f"{web.url}/0.tar?sig=0ld"})).plans()
        assert "a new address if its signature has expired" in str(rejected.value)
        assert "0ld" not in str(rejected.value)
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*.json*") if path.is_file())
    for one in (run, signed):
        assert "s3cret" not in native.show(one, {}, Redactor())
        assert "s3cret" not in repr(one)
        assert "s3cret" in native.write(one)  # the run's own config.yaml, for its owner alone
    assert b"s3cret" not in written


def test_an_address_without_data(tmp_path: Path, site: Path) -> None:
    with web_server(site) as web:
        with pytest.raises(CopyError, match="no data at this address"):
            copies(config(tmp_path, {"path": f"{web.url}/none.tar"})).plans()
        closed = web.url
    with pytest.raises(CopyError, match="cannot be reached"):
        copies(config(tmp_path, {"path": f"{closed}/0.tar"})).plans()


def test_a_list_of_addresses(site: Path, tmp_path: Path) -> None:
    for number in range(4):
        (site / f"{number}.png").write_bytes(encoded_image(number))
    (site / "page.html").write_text("<html>")
    with web_server(site) as web:
        lines = [f"{web.url}/{number}.png?size=large,photo {number}" for number in range(4)]
        table = "\n".join(["url,text", *lines, f"{web.url}/gone.png,lost", f"{web.url}/page.html,no picture"])
        (tmp_path / "list.csv").write_text(table)
        dataset = {
            "path": str(tmp_path / "list.csv"), "corrupt_threshold": 0.5,
            "captions": {"strategy": "jsonl", "table": {**FROM_COLUMNS, "caption_column": "text"}},
            "local_copy": {"format": "urls"},
        }  # fmt: skip
        assert sorted(fetched(config(tmp_path, dataset))["d0"].values()) == [
            (f"photo {number}",) for number in range(4)
        ]
        strict = config(tmp_path / "strict", {**dataset, "corrupt_threshold": 0.1})
        with pytest.raises(CopyError) as rejected:
            copies(strict).make(retry_policy=QUICK)
        assert "2 of 6 samples cannot be used" in str(rejected.value)
        wrong = config(tmp_path / "wrong", {**dataset, "local_copy": {"format": "urls", "media_column": "urls"}})
        with pytest.raises(CopyError, match=r"media_column=url'"):
            copies(wrong).make(retry_policy=QUICK)
