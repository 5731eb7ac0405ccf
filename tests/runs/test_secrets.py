"""A run uses the secrets of its config and shows none of them in files, events or lines."""

from __future__ import annotations

import base64
import json
import os
import stat
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
import pytest

from gracetune.config import load
from gracetune.config.environment import Environment
from gracetune.config.run_config import RunConfig
from gracetune.errors import ConfigError
from gracetune.telemetry.errors import TelemetryError
from gracetune.train.preflight import RunOptions
from gracetune.train.run import train
from gracetune.train.view import View
from runs.launched import command_line, start, write_config
from runs.made_runs import TinyModel, config_for, images, run

PASSWORD, PATH, TOKEN, KEY, LOGIN = (f"S{number}cret-{uuid.uuid4().hex}" for number in range(5))
HF = f"hf_{uuid.uuid4().hex}"
SECRETS = (PASSWORD, PATH, TOKEN, KEY, LOGIN, HF)


@pytest.fixture
def webhook() -> Iterator[HTTPServer]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.server.got.append((self.path, self.headers["Authorization"], body))  # type: ignore[attr-defined]
            self.send_response(500)
            self.end_headers()

        def log_message(self, *words: Any) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    server.got = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def secretive(tiny_model: TinyModel, root: Path, webhook: HTTPServer, dataset: dict[str, Any]) -> RunConfig:
    """A config with a secret in every place that can hold one, except file names."""
    url = f"https://me:{PASSWORD}@host.example/x.png?X-Amz-Signature={TOKEN}"
    return config_for(
        "flux", tiny_model, root,
        training={"max_steps": 2},
        datasets=[{"id": "pictures", "resolution": 64.0, "captions": {"default": f"like {url}"}, **dataset}],
        validation={"every_steps": 1, "width": 64, "height": 64, "steps": 1, "prompts": [{"prompt": f"{url} {HF}"}],
                    "negative_prompt": f"api_key={KEY}"},
        adapter={"by_module": {"FluxTransformerBlock": {"dim": 2}}},
        checkpoints={"every_steps": 1},
        logging={"webhook": f"http://me:{LOGIN}@127.0.0.1:{webhook.server_port}/services/{PATH}", "every_steps": 1},
    )  # fmt: skip


def found_in(folder: Path, *but: str) -> list[str]:
    """Files that contain a secret, or have one in their names."""
    found = []
    for path in folder.rglob("*"):
        content = path.read_bytes() if path.is_file() and path.name not in but else b""
        found += [f"{path.name}: {one}" for one in SECRETS if one.encode() in content or one in path.name]
    return found


class Listening(View):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def warn(self, text: str) -> None:
        super().warn(text)
        self.lines.append(text)


def test_a_whole_run(tiny_model: TinyModel, tmp_path: Path, webhook: HTTPServer) -> None:
    """Data is in memory:// storage whose URL holds a password, and the environment holds tokens."""
    bucket = f"memory://me:{PASSWORD}@{uuid.uuid4()}/pictures"
    storage = fsspec.filesystem("memory")
    for path in images(tmp_path / "pictures").iterdir():
        if path.name != "00.txt":  # one has the caption that the config gives
            storage.pipe(f"{bucket.removeprefix('memory:/')}/{path.name}", path.read_bytes())
    config = secretive(tiny_model, tmp_path, webhook, {"type": "url", "path": bucket})
    environment = Environment({"HF_TOKEN": HF, "WANDB_API_KEY": KEY, "PROXY": f"http://a:{TOKEN}@proxy"})
    view = Listening()
    result = train(config, environment=environment, options=RunOptions(), view=view)
    assert result.stop is not None
    assert result.stop.kind == "finished"
    folder = tmp_path / "out"
    assert found_in(folder, "config.yaml") == []
    # They were used: the data was read, the webhook was asked at its whole address. A run can be started again.
    ((path, login, body),) = webhook.got  # type: ignore[attr-defined]
    assert path == f"/services/{PATH}"
    assert login == f"Basic {base64.b64encode(f'me:{LOGIN}'.encode()).decode()}"
    assert not any(one.encode() in body for one in SECRETS)
    (message,) = [line for line in view.lines if "webhook" in line]
    assert "the webhook at 127.0.0.1 failed and is left out from here on: the answer 500" in message
    saved = folder / "config.yaml"
    assert stat.S_IMODE(saved.stat().st_mode) == 0o600
    assert load(saved, environment=environment).config == config
    assert {path.name for path in folder.rglob("*.json")} >= {"manifest.json", "config.json", "report.json"}
    events = (folder / "logs" / "events.jsonl").read_text()
    assert "https://(hidden)@host.example/x.png?(hidden)" in events
    assert "memory://(hidden)@" in events


