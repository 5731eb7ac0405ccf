"""TensorBoard, wandb and webhooks."""

from __future__ import annotations

import json
import resource
import shutil
import signal
import socket
import sys
import threading
import types
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gracetune.telemetry.dispatcher import Telemetry
from gracetune.telemetry.errors import TelemetryError
from gracetune.telemetry.events import Event, Record, ValidationDone, Warned
from gracetune.telemetry.sinks.scalars import scalars
from gracetune.telemetry.sinks.tensorboard import TensorBoardSink
from gracetune.telemetry.sinks.wandb import WandbSink
from gracetune.telemetry.sinks.webhook import WebhookSink
from unit.cache.processes import Child
from unit.telemetry.sample_events import end, memory, start, step, whole_run


class TestScalars:
    def test_names_keep_their_dots_and_units(self) -> None:
        found = scalars(memory(4))
        assert found["uvm/uvm.stage"] == 1
        assert found["memory/device_bytes"] == 35 << 30
        assert found["memory/device/weights_bytes"] == 28 << 30
        assert found["cache/cache.latents.hit_rate"] == 0.97

    def test_a_step(self) -> None:
        found = scalars(step(3))
        assert found["train/loss"] == found["train/loss/high_noise"] == step(3).loss
        assert found["lr/low_noise"] == 2e-4
        assert found["time/data_wait_ms"] == 4.5
        assert "train/grad_norm" not in scalars(step(3, grad_norm=None))


