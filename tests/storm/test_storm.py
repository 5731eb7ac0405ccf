"""The storm lane: 60 kills, 12 signals, every file operation that fails in every dialect; and that a storm can fail.

One failing case names the command that repeats it. `make storm` runs more of them (`storm/__main__.py`).
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple

import pytest

from faults.injection import Fault
from storm.cases import Case, lane, storm
from storm.runner import Outcome, Storm

pytestmark = pytest.mark.full
LANE = lane()
FRESH = [
    Case("kill", "native-lora", 500),
    Case("signal", "simpletuner-lora", 501),
    Case("write", "aitoolkit-lokr", 502),
]
BROKEN = {
    "write_in_place": ("native-lora", Fault("out/run/tiny.safetensors", "write", "kill", after=2)),
    "keep_leftovers": ("native-lora", Fault("out/run/.gracetune-*.tmp", "sync", "kill", after=2)),
    "forget_optimizer": ("simpletuner-lora", Fault("out/run/checkpoints/checkpoint-2", "rename", "kill")),
}
"""What is broken (`storm.sabotage`), and the moment at which it shows."""

FOUND = {
    "a run folder that others can read": (
        Case("kill", "simpletuner-lora", 0), [Fault("out/run/cache/.gracetune-*.tmp", "unlink", "kill")]
    ),
    "checkpoints that are not retired": (
        Case("open", "native-lora", 0), [Fault("out/run/checkpoints/checkpoint-*/manifest.json", "open", errno.ESTALE)]
    ),
    "a traceback of an adapter that is not mapped": (
        Case("map", "aitoolkit-lokr", 0), [Fault("out/run/run*.safetensors", "map", errno.ENODEV)]
    ),
    "a temporary file that could not be locked": (
        Case("lock", "aitoolkit-lora", 0), [
            Fault("out/run/cache/text/.gracetune-*.tmp", "lock", errno.EIO, times=1),
            Fault("out/run/cache/text/.gracetune-*.tmp", "lock", errno.ESTALE, after=1, times=1),
        ],
    ),
    "a killed process's file in a cache that a finished run does not open": (
        Case("kill", "aitoolkit-lora", 0), [
            Fault("out/run/cache/text/shards/.gracetune-*.tmp", "sync", "kill"),
            Fault("out/run/cache/text/shards/.gracetune-*.tmp", "lock", errno.ESTALE, times=1),
        ],
    ),
    "an index of a cache that could not be read": (
        Case("read", "simpletuner-lokr", 0), [Fault("out/vae-cache/latents/shards/*", "read", errno.ESTALE)]
    ),
    "entries of a killed process that nobody wants to keep": (
        Case("kill", "native-lokr", 0), [Fault("out/run/checkpoints/checkpoint-2", "rename", "kill")]
    ),
    "a history that one failed write ended": (
        Case("write", "native-full", 0), [Fault("out/run/logs/events.jsonl", "write", errno.EDQUOT, after=4, times=1)]
    ),
    "entries that the finished run could not remove": (
        Case("open", "native-lokr", 0), [Fault("out/run/cache/latents/upkeep.lock", "open", errno.ESTALE)]
    ),
}  # fmt: skip
"""Defects that storms have found, and the moments at which they showed."""


class Judged(NamedTuple):
    storm: Storm
    requested: dict[tuple[Case, bool], Future[Outcome]]


@pytest.fixture(scope="module")
def judged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Judged]:
    """All cases of the tests that were chosen run at once, two at a time; each test waits for its own."""
    with Storm(tmp_path_factory.mktemp("storm") / "runs") as own:
        requested: dict[tuple[Case, bool], Future[Outcome]] = {}
        for item in request.session.items:
            values: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
            if item.path == request.path and "case" in values:
                fresh = item.name.startswith("test_in_processes_that_a_shell_starts")
                requested[values["case"], fresh] = own.submit(values["case"], fresh=fresh)
        yield Judged(own, requested)


@pytest.mark.parametrize("case", LANE, ids=str)
def test_a_disturbed_run_ends_as_an_undisturbed_one(case: Case, judged: Judged) -> None:
    outcome = judged.requested[case, False].result()
    assert not outcome.wrong, outcome.describe()


@pytest.mark.parametrize("case", FRESH, ids=str)
def test_in_processes_that_a_shell_starts(case: Case, judged: Judged) -> None:
    outcome = judged.requested[case, True].result()
    assert outcome.was_met
    assert not outcome.wrong, outcome.describe()


@pytest.mark.parametrize("defect", FOUND)
def test_a_defect_that_a_storm_found_is_gone(defect: str, judged: Judged) -> None:
    case, faults = FOUND[defect]
    outcome = judged.storm.submit(case, at=faults).result()
    assert outcome.was_met
    assert not outcome.wrong, outcome.describe()


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_gracetune_is_noticed(broken: str, judged: Judged) -> None:
    scenario, fault = BROKEN[broken]
    case = Case("kill", scenario, 0)
    outcome = judged.storm.submit(case, prepare=f"storm.sabotage:{broken}", at=[fault]).result()
    assert outcome.was_met
    assert outcome.wrong


def test_a_storm_has_kills_signals_and_errors_of_every_operation_in_every_dialect() -> None:
    kinds = [case.kind for case in LANE]
    assert kinds.count("kill") + kinds.count("clock") == 60
    cases = storm(500, seed=1)
    assert len(cases) == len({str(case) for case in cases}) == 500
    for each in (LANE, cases):
        assert len({(case.kind, case.scenario.partition("-")[0]) for case in each}) == 3 * 17
        assert [Case.parse(str(case)) for case in each] == each
