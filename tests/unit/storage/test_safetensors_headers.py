from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open

from gracetune.storage.safetensors_headers import BITS, TensorEntry, WeightFileError, open_weights

FOUR_FLOATS = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
ENTRY_TEXT = json.dumps(FOUR_FLOATS).encode()
DATA = bytes(range(16))


def write(path: Path, header: object, data: bytes = DATA) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return path


def rejection(path: Path) -> str:
    with pytest.raises(WeightFileError) as caught:
        open_weights(path)
    assert all(problem.file is not None for problem in caught.value.problems)
    return str(caught.value)


class TestAFile:
    def test_entries_give_the_position_of_each_tensor(self, tmp_path: Path) -> None:
        header = {
            "__metadata__": {"format": "pt"},
            "late": {"dtype": "I16", "shape": [2, 2], "data_offsets": [8, 16]},
            "early": {"dtype": "F64", "shape": [], "data_offsets": [0, 8]},
            "nothing": {"dtype": "BF16", "shape": [3, 0], "data_offsets": [8, 8]},
        }
        path = write(tmp_path / "a.safetensors", header)
        weights = open_weights(path)
        start = path.stat().st_size - len(DATA)
        assert weights.entries == {
            "early": TensorEntry("early", "F64", (), path, start, 8),
            "nothing": TensorEntry("nothing", "BF16", (3, 0), path, start + 8, 0),
            "late": TensorEntry("late", "I16", (2, 2), path, start + 8, 8),
        }
        assert weights.metadata == {"format": "pt"}
        assert weights.size == 16

    def test_without_tensors(self, tmp_path: Path) -> None:
        assert open_weights(write(tmp_path / "a.safetensors", {}, b"")).entries == {}

    @pytest.mark.parametrize("dtype", BITS)
    def test_every_dtype_of_the_format(self, tmp_path: Path, dtype: str) -> None:
        count = 16 * 8 // BITS[dtype] // 4 * 4
        size = count * BITS[dtype] // 8
        header = {"a": {"dtype": dtype, "shape": [count], "data_offsets": [0, size]}}
        path = write(tmp_path / "a.safetensors", header, DATA[:size])
        assert open_weights(path).entries["a"].dtype == dtype
        with safe_open(path, "pt") as library:
            assert library.keys() == ["a"]


