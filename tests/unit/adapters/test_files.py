"""Files are whole or refused, appear whole or not at all, and never take another's place."""

from __future__ import annotations

import hashlib
import os
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from safetensors.torch import save as library_save
from torch import Tensor

from gracetune.adapters import files
from gracetune.adapters.file_errors import UnreadableAdapterError
from gracetune.errors import ConfigError
from gracetune.storage.os_errors import FileError

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.float64)


@st.composite
def contents(draw: st.DrawFn) -> dict[str, Tensor]:
    names = draw(st.lists(st.text(min_size=1, max_size=20), unique=True, max_size=6))
    names = [name for name in names if name != "__metadata__" and name.isprintable()]
    found = {}
    for index, name in enumerate(names):
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        found[name] = torch.full(shape, index + 1).to(draw(st.sampled_from(DTYPES)))
    return found


@given(tensors=contents(), metadata=st.dictionaries(st.text(max_size=10), st.text(max_size=10), max_size=4))
def test_the_safetensors_library_reads_what_we_write(tensors, metadata, tmp_path_factory) -> None:
    metadata = {key: value for key, value in metadata.items() if (key + value).isprintable()}
    path = tmp_path_factory.mktemp("files") / "a.safetensors"
    files.write(path, tensors, metadata)
    found = load_file(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    with safe_open(path, framework="pt") as file:
        assert (file.metadata() or {}) == metadata
    again = files.read(path)
    assert again.metadata == metadata
    assert again.tensors.keys() == tensors.keys()


def test_the_same_contents_give_the_same_bytes(tmp_path: Path) -> None:
    tensors = {"b": torch.ones(3), "a": torch.zeros(2, dtype=torch.bfloat16)}
    one = files.write(tmp_path / "1.safetensors", tensors, {"x": "1", "y": "2"})
    two = files.write(tmp_path / "2.safetensors", dict(reversed(tensors.items())), {"y": "2", "x": "1"})
    assert one.read_bytes() == two.read_bytes()


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    whole = files.write(tmp_path / "whole.safetensors", {"a": torch.ones(8)}, {"x": "1"}).read_bytes()
    cut = tmp_path / "cut.safetensors"
    for length in range(len(whole)):
        cut.write_bytes(whole[:length])
        with pytest.raises(UnreadableAdapterError) as error:
            files.read(cut)
        assert str(cut) in str(error.value)
    cut.write_bytes(whole + b"more")
    with pytest.raises(UnreadableAdapterError):
        files.read(cut)


class Trap:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch sprung",)


@pytest.mark.parametrize("name", ["adapter.pt", "adapter.safetensors", "adapter.bin"])
@pytest.mark.parametrize("kind", ["pickle", "zip"])
def test_pickles_are_refused_and_never_run(name: str, kind: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / name
    if kind == "pickle":
        path.write_bytes(pickle.dumps(Trap()))
    else:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("archive/data.pkl", pickle.dumps(Trap()))
    with pytest.raises(UnreadableAdapterError, match="pickle"):
        files.read(path)
    assert not (tmp_path / "sprung").exists()


def test_a_header_whose_length_looks_like_a_pickle(tmp_path: Path) -> None:
    """0x480 bytes of header begin with the two bytes a pickle of protocol 4 begins with."""
    for padding in range(2000):
        tensors = {"a": torch.ones(1)}
        content = library_save(tensors, {"x": "y" * padding})
        if content.startswith(b"\x80\x04"):
            break
    else:
        pytest.fail("no such header found")
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    assert files.read(path).tensors.keys() == tensors.keys()


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.mkdir(), lambda path: path.write_bytes(b"")])
def test_what_is_no_file(make, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    make(path)
    with pytest.raises(UnreadableAdapterError):
        files.read(path)


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_text("somebody's work")
    with pytest.raises(ConfigError, match="a name that is free"):
        files.write(path, {"a": torch.ones(1)}, {})
    assert path.read_text() == "somebody's work"
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyError):  # a type of numbers the format has no name for
        files.write(tmp_path / "a.safetensors", {"a": torch.ones(1, dtype=torch.complex128)}, {})
    assert list(tmp_path.iterdir()) == []


def test_permissions_are_the_users_own(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        path = files.write(tmp_path / "a.safetensors", {"a": torch.ones(1)}, {})
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o640


def test_the_hashes_are_of_the_files_own_bytes(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(400_000), "b": torch.ones(7, dtype=torch.bfloat16)}
    content = files.write(tmp_path / "a.safetensors", tensors, {"ss_x": "1"}).read_bytes()
    data = content[8 + int.from_bytes(content[:8], "little") :]
    assert files.data_hash(tensors) == hashlib.sha256(data).hexdigest()
    legacy = hashlib.sha256(content[0x100000 : 0x100000 + 0x10000]).hexdigest()[:8]
    assert files.legacy_hash(tensors, {"ss_x": "1"}) == legacy
    assert files.legacy_hash({"b": tensors["b"]}, {}) == hashlib.sha256(b"").hexdigest()[:8]


def test_a_place_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="move what is there away"):
        files.write(tmp_path / "file" / "a.safetensors", {"a": torch.ones(1)}, {})


def test_numbers_we_cannot_compute_with(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(library_save({"a": torch.ones(2).to(torch.float8_e4m3fn)}))
    with pytest.raises(UnreadableAdapterError, match="F8_E4M3"):
        files.read(path)


def test_names_as_long_as_they_may_be(tmp_path: Path) -> None:
    longest = "a" * (255 - len(".safetensors")) + ".safetensors"
    assert files.read(files.write(tmp_path / longest, {"a": torch.ones(1)}, {})).tensors.keys() == {"a"}
    with pytest.raises(FileError, match="too long"):
        files.write(tmp_path / f"a{longest}", {"a": torch.ones(1)}, {})


def test_a_named_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.safetensors")
    with pytest.raises(UnreadableAdapterError, match="not a regular file"):
        files.read(tmp_path / "pipe.safetensors")
