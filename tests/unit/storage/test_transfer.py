"""Transfers from storage that fails at any point: the result is the complete file or no file."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gracetune.storage import transfer as module
from gracetune.storage.transfer import (
    RemoteFile,
    RetryPolicy,
    TransferError,
    digest_of,
    is_local_disk_error,
    resumable_bytes,
    transfer,
)

QUICK = RetryPolicy(attempts=2, first_pause=0.0)


class Storage:
    """Serves one file in ranges, with configured failures."""

    def __init__(self, data: bytes, faults: list[str] | None = None, *, can_seek: bool = True) -> None:
        self.data, self.faults, self.can_seek = data, faults or [], can_seek
        self.sent = 0

    def _fault(self) -> str:
        return self.faults.pop(0) if self.faults else ""

    def read(self, start: int, end: int) -> bytes:
        fault = self._fault()
        if fault == "error":
            raise ConnectionResetError("broken off")
        if fault == "final":
            raise PermissionError("expired")
        data = bytearray(self.data[start:end])
        if fault == "short":
            del data[len(data) // 2 :]
        if fault == "wrong" and data:
            data[0] ^= 1
        self.sent += len(data)
        return bytes(data)

    def stream(self) -> Iterator[bytes]:
        for at in range(0, len(self.data), 7):
            yield self.read(at, min(len(self.data), at + 7))

    def is_final(self, error: Exception) -> bool:
        return isinstance(error, PermissionError)


def remote(data: bytes, *, digest: bool = True) -> RemoteFile:
    return RemoteFile(len(data), f"sha256:{hashlib.sha256(data).hexdigest()}" if digest else None, "tag")


FAULTS = st.lists(st.sampled_from(["", "", "error", "short", "final", "wrong"]), max_size=12)


@settings(max_examples=60)
@given(st.binary(max_size=200), st.lists(FAULTS, max_size=3), st.booleans())
def test_after_any_failure_the_file_is_complete_or_absent(data: bytes, starts: list[list[str]], can_seek: bool) -> None:
    """Each start fails in a different way, except for the last."""
    with TemporaryDirectory() as folder, ThreadPoolExecutor(2) as requests, pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "RANGE", 16)
        target, part = Path(folder) / "file", Path(folder) / "incoming" / "file.part"
        for faults in [*starts, []]:
            counted: list[int] = []
            storage = Storage(data, list(faults), can_seek=can_seek)
            try:
                transfer(target, part, remote(data), storage, requests, on_bytes=counted.append, retry_policy=QUICK)
            except (TransferError, OSError):
                assert not target.exists()
                continue
            assert target.read_bytes() == data
            assert sum(counted) == len(data)
            assert [*part.parent.iterdir()] == []
            target.unlink()
            break


def test_received_bytes_are_not_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RANGE", 10)
    data = bytes(range(100))
    part = tmp_path / "a.part"
    with ThreadPoolExecutor(1) as requests:
        with pytest.raises(PermissionError):
            transfer(
                tmp_path / "a", part, remote(data), Storage(data, [""] * 6 + ["final"]), requests, retry_policy=QUICK
            )
        kept = resumable_bytes(part, remote(data))
        assert 20 <= kept <= 60
        storage = Storage(data)
        transfer(tmp_path / "a", part, remote(data), storage, requests, retry_policy=QUICK)
    assert storage.sent == 100 - kept
    assert (tmp_path / "a").read_bytes() == data


def test_another_version_starts_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RANGE", 10)
    old, new = b"o" * 100, b"n" * 100
    with ThreadPoolExecutor(1) as requests:
        storage = Storage(old, [""] * 5 + ["final"])
        with pytest.raises(PermissionError):
            transfer(tmp_path / "a", tmp_path / "p", RemoteFile(100, None, "1"), storage, requests, retry_policy=QUICK)
        transfer(tmp_path / "a", tmp_path / "p", RemoteFile(100, None, "2"), Storage(new), requests, retry_policy=QUICK)
    assert (tmp_path / "a").read_bytes() == new


def test_an_unreliable_digest_is_checked_by_a_second_download(tmp_path: Path) -> None:
    """The ETag of an encrypted object looks like an MD5 but is not one: the content is the same every time."""
    data = b"x" * 50
    seeming = RemoteFile(50, "md5:" + "0" * 32, "tag", sure=False)
    with ThreadPoolExecutor(1) as requests:
        storage = Storage(data)
        transfer(tmp_path / "a", tmp_path / "p", seeming, storage, requests, retry_policy=QUICK)
        assert storage.sent == 100
        with pytest.raises(TransferError, match="as the storage says"):
            transfer(
                tmp_path / "b", tmp_path / "q", RemoteFile(50, "md5:" + "0" * 32), storage, requests, retry_policy=QUICK
            )
    assert (tmp_path / "a").read_bytes() == data
    assert not (tmp_path / "b").exists()


def test_git_blob_id(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"hello\n")
    assert digest_of(tmp_path / "a", "git") == "ce013625030ba8dba906f756967f9e9ca394464a"


def test_local_disk_errors_are_told_from_remote_errors() -> None:
    assert is_local_disk_error(OSError(28, "No space left on device"))
    assert is_local_disk_error(PermissionError(13, "Permission denied", "/data/x"))
    assert not is_local_disk_error(ConnectionResetError(104, "Connection reset by peer"))
    assert not is_local_disk_error(FileNotFoundError("bucket/key"))
