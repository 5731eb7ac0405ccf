"""The storm lane: 60 kills, 12 signals, every file operation that fails in every dialect; and that a storm can fail.

One failing case names the command that repeats it. `make storm` runs more of them (`storm/__main__.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from storm.cases import Case, lane, storm
from storm.runner import Outcome, Storm

pytestmark = pytest.mark.full
LANE = lane()
FRESH = [
    Case("kill", "native-lora", 500),
    Case("signal", "simpletuner-lora", 501),
    Case("write", "aitoolkit-lokr", 502),
]
SABOTAGE = {
    "write_in_place": [Case("kill", "native-lora", seed) for seed in range(600, 606)],
    "keep_leftovers": [Case("kill", "native-full", seed) for seed in range(600, 606)],
    "forget_optimizer": [Case("kill", "simpletuner-lora", seed) for seed in range(600, 603)],
}
Judged = Callable[..., Outcome]


@pytest.fixture(scope="module")
def judged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Judged]:
    """All cases of the tests that were chosen run at once, two at a time; each test waits for its own."""
    with Storm(tmp_path_factory.mktemp("storm") / "runs") as own:
        asked: dict[tuple[Case, str, bool], Future[Outcome]] = {}
        for item in request.session.items:
            values: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
            if item.path == request.path and "case" in values:
                breaking, fresh = values.get("breaking", ""), item.name.startswith(_FRESH)
                prepare = breaking and f"storm.sabotage:{breaking}"
                asked[values["case"], breaking, fresh] = own.submit(values["case"], prepare=prepare, fresh=fresh)
        yield lambda case, breaking="", fresh=False: asked[case, breaking, fresh].result()


_FRESH = "test_in_processes_that_a_shell_starts"


@pytest.mark.parametrize("case", LANE, ids=str)
def test_a_disturbed_run_ends_as_an_undisturbed_one(case: Case, judged: Judged) -> None:
    outcome = judged(case)
    assert not outcome.wrong, outcome.describe()


@pytest.mark.parametrize("case", FRESH, ids=str)
def test_in_processes_that_a_shell_starts(case: Case, judged: Judged) -> None:
    outcome = judged(case, fresh=True)
    assert outcome.was_met
    assert not outcome.wrong, outcome.describe()


@pytest.mark.parametrize(
    ("breaking", "case"),
    [pytest.param(name, case, id=f"{name}-{case}") for name, cases in SABOTAGE.items() for case in cases],
)
def test_a_broken_gracetune_is_noticed(breaking: str, case: Case, judged: Judged) -> None:
    assert judged(case, breaking).wrong


def test_a_storm_has_kills_signals_and_errors_of_every_operation_in_every_dialect() -> None:
    kinds = [case.kind for case in LANE]
    assert kinds.count("kill") + kinds.count("clock") == 60
    cases = storm(500, seed=1)
    assert len(cases) == len({str(case) for case in cases}) == 500
    for each in (LANE, cases):
        assert len({(case.kind, case.scenario.partition("-")[0]) for case in each}) == 3 * 17
        assert [Case.parse(str(case)) for case in each] == each
