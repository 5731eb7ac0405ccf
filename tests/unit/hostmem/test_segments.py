from __future__ import annotations

import fcntl
import io
import mmap
import os
from pathlib import Path

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from gracetune.hostmem.errors import StagingError
from gracetune.hostmem.numa import NodeChoice
from gracetune.hostmem.segment import ALIGNMENT, DATA_AT, RECORD, Segment, SegmentEntry, SegmentWriter
from unit.data.backends.helpers import held

ANYWHERE = NodeChoice((), "anywhere")


def made(files: dict[str, bytes]) -> Segment:
    with SegmentWriter(1 << 20, ANYWHERE) as writer:
        entries = []
        for path, data in files.items():
            offset = writer.reserve(len(data))
            writer.write(offset, data)
            entries.append(SegmentEntry(path, 0, offset, len(data), len(data), 42, xxhash.xxh3_128_digest(data)))
        return Segment(writer.finish(entries))


def sealed_copy(content: bytes, seals: int) -> io.FileIO:
    descriptor = os.memfd_create("gracetune-staged", os.MFD_ALLOW_SEALING)
    os.write(descriptor, content)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    copy = io.FileIO(os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY))
    os.close(descriptor)
    return copy


ALL_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
names = st.text(alphabet=st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=12)


@settings(max_examples=60)
@given(files=st.dictionaries(names, st.binary(max_size=300), max_size=12))
def test_finds_every_file_and_nothing_else(files: dict[str, bytes]) -> None:
    segment = made(files)
    try:
        assert [entry.path for entry in segment] == sorted(files)
        for path, data in files.items():
            entry = segment.find(path)
            assert entry is not None
            assert (entry.size, entry.modified_ns, entry.digest) == (len(data), 42, xxhash.xxh3_128_digest(data))
            assert entry.offset % ALIGNMENT == 0
            assert segment.read(entry) == data
        for path in ("", "\0", "zzzz-absent", *(path + "x" for path in files)):
            assert (segment.find(path) is not None) == (path in files)
    finally:
        segment.close()