class TestTensorBoard:
    def written(self, folder: Path, *events: Event) -> None:
        reports: list[str] = []
        with Telemetry([TensorBoardSink(folder / "logs", folder)], report=reports.append) as telemetry:
            for event in events:
                telemetry.emit(event)
        assert reports == []

    def read(self, folder: Path) -> EventAccumulator:
        found = EventAccumulator(str(folder / "logs"), size_guidance={"images": 0, "scalars": 0, "tensors": 0})
        found.Reload()
        return found

    def test_curves_and_images_arrive(self, tmp_path: Path) -> None:
        events = [event for event in whole_run(tmp_path) if not isinstance(event, ValidationDone)]
        images = [event for event in whole_run(tmp_path) if isinstance(event, ValidationDone)]
        kept = [
            ValidationDone(step=one.step, files=tuple(file for file in one.files if "outside" not in file.path))
            for one in images
        ]
        self.written(tmp_path, *events, *kept)
        found = self.read(tmp_path)
        losses = {one.step: one.value for one in found.Scalars("train/loss")}
        assert losses == pytest.approx({number: step(number).loss for number in range(1, 21)})
        memory_stages = {one.step: one.value for one in found.Scalars("uvm/uvm.stage")}
        assert (memory_stages[9], memory_stages[20]) == (2, 3)
        assert [one.value for one in found.Scalars("train/effective_batch")] == [4]
        assert [one.value for one in found.Scalars("memory/look_ahead_batches")] == [2]
        assert [one.value for one in found.Scalars("uvm/light_reclamation_ms")] == [7]
        (tag,) = found.Tags()["images"]
        assert [one.step for one in found.Images(tag)] == [0, 5, 10, 15, 20]
        assert (found.Images(tag)[0].width, found.Images(tag)[0].height) == (300, 200)

    def test_steps_repeated_by_a_resumed_run_replace_the_earlier_ones(self, tmp_path: Path) -> None:
        self.written(tmp_path, start(), *(step(number) for number in range(1, 9)))
        self.written(tmp_path, start(5), *(step(number, loss=7.0) for number in range(6, 8)))
        losses = [(one.step, one.value) for one in self.read(tmp_path).Scalars("train/loss")]
        assert [number for number, _ in losses] == [*range(1, 8)]
        assert [loss for _, loss in losses[5:]] == [7.0, 7.0]

    def test_a_missing_image_removes_the_sink_and_stops_nothing(self, tmp_path: Path) -> None:
        reports: list[str] = []
        with Telemetry([TensorBoardSink(tmp_path / "logs", tmp_path)], report=reports.append) as telemetry:
            for event in whole_run(tmp_path):
                telemetry.emit(event)
        assert len(reports) == 1
        assert "outside.png" in reports[0]

    @pytest.mark.parametrize("fault", ["full", "removed"])
    def test_a_file_that_cannot_be_written_is_one_warning_and_no_traceback(
        self, fault: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        """The disk fills up, or the folder is removed. What was written before stays readable."""

        def work(report: Callable[[str], None]) -> None:
            reports: list[str] = []
            with Telemetry([TensorBoardSink(tmp_path / "logs", tmp_path)], report=reports.append) as telemetry:
                telemetry.emit(start())
                telemetry.emit(step(1))
                if fault == "full":
                    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                    (file,) = (tmp_path / "logs").iterdir()
                    resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 10,) * 2)
                else:
                    shutil.rmtree(tmp_path / "logs")
                for number in range(2, 100):
                    telemetry.emit(step(number))
            assert len(reports) == 1
            assert ("File too large" if fault == "full" else "its folder was removed") in reports[0]

        Child(work).join()
        assert "Traceback" not in capfd.readouterr().err
        if fault == "full":
            assert [one.step for one in self.read(tmp_path).Scalars("train/loss")] == [1]

    def test_a_missing_package_is_an_error_at_the_start(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
        with pytest.raises(TelemetryError, match="pip install tensorboard"):
            TensorBoardSink(tmp_path, tmp_path)


class TestWandb:
    class Run:
        def __init__(self) -> None:
            self.logged: list[dict[str, Any]] = []
            self.metrics: list[tuple[str, Any]] = []
            self.alerts: list[str] = []
            self.codes: list[int] = []

        def log(self, values: dict[str, Any]) -> None:
            self.logged.append(values)

        def define_metric(self, name: str, step_metric: str | None = None) -> None:
            self.metrics.append((name, step_metric))

        def alert(self, title: str, text: str) -> None:
            self.alerts.append(text)

        def finish(self, exit_code: int) -> None:
            self.codes.append(exit_code)

    @pytest.fixture
    def run(self, monkeypatch: pytest.MonkeyPatch) -> TestWandb.Run:
        """A stand-in for wandb, which is not installed where tests run. It records the calls we make."""
        run = self.Run()
        module = types.ModuleType("wandb")
        given: dict[str, Any] = {}

        def init(**options: Any) -> TestWandb.Run:
            assert options.keys() <= {"project", "name", "config", "dir", "reinit"}
            given.update(options)
            run.logged.append({"config": given["config"]})
            return run

        module.__dict__.update(init=init, Image=lambda path, caption: (path, caption))
        monkeypatch.setitem(sys.modules, "wandb", module)
        return run

    def test_our_step_is_the_x_axis_of_every_metric(self, run: TestWandb.Run, tmp_path: Path) -> None:
        sink = WandbSink("cats", tmp_path)
        for event in [*whole_run(tmp_path), end(outcome="failed")]:
            sink.write(Record(0.0, event))
        sink.close()
        assert run.metrics == [("step", None), ("*", "step")]
        assert run.logged[0]["config"]["nested"] == {"lr": 1e-4, "url": "https://example.org/x"}
        losses = {one["step"]: one["train/loss"] for one in run.logged if "train/loss" in one}
        assert losses == {number: step(number).loss for number in range(1, 21)}
        assert sum("samples" in one for one in run.logged) == 5
        assert len(run.alerts) == 1
        assert run.codes == [1], "finished once"

    def test_events_before_the_start_are_ignored(self, run: TestWandb.Run, tmp_path: Path) -> None:
        sink = WandbSink("cats", tmp_path)
        sink.write(Record(0.0, Warned(message="early")))
        sink.close()
        assert (run.alerts, run.codes) == ([], [])

    def test_a_missing_package_is_an_error_at_the_start(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "wandb", None)
        with pytest.raises(TelemetryError, match="pip install wandb"):
            WandbSink("cats", tmp_path)


class TestWebhook:
    @pytest.fixture
    def server(self) -> Iterator[HTTPServer]:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                self.server.got.append((self.path, self.headers["Content-Type"], body))  # type: ignore[attr-defined]
                self.send_response(self.server.answer)  # type: ignore[attr-defined]
                self.end_headers()

            def log_message(self, *words: Any) -> None:
                pass

        server = HTTPServer(("127.0.0.1", 0), Handler)
        server.got, server.answer = [], 204  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()
        server.server_close()

    def sent(self, url: str, *events: Event, timeout_s: float = 5.0) -> list[str]:
        reports: list[str] = []
        with Telemetry([WebhookSink(url, timeout_s=timeout_s)], report=reports.append) as telemetry:
            for event in events:
                telemetry.emit(event)
        return reports

    @pytest.mark.parametrize(
        ("outcome", "reason"), [("finished", ""), ("failed", "NaN at step 7"), ("interrupted", "")]
    )
    def test_one_post_at_the_end(self, server: HTTPServer, outcome: str, reason: str) -> None:
        url = f"http://127.0.0.1:{server.server_port}/hook?secret=1"
        assert self.sent(url, start(), step(1), step(2), end(outcome=outcome, reason=reason)) == []
        ((path, kind, body),) = server.got  # type: ignore[attr-defined]
        value = json.loads(body)
        assert (path, kind) == ("/hook?secret=1", "application/json")
        assert (value["kind"], value["outcome"], value["reason"]) == ("RunEnded", outcome, reason)
        assert value["loss"] == step(2).loss
        assert value["text"] == value["content"]
        assert f"{outcome} at step 20" in value["text"]
        assert reason in value["text"]

    def test_a_non_finite_loss_is_sent_as_text(self, server: HTTPServer) -> None:
        assert self.sent(f"http://127.0.0.1:{server.server_port}/", step(1, loss=float("nan")), end()) == []
        assert json.loads(server.got[0][2])["loss"] == "nan"  # type: ignore[attr-defined]

    def test_a_rejection_is_a_warning_without_the_secret(self, server: HTTPServer) -> None:
        server.answer = 403  # type: ignore[attr-defined]
        (message,) = self.sent(f"http://127.0.0.1:{server.server_port}/hook?secret=1", end())
        assert "the answer 403" in message
        assert "secret" not in message

    def test_no_server_and_no_response_are_warnings(self) -> None:
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            port = silent.getsockname()[1]
            (message,) = self.sent(f"http://127.0.0.1:{port}/", end())
            assert "refused" in message
            silent.listen()
            (message,) = self.sent(f"http://127.0.0.1:{port}/", end(), timeout_s=0.2)
            assert "timed out" in message

    @pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://x/y", "example.org/hook", "", "http://", "data:,x"])
    def test_other_addresses_are_rejected_at_once(self, url: str) -> None:
        with pytest.raises(TelemetryError, match="https://HOST"):
            WebhookSink(url)
