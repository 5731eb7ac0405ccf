"""Only regular files are opened: no open blocks on a pipe, and no device is read."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import pytest

from gracetune.checkpoint.manifest import MANIFEST, Fact, difference, read_manifest
from gracetune.errors import ConfigError
from gracetune.models.source import read_json
from gracetune.storage.regular_files import check_regular, open_regular, read_small_file
from gracetune.storage.safetensors_files import open_tensors, read_tensors
from gracetune.storage.safetensors_headers import WeightFileError, open_weights


@pytest.fixture(params=["pipe", "socket", "device", "folder"])
def other(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "other.safetensors"
    if request.param == "pipe":
        os.mkfifo(path)
    elif request.param == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
    elif request.param == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    return path


@pytest.mark.parametrize("read", [open_regular, check_regular, read_small_file, read_tensors, open_tensors])
def test_only_regular_files_are_opened(read, other: Path) -> None:
    with pytest.raises(OSError, match="not a regular file"):
        read(other)


def test_indexes_and_checksummed_files_must_be_regular(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors.index.json")
    with pytest.raises(WeightFileError, match="a named pipe, not a regular file"):
        open_weights(tmp_path / "model.safetensors.index.json")
    with pytest.raises(OSError, match="a named pipe"):
        difference(tmp_path / "model.safetensors.index.json", Fact(0, ""))


def test_model_configs_and_checkpoint_manifests_must_be_regular(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ConfigError, match="a named pipe, not a regular file"):
        read_json(tmp_path / "config.json")
    os.mkfifo(tmp_path / MANIFEST)
    with pytest.raises(OSError, match="a named pipe, not a regular file"):
        read_manifest(tmp_path)


def test_links_are_followed_and_descriptors_closed(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    before = len(list(Path("/proc/self/fd").iterdir()))
    assert read_small_file(tmp_path / "link") == b"content"
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "nothing")
    with pytest.raises(OSError, match="a file of more than 6 B") as caught:
        read_small_file(tmp_path / "file", most=6)
    assert caught.value.errno == errno.EFBIG
    assert len(list(Path("/proc/self/fd").iterdir())) == before
