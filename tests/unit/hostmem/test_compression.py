from __future__ import annotations

import struct

import cramjam
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gracetune.config.dataset_config import InMemory
from gracetune.hostmem.compression import BY_NUMBER, CHUNK, CODECS, Compression, CompressionCodec, shrinks


def packed(codec: CompressionCodec, data: bytes) -> bytes:
    chunks = [memoryview(data)[at : at + CHUNK] for at in range(0, len(data), CHUNK)]
    return b"".join(codec.pack(chunk) for chunk in chunks)


@pytest.mark.parametrize("codec", CODECS.values(), ids=lambda codec: codec.name)
class TestEachCodec:
    @given(data=st.binary(max_size=2000))
    def test_round_trips(self, codec: CompressionCodec, data: bytes) -> None:
        assert codec.unpack(memoryview(packed(codec, data)), len(data)) == data

    @pytest.mark.parametrize("size", [CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 7])
    def test_files_of_several_chunks(self, codec: CompressionCodec, size: int) -> None:
        data = (b"a line that repeats, " * (size // 21 + 1))[:size]
        stored = packed(codec, data)
        assert len(stored) < size / 5
        view = codec.unpack(memoryview(stored), size)
        assert view == data
        assert view.readonly

    def test_a_chunk_that_does_not_shrink_costs_four_bytes(self, codec: CompressionCodec) -> None:
        stored = codec.pack(memoryview(b"\x93\x11\xf7"))
        assert stored == struct.pack("<I", 3 | 1 << 31) + b"\x93\x11\xf7"

    @given(damage=st.binary(max_size=60))
    def test_damage_is_an_error_or_other_bytes_of_the_same_length(self, codec: CompressionCodec, damage: bytes) -> None:
        try:
            found = codec.unpack(memoryview(damage), 100)
        except (ValueError, cramjam.DecompressionError):
            return
        assert len(found) == 100


def test_the_configuration_offers_exactly_these() -> None:
    offered = set(InMemory.model_json_schema()["properties"]["compression"]["enum"])
    assert offered == {"none", *CODECS}


def test_codec_numbers_never_change() -> None:
    numbers: dict[Compression, int] = {"lz4": 1, "zlib": 2, "snappy": 3, "zstd": 4}
    assert {name: codec.number for name, codec in CODECS.items()} == numbers
    assert {codec.number: codec for codec in CODECS.values()} == BY_NUMBER


def test_small_savings_are_not_worth_compressing() -> None:
    assert shrinks(96, 100)
    assert not shrinks(97, 100)
    assert not shrinks(120, 100)
