"""What `gracetune studio` costs and how fast it answers, each against its bar, in a real browser. No GPU is needed.

python benchmarks/studio.py --output benchmarks/results/studio-cpu.json

    list   1,000 runs in the list
    log    a run whose log has 1,000,000 events
    tabs   five open pages of a run that logs one step per second
    live   a tiny run that trains as fast as it can: delay of new points, layout shift, what the run opens

Takes about six minutes. Processor time is measured where other programs on the machine would disturb a clock; the load
of the machine is part of the result. Needs Chromium (scripts/install_browser.sh), and strace for `live`.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

TESTS: Final = Path(__file__).resolve().parents[1] / "tests"
sys.path.insert(0, str(TESTS))

import psutil  # noqa: E402
from playwright.sync_api import Browser, Page, sync_playwright  # noqa: E402

from gracetune.bench.results import result_of, write_result  # noqa: E402
from gracetune.bench.row import BenchRow  # noqa: E402
from gracetune.cli.bench import print_rows  # noqa: E402
from gracetune.cli.console import out  # noqa: E402
from gracetune.hardware import probe  # noqa: E402

if TYPE_CHECKING:
    from browser.studio_process import Studio

RUNS: Final = 1000
STEPS: Final = 990_000
"""With the steps of a resumed run and the samples of memory, a million events."""
ROUNDS: Final = 7
TABS_S: Final = 60.0
SETTLE_S: Final = 6.0
LIVE_S: Final = 40.0
ROUTES: Final = ("#/run/RUN", "#/run/RUN", "#/run/RUN/memory", "#/runs", "#/compare?ids=RUN,OTHER")
"""The five open pages."""
OPENED: Final = re.compile(r"(openat|open|creat|socket|connect|accept4?|bind)\((.*)")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[*PARTS], action="append", help="all without it")
    parser.add_argument("--output", type=Path, help="also write the result there, as JSON")
    requested = parser.parse_args()
    rows, loads = list[BenchRow](), [os.getloadavg()[0]]
    with sync_playwright() as playwright:
        found = _chromium()
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        for name in requested.only or PARTS:
            with tempfile.TemporaryDirectory(prefix="gracetune-bench-") as folder:
                rows += PARTS[name](Path(folder).resolve(), browser)
            loads.append(os.getloadavg()[0])
            if requested.output is not None:  # after each part: the next one takes minutes and may fail
                write_result(requested.output, _result(rows, loads, browser.version))
        browser.close()
    print_rows(out(), rows)
    return int(any(row.ok is False for row in rows))


def _result(rows: Sequence[BenchRow], loads: Sequence[float], chromium: str) -> dict[str, Any]:
    result = result_of("studio", rows, probe())
    libraries = {name: version(name) for name in ("starlette", "uvicorn", "anyio", "h11", "playwright")}
    result["versions"]["studio"] = {**libraries, "chromium": chromium, "kernel": platform.release()}
    result["load_of_the_machine"] = [round(load, 1) for load in loads]
    return result


def _chromium() -> str:
    from browser.chromium import chromium

    found = chromium()
    if found is None:
        raise SystemExit("found no Chromium; type: bash scripts/install_browser.sh")
    return found


# -- a list of many runs and a long log -------------------------------------------------------------------------------


def list_rows(folder: Path, browser: Browser) -> Iterator[BenchRow]:
    from unit.studio.logs import small_run

    for number in range(RUNS):
        small_run(folder / "runs" / f"group{number % 10}" / f"run{number:04}", 100)
    with _serving(folder / "runs") as served:
        page = _page(browser, served.studio)
        first, seconds = served.cost(lambda: _fetched(page, "api/runs"))
        again = [served.cost(lambda: _fetched(page, "api/runs")) for _ in range(ROUNDS)]
        cpu, wall = statistics.median(one[0] for one in again), statistics.median(one[1] for one in again)
        shown = [_shown_after(page, served.studio, "#/runs", "tbody tr") for _ in range(ROUNDS)]
    detail = f"processor time of a request; by the clock {wall * 1e3:.0f} ms"
    detail += f"; the first one {first * 1e3:.0f} ms, {seconds * 1e3:.0f} ms by the clock"
    yield BenchRow("list_1000_runs", cpu * 1e3, "ms", "< 300", cpu < 0.3, detail)
    yield _of_clock("list_1000_runs_shown", shown, 0.3, "from the click to rows on the page, in the browser")


def log_rows(folder: Path, browser: Browser) -> Iterator[BenchRow]:
    from unit.studio.logs import long_log

    run = long_log(folder / "runs" / "long", STEPS)
    log = run / "logs" / "events.jsonl"
    size, count = log.stat().st_size / 1e6, sum(1 for _ in log.open("rb"))
    cold, warm, shown = list[tuple[float, float]](), list[tuple[float, float]](), list[float]()
    for _ in range(ROUNDS):
        with _serving(folder / "runs") as served:
            page = _page(browser, served.studio)
            identifier = _runs(page)["long"]
            requests = [f"api/runs/{identifier}", f"api/runs/{identifier}/series?points=2000"]
            if len(shown) < ROUNDS // 2 + 1:
                shown.append(_shown_after(page, served.studio, f"#/run/{identifier}", "figure.chart canvas"))
            else:
                cold.append(served.cost(partial(_fetched, page, *requests)))
                warm.append(served.cost(partial(_fetched, page, *requests)))
            page.context.close()
    cpu, wall = (statistics.median(one[part] for one in cold) for part in (0, 1))
    again = statistics.median(one[0] for one in warm)
    detail = f"processor time of a run's first page in a new studio; {count:,} events, {size:.0f} MB"
    detail += f"; by the clock {wall:.2f} s; processor time of the next one {again:.2f} s"
    yield BenchRow("open_1e6_events", cpu, "s", "< 1", cpu < 1, detail)
    yield _of_clock("open_1e6_events_shown", shown, 1.0, "from the click to the curve on the page, in a new studio")


def _of_clock(name: str, seconds: Sequence[float], most: float, what: str) -> BenchRow:
    """A time by the clock. On a busy machine, one that is too long says nothing."""
    middle, load = statistics.median(seconds), os.getloadavg()[0]
    detail = f"{what}; {len(seconds)} times, {min(seconds):.2f} to {max(seconds):.2f} s; load of the machine {load:.0f}"
    return BenchRow(name, middle, "s", f"< {most:g}", _verdict(met=middle < most), detail)


def _verdict(*, met: bool) -> bool | None:
    return True if met else None if os.getloadavg()[0] > (os.cpu_count() or 1) else False


# -- pages that stay open ---------------------------------------------------------------------------------------------


def tab_rows(folder: Path, browser: Browser) -> Iterator[BenchRow]:
    """The same five pages, on a run whose log is written here at an even pace."""
    from unit.studio.logs import locked, small_run, started, step, write_run

    run = write_run(folder / "runs" / "live", [started(total_steps=100_000), step(1)])
    for number in range(20):
        small_run(folder / "runs" / f"other{number}", 200)
    with locked(run), _serving(folder / "runs") as served:
        for count, name in ((0, "idle"), (5, "five_tabs")):
            pages = _tabs(browser, served.studio, count)
            number = 2 + count * 1000
            end = time.monotonic() + SETTLE_S
            while time.monotonic() < end:
                number += 1
                write_run(run, [step(number)], begin=time.time())
                time.sleep(1)
            before, began = served.cpu(), time.monotonic()
            while time.monotonic() - began < TABS_S:
                number += 1
                write_run(run, [step(number)], begin=time.time())
                time.sleep(max(0.0, 1 - (time.monotonic() - began) % 1))
            spent = (served.cpu() - before) / (time.monotonic() - began)
            for page in pages:
                page.context.close()
            detail = f"of a core, over {TABS_S:.0f} s, a step per second, 21 runs below the folder"
            if count:
                detail += "; pages: a run twice, its memory, the list, a comparison"
                yield BenchRow(name, 100 * spent, "%", "<= 2", spent <= 0.02, detail)
            else:
                yield BenchRow(name, 100 * spent, "%", detail=f"{detail}; no page is open")


def live_rows(folder: Path, browser: Browser) -> Iterator[BenchRow]:
    with _training(folder) as (run, process):
        alone = _trace(process, LIVE_S, lambda: None)
        yield from _beside_training(run, process, alone, browser)


def _beside_training(run: Path, process: psutil.Process, alone: set[str], browser: Browser) -> Iterator[BenchRow]:
    from browser.page_scripts import SHOWN
    from browser.studio_process import events, steps_done

    with _serving(run.parent) as served:
        first = steps_done(run)
        pages = _tabs(browser, served.studio, 5)
        time.sleep(SETTLE_S)
        pages[0].evaluate(SHOWN)
        for page in pages:
            page.evaluate("globalThis.shifts = 0")
        before, began = served.cpu(), time.monotonic()
        beside = _trace(process, LIVE_S, lambda: pages[0].wait_for_timeout(1000))
        passed = time.monotonic() - began
        spent = (served.cpu() - before) / passed
        shifts = {route: page.evaluate("globalThis.shifts") for route, page in zip(ROUTES, pages, strict=True)}
        shown = pages[0].evaluate("globalThis.shown")
        written = {line["step"]: line["time_s"] for line in events(run) if line["kind"] == "StepDone"}
        for page in pages:
            page.context.close()
        pace = (steps_done(run) - first) / passed
    delays = sorted(moment - written[number] for moment, number in shown if number in written)
    middle, late = statistics.median(delays), delays[int(0.95 * len(delays))]
    detail = f"median of {len(delays)}; 95 % within {late:.2f} s, all within {delays[-1]:.2f} s; {pace:.1f} steps/s"
    detail += f"; load of the machine {os.getloadavg()[0]:.0f}"
    yield BenchRow("new_point_delay", middle, "s", "< 2", _verdict(met=late < 2), detail)
    yield BenchRow("five_tabs_of_a_tiny_run", 100 * spent, "%", detail=f"of a core, at {pace:.1f} steps/s")
    worst = max(shifts, key=lambda route: shifts[route])
    detail = f"sum over {passed:.0f} s; most on {worst}"
    yield BenchRow("layout_shift", shifts[worst], "", "< 0.005", shifts[worst] < 0.005, detail)
    extra = sorted(beside - alone)
    detail = f"with five open pages for {LIVE_S:.0f} s; it opened {len(alone)} names in {LIVE_S:.0f} s without a studio"
    detail = "; ".join([detail, *extra[:4]])
    yield BenchRow("training_opens_for_the_studio", len(extra), "files and sockets", "0", not extra, detail)


@contextmanager
def _training(folder: Path) -> Iterator[tuple[Path, psutil.Process]]:
    """A tiny run that trains until the block ends."""
    from browser.conftest import LONG, tiny_config
    from browser.studio_process import process, steps_done, wait_for
    from gracetune.models.tiny import build
    from runs.launched import write_config
    from unit.studio.logs import small_run

    def tiny_model(family: str, flavour: str) -> Path:
        return build(family, flavour, folder / "model")

    (folder / "runs").mkdir()
    small_run(folder / "runs" / "other1", 200)
    config = tiny_config(tiny_model, folder, "live", LONG)
    file = write_config(config, folder / "live.yaml")
    with process("train", str(file), output=folder / "live.txt") as begun:
        run = Path(config.output_dir)
        wait_for(lambda: steps_done(run) > 20, "the first steps", 900)
        yield run, psutil.Process(begun.pid)


def _trace(process: psutil.Process, seconds: float, while_waiting: Callable[[], object]) -> set[str]:
    """What the process opens in this time: names of files without digits, and sockets."""
    with tempfile.NamedTemporaryFile() as lines:
        command = ["strace", "-f", "-q", "-e", "trace=openat,open,creat,socket,connect,accept,accept4,bind"]
        tracer = subprocess.Popen([*command, "-o", lines.name, "-p", str(process.pid)])
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            while_waiting()
            time.sleep(0.1)
        tracer.send_signal(signal.SIGINT)
        tracer.wait()
        text = Path(lines.name).read_text(errors="replace")
    calls = [found[2] if found[1].startswith("open") else found[0] for found in OPENED.finditer(text)]
    return {re.sub(r"\d+", "N", (re.search(r'"([^"]*)"', call) or [call, call])[1]) for call in calls}


# -- the studio and its pages -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Served:
    studio: Studio
    process: psutil.Process

    def cpu(self) -> float:
        """Processor seconds of the studio and of the commands that it has run."""
        times = self.process.cpu_times()
        return times.user + times.system + times.children_user + times.children_system

    def cost(self, work: Callable[[], object]) -> tuple[float, float]:
        """Processor seconds of the studio, and seconds by the clock."""
        before, began = self.cpu(), time.perf_counter()
        work()
        return self.cpu() - before, time.perf_counter() - began


@contextmanager
def _serving(root: Path) -> Iterator[Served]:
    from browser.studio_process import studio

    with studio(root) as served:
        children = psutil.Process().children()
        process = next(one for one in children if "studio" in one.cmdline() and str(root) in one.cmdline())
        time.sleep(1)  # its first look at the runs
        yield Served(served, process)


def _page(browser: Browser, served: Studio, route: str = "#/machine") -> Page:
    """A page with cookies of its own. Its first route asks for nothing that is measured."""
    from browser.page_scripts import OBSERVER

    page = browser.new_context(viewport={"width": 1280, "height": 800}).new_page()
    page.add_init_script(OBSERVER)
    page.set_default_timeout(60_000)
    page.goto(served.link)
    page.goto(served.address + route)
    page.wait_for_selector("main h1")
    return page


def _tabs(browser: Browser, served: Studio, count: int) -> list[Page]:
    if count == 0:
        return []
    first = _page(browser, served)
    ids = _runs(first)
    first.context.close()
    routes = [route.replace("RUN", ids["live"]).replace("OTHER", ids["other1"]) for route in ROUTES[:count]]
    return [_page(browser, served, route) for route in routes]


def _runs(page: Page) -> dict[str, str]:
    """Path of each run -> its id."""
    rows: list[dict[str, Any]] = page.evaluate("fetch('api/runs').then((answer) => answer.json())")["runs"]
    return {row["path"]: row["id"] for row in rows}


def _fetched(page: Page, *paths: str) -> None:
    get = "(paths) => Promise.all(paths.map((path) => fetch(path).then((answer) => answer.arrayBuffer())))"
    page.evaluate(get, [*paths])


def _shown_after(page: Page, served: Studio, route: str, selector: str) -> float:
    """Seconds from the change of the address until the element is there."""
    page.goto(f"{served.address}#/new")
    page.wait_for_selector("main h1")
    seconds: float = page.evaluate(
        """async ([route, selector]) => {
          const began = performance.now();
          location.hash = route;
          while (!document.querySelector(selector)) await new Promise(requestAnimationFrame);
          return (performance.now() - began) / 1000;
        }""",
        [route, selector],
    )
    return seconds


PARTS: Final[Mapping[str, Callable[[Path, Browser], Iterator[BenchRow]]]] = {
    "list": list_rows,
    "log": log_rows,
    "tabs": tab_rows,
    "live": live_rows,
}

if __name__ == "__main__":
    sys.exit(main())
