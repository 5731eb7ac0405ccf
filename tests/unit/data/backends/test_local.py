from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path

import pytest

from gracetune.data.backend import FileStat
from gracetune.data.backends.errors import StorageError
from gracetune.data.backends.local import LocalBackend
from gracetune.data.errors import MissingFileError, OutsideRootError, UnreadableMediaError
from unit.data.backends.helpers import fill


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return fill(tmp_path / "data", {"b.jpg": b"B", "a/c.txt": b"C", ".hidden": b"H", "a/ü 日.png": b"U"})


class TestRoot:
    def test_absolute_relative_linked_and_unicode_roots_show_the_same(
        self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "dätä 日").symlink_to(folder)
        monkeypatch.chdir(tmp_path)
        roots = [str(folder), "data", "./data/../data/", "dätä 日", str(tmp_path / "dätä 日")]
        backends = [LocalBackend(root) for root in roots]
        assert [backend.root for backend in backends] == roots
        for backend in backends:
            assert backend.list() == (".hidden", "a/c.txt", "a/ü 日.png", "b.jpg")
            assert backend.read("a/ü 日.png") == b"U"

    def test_is_resolved_once(self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "link").symlink_to(folder)
        monkeypatch.chdir(tmp_path)
        relative, linked = LocalBackend("data"), LocalBackend("link")
        monkeypatch.chdir("/")
        (tmp_path / "link").unlink()
        assert relative.read("b.jpg") == linked.read("b.jpg") == b"B"

    def test_the_home_folder_of_an_unknown_user(self) -> None:
        with pytest.raises(StorageError, match="no such folder"):
            LocalBackend("~no-such-user-here/data")

    def test_tilde_is_the_home_folder(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", str(folder.parent))
        assert LocalBackend("~/data").read("b.jpg") == b"B"

    @pytest.mark.parametrize(
        ("root", "found"), [("nowhere", "no such folder"), ("data/b.jpg", "a file"), ("da\0ta", "no such folder")]
    )
    def test_must_be_a_folder(self, folder: Path, root: str, found: str) -> None:
        with pytest.raises(StorageError, match=f"(?s){found}.*expected  a folder.*try"):
            LocalBackend(folder.parent / root)


class TestListing:
    def test_everything_is_listed_or_reported(self, folder: Path, tmp_path: Path) -> None:
        outside = fill(tmp_path / "outside", {"secret.jpg": b"S"})
        (folder / "out.jpg").symlink_to(outside / "secret.jpg")
        (folder / "outdir").symlink_to(outside)
        (folder / "in.jpg").symlink_to("b.jpg")
        (folder / "loop").symlink_to(folder)
        (folder / "circle").symlink_to("circle")
        (folder / "nothing").symlink_to("absent")
        (folder / "back\\slash.jpg").write_bytes(b"")
        os.mkfifo(folder / "pipe")
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(folder / "socket"))
        (Path(os.fsdecode(os.fsencode(folder) + b"/latin-\xe4.jpg"))).write_bytes(b"")
        listing = LocalBackend(folder).survey()
        assert list(listing.files) == [".hidden", "a/c.txt", "a/ü 日.png", "b.jpg", "in.jpg"]
        assert listing.files["in.jpg"].size == 1
        reasons = {item.path: item.reason for item in listing.left_out}
        assert reasons.keys() == {
            "out.jpg", "outdir", "loop", "circle", "nothing", "back\\slash.jpg", "pipe", "socket",
            "latin-\\udce4.jpg",
        }  # fmt: skip
        assert "out of the folder" in reasons["out.jpg"]
        assert "out of the folder" in reasons["outdir"]
        assert "their own path" in reasons["loop"]
        assert "UTF-8" in reasons["latin-\\udce4.jpg"]

    def test_sizes_and_times_are_the_files(self, folder: Path) -> None:
        os.utime(folder / "b.jpg", ns=(1, 1_700_000_000_123_456_789))
        backend = LocalBackend(folder)
        assert backend.survey().files["b.jpg"] == FileStat(1, 1_700_000_000_123_456_789) == backend.stat("b.jpg")

    def test_is_sorted_by_code_point(self, tmp_path: Path) -> None:
        fill(tmp_path, dict.fromkeys(("é", "z", "a/b", "a.b", "Z"), b""))
        assert LocalBackend(tmp_path).list() == ("Z", "a.b", "a/b", "z", "é")

    def test_an_empty_folder_is_empty(self, tmp_path: Path) -> None:
        assert LocalBackend(tmp_path).list() == ()

    def test_a_folder_that_vanished_is_an_error_not_an_empty_dataset(self, folder: Path) -> None:
        backend = LocalBackend(folder / "a")
        for file in (folder / "a").iterdir():
            file.unlink()
        (folder / "a").rmdir()
        with pytest.raises(StorageError, match="cannot be listed"):
            backend.list()