class TestMemory:
    def test_is_sealed(self) -> None:
        segment = made({"a": b"A"})
        writable = os.open(f"/proc/self/fd/{segment.fileno()}", os.O_RDWR)
        try:
            with pytest.raises(PermissionError):
                os.pwrite(writable, b"x", DATA_AT)
            with pytest.raises(PermissionError):
                os.ftruncate(writable, 1)
            with pytest.raises(PermissionError):
                mmap.mmap(writable, 0, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            with pytest.raises(OSError, match="denied"):
                mmap.mmap(segment.fileno(), 0, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            os.close(writable)
            segment.close()

    def test_views_share_the_segment_and_are_read_only(self) -> None:
        segment = made({"a": b"A" * 5000})
        entry = segment.find("a")
        assert entry is not None
        first, second = segment.read(entry), segment.read(entry)
        assert isinstance(first.obj, mmap.mmap)
        assert first.obj is second.obj
        with pytest.raises(TypeError):
            first[0] = 0
        del first, second
        segment.close()

    def test_memory_is_freed_with_the_last_view(self) -> None:
        before = held()
        segment = made({"a": b"A" * 5000})
        entry = segment.find("a")
        assert entry is not None
        view = segment.read(entry)
        segment.close()
        segment.close()
        assert bytes(view) == b"A" * 5000
        assert held() > before
        del view
        assert held() == before

    def test_an_abandoned_writer_frees_its_memory(self) -> None:
        before = held()
        with SegmentWriter(1 << 40, ANYWHERE) as writer:
            writer.write(writer.reserve(100), b"x" * 100)
            assert held() > before
        assert held() == before

    def test_discarded_ranges_use_no_memory(self) -> None:
        with SegmentWriter(1 << 30, ANYWHERE) as writer:
            kept = writer.reserve(10)
            writer.write(kept, b"k" * 10)
            large = writer.reserve(8 << 20)
            writer.write(large, b"x" * (8 << 20))
            after = writer.reserve(10)
            writer.write(after, b"a" * 10)
            writer.discard(large, 8 << 20)
            entries = [SegmentEntry(name, 0, at, 10, 10, 0, bytes(16)) for name, at in (("k", kept), ("a", after))]
            segment = Segment(writer.finish(entries))
        assert segment.resident <= 6 * mmap.PAGESIZE
        assert [bytes(segment.read(entry)) for entry in segment] == [b"a" * 10, b"k" * 10]
        segment.close()

    def test_reserved_capacity_uses_no_memory(self) -> None:
        with SegmentWriter(1 << 42, ANYWHERE) as writer:
            segment = Segment(writer.finish([]))
        assert segment.resident <= 2 * mmap.PAGESIZE
        segment.close()

    def test_running_out_of_capacity_explains_why(self) -> None:
        with SegmentWriter(1000, ANYWHERE) as writer, pytest.raises(StagingError, match=r"grew while.*\n  try"):
            writer.reserve(2000)


class TestRejections:
    @pytest.fixture
    def content(self) -> bytes:
        segment = made({"a": b"A" * 100, "b": b"B"})
        data = bytes(Path(f"/proc/self/fd/{segment.fileno()}").read_bytes())
        segment.close()
        return data

    def test_a_faithful_copy_is_accepted(self, content: bytes) -> None:
        segment = Segment(sealed_copy(content, ALL_SEALS))
        assert [entry.path for entry in segment] == ["a", "b"]
        segment.close()

    @pytest.mark.parametrize("seals", [0, ALL_SEALS & ~fcntl.F_SEAL_WRITE, ALL_SEALS & ~fcntl.F_SEAL_SHRINK])
    def test_memory_that_could_change(self, content: bytes, seals: int) -> None:
        with pytest.raises(StagingError, match="not sealed"):
            Segment(sealed_copy(content, seals))

    @pytest.mark.parametrize(
        ("at", "why"),
        [(0, "not staged by"), (8, "format"), (12, "damaged"), (40, "damaged"), (60, "damaged"), (-1, "damaged")],
    )
    def test_any_flipped_bit_of_header_or_index(self, content: bytes, at: int, why: str) -> None:
        changed = bytearray(content)
        changed[at] ^= 4
        before = held()
        with pytest.raises(StagingError, match=why):
            Segment(sealed_copy(bytes(changed), ALL_SEALS))
        assert held() == before

    @pytest.mark.parametrize("size", [0, 1, 71, 127, 128, 300])
    def test_something_shorter(self, content: bytes, size: int) -> None:
        with pytest.raises(StagingError):
            Segment(sealed_copy(content[:size], ALL_SEALS))

    def test_an_ordinary_file(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "copy").write_bytes(content)
        with pytest.raises(StagingError, match="not staged data"):
            Segment(io.FileIO(tmp_path / "copy"))

    def test_a_record_that_reaches_into_the_index(self) -> None:
        with SegmentWriter(1 << 20, ANYWHERE) as writer:
            lying = SegmentEntry("a", 0, DATA_AT, 1 << 30, 1 << 30, 0, bytes(16))
            segment = Segment(writer.finish([lying]))
        with pytest.raises(StagingError, match="outside"):
            segment.read(lying)
        segment.close()

    def test_a_compressed_file_that_is_damaged(self) -> None:
        with SegmentWriter(1 << 20, ANYWHERE) as writer:
            offset = writer.reserve(8)
            writer.write(offset, b"\x04\0\0\0\xff\xff\xff\xff")
            segment = Segment(writer.finish([SegmentEntry("a", 4, offset, 8, 100, 0, bytes(16))]))
        entry = segment.find("a")
        assert entry is not None
        with pytest.raises(StagingError, match="a is damaged in memory"):
            segment.read(entry)
        segment.close()


def test_record_size_matches_the_format() -> None:
    assert RECORD.size == 64
