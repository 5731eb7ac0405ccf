from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gracetune.data.backends.stream import stream_over, whole_bytes

DATA = bytes(range(100))
moves = st.one_of(
    st.tuples(st.just("read"), st.integers(-1, 130)),
    st.tuples(st.just("set"), st.integers(0, 130)),
    st.tuples(st.just("end"), st.integers(-100, 30)),
    st.tuples(st.just("tell"), st.just(0)),
)


@given(st.lists(moves, max_size=12))
def test_moves_and_reads_as_a_file_does(steps: list[tuple[str, int]]) -> None:
    streams = [stream_over(memoryview(bytearray(DATA))), stream_over(memoryview(DATA)), io.BytesIO(DATA)]
    for what, number in steps:
        found = []
        for stream in streams:
            if what == "read":
                found.append(stream.read(number))
            elif what == "tell":
                found.append(stream.tell())
            else:
                found.append(stream.seek(number, io.SEEK_SET if what == "set" else io.SEEK_END))
        assert found[0] == found[1] == found[2]


def test_the_raw_stream_counts_what_it_gave() -> None:
    stream = stream_over(memoryview(bytearray(DATA)))
    raw = stream.raw  # type: ignore[attr-defined]
    assert (raw.read(90), raw.read(90), raw.tell()) == (DATA[:90], DATA[90:], 100)


@pytest.mark.parametrize("memory", [DATA, bytearray(DATA)])
def test_before_the_start_there_is_nothing(memory: bytes) -> None:
    with pytest.raises((ValueError, OSError)):
        stream_over(memoryview(memory)).seek(-1)


@pytest.mark.parametrize(
    "view", [memoryview(DATA)[3:], memoryview(DATA)[::-1], memoryview(bytearray(DATA))], ids=["part", "back", "other"]
)
def test_only_a_view_of_all_of_some_bytes_is_taken_for_them(view: memoryview) -> None:
    assert whole_bytes(view) is None
    assert stream_over(view).read() == bytes(view)
    assert whole_bytes(memoryview(DATA)) is DATA


def test_closing_lets_go_of_the_memory() -> None:
    memory = bytearray(DATA)
    with stream_over(memoryview(memory)) as stream:
        assert stream.read(3) == DATA[:3]
    memory.clear()  # would raise while a view of it exists
    assert stream.closed
