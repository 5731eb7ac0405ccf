"""Events, their schema, the event log and the distribution to sinks."""

from __future__ import annotations

import itertools
import json
import math
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gracetune.storage.atomic import LineFile
from gracetune.telemetry.dispatcher import Telemetry
from gracetune.telemetry.errors import TelemetryError
from gracetune.telemetry.events import EVENTS, Event, Record, RunEnded, RunStarted, StepDone, Warned, step_of
from gracetune.telemetry.schema import NotAnEventError, document, from_json, from_line, json_schema, to_json, to_line
from gracetune.telemetry.sinks import jsonl
from gracetune.telemetry.sinks.jsonl import JsonlSink, LogReader, merge, read_log
from unit.cache.processes import Child, mount_tmpfs, own_mounts
from unit.telemetry.sample_events import any_event, end, memory, start, step, whole_run, write_log

SINKS = ("jsonl", "scalars", "tensorboard", "wandb", "webhook")
ROOT = Path(__file__).resolve().parents[3]


def same(left: Any, right: Any) -> bool:
    """Equality in which NaN equals NaN."""
    return repr(left) == repr(right)


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """Validate the part of JSON Schema that our schema uses."""
    if "anyOf" in schema:
        return any(fits(value, one) for one in schema["anyOf"])
    if "const" in schema or "enum" in schema:
        return value in schema.get("enum", [schema.get("const")])
    kinds = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}
    kind = schema.get("type")
    if kind in ("number", "integer"):
        return isinstance(value, int if kind == "integer" else (int, float)) and not isinstance(value, bool)
    if kind is not None and not isinstance(value, kinds[kind]):
        return False
    if kind == "array":
        return all(fits(one, schema["items"]) for one in value)
    if "additionalProperties" in schema:
        return all(fits(one, schema["additionalProperties"]) for one in value.values())
    if "properties" in schema:
        named = all(fits(value[name], one) for name, one in schema["properties"].items() if name in value)
        return named and set(schema["required"]) <= set(value)
    return True


class TestSchema:
    @given(any_event, st.floats(0, 4e9))
    def test_every_event_round_trips_and_matches_the_schema(self, event: Event, time_s: float) -> None:
        line = to_line(Record(time_s, event))
        assert line.count(b"\n") == 1
        found = from_line(line)
        assert fits(json.loads(line), json_schema())
        assert same(found.event, event)
        assert found.time_s == time_s

    @pytest.mark.parametrize(
        ("change", "match"),
        [
            ({"kind": "Other"}, "unknown kind, Other"),
            ({"v": 4}, r"version 4 \(versions 1, 2, 3 are read\): update gracetune"),
            ({"step": "7"}, "step is '7'"),
            ({"step": 7.5}, "step is 7.5"),
            ({"step": True}, "step is True"),
            ({"step": 10**30}, "step is 1000"),
            ({"loss": None}, "loss is None"),
            ({"lr": [1]}, "lr is"),
            ({"lr": {"a": "b"}}, "lr is 'b'"),
            ({"time_s": "now"}, "time_s"),
        ],
    )
    def test_a_line_that_is_not_an_event_is_rejected_with_the_reason(self, change: dict[str, Any], match: str) -> None:
        good = to_json(Record(1.0, step(7)))
        with pytest.raises(NotAnEventError, match=match):
            from_json({**good, **change})
        assert not fits({**good, **change}, json_schema()) or change.get("step") == 10**30

    def test_a_missing_field_is_named_and_one_with_a_default_may_be_missing(self) -> None:
        good = to_json(Record(1.0, step(7)))
        with pytest.raises(NotAnEventError, match="StepDone without loss"):
            from_json({name: value for name, value in good.items() if name != "loss"})
        without = from_json({name: value for name, value in good.items() if name != "compile_ms"})
        assert without.event == step(7)

    @pytest.mark.parametrize("version", [1, 2])
    def test_a_log_of_an_earlier_version_is_read(self, version: int) -> None:
        assert from_json({**to_json(Record(1.0, step(7))), "v": version}).event == step(7)

    def test_fields_of_a_later_release_are_ignored(self) -> None:
        assert from_json({**to_json(Record(1.0, step(7))), "novelty": 3}).event == step(7)

    @pytest.mark.parametrize("line", [b"", b"[1]", b'{"v":1}', b"{", b"\xff\xfe", b"[" * 100_000, b'"x"', b"7"])
    def test_garbage_is_rejected(self, line: bytes) -> None:
        with pytest.raises(NotAnEventError):
            from_line(line)

    def test_the_docs_page_matches_the_code(self) -> None:
        hint = "PYTHONPATH=src python -m gracetune.telemetry.schema > docs/events.md"
        assert (ROOT / "docs" / "events.md").read_text() == document(), hint

    def test_every_field_has_a_note_and_durations_and_sizes_carry_their_unit(self) -> None:
        for kind in json_schema()["anyOf"]:
            for name, field in kind["properties"].items():
                if name in ("v", "kind", "time_s"):
                    continue
                assert field["description"], name
                assert not name.endswith(("time", "duration", "wait", "bytes_used", "memory")), name

    def test_every_event_but_the_start_and_its_plan_has_a_step(self) -> None:
        without = [kind.__name__ for kind in EVENTS if "step" not in kind.__dataclass_fields__]
        assert without == ["RunStarted", "Planned"]

    @given(any_event)
    def test_the_step_of_an_event_is_its_step(self, event: Event) -> None:
        assert step_of(event) == vars(event).get("step")


