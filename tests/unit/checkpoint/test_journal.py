from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gracetune.checkpoint.folder import Journal, Work, read_journal
from gracetune.checkpoint.store import CheckpointStore
from gracetune.storage.locks import open_lock_file
from unit.checkpoint.states import IDENTITY, METADATA, Weights, begin, names

WORKS = st.sampled_from(get_args(Work))


@contextmanager
def opened(path: Path, *, is_fresh: bool = False) -> Iterator[Journal]:
    descriptor = open_lock_file(path)
    try:
        yield Journal(descriptor, is_fresh=is_fresh)
    finally:
        os.close(descriptor)


@settings(max_examples=30)
@given(changes=st.lists(st.tuples(st.booleans(), WORKS, st.integers(0, 10**12))))
def test_the_next_process_finds_what_was_begun_and_not_ended(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[bool, Work, int]]
) -> None:
    path = tmp_path_factory.mktemp("journal") / "lock"
    expected: dict[Work, set[int]] = {work: set() for work in get_args(Work)}
    with opened(path) as journal:
        for begins, work, step in changes:
            (journal.begin if begins else journal.end)(work, step)
            expected[work] = expected[work] | {step} if begins else expected[work] - {step}
    assert read_journal(path) == expected
    with opened(path) as journal:
        assert {work: {*journal.steps(work)} for work in get_args(Work)} == expected


@pytest.mark.parametrize(
    "line", [b"", b"\n", b'{"saving": [1', b"\xff\n", b"[]\n", b'{"saving": "1", "x": [2]}\n', b"{}"]
)
def test_a_line_that_is_none_says_nothing(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "lock").write_bytes(line)
    with opened(tmp_path / "lock") as journal:
        assert not journal.steps("saving")
        journal.begin("saving", 7)
    assert read_journal(tmp_path / "lock")["saving"] == {7}


def test_what_is_left_of_a_longer_line_is_not_read(tmp_path: Path) -> None:
    """The process was killed between the two calls that write a shorter line."""
    (tmp_path / "lock").write_bytes(b'{"saving": [3]}\nng": [1, 2, 3]}\n')
    assert read_journal(tmp_path / "lock")["saving"] == {3}


def test_without_locks_the_line_may_be_of_a_process_at_work(tmp_path: Path) -> None:
    (tmp_path / "lock").write_bytes(b'{"saving": [3]}\n')
    with opened(tmp_path / "lock", is_fresh=True) as journal:
        assert not journal.steps("saving")


def test_a_retirement_that_was_interrupted_is_ended(tmp_path: Path) -> None:
    """Checkpoint 3 is complete, and the process was killed before it deleted checkpoint 1."""
    with CheckpointStore(tmp_path, keep_last=9) as store:
        for step in (1, 2, 3):
            store.write(step, [Weights(step)], metadata=METADATA)
    (tmp_path / ".gracetune.lock").write_text('{"saving": [3]}\n')
    with CheckpointStore(tmp_path, keep_last=2) as store:
        assert begin("latest", store, IDENTITY).step == 3
        assert names(tmp_path) == ["checkpoint-2", "checkpoint-3"]
        assert store.unfinished("saving") == ()
        assert store.unfinished("retiring") == (1,), "until the weights of that step are gone too"


def test_the_checkpoint_that_a_run_goes_on_from_is_never_retired(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path, keep_last=9) as store:
        for step in (1, 2, 3):
            store.write(step, [Weights(step)], metadata=METADATA)
    (tmp_path / ".gracetune.lock").write_text('{"retiring": [1]}\n')
    with CheckpointStore(tmp_path, keep_last=1) as store:
        start = begin(str(tmp_path / "checkpoint-1"), store, IDENTITY)
        assert start.checkpoint is not None
        assert start.checkpoint.saved("weights").json["step"] == 1
        assert store.unfinished("retiring") == (2,)
    assert names(tmp_path) == ["checkpoint-1", "set-aside-checkpoint-3"]


def test_a_checkpoint_that_fails_stays_in_the_journal(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path, keep_last=1) as store:
        store.claim(IDENTITY)
        store.begin_work("saving", 5)
        store.begin_work("saving", 6)
        store.write(6, [Weights(6)], metadata=METADATA)
        store.wait()
        assert store.unfinished("saving") == (5,)
    assert read_journal(tmp_path / ".gracetune.lock")["saving"] == {5}
