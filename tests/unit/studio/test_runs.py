"""The list and the pages of runs: states, hostile and damaged logs, resumed runs, comparisons."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from gracetune.studio.run_locks import RunLocks
from gracetune.telemetry.events import (
    CheckpointWritten,
    HeldOutLoss,
    MemorySampled,
    Planned,
    PlannedMemory,
    PlannedTier,
    RunEnded,
    SampleFile,
    StageSwitched,
    ValidationDone,
    Warned,
)
from unit.studio.clients import StudioClient, client_of
from unit.studio.logs import BEGAN_S, ended, locked, small_run, started, step, write_run

HOSTILE = "<script>alert(1)</script>\"'&\ud800\u202e" + "\0"


def rows(client: StudioClient) -> dict[str, dict[str, Any]]:
    return {row["path"]: row for row in client.get("runs")["runs"]}


def test_the_row_of_a_run(tmp_path: Path) -> None:
    events = [
        started(), step(1), HeldOutLoss(step=1, mean=0.5), Warned(message="a"),
        MemorySampled(step=1, used_bytes={"host": {"weights": 3, "other": 4}}, capacity_bytes={"host": 10}),
        ValidationDone(step=1, files=(SampleFile(path="samples/a b.png", kind="image", prompt="x"),)),
        step(2), step(3), ended(3),
    ]  # fmt: skip
    write_run(tmp_path / "a" / "cats", events)
    (row,) = client_of(tmp_path).get("runs")["runs"]
    assert row["path"] == "a/cats"
    assert row["name"] == "cats"
    assert (row["state"], row["step"], row["total_steps"], row["warnings"]) == ("finished", 3, 100, 1)
    assert row["memory"] == {"tier": "host", "used_bytes": 7, "capacity_bytes": 10}
    assert row["held_out"] == 0.5
    assert row["seconds_per_step"] == 0.25
    assert row["thumbnail"] == f"api/runs/{row['id']}/files/samples/a%20b.png"
    assert row["began_s"] == BEGAN_S
    assert row["updated_s"] == BEGAN_S + 8


def test_the_state_is_told_from_log_and_lock(tmp_path: Path) -> None:
    """Never from a stored flag: a killed run is stale the moment its process has ended."""
    for outcome in ("finished", "interrupted", "failed"):
        small_run(tmp_path / outcome, outcome=outcome)
    write_run(tmp_path / "killed", [started(), step(1)])
    live = write_run(tmp_path / "live", [started(), step(1)])
    (tmp_path / "new" / "checkpoints").mkdir(parents=True)
    again = small_run(tmp_path / "again", outcome="interrupted")
    (again / "config.yaml").write_text("name: again\n")
    client = client_of(tmp_path)
    with locked(live), locked(tmp_path / "new"), locked(again):
        time.sleep(0.3)  # the list of locks is read at most that often
        states = {path: row["state"] for path, row in rows(client).items()}
        assert states == {
            "finished": "finished", "interrupted": "stopped", "failed": "failed", "killed": "stale", "live": "running",
            "new": "preparing", "again": "preparing",
        }  # fmt: skip
        live_row = rows(client)["live"]
        assert live_row["eta_s"] == pytest.approx(99 * 0.25)
    time.sleep(0.3)
    after = rows(client)
    assert after["live"]["state"] == "stale"
    assert "killed" in after["live"]["reason"]
    assert after["new"]["state"] == "stale"
    assert after["again"]["state"] == "stopped"


def test_the_lock_is_never_taken(tmp_path: Path) -> None:
    """A run that starts while the studio looks must get its lock: the studio reads the kernel's list of locks."""
    run = write_run(tmp_path / "run", [started()])
    with locked(run):
        locks = RunLocks()
        assert locks.holder(run) == os.getpid()
    assert RunLocks().holder(run) is None
    assert RunLocks(tmp_path / "no such list").holder(run) is None


