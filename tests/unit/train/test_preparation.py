from __future__ import annotations

import pytest

from gracetune.train.preparation import IMPORTS, OTHER, PreparationTimes


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_parts_add_up_to_the_time_since_the_process_started() -> None:
    clock = Clock()
    times = PreparationTimes(6.0, clock=clock)
    for name, seconds in (("model", 20.0), ("caches", 3.0), ("model", 2.0)):
        with times.part(name):
            clock.now += seconds
        clock.now += 0.5  # between the parts
    assert times.seconds() == {IMPORTS: 6.0, "model": 22.0, "caches": 3.0, OTHER: 1.5}


def test_a_caller_that_has_done_other_things_before_has_no_imports() -> None:
    assert list(PreparationTimes().seconds()) == [OTHER]


def test_this_process_has_run_for_a_while() -> None:
    seconds = PreparationTimes.of_this_process().seconds()
    assert 0 < seconds[IMPORTS] == pytest.approx(sum(seconds.values()), rel=0.1)