class TestRejections:
    """Each names the file and the tensor, what was found, what was expected, and what to do."""

    def test_truncated_data(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.safetensors", {"a": FOUR_FLOATS}, DATA[:-1])
        size = path.stat().st_size
        assert rejection(path) == (
            f"{path}: data\n  found     a file of {size} bytes: it is truncated\n"
            f"  expected  {size + 1} bytes, as its header says\n"
            "  try       download it again, and compare its size with the one at the source"
        )

    def test_truncated_inside_the_header(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.safetensors", {"a": FOUR_FLOATS})
        path.write_bytes(path.read_bytes()[:20])
        assert "the file ends after 20 bytes" in rejection(path)

    @pytest.mark.parametrize("content", [b"", b"\x01", b"\x00" * 8, b"\xff" * 8, b"<!DOCTYPE html>", b"PK\x03\x04" * 9])
    def test_a_file_of_another_format(self, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "a.safetensors"
        path.write_bytes(content)
        assert "expected  a safetensors file" in rejection(path)

    def test_a_git_lfs_pointer(self, tmp_path: Path) -> None:
        path = tmp_path / "a.safetensors"
        path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n")
        assert "try       git lfs pull" in rejection(path)

    def test_bytes_after_the_last_tensor(self, tmp_path: Path) -> None:
        assert "bytes, as its header says" in rejection(write(tmp_path / "a", {"a": FOUR_FLOATS}, DATA + b"x"))

    def test_overlap(self, tmp_path: Path) -> None:
        two = FOUR_FLOATS | {"shape": [2], "data_offsets": [8, 16]}
        text = rejection(write(tmp_path / "a", {"a": FOUR_FLOATS, "b": two}))
        assert ": b\n  found     it shares 8 bytes with the tensor before it" in text

    def test_gap(self, tmp_path: Path) -> None:
        header = {
            "a": FOUR_FLOATS | {"shape": [1], "data_offsets": [0, 4]},
            "b": FOUR_FLOATS | {"shape": [2], "data_offsets": [8, 16]},
        }
        text = rejection(write(tmp_path / "a", header))
        assert ": b\n  found     it begins 4 bytes after the end of the tensor before it" in text

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"dtype": "F7"}, "dtype 'F7'"),
            ({"dtype": 4}, "dtype 4"),
            ({"shape": [5]}, "expected  20 bytes for F32 [5]"),
            ({"shape": [4.0]}, "shape [4.0]"),
            ({"shape": [True, 4]}, "shape [True, 4]"),
            ({"shape": [-4]}, "shape [-4]"),
            ({"shape": 4}, "shape 4"),
            ({"shape": [1 << 40, 1 << 40]}, "fits a 64-bit machine"),
            ({"shape": [0, 1 << 40, 1 << 40], "data_offsets": [0, 0]}, "fits a 64-bit machine"),
            ({"data_offsets": [0, 1 << 64]}, "fits a 64-bit machine"),
            ({"data_offsets": [16, 0]}, "data_offsets [16, 0]"),
            ({"data_offsets": [0]}, "data_offsets [0]"),
            ({"data_offsets": "0-16"}, "data_offsets '0-16'"),
            ({"dtype": "F4", "shape": [31]}, "15.5 bytes for F4"),
        ],
    )
    def test_a_bad_entry(self, tmp_path: Path, change: dict[str, Any], words: str) -> None:
        text = rejection(write(tmp_path / "a", {"bad": FOUR_FLOATS | change}))
        assert ": bad\n" in text
        assert words in text

    @pytest.mark.parametrize(
        "header",
        [
            b"[1, 2]",
            b"{} and more",
            b"{" * 20,
            b"[" * 100_000,
            b'{"\xff": ' + ENTRY_TEXT + b"}",
            b'{"a": ' + ENTRY_TEXT + b', "a": ' + ENTRY_TEXT + b"}",
            b'{"a": ' + ENTRY_TEXT[:-1] + b', "more": NaN}}',
            b'{"\\ud800": ' + ENTRY_TEXT + b"}",
            b'{"a": ' + ENTRY_TEXT[:-1] + b', "more": ' + b"9" * 5000 + b"}}",
            b'{"__metadata__": {"a": 1}}',
            b'{"__metadata__": []}',
            b'{"a": {"dtype": "F32", "shape": [4]}}',
            b'{"a": null}',
        ],
    )
    def test_a_bad_header(self, tmp_path: Path, header: bytes) -> None:
        assert "  try       " in rejection(write(tmp_path / "a", header))

    def test_thousands_of_problems_are_counted_not_listed(self, tmp_path: Path) -> None:
        text = rejection(write(tmp_path / "a", {str(number): None for number in range(3000)}))
        assert "2,992 more problems of this kind" in text
        assert len(text) < 4000

    def test_paths_that_are_not_files(self, tmp_path: Path) -> None:
        assert "No such file" in rejection(tmp_path / "missing.safetensors")
        os.mkfifo(tmp_path / "pipe.safetensors")
        assert "not a regular file" in rejection(tmp_path / "pipe.safetensors")
        assert "it holds pipe.safetensors" in rejection(tmp_path)
        (tmp_path / "empty").mkdir()
        assert "it holds no safetensors file" in rejection(tmp_path / "empty")


NAME = st.text(min_size=1, max_size=3)
ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*BITS, "F7"]),
        "shape": st.lists(st.integers(0, 4), max_size=3),
        "data_offsets": st.lists(st.integers(0, 16), min_size=2, max_size=2),
    }
)
CHAINED = st.lists(st.tuples(NAME, st.sampled_from([*BITS]), st.lists(st.integers(0, 4), max_size=3)), max_size=4)


def chained(tensors: list[tuple[str, str, list[int]]]) -> tuple[dict[str, Any], int]:
    """A header whose tensors follow each other without gaps."""
    header, end = {}, 0
    for name, dtype, shape in tensors:
        bits = BITS[dtype]
        for length in shape:
            bits *= length
        assume(bits % 8 == 0 and name not in header)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + bits // 8]}
        end += bits // 8
    return header, end


class TestAgreementWithTheLibrary:
    """We reject what the safetensors library rejects, and read every file it writes."""

    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(header=st.dictionaries(NAME, ENTRY, max_size=3), size=st.integers(0, 20))
    def test_on_arbitrary_headers(self, tmp_path: Path, header: dict[str, Any], size: int) -> None:
        path = write(tmp_path / "a", header, bytes(size))
        assert accepts(path) == library_accepts(path)

    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much])
    @given(tensors=CHAINED, wrong=st.sampled_from([0, 0, 1, -1]))
    def test_on_good_headers_and_almost_good_ones(
        self, tmp_path: Path, tensors: list[tuple[str, str, list[int]]], wrong: int
    ) -> None:
        header, end = chained(tensors)
        assume(end + wrong >= 0)
        path = write(tmp_path / "a", header, bytes(end + wrong))
        assert accepts(path) == library_accepts(path) == (wrong == 0)

    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(position=st.integers(0, 200), value=st.integers(0, 255))
    def test_on_a_file_with_one_wrong_byte(self, tmp_path: Path, position: int, value: int) -> None:
        good = write(tmp_path / "a", {"a": FOUR_FLOATS, "__metadata__": {"x": "y"}}).read_bytes()
        path = tmp_path / "b"
        path.write_bytes(good[:position] + bytes([value]) + good[position + 1 :])
        # Never the other way round: we also reject what the format forbids and the library lets pass.
        assert library_accepts(path) or not accepts(path)