@pytest.mark.full
def test_what_is_printed(tiny_model: TinyModel, tmp_path: Path, webhook: HTTPServer) -> None:
    """The run, the same run again, and every command that reads the config, also with `--json`."""
    config = secretive(tiny_model, tmp_path, webhook, {"path": str(images(tmp_path / "pictures"))})
    file = str(write_config(config, tmp_path / "config.yaml"))
    commands = [["train", file], ["train", file, "--json", "--log-level", "debug"], ["train", file, "--dry-run"],
                ["config", "show", file], ["config", "show", file, "--json"], ["config", "check", file],
                ["data", "show", file], ["data", "show", file, "--json"], ["estimate", file, "--json"],
                ["cache", "audit", file], ["cache", "audit", file, "--json"],
                ["baseline", "capture", file, "--output", str(tmp_path / "baseline"), "--steps", "8"]]  # fmt: skip
    printed = ""
    for words in commands:
        process = start(command_line(*words), HF_TOKEN=HF, WANDB_API_KEY=KEY)
        out, errors = process.communicate(timeout=240)
        assert process.returncode in (0, 1), errors
        assert "Traceback" not in errors
        assert [one for one in SECRETS if one in out + errors] == [], words
        printed += out + errors
        if "--json" in words:
            json.loads(out)
    assert "https://(hidden)@host.example/x.png?(hidden)" in printed
    assert found_in(tmp_path / "out", "config.yaml") == []
    assert found_in(tmp_path / "baseline", "config.yaml") == []


def test_a_traceback_is_redacted_too() -> None:
    """An unexpected error ends with a traceback, which may quote the config."""
    script = (
        "import sys; from gracetune.cli.console import start\n"
        "def run(session):\n    print('stdout', sys.argv[1]); raise RuntimeError(f'at {sys.argv[1]}')\n"
        "start(run)"
    )
    environment = {**os.environ, "SOME_TOKEN": KEY}
    done = subprocess.run(
        [sys.executable, "-c", script, f"https://a:{PASSWORD}@b/c {KEY}"],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "RuntimeError: at https://(hidden)@b/c (hidden)" in done.stderr
    assert done.stdout == "stdout https://(hidden)@b/c (hidden)\n"


@pytest.mark.parametrize("address", ["http://[::1/{}", "{}", "ftp://host/{}", "https:///{}", "https://host:port/{}",
                                     "https://host/{} x", "https://host/\u00e9{}"])  # fmt: skip
def test_a_webhook_that_is_no_address_is_rejected_without_it(
    tiny_model: TinyModel, tmp_path: Path, address: str
) -> None:
    config = config_for("flux", tiny_model, tmp_path, logging={"webhook": address.format(PATH)})
    with pytest.raises((ConfigError, TelemetryError), match=r"logging\.webhook") as rejected:
        run(config)
    assert PATH not in str(rejected.value)
    assert not (tmp_path / "out").exists()


def test_who_may_look_into_a_run_folder(tiny_model: TinyModel, tmp_path: Path) -> None:
    """See `storage/folders.py` and its test. Folders above the run folder keep their modes."""
    before = os.umask(0o022)
    try:
        for name, existing in (("new", False), ("old", True)):
            config = config_for("flux", tiny_model, tmp_path / name, training={"max_steps": 1})
            if existing:
                Path(config.output_dir).mkdir(mode=0o755)
            run(config, dry_run=not existing)
        modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("new", "new/out", "old/out")]
        assert modes == [0o755, 0o700, 0o755]
    finally:
        os.umask(before)