class TestLog:
    def test_appends_and_is_read_back(self, tmp_path: Path) -> None:
        path = write_log(tmp_path, [start(), step(1)])
        write_log(tmp_path, [start(1), step(2)])
        log = read_log(path)
        assert [record.event for record in log.records] == [start(), step(1), start(1), step(2)]
        assert log.unreadable == ()

    @given(st.integers(1, 2000))
    def test_a_log_truncated_anywhere_loses_at_most_one_line(self, cut: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            events = [start(), *(step(number) for number in range(1, 6))]
            path = write_log(Path(folder), events)
            whole = path.read_bytes()
            cut = min(cut, len(whole))
            path.write_bytes(whole[:-cut])
            lines_left = whole[:-cut].count(b"\n")
            # The next process goes on with a line of its own.
            write_log(Path(folder), [start(2), step(3)])
            log = read_log(path)
            found = [record.event for record in log.records]
            kept = len(found) - 2
            assert lines_left <= kept <= lines_left + 1  # a line that lacks nothing but its end is whole
            assert found == [*events[:kept], start(2), step(3)]
            assert len(log.unreadable) <= 1

    def test_survives_kill_9(self, tmp_path: Path) -> None:
        path = tmp_path / "logs" / "events.jsonl"

        def work(report: Callable[[str], None]) -> None:
            sink = JsonlSink(path)
            for number in range(1, 10_000):
                sink.write(Record(0.0, step(number)))
                report(str(number))
                if number == 50:
                    os.kill(os.getpid(), signal.SIGKILL)

        child = Child(work)
        while child.wait_for_word():
            pass
        os.waitpid(child.pid, 0)
        assert [record.event for record in read_log(path).records] == [step(number) for number in range(1, 51)]

    def test_a_folder_that_cannot_be_created_is_an_error_at_the_start(self, tmp_path: Path) -> None:
        (tmp_path / "logs").write_text("a file")
        with pytest.raises(TelemetryError, match="output_dir"):
            JsonlSink(tmp_path / "logs" / "events.jsonl")

    def test_no_log_says_what_to_type(self, tmp_path: Path) -> None:
        with pytest.raises(TelemetryError, match="name the run's folder"):
            read_log(tmp_path / "logs" / "events.jsonl")


class TestMerging:
    def merged(self, *events: Event) -> list[Event]:
        return [record.event for record in merge([Record(0.0, event) for event in events])]

    def test_events_of_steps_repeated_after_a_resume_are_dropped(self) -> None:
        first = [start(), *(step(number) for number in range(1, 9)), end(step=8, outcome="failed")]
        second = [start(5), *(step(number, loss=9.0) for number in range(6, 10))]
        assert self.merged(*first, *second) == [*first[:6], *second]

    def test_a_start_from_the_beginning_voids_all_earlier_events(self) -> None:
        again = [start(), step(1)]
        assert self.merged(start(), step(1, loss=3.0), Warned(message="x"), *again) == again

    def test_warnings_from_outside_training_stay(self) -> None:
        warning = Warned(message="x")
        assert self.merged(start(), warning, step(3), start(1)) == [start(), warning, start(1)]

    @given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 20)), min_size=1, max_size=6))
    def test_steps_always_rise_and_come_from_the_last_process_that_did_them(
        self, segments: list[tuple[int, int]]
    ) -> None:
        events: list[Event] = []
        expected: dict[int, float] = {}
        done = 0
        for process, (back, count) in enumerate(segments):
            begin = max(0, done - back)
            events.append(start(begin if process else None))
            expected = {number: loss for number, loss in expected.items() if number <= begin and process}
            begin = begin if process else 0
            for number in range(begin + 1, begin + count + 1):
                events.append(step(number, loss=float(process)))
                expected[number] = float(process)
            done = begin + count
        found = {event.step: event.loss for event in self.merged(*events) if isinstance(event, StepDone)}
        assert found == expected
        assert [*found] == sorted(found)

    @settings(max_examples=60)
    @given(st.lists(any_event, max_size=12))
    def test_reading_line_by_line_gives_the_same_events(self, events: list[Event]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            reader = LogReader(write_log(Path(folder), events))
            lines = [*reader.lines()]
            merged = merge([line.record for line in lines if line.record is not None])
            assert tuple(line.record for line in lines if line.is_valid) == merged
            status = [line for line in lines if line.is_valid]
            again = reader.at(line.begin for line in status)
            assert [to_line(record) for record in again] == [to_line(record) for record in merged]  # nan is not nan


class Failing:
    """A sink that raises `error` after `after` events; a negative `after` means never."""

    def __init__(self, name: str, after: int, error: Exception) -> None:
        self.name, self._left, self._error = name, after, error
        self.got: list[Event] = []
        self.closed = False

    def write(self, record: Record) -> None:
        if self._left == 0:
            raise self._error
        self._left -= 1
        self.got.append(record.event)

    def close(self) -> None:
        self.closed = True
        if self._left == 0:
            raise self._error


class TestTelemetry:
    def test_a_failing_sink_is_reported_once_and_removed_and_the_others_continue(self) -> None:
        good, bad = Failing("good", -1, OSError()), Failing("bad", 2, RuntimeError("the tracker is down"))
        reports: list[str] = []
        with Telemetry([bad, good], report=reports.append) as telemetry:
            for number in range(1, 6):
                telemetry.emit(step(number))
        text = "bad failed and is left out from here on: RuntimeError: the tracker is down"
        assert reports == [text]
        assert bad.got == [step(1), step(2)]
        assert good.got == [step(1), step(2), Warned(message=text, step=3), step(3), step(4), step(5)]
        assert (good.closed, bad.closed) == (True, False)

    def test_a_warning_from_anywhere_is_logged_before_the_next_event(self) -> None:
        sink = Failing("good", -1, OSError())
        with Telemetry([sink]) as telemetry:
            telemetry.emit(start())
            telemetry.warn("early")
            telemetry.emit(step(1))
            telemetry.warn("odd")
            telemetry.warn("emitted with its step")
            telemetry.emit(Warned(message="emitted with its step", step=1))
            telemetry.emit(step(2))
            telemetry.warn("late")
        stated = [event.message if isinstance(event, Warned) else type(event).__name__ for event in sink.got]
        assert stated == ["RunStarted", "early", "StepDone", "odd", "emitted with its step", "StepDone", "late"]
        assert [event.step for event in sink.got if isinstance(event, Warned)] == [None, 1, 1, 2]

    def test_the_report_of_a_failed_sink_is_logged_once(self) -> None:
        """In a run, `report` is the view's `warn`, which passes every warning back to `Telemetry.warn`."""
        good, bad = Failing("good", -1, OSError()), Failing("bad", 0, RuntimeError("down"))
        telemetry = Telemetry([bad, good], report=lambda text: telemetry.warn(text))
        telemetry.emit(step(1))
        telemetry.emit(step(2))
        assert [type(event).__name__ for event in good.got] == ["Warned", "StepDone", "StepDone"]

    def test_warning_inside_the_write_of_a_sink_takes_no_lock(self) -> None:
        """A console that cannot be written to calls `warn` while another thread holds the lock of `Telemetry`."""

        class Warner(Failing):
            def write(self, record: Record) -> None:
                super().write(record)
                other = threading.Thread(target=telemetry.warn, args=("from another thread",))
                other.start()
                other.join(10)
                assert not other.is_alive()

        sink = Warner("warning", -1, OSError())
        telemetry = Telemetry([sink])
        telemetry.emit(step(1))
        warned = Warned(message="from another thread", step=1)
        assert sink.got == [step(1), warned]
        telemetry.close()
        assert sink.got == [step(1), warned, warned]

    def test_all_sinks_failing_at_once_stops_nothing(self) -> None:
        reports: list[str] = []
        sinks = [Failing(f"sink {number}", 0, ValueError("x")) for number in range(3)]
        telemetry = Telemetry(sinks, report=reports.append)
        telemetry.emit(step(1))
        telemetry.emit(step(2))
        assert len(reports) == 3

    def test_a_sink_that_fails_to_close_is_reported(self) -> None:
        reports: list[str] = []
        sink = Failing("late", 1, OSError("gone"))
        with Telemetry([sink], report=reports.append) as telemetry:
            telemetry.emit(step(1))
        assert reports == ["late failed and is left out from here on: OSError: gone"]

    def test_a_telemetry_error_is_reported_with_its_own_text(self) -> None:
        reports: list[str] = []
        error = TelemetryError("the webhook", found="no answer", expected="an answer", hint="check the network")
        Telemetry([Failing("it", 0, error)], report=reports.append).emit(step(1))
        assert reports == ["it failed and is left out from here on: no answer; check the network"]

    def test_threads_may_emit(self, tmp_path: Path) -> None:
        with Telemetry([JsonlSink(tmp_path / "events.jsonl")]) as telemetry:
            work = [
                threading.Thread(target=lambda base=base: [telemetry.emit(step(base + n)) for n in range(200)])
                for base in (0, 1000, 2000)
            ]
            for one in work:
                one.start()
            for one in work:
                one.join()
        log = read_log(tmp_path / "events.jsonl")
        assert len(log.records) == 600
        assert log.unreadable == ()
        assert [one.time_s for one in log.records] == sorted(one.time_s for one in log.records)

    @pytest.mark.parametrize("recovers", [True, False])
    def test_events_of_a_full_disk_are_written_when_there_is_room(self, recovers: bool, tmp_path: Path) -> None:
        def work(report: Callable[[str], None]) -> None:
            own_mounts()
            mount_tmpfs(tmp_path / "small", 64 << 10)
            ballast, path = tmp_path / "small" / "ballast", tmp_path / "small" / "events.jsonl"
            ballast.write_bytes(bytes(40 << 10))
            reports, warnings = list[str](), list[str]()
            other = Failing("other", -1, OSError())
            with Telemetry([JsonlSink(path, warnings.append), other], report=reports.append) as telemetry:
                for number in range(1, 121):
                    telemetry.emit(step(number))
                written = len(read_log(path).records)
                assert 20 < written < 100
                assert "kept in memory" in warnings[0]
                assert "No space left on device" in warnings[0]
                if recovers:
                    ballast.unlink()
                telemetry.emit(end(step=120))
                expected = [*(step(number) for number in range(1, 121)), end(step=120)][: None if recovers else written]
                log = read_log(path)  # before it is closed: the report is made from it
                assert [one.event for one in log.records] == expected
                assert log.unreadable == ()
            assert reports == []
            assert len(other.got) == 121
            lost = [f"{121 - written} events are not in {path}: it could not be written "
                    "(No space left on device)"]  # fmt: skip
            assert warnings[1:] == ([] if recovers else lost)

        Child(work).join()

    def test_attempts_to_write_take_at_most_a_tenth_of_the_time(self, tmp_path: Path) -> None:
        """An unreachable server may block each call for a minute. This clock advances by a second per reading."""

        def work(report: Callable[[str], None]) -> None:
            sink = JsonlSink(tmp_path / "events.jsonl", clock=itertools.count(1.0).__next__)
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            limit = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, limit[1]))
            sink.write(Record(0.0, step(1)))  # takes a second, so the next attempt is nine seconds later
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
            written = []
            for number in range(2, 12):
                sink.write(Record(0.0, step(number)))
                written.append(len(read_log(tmp_path / "events.jsonl").records))
            assert written == [0] * 8 + [10, 11]

        Child(work).join()

    def test_a_line_that_cannot_be_written_whole_is_removed(self, tmp_path: Path) -> None:
        def work(report: Callable[[str], None]) -> None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            file = LineFile(path := tmp_path / "lines")
            file.write(b"first\n")
            limit = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (10, limit[1]))
            with pytest.raises(OSError, match="File too large"):
                file.write(b"second\n")
            assert path.read_bytes() == b"first\n"

        Child(work).join()

    def test_memory_for_events_that_cannot_be_written_is_bounded(self, tmp_path: Path) -> None:
        path, rare = tmp_path / "events.jsonl", [start(), Warned(message="odd", step=500)]

        def work(report: Callable[[str], None]) -> None:
            jsonl._KEPT_BYTES = 50_000  # type: ignore[misc]
            warnings: list[str] = []
            sink = JsonlSink(path, warnings.append)
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            limit = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, limit[1]))
            for event in [rare[0], *(step(n) for n in range(500)), rare[1], *(memory(n) for n in range(1000))]:
                sink.write(Record(0.0, event))
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
            sink.close()
            written = [record.event for record in read_log(path).records]
            assert [event for event in written if isinstance(event, RunStarted | Warned)] == rare
            steps = [event.step for event in written if isinstance(event, StepDone)]
            assert steps == sorted(steps)
            assert 10 < len(steps) < 100
            assert path.stat().st_size <= 50_000
            assert f"{1502 - len(written):,} events are not in {path}" in warnings[-1]

        Child(work).join()


def test_importing_it_imports_neither_torch_nor_pillow() -> None:
    modules = ["dispatcher", "progress", "schema", "report", *(f"sinks.{name}" for name in SINKS)]
    code = "import sys; " + "; ".join(f"import gracetune.telemetry.{name}" for name in modules)
    code += "; print([name for name in ('torch', 'PIL', 'numpy', 'gracetune.errors') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"


def test_the_whole_run_of_the_other_tests_uses_every_event(tmp_path: Path) -> None:
    assert {type(event) for event in [*whole_run(tmp_path), end()]} == set(EVENTS)
    assert math.isclose(memory(4).counters["uvm.prefetch_wait_ms"], 1.0)
    assert isinstance(end(), RunEnded)
    assert isinstance(start(), RunStarted)