def accepts(path: Path) -> bool:
    try:
        open_weights(path)
    except WeightFileError:
        return False
    return True


def library_accepts(path: Path) -> bool:
    try:
        with safe_open(path, "pt"):
            return True
    except SafetensorError:
        return False


class TestAnIndex:
    def index(self, folder: Path, weight_map: object) -> Path:
        path = folder / "model.safetensors.index.json"
        path.write_text(json.dumps({"metadata": {"total_size": 32}, "weight_map": weight_map}))
        return path

    def shards(self, folder: Path) -> None:
        write(folder / "one.safetensors", {"a": FOUR_FLOATS})
        write(folder / "two.safetensors", {"b": FOUR_FLOATS})

    def test_combines_the_shards(self, tmp_path: Path) -> None:
        self.shards(tmp_path)
        weights = open_weights(self.index(tmp_path, {"b": "two.safetensors", "a": "one.safetensors"}))
        assert {name: entry.path.name for name, entry in weights.entries.items()} == {
            "a": "one.safetensors",
            "b": "two.safetensors",
        }
        assert len(weights.files) == 2
        assert weights.size == 32

    def test_through_links_as_a_hub_cache_has_them(self, tmp_path: Path) -> None:
        blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
        blobs.mkdir()
        snapshot.mkdir()
        self.shards(blobs)
        for file in [*blobs.iterdir(), self.index(blobs, {"a": "one.safetensors", "b": "two.safetensors"})]:
            renamed = file.rename(file.with_name(f"sha-{file.name}")) if file.exists() else blobs / f"sha-{file.name}"
            (snapshot / file.name).symlink_to(renamed)
        assert set(open_weights(snapshot / "model.safetensors.index.json").entries) == {"a", "b"}

    def test_many_problems_in_the_shards_are_counted(self, tmp_path: Path) -> None:
        for shard in ("one", "two", "three"):
            write(
                tmp_path / f"{shard}.safetensors",
                {f"{shard}{number}": FOUR_FLOATS | {"dtype": "F3"} for number in range(1000)},
            )
        text = rejection(self.index(tmp_path, {name: f"{name}.safetensors" for name in ("one", "two", "three")}))
        assert "992 more problems of this kind" in text
        assert "2 more files with problems" in text

    def test_a_tensor_missing_from_its_shard(self, tmp_path: Path) -> None:
        self.shards(tmp_path)
        text = rejection(self.index(tmp_path, {"a": "one.safetensors", "b": "one.safetensors"}))
        assert ": b\n  found     not in one.safetensors" in text

    def test_a_tensor_it_does_not_mention(self, tmp_path: Path) -> None:
        half = FOUR_FLOATS | {"shape": [2]}
        header = {"a": half | {"data_offsets": [0, 8]}, "extra": half | {"data_offsets": [8, 16]}}
        write(tmp_path / "one.safetensors", header)
        text = rejection(self.index(tmp_path, {"a": "one.safetensors"}))
        assert ": extra\n  found     in one.safetensors, where the index does not look for it" in text

    def test_a_tensor_that_is_in_two_files(self, tmp_path: Path) -> None:
        write(tmp_path / "one.safetensors", {"a": FOUR_FLOATS})
        half = FOUR_FLOATS | {"shape": [2]}
        header = {"a": half | {"data_offsets": [0, 8]}, "b": half | {"data_offsets": [8, 16]}}
        write(tmp_path / "two.safetensors", header)
        text = rejection(self.index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"}))
        assert ": a\n  found     in two.safetensors, where the index does not look for it" in text

    def test_all_broken_files_at_once(self, tmp_path: Path) -> None:
        write(tmp_path / "one.safetensors", {"a": FOUR_FLOATS}, b"")
        text = rejection(self.index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"}))
        assert "it is truncated" in text
        assert "No such file" in text

    @pytest.mark.parametrize("name", ["../one.safetensors", "/etc/passwd", "", "..", "a\\b", "a\0b", 7, None])
    def test_names_only_files_beside_it(self, tmp_path: Path, name: object) -> None:
        assert "expected  an object: tensor name -> name of a file" in rejection(self.index(tmp_path, {"a": name}))

    @pytest.mark.parametrize("content", ["{}", '{"weight_map": []}', "[]", "{", '{"weight_map": {"a": "x", "a": "x"}}'])
    def test_invalid_index_files(self, tmp_path: Path, content: str) -> None:
        path = tmp_path / "model.safetensors.index.json"
        path.write_text(content)
        assert "  try       download it again" in rejection(path)
