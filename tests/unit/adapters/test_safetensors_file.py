"""Incomplete files are rejected, writes are atomic, and no existing file is replaced."""

from __future__ import annotations

import hashlib
import os
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from safetensors.torch import save as library_save
from torch import Tensor

from gracetune.adapters import safetensors_file as files
from gracetune.adapters.adapter_files import open_adapter, save
from gracetune.adapters.errors import AlteredFileError, UnreadableAdapterError
from gracetune.errors import ConfigError
from gracetune.storage.os_errors import FileError
from gracetune.storage.safetensors_files import in_file_order
from gracetune.storage.safetensors_headers import describe, open_weights, pack_header
from unit.adapters.formats import making

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


def test_every_truncation_is_rejected(tmp_path: Path) -> None:
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
def test_pickles_are_rejected_and_never_run(name: str, kind: str, tmp_path: Path, monkeypatch) -> None:
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
def test_paths_that_are_not_files_are_rejected(make, tmp_path: Path) -> None:
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
    with pytest.raises(FileError, match="move the existing file or folder"):
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
    with pytest.raises(UnreadableAdapterError, match="a named pipe, not a regular file"):
        files.read(tmp_path / "pipe.safetensors")


@pytest.mark.parametrize(
    ("name", "beside"), [("parameters", "parameters.json"), ("adapter_model", "adapter_config.json")]
)
def test_a_named_pipe_beside_a_file_is_not_waited_for(name: str, beside: str, tmp_path: Path) -> None:
    path = files.write(tmp_path / f"{name}.safetensors", {"a": torch.ones(1)}, {})
    os.mkfifo(tmp_path / beside)
    with pytest.raises(UnreadableAdapterError, match=f"{beside}.*\n.*a named pipe, not a regular file"):
        files.read(path)


@pytest.mark.parametrize(
    ("alpha", "expected_text"),
    [("NaN", "is NaN"), ('"8"', "is the text"), ("true", "is true"), ("1" + "0" * 400, "above")],
)
def test_a_checkpoints_alpha_that_is_no_number(alpha: str, expected_text: str, tmp_path: Path) -> None:
    path = files.write(tmp_path / "parameters.safetensors", {"a": torch.ones(1)}, {})
    path.with_suffix(".json").write_text(f'{{"alphas": {{"a": {alpha}}}}}')
    with pytest.raises(UnreadableAdapterError, match=expected_text):
        files.read(path)


def test_a_file_larger_than_memory_is_rejected_before_it_is_read(tmp_path: Path) -> None:
    """A sparse file of a terabyte takes no space on the disk."""
    path, size = tmp_path / "sparse.safetensors", 1 << 40
    header = pack_header({"a.diff": describe("F16", (1 << 19, 1 << 20), 0, size)}, {})
    with path.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + size)
    with pytest.raises(UnreadableAdapterError, match=r"1.00 TiB of tensors"):
        files.read(path)


def test_a_loop_of_links_and_a_name_that_is_too_long(tmp_path: Path) -> None:
    (tmp_path / "loop.safetensors").symlink_to("loop.safetensors")
    with pytest.raises(UnreadableAdapterError, match="symbolic links"):
        files.read(tmp_path / "loop.safetensors")
    with pytest.raises(UnreadableAdapterError, match="name too long"):
        files.read(tmp_path / ("x" * 300))


# -- the hash in the header -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """With weights in bf16 and alphas in fp32."""
    state = making.state("wan", {"blocks.0.attn1.to_q": (8, 8), "blocks.1.attn1.to_q": (8, 8)}, "lora")
    path = save(tmp_path_factory.mktemp("ours") / "a.safetensors", state, "comfyui", torch.bfloat16)
    return path.read_bytes()


def test_every_flip_in_the_tensors_of_our_own_file_is_found(ours: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(ours)
    assert not open_adapter(path).reading.altered
    start = 8 + int.from_bytes(ours[:8], "little")
    assert len(ours) - start > 100
    for place in range(start, len(ours)):
        for bit in (0, 7) if place % 7 else range(8):
            path.write_bytes(ours[:place] + bytes([ours[place] ^ 1 << bit]) + ours[place + 1 :])
            with pytest.raises(AlteredFileError, match="--ignore-hash"):
                open_adapter(path).states()


@settings(max_examples=30)
@given(data=st.data())
def test_any_change_of_the_tensors_is_found(data: st.DataObject, ours: bytes, tmp_path_factory) -> None:
    path = tmp_path_factory.mktemp("flips") / "a.safetensors"
    start = 8 + int.from_bytes(ours[:8], "little")
    places = data.draw(st.dictionaries(st.integers(start, len(ours) - 1), st.integers(1, 255), min_size=1, max_size=9))
    content = bytearray(ours)
    for place, change in places.items():
        content[place] ^= change
    path.write_bytes(content)
    assert open_adapter(path).reading.altered
    assert not open_adapter(path, ignore_hash=True).reading.altered


def test_a_program_that_orders_the_same_tensors_otherwise_has_changed_nothing(ours: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(ours)
    found = files.read(tmp_path / "a.safetensors")
    mixed = {key: tensor.half() if "lora_A" in key else tensor for key, tensor in found.tensors.items()}
    metadata = {**found.metadata, "sshs_model_hash": files.data_hash(mixed)}
    (tmp_path / "b.safetensors").write_bytes(library_save(mixed, metadata))
    assert list(open_weights(tmp_path / "b.safetensors").entries) != [name for name, _ in in_file_order(mixed)]
    assert files.read(tmp_path / "b.safetensors").hash_matches


def test_another_programs_hash_is_only_worth_a_note(ours: bytes, tmp_path: Path) -> None:
    """kohya's scripts and ai-toolkit write the hash too. Their files may be edited without updating the header."""
    (tmp_path / "a.safetensors").write_bytes(ours)
    found = files.read(tmp_path / "a.safetensors")
    theirs = {"sshs_model_hash": files.data_hash(found.tensors), "ss_network_module": "networks.lora"}
    (tmp_path / "kohya.safetensors").write_bytes(library_save(dict(found.tensors), theirs))
    opened = open_adapter(tmp_path / "kohya.safetensors")
    assert (opened.file.hash_matches, opened.notes) == (True, ())
    (tmp_path / "other.safetensors").write_bytes(
        library_save(dict(found.tensors), theirs | {"sshs_model_hash": "0" * 64})
    )
    opened = open_adapter(tmp_path / "other.safetensors")
    assert opened.states()
    assert "sshs_model_hash" in opened.notes[0]
