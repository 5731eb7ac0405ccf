"""A browser, a studio and a tiny run that trains: real ones, shared by the tests of a file."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from browser.chromium import chromium
from browser.page_scripts import OBSERVER
from browser.studio_process import Studio, process, steps_done, studio, wait_for
from gracetune.config.run_config import RunConfig
from runs.launched import write_config
from runs.made_runs import TinyModel, config_for

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

HOSTILE = "<script>document.title = 'hostile'</script><img src=x onerror=\"document.title = 'hostile'\">"
LONG = 100_000
"""Optimizer steps of a run that trains until the tests are done."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of these tests take seconds each, and a browser."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.full)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    found = chromium()
    if found is None:
        pytest.skip("no Chromium; where apt and root are to be had: bash scripts/install_browser.sh")
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright: pip install 'gracetune[dev]'")
    playwright.expect.set_options(timeout=20_000)  # other tests and runs may keep the machine busy
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield opened
        opened.close()


OpenPage = Callable[..., "Page"]


@pytest.fixture
def open_page(browser: Browser) -> Iterator[OpenPage]:
    """`open_page(studio, "#/runs", **context)`: the page, in a browser that has opened the link. Errors of scripts and
    of the content security policy fail the test."""
    contexts, errors = [], []

    def opened(served: Studio, route: str = "#/runs", **options: Any) -> Page:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
        contexts.append(context)
        context.add_init_script(OBSERVER)
        page = context.new_page()
        page.set_default_timeout(30_000)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda line: errors.append(line.text) if _is_mistake(line.type, line.text) else None)
        page.goto(served.link)
        page.goto(served.address + route)
        page.wait_for_selector("main h1")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert errors == []


def _is_mistake(kind: str, text: str) -> bool:
    return kind == "error" and ("Content Security Policy" in text or "Uncaught" in text)


def tiny_config(tiny_model: TinyModel, root: Path, name: str, steps: int, **sections: Any) -> RunConfig:
    """A run of a tiny SDXL whose validation prompts include one that is markup."""
    settings: dict[str, Any] = {
        "training": {"max_steps": steps},
        "validation": {
            "every_steps": None, "steps": 1, "width": 64, "height": 64,
            "prompts": [{"prompt": "a small house"}, {"prompt": HOSTILE}],
        },
    }  # fmt: skip
    made = config_for("sdxl", tiny_model, root / f"{name}-files", name=name, output_dir=str(root / "runs" / name))
    values = made.model_dump(mode="json", exclude_unset=True)
    for section, changes in {**settings, **sections}.items():
        values[section] = {**values.get(section, {}), **changes}
    return RunConfig.model_validate(values)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder; its runs are below `runs`, so that the configs and data beside them are no part of the studio."""
    folder = tmp_path_factory.mktemp("studio")
    (folder / "runs").mkdir()
    return folder


@pytest.fixture(scope="module")
def control(root: Path) -> Iterator[Studio]:
    """A studio that may act on runs."""
    with studio(root / "runs", "--control") as served:
        yield served


@pytest.fixture(scope="module")
def training(root: Path, tiny_model: TinyModel) -> Iterator[Path]:
    """The folder of a run that trains all the time, slowly enough to leave the machine some time."""
    config = tiny_config(tiny_model, root, "live", LONG)
    file = write_config(config, root / "live.yaml")
    with process("train", str(file), output=root / "live.txt") as started:
        folder = Path(config.output_dir)

        def trains() -> bool:
            assert started.poll() is None, (root / "live.txt").read_text()
            return steps_done(folder) > 3

        wait_for(trains, "the first steps", 120)
        yield folder


def run_id(page: Page, name: str) -> str:
    """The id of the run with this name, as soon as the studio's list has it."""

    def listed() -> str | None:
        rows = page.evaluate("fetch('api/runs').then((answer) => answer.json())")["runs"]
        return next((str(row["id"]) for row in rows if row["name"] == name), None)

    return str(wait_for(listed, f"the run {name}"))


def settle(seconds: float) -> None:
    """Let a page stream for a while."""
    time.sleep(seconds)
