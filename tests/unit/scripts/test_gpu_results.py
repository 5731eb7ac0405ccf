"""The results file of `make test-gpu`: merged over runs, written while a run goes on; and the order of its tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gpu.results import Circumstances, GpuTestResults, file_for, in_random_order, without_paths

H200 = Circumstances("abc", "2.11.0", "580.1", "NVIDIA H200")


def begun(file: Path, seed: int, existing: tuple[str, ...]) -> GpuTestResults:
    return GpuTestResults.begin(file, H200, seed, selected=len(existing), existing=existing)


def read(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def test_the_newest_outcome_of_each_test_counts_and_every_run_is_listed(tmp_path: Path) -> None:
    file = file_for(tmp_path, H200.gpu)
    assert file.name == "gpu-tests-h200.json"
    first = begun(file, 1, ("a.py::one", "a.py::two", "b.py::three"))
    first.started("a.py::one")
    for phase in ("setup", "call", "teardown"):
        first.done(
            "a.py::one", "failed" if phase == "call" else "passed", 0.5, "boom in /home/me/x.py" * (phase == "call")
        )
    first.finished("a.py::one")
    first.done("a.py::two", "passed", 1.0)
    first.done("b.py::three", "skipped", 0.0, "needs two GPUs")
    first.end()
    found = read(file)
    assert (found["passed"], found["failed"], found["skipped"], found["seeds"]) == (1, 1, 1, [1])
    assert found["tests"]["a.py::one"]["seconds"] == 1.5
    assert found["tests"]["a.py::one"]["reason"] == "boom in PATH"

    second = begun(file, 2, ("a.py::one",))  # a.py::two was removed, b.py was not collected
    second.done("a.py::one", "passed", 0.25)
    second.end()
    found = read(file)
    assert (found["passed"], found["failed"], found["skipped"], found["seeds"]) == (1, 0, 1, [1, 2])
    assert found["tests"].keys() == {"a.py::one", "b.py::three"}
    assert [(run["seed"], run["passed"], run["failed"], run["ended"]) for run in found["runs"]] == [
        (1, 1, 1, True), (2, 1, 0, True)
    ]  # fmt: skip


def test_a_run_that_is_killed_leaves_what_it_had_and_names_the_test_it_was_in(tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    results = begun(file, 7, ("a.py::one", "a.py::two"))
    results.done("a.py::one", "passed", 1.0)
    results.started("a.py::two")
    found = read(file)
    assert found["passed"] == 1
    assert (found["runs"][0]["ended"], found["runs"][0]["running"]) == (False, "a.py::two")


def test_no_path_of_a_machine_gets_in() -> None:
    assert without_paths("OSError: /data/me/x/y.bin is a / b 1/2\nmore") == "OSError: PATH is a / b 1/2"


def test_a_seed_gives_the_order_again_and_other_tests_stay_where_they_are() -> None:
    tests = ["cpu", *(f"gpu {number}" for number in range(12)), "cpu too"]
    first, again, other = (in_random_order(tests, lambda test: test.startswith("gpu"), seed) for seed in (1, 1, 2))
    assert first == again != other
    assert sorted(other) == sorted(first) == sorted(tests)
    assert [first[0], first[-1]] == ["cpu", "cpu too"]
    assert first != tests
