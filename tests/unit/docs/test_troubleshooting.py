"""docs/troubleshooting.md: every message quoted there is really said, and every remedy can be typed."""

from __future__ import annotations

import pytest

from unit.docs.targets import PROGRAMS, command, flag, key, message, problems, python, rows, spans, text_of

ROWS = [row for row in rows(text_of("troubleshooting.md")) if len(row) == 3]
OTHER_PROGRAMS = ("Unrecognized key 'use_uvm'", "Unrecognized CachingAllocator option")
"""Quoted from torch."""
NO_MESSAGES = ("uvm.stage", "dataset_type")
"""Names in descriptions of what can be seen without being said."""
ELSEWHERE = ("--gpus all", "spawn", "print(hint.reason)")
"""A container's flag, multiprocessing's word, a line of Python."""


def remedy(span: str) -> str | None:
    """What is wrong with something to type."""
    if span.startswith("--"):
        return flag(span)
    first = span.split()[0]
    if first in ("gracetune", "python", "source", "make", "accelerate", *PROGRAMS):
        return command(span)
    if span.startswith("gracetune."):
        return python(span)
    is_file = span.endswith(("/", ".safetensors", ".json"))
    return None if is_file else f"{span}: neither command nor flag"


def test_there_are_sections_for_everything_a_run_goes_through() -> None:
    assert len(ROWS) > 60


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:50])
def test_what_is_quoted_is_said_and_what_to_do_can_be_done(row: list[str]) -> None:
    seen, _, todo = row
    quoted = [span for span in spans(seen) if span not in (*OTHER_PROGRAMS, *NO_MESSAGES, *ELSEWHERE)]
    assert [problem for span in quoted if (problem := message(span))] == []
    names = [span for span in spans(todo) if span not in ELSEWHERE and f"result `{span}`" not in todo]
    typed = [span for span in names if key(span) is not None]
    assert problems(todo) + [problem for span in typed if (problem := remedy(span))] == []


def test_every_row_says_what_to_do_or_that_there_is_nothing() -> None:
    assert [row[0] for row in ROWS if not row[2]] == []


def test_a_message_nobody_says_is_noticed() -> None:
    assert message("the file ended … bytes early while it was read") is None
    assert message("the file ended … miles early while it was read") is not None
    assert message("bytes early … the file ended") is not None, "in this order"
    assert message("no … in …") is not None, "says too little"
    assert remedy("--set training.batchsize=1") is not None
    assert remedy("gracetune trian CONFIG") is not None
    assert remedy("frobnicate") is not None