def test_new_events_and_new_runs_appear_and_removed_ones_disappear(tmp_path: Path) -> None:
    run = small_run(tmp_path / "one", 3)
    client = client_of(tmp_path)
    assert rows(client)["one"]["step"] == 3
    write_run(run, [started(resumed_step=3, total_steps=9), step(4), step(5)], begin=BEGAN_S + 100)
    small_run(tmp_path / "two")
    row = rows(client)["one"]
    assert (row["step"], row["total_steps"], row["began_s"]) == (5, 9, BEGAN_S)
    client.studio.runs._next_search = 0.0
    assert set(rows(client)) == {"one", "two"}
    for file in sorted((tmp_path / "one").rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    (tmp_path / "one").rmdir()
    client.studio.runs._next_search = 0.0
    assert set(rows(client)) == {"two"}


def test_steps_that_a_resumed_run_repeated_are_void(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [started(total_steps=6), *(step(one, loss=9.0) for one in range(1, 6))])
    write_run(run, [Warned(message="lost", step=5), Warned(message="kept", step=2), Warned(message="also")])
    again = [started(resumed_step=3, total_steps=6), *(step(one, loss=1.0) for one in range(4, 7)), ended(6)]
    write_run(run, again, begin=BEGAN_S + 50)
    client = client_of(tmp_path)
    (row,) = client.get("runs")["runs"]
    curve = client.get(f"runs/{row['id']}/series")["loss"][""]
    assert curve["step"] == [1, 2, 3, 4, 5, 6]
    assert curve["value"] == [9.0, 9.0, 9.0, 1.0, 1.0, 1.0]
    assert [one["message"] for one in client.get(f"runs/{row['id']}")["warnings"]] == ["kept", "also"]


def test_curves_of_two_experts_with_gaps(tmp_path: Path) -> None:
    steps = [step(one, stage=("high", "low")[one % 2], loss=float("nan") if one == 3 else 0.5) for one in range(1, 7)]
    switch = StageSwitched(step=2, before="low", after="high", reason="turns")
    write_run(tmp_path / "run", [started(), *steps, switch, HeldOutLoss(step=2, stage="low", mean=0.25)])
    client = client_of(tmp_path)
    found = client.get(f"runs/{client.get('runs')['runs'][0]['id']}/series?points=100")
    assert found["loss"]["low"]["step"] == [1, 3, 5]
    assert found["loss"]["low"]["value"] == [0.5, None, 0.5]
    assert found["loss"]["low"]["smoothed"][1] is None
    assert found["held_out"] == {"low": {"step": [2], "value": [0.25]}}
    assert found["lr"]["all"]["value"] == [1e-4] * 6
    assert found["batch"]["value"] == [4.0] * 6
    assert found["switches"] == [{"step": 2, "before": "low", "after": "high", "reason": "turns"}]


def test_the_page_of_a_run(tmp_path: Path) -> None:
    checkpoints = [
        CheckpointWritten(step=2, path="checkpoints/checkpoint-2", size_bytes=7, snapshot_ms=1, write_ms=1),
        CheckpointWritten(step=4, path="checkpoints/checkpoint-4", size_bytes=8, snapshot_ms=1, write_ms=1,
                          removed=("checkpoint-2",)),
    ]  # fmt: skip
    tier = PlannedTier(name="host", label="main memory", budget_bytes=9)
    lines = (
        PlannedMemory(owner="U-Net", tier="host", bytes=5, phases=("train",), why="frozen", role="weights"),
        PlannedMemory(owner="VAE", tier="host", bytes=9, phases=("sample",), role="weights"),
        PlannedMemory(owner="assistant", tier="host", bytes=2, phases=("train",), role="weights"),
        PlannedMemory(owner="of an old log", tier="host", bytes=1, phases=("train",)),
    )
    plan = Planned(verdict="fits", tiers=(tier,), lines=lines)
    files = (
        SampleFile(path="samples/a.png", kind="image", prompt=HOSTILE, seed=3),
        SampleFile(path="samples/a.mp4", kind="video"), SampleFile(path="samples/a.js", kind="script"),
    )  # fmt: skip
    run = write_run(
        tmp_path / "run",
        [
            started(),
            plan,
            step(1),
            *checkpoints,
            ValidationDone(step=4, files=files),
            ended(4, outputs=("cats.safetensors", "../outside.safetensors", "/etc/passwd")),
        ],
    )
    (run / "checkpoints" / "checkpoint-4").mkdir()
    (tmp_path / "outside.safetensors").write_bytes(b"1")
    (run / "cats.safetensors").write_bytes(b"12345")
    (run / "report.json").write_text(json.dumps({"how_to_load": {"ComfyUI": "copy it"}}))
    client = client_of(tmp_path)
    identifier = client.get("runs")["runs"][0]["id"]
    page = client.get(f"runs/{identifier}")
    assert page["plan"]["verdict"] == "fits"
    assert [one["step"] for one in page["checkpoints"]] == [4]
    assert page["outputs"] == [
        {"name": "cats.safetensors", "url": f"api/runs/{identifier}/files/cats.safetensors", "bytes": 5}
    ]
    assert page["how_to_load"] == {"ComfyUI": "copy it"}
    assert page["validations"][0]["files"][0]["seed"] == 3
    assert page["validations"][0]["files"][0]["prompt"].startswith("<script>")
    # The page makes an element of this name.
    assert [one["kind"] for one in page["validations"][0]["files"]] == ["image", "video", "image"]
    assert page["actions"]["resume"]["why"] == "the run is finished"
    assert page["config"]["optimizer"] == {"lr": 1e-4}
    memory = client.get(f"runs/{identifier}/memory")
    assert memory["tiers"][0]["planned"] == [
        {"owner": "weights", "bytes": 7, "why": "U-Net: frozen; assistant"},
        {"owner": "of an old log", "bytes": 1, "why": ""},
    ]
    assert memory["unavailable"]["GPU memory"] == "this run has no GPU"
    log = client.get(f"runs/{identifier}/log?lines=2")["lines"]
    assert len(log) == 2
    assert "RunEnded" in log[1]


def test_a_comparison_lists_only_what_differs(tmp_path: Path) -> None:
    small_run(tmp_path / "a", config={"optimizer": {"lr": 1}, "same": [1, {"x": 2}], "only": None})
    small_run(tmp_path / "b", config={"optimizer": {"lr": 2}, "same": [1, {"x": 2}]})
    client = client_of(tmp_path)
    ids = {path: row["id"] for path, row in rows(client).items()}
    found = client.get(f"compare?run={ids['a']}&run={ids['b']}")
    assert [one["key"] for one in found["differences"]] == ["optimizer.lr"]
    assert found["differences"][0]["values"] == {ids["a"]: 1, ids["b"]: 2}
    assert set(found["series"]) == set(ids.values())
    assert client.rejected("GET", "compare")[0] == 400
    assert client.rejected("GET", "compare?run=nothing")[0] == 404


def test_many_runs_are_compared_with_fewer_points_each(tmp_path: Path) -> None:
    for number in range(60):
        small_run(tmp_path / f"run{number}", 500 if number == 0 else 2)
    client = client_of(tmp_path)
    ids = {path: row["id"] for path, row in rows(client).items()}
    found = client.get("compare?" + "&".join(f"run={one}" for one in ids.values()))
    assert len(found["series"]) == 60
    assert 100 < len(found["series"][ids["run0"]]["loss"][""]["step"]) <= 400
    assert client.rejected("GET", "compare?" + "&".join(f"run={one:012x}" for one in range(101)))[0] == 400


DEEP = b'{"a":' * 600 + b"1" + b"}" * 600
"""Nested deeper than a reply can be."""
MALFORMED = [
    b'{"v":3,"kind":"RunStarted","config":%s}\n{"v":3,"kind":"StageSwitched","step":1,"before":%s}\n' % (DEEP, DEEP),
    b"", b"\n\n", b"{", b"null\n[]\n7\n", b"\xff\xfe\x00" * 100, b"[" * 50_000 + b"\n", b'{"v":3,"kind":"StepDone"}\n',
    b'{"v":3,"kind":"StepDone","time_s":1e400,"step":"x","loss":[],"lr":7,"step_ms":{}}\n',
    b'{"v":3,"kind":"RunStarted","time_s":[],"run":{},"config":"x","total_steps":1e308,"resumed_step":-1}\n',
    b'{"v":3,"kind":"MemorySampled","used_bytes":[1],"capacity_bytes":3,"counters":{"a":"b"}}\n',
    b'{"v":3,"kind":"ValidationDone","files":[1,{"path":7},{"path":"\\u0000","kind":"image"}],"step":null}\n',
    b'{"v":3,"kind":"CheckpointWritten","path":"\\u0000","removed":[[],{}],"step":1e999}\n',
    b'{"v":3,"kind":"RunEnded","outputs":["\\u0000","../../etc/passwd",{}],"how_to_load":[],"outcome":5}\n',
    b'{"v":3,"kind":"Planned","tiers":[1,{"name":[]}],"lines":{},"verdict":[]}\n',
    b'{"v":3,"kind":"StageSwitched","step":[],"before":7}\n{"v":3,"kind":"HeldOutLoss","stage":[],"mean":"NaN"}\n',
    b'{"v":99,"kind":"Novelty"}\n' * 50, b'{"kind":"StepDone","v":3,"step":5,"loss":1}\n', b"x" * 200_000,
    b'{"v":3,"kind":"StepDone","step":' + b"9" * 5000 + b"}\n",
    b'{"v":3,"kind":"RequestServed","source":{},"step":{}}\n{"v":3,"kind":"Warned","message":[],"step":"a"}\n',
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(MALFORMED)))
def test_a_malformed_log_breaks_no_page(number: int, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [started(), step(1)] if number % 2 else [])
    with (run / "logs" / "events.jsonl").open("ab") as file:
        file.write(MALFORMED[number])
    client = client_of(tmp_path)
    identifier = client.get("runs")["runs"][0]["id"]
    for path in ("", "/series", "/memory", "/log"):
        client.get(f"runs/{identifier}{path}")
    client.get(f"compare?run={identifier}")
    write_run(run, [step(2), step(3)])
    client.get("runs")
    client.get(f"runs/{identifier}/series")


