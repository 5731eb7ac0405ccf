from __future__ import annotations

import functools
import http.server
import threading
import uuid
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gracetune.data.backend import LeftOut
from gracetune.data.backends.errors import StorageError
from gracetune.data.backends.open import attach_backend
from gracetune.data.backends.url import UrlBackend
from gracetune.data.errors import MissingFileError, OutsideRootError, UnreadableMediaError
from unit.data.backends.helpers import contents, fill, put, staged


@pytest.fixture
def url() -> str:
    return f"memory://{uuid.uuid4()}/pets"


class TestOpening:
    @pytest.mark.parametrize(
        ("protocol", "package"),
        [("s3", "s3fs"), ("gs", "gcsfs"), ("gcs", "gcsfs"), ("https", "aiohttp"), ("abfs", "adlfs")],
    )
    def test_a_missing_library_is_named(self, protocol: str, package: str) -> None:
        try:
            __import__(package)
        except ImportError:
            with pytest.raises(
                StorageError, match=rf"(?s){protocol}:// is not installed.*try       pip install {package}"
            ):
                UrlBackend(f"{protocol}://bucket/pets")
        else:
            pytest.skip(f"{package} is installed here, so it cannot be missing")

    def test_a_missing_library_of_a_chain_is_named(self) -> None:
        with pytest.raises(StorageError, match=r"pip install smbprotocol"):
            UrlBackend("simplecache::smb://host/pets")

    @pytest.mark.parametrize(
        ("url", "why"),
        [
            ("s4://bucket/pets", "Protocol not known: s4"),
            ("pets", "not a URL"),
            ("/data/pets", "not a URL"),
            ("file:///data/pets", "type: local"),
            ("local:///data/pets", "type: local"),
            ("simplecache::file:///data/pets", "type: local"),
            ("dir::file:///data/pets", "type: local"),
            ("https://host/pets?token=1", "remove everything from"),
        ],
    )
    def test_what_is_no_url_of_ours_says_what_to_write(self, url: str, why: str) -> None:
        with pytest.raises(StorageError, match=why) as rejected:
            UrlBackend(url)
        assert all(word in str(rejected.value) for word in ("found", "expected", "try"))

    def test_an_archive_that_is_none(self, tmp_path: Path) -> None:
        (tmp_path / "a.zip").write_bytes(b"not a zip")
        with pytest.raises(StorageError, match="cannot be opened"):
            UrlBackend(f"zip://::file://{tmp_path}/a.zip")


class TestContract:
    def test_round_trip(self, url: str) -> None:
        backend = UrlBackend(url)
        assert backend.list() == ()
        put(url, "a/ü 日?#%41.png", b"picture")
        put(url, "b.txt", b"caption")
        assert backend.root == url
        assert backend.list() == ("a/ü 日?#%41.png", "b.txt")
        assert backend.read("b.txt") == b"caption"
        assert backend.stat("b.txt").size == 7
        assert backend.stat("b.txt").modified_ns > 1_600_000_000 * 10**9
        assert backend.survey().files["b.txt"] == backend.stat("b.txt")
        with backend.open("b.txt") as stream:
            assert (stream.seek(3), stream.read(), stream.seek(-2, 2), stream.read(1), stream.tell()) == (
                3, b"tion", 5, b"o", 6,
            )  # fmt: skip
        assert not backend.exists("a")

    @pytest.mark.parametrize("path", ["missing.txt", "a"])
    def test_folders_are_missing_files(self, url: str, path: str) -> None:
        backend = UrlBackend(url)
        put(url, "a/b.txt", b"")
        for call in (backend.stat, backend.read, backend.open):
            with pytest.raises(MissingFileError):
                call(path)

    @pytest.mark.parametrize("path", ["../secret", "/secret", "a\\b", "", "a//b"])
    def test_no_way_out(self, url: str, path: str) -> None:
        put(url.rpartition("/")[0], "secret", b"S")
        put(f"{url}-next", "secret", b"S")
        backend = UrlBackend(url)
        for call in (backend.read, backend.open, backend.stat, backend.exists):
            with pytest.raises(OutsideRootError):
                call(path)
        assert backend.list() == ()

    def test_names_that_cannot_be_paths_are_left_out_with_the_reason(self, url: str) -> None:
        put(url, "a\\b.png", b"")
        listing = UrlBackend(url).survey()
        assert listing.files == {}
        assert [item.path for item in listing.left_out] == ["a\\b.png"]
        assert isinstance(listing.left_out[0], LeftOut)

    def test_another_process_can_open_it_by_its_handle(self, url: str) -> None:
        backend = UrlBackend(url)
        put(url, "a.txt", b"A")
        assert contents(attach_backend(backend.handle())) == {"a.txt": b"A"}

    def test_an_archive_is_read(self, tmp_path: Path) -> None:
        with zipfile.ZipFile(tmp_path / "pets.zip", "w") as archive:
            archive.writestr("a/b.txt", "caption")
            archive.writestr("c.png", "picture")
        backend = UrlBackend(f"zip://::file://{tmp_path}/pets.zip")
        assert contents(backend) == {"a/b.txt": b"caption", "c.png": b"picture"}
        assert backend.stat("c.png").size == 7
        with pytest.raises(MissingFileError):
            backend.read("d.png")
        with staged(backend) as memory:
            assert contents(memory) == {"a/b.txt": b"caption", "c.png": b"picture"}


class TestWeb:
    @pytest.fixture
    def site(self, tmp_path: Path) -> Iterator[tuple[str, http.server.ThreadingHTTPServer]]:
        pytest.importorskip("aiohttp", reason="http:// needs the optional aiohttp, which is not installed")
        fill(tmp_path, {"pets/a b?c#%41ü.txt": b"caption", "pets/sub dir/x.jpg": b"J" * 100_000, "secret.txt": b"S"})
        handler = functools.partial(_Quiet, directory=str(tmp_path))
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/pets", server
        server.shutdown()
        server.server_close()
        thread.join()

    def test_files_of_any_name_are_read(self, site: tuple[str, http.server.ThreadingHTTPServer]) -> None:
        backend = UrlBackend(site[0])
        assert {path: len(data) for path, data in contents(backend).items()} == {
            "a b?c#%41ü.txt": 7,
            "sub dir/x.jpg": 100_000,
        }
        with backend.open("sub dir/x.jpg") as stream:
            assert (stream.seek(99_990), stream.read()) == (99_990, b"J" * 10)
        assert not backend.exists("missing.jpg")
        with pytest.raises(OutsideRootError):
            backend.read("../secret.txt")

    def test_a_server_that_is_gone_is_no_empty_dataset(self, site: tuple[str, http.server.ThreadingHTTPServer]) -> None:
        backend = UrlBackend(site[0])
        site[1].shutdown()
        site[1].server_close()
        with pytest.raises(StorageError, match="cannot be listed"):
            backend.list()
        for call in (backend.read, backend.exists):
            with pytest.raises(UnreadableMediaError):
                call("sub dir/x.jpg")


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *arguments: object) -> None: ...