class TestReading:
    def test_read_open_stat_exists(self, folder: Path) -> None:
        backend = LocalBackend(folder)
        view = backend.read("a/c.txt")
        assert (bytes(view), view.readonly) == (b"C", True)
        with backend.open("a/c.txt") as stream:
            assert (stream.read(), stream.seek(0), stream.read(1)) == (b"C", 0, b"C")
        assert backend.exists("a/c.txt")
        assert not backend.exists("a/missing.txt")
        assert not backend.exists("a")
        assert not backend.exists("b.jpg/below-a-file")
        assert not backend.exists("n" * 300)

    @pytest.mark.parametrize("path", ["missing", "a", "b.jpg/x", "n" * 300])
    def test_folders_are_missing_files(self, folder: Path, path: str) -> None:
        backend = LocalBackend(folder)
        for call in (backend.read, backend.open, backend.stat):
            with pytest.raises(MissingFileError):
                call(path)

    def test_a_view_outlives_what_happens_to_the_file(self, folder: Path) -> None:
        fill(folder, {"large.bin": b"x" * 3_000_000})
        view = LocalBackend(folder).read("large.bin")
        os.truncate(folder / "large.bin", 0)  # under a mapping, touching the view would now be SIGBUS
        assert view[-1] == ord("x")

    def test_links_inside_are_followed_and_links_outside_rejected(self, folder: Path, tmp_path: Path) -> None:
        outside = fill(tmp_path / "outside", {"secret.jpg": b"S"})
        (folder / "out.jpg").symlink_to(outside / "secret.jpg")
        (folder / "outdir").symlink_to("../outside")
        (folder / "a/up").symlink_to("..")
        (folder / "twice").symlink_to("outdir")
        backend = LocalBackend(folder)
        assert backend.read("a/up/b.jpg") == b"B"
        for path in ("out.jpg", "outdir/secret.jpg", "twice/secret.jpg", "a/up/outdir/secret.jpg"):
            for call in (backend.read, backend.open, backend.stat, backend.exists):
                with pytest.raises(OutsideRootError, match="out of"):
                    call(path)

    def test_a_sibling_with_the_same_beginning_is_outside(self, folder: Path, tmp_path: Path) -> None:
        fill(tmp_path / "data-secret", {"s.jpg": b"S"})
        (folder / "link").symlink_to("../data-secret/s.jpg")
        with pytest.raises(OutsideRootError):
            LocalBackend(folder).read("link")

    def test_a_pipe_does_not_hang(self, folder: Path) -> None:
        os.mkfifo(folder / "pipe.jpg")
        with pytest.raises(UnreadableMediaError, match=r"pipe\.jpg: neither"):
            LocalBackend(folder).read("pipe.jpg")

    def test_a_link_to_itself_is_named(self, folder: Path) -> None:
        (folder / "circle").symlink_to("circle")
        with pytest.raises(UnreadableMediaError, match="back to itself"):
            LocalBackend(folder).read("circle")

    def test_refusing_leaves_no_descriptor_open(self, folder: Path) -> None:
        os.mkfifo(folder / "pipe")
        backend = LocalBackend(folder)
        before = len([*Path("/proc/self/fd").iterdir()])
        for path in ("pipe", "a", "missing"):
            with pytest.raises((MissingFileError, UnreadableMediaError)):
                backend.open(path)
        assert len([*Path("/proc/self/fd").iterdir()]) == before

    @pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, which only root can")
    def test_a_file_we_may_not_read_is_named_with_the_reason(self) -> None:
        with tempfile.TemporaryDirectory() as name:  # pytest's own folders are closed to other users
            folder = fill(Path(name), {"locked.jpg": b"L"})
            folder.chmod(0o755)
            (folder / "locked.jpg").chmod(0)
            backend = LocalBackend(folder)
            os.seteuid(65534)
            try:
                with pytest.raises(UnreadableMediaError, match=r"locked\.jpg: Permission denied \(EACCES\)"):
                    backend.read("locked.jpg")
            finally:
                os.seteuid(0)