def test_a_log_that_is_replaced_truncated_or_no_file(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run", 50)
    client = client_of(tmp_path)
    identifier = client.get("runs")["runs"][0]["id"]
    series = f"runs/{identifier}/series"
    assert len(client.get(series)["grad_norm"]["step"]) == 50
    log = run / "logs" / "events.jsonl"
    os.truncate(log, log.stat().st_size // 2)
    assert len(client.get(series)["grad_norm"]["step"]) < 50
    log.unlink()
    assert client.get(series)["loss"] == {}
    small_run(run, 3)
    assert len(client.get(series)["grad_norm"]["step"]) == 3
    log.unlink()
    os.mkfifo(log)  # opening it would wait for a writer
    assert client.rejected("GET", series)[0] == 409
    client.get("runs")


def test_hostile_names_and_prompts_reach_the_browser_as_data(tmp_path: Path) -> None:
    name = "a<img src=x onerror=1>\n\udcff"
    run = tmp_path / os.fsencode(name).decode("utf-8", "surrogateescape")
    write_run(
        run, [started(run=HOSTILE, model=HOSTILE, machine=HOSTILE), step(1, stage=HOSTILE), Warned(message=HOSTILE)]
    )
    client = client_of(tmp_path)
    reply = client.http.get("/api/runs")
    assert reply.headers["content-type"] == "application/json"
    (row,) = reply.json()["runs"]
    assert row["name"] == HOSTILE
    page = client.get(f"runs/{row['id']}")
    assert page["warnings"][0]["message"] == HOSTILE
    assert client.get(f"runs/{row['id']}/series")["loss"]


def test_names_that_no_file_can_have_break_no_page(tmp_path: Path) -> None:
    bad = SampleFile(path="\ud800.png", kind="image")
    write_run(
        tmp_path / "run",
        [
            started(), step(1), ValidationDone(step=1, files=(bad,)),
            CheckpointWritten(step=1, path="c" * 300, size_bytes=1, snapshot_ms=1, write_ms=1),
            RunEnded(step=1, outcome="finished", outputs=("a" * 300, "b\ud800")),
        ],
    )  # fmt: skip
    client = client_of(tmp_path)
    (row,) = client.get("runs")["runs"]
    page = client.get(f"runs/{row['id']}")
    assert page["outputs"] == []
    assert page["checkpoints"] == []


def test_links_hidden_folders_and_depth_are_not_followed(tmp_path: Path) -> None:
    outside = small_run(tmp_path / "outside" / "secret")
    root = tmp_path / "root"
    small_run(root / "run")
    small_run(root / ".hidden" / "run")
    small_run(root / "a" / "b" / "c" / "d" / "e" / "f" / "g" / "deep")
    small_run(root / "run" / "checkpoints" / "inner")
    (root / "link").symlink_to(outside)
    (root / "loop").symlink_to(root)
    assert set(rows(client_of(root))) == {"run"}
