"""Five open pages of a run that trains: the training process opens nothing for them."""

from __future__ import annotations

import re
import time
from pathlib import Path

import psutil
import pytest
from playwright.sync_api import Browser

from browser.conftest import LONG, run_id, tiny_config
from browser.studio_process import process, steps_done, studio, wait_for
from runs.launched import write_config
from runs.made_runs import TinyModel

ROUTES = ("#/runs", "#/run/RUN", "#/run/RUN", "#/run/RUN/memory", "#/compare?ids=RUN")
WATCHED_S = 15.0
AUDIT = """
import os, sys
opened = os.open({file!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
def note(event, arguments):
    if event == "open" or event.startswith("socket."):
        os.write(opened, f"{{event}} {{arguments[0]!r}}\\n".encode())
sys.addaudithook(note)
"""
"""Notes everything that Python code of a process opens."""


def names(file: Path) -> set[str]:
    """What was opened, without numbers: temporary names and process ids differ each time."""
    return {re.sub(r"\d+", "N", line) for line in file.read_text().splitlines()}


def descriptors(pid: int) -> list[str]:
    return sorted(str(one.readlink()) for one in Path(f"/proc/{pid}/fd").iterdir())


@pytest.mark.timeout(400)
def test_training_opens_nothing_for_five_open_pages(browser: Browser, tiny_model: TinyModel, tmp_path: Path) -> None:
    config = tiny_config(tiny_model, tmp_path, "live", LONG)
    file, opened, folder = write_config(config, tmp_path / "live.yaml"), tmp_path / "opened", Path(config.output_dir)
    output = tmp_path / "live.txt"
    with process("train", str(file), output=output, before=AUDIT.format(file=str(opened))) as training:
        wait_for(lambda: steps_done(folder) > 20 or training.poll() is not None, "the first steps", 240)
        assert training.poll() is None, output.read_text()
        with studio(tmp_path / "runs") as served:
            before, held = names(opened), descriptors(training.pid)
            size, first = opened.stat().st_size, steps_done(folder)
            pages = [browser.new_context().new_page() for _ in ROUTES]
            for page, route in zip(pages, ROUTES, strict=True):
                page.goto(served.link)
                page.goto(served.address + route.replace("RUN", run_id(page, "live")))
                page.wait_for_selector("main h1")
            end = time.monotonic() + WATCHED_S
            while time.monotonic() < end:
                pages[0].wait_for_timeout(500)
            assert descriptors(training.pid) == held
            assert psutil.Process(training.pid).net_connections() == []
            for page in pages:
                page.context.close()
        with opened.open() as lines:
            lines.seek(size)
            assert "socket." not in lines.read()
        assert names(opened) <= before
        assert steps_done(folder) > first
