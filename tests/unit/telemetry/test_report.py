"""The report is well formed, complete and self-contained, for crashed runs too."""

from __future__ import annotations

import base64
import io
import json
import math
import re
import subprocess
import sys
import tempfile
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from gracetune.adapters.loading_steps import loading_steps
from gracetune.telemetry import number_format
from gracetune.telemetry.errors import TelemetryError
from gracetune.telemetry.events import Event, MemoryStageChanged, RunStarted, SampleFile, StageSwitched, ValidationDone
from gracetune.telemetry.report import write_report
from gracetune.telemetry.report.plots import LEFT, RIGHT, TEXT_SIZE, WIDTH
from gracetune.telemetry.report.sample_images import grid, link_to
from gracetune.telemetry.report.sections import ReportCard, ReportSection, write_section
from unit.telemetry.sample_events import NASTY, any_event, end, memory, start, step, whole_run, write_log

_VOID = {"meta", "img", "link", "br", "line", "circle", "rect", "path"}
_ADDRESSES = ("src", "href", "action", "data", "poster", "srcset", "xlink:href", "formaction", "background")


class Page(HTMLParser):
    """Asserts that elements are closed in order, and collects text, addresses and elements."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.texts: list[str] = []
        self.addresses: list[str] = []
        self.elements: list[str] = []
        self.labels: list[str] = []
        self.ids: list[str] = []
        self.headings: list[str] = []
        self.styles: list[str] = []
        self.images = 0
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        values = dict(attrs)
        assert len(values) == len(attrs), "an attribute twice"
        self.addresses += [str(values[name]) for name in _ADDRESSES if name in values]
        self.styles += [str(values["style"])] if "style" in values else []
        self.ids += [str(values["id"])] if "id" in values else []
        assert not any(name.startswith("on") for name in values)
        if tag == "img":
            self.images += 1
            assert values["alt"], "an image without alternative text"
        if tag == "svg":
            self.labels.append(str(values["aria-label"]))
            assert values["role"] == "img"
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in _VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag in _VOID:
            return
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "style":
            assert "url(" not in data
            assert "@import" not in data
            return
        self.texts.append(data)
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)

    @property
    def text(self) -> str:
        return "\n".join(self.texts)


def made(folder: Path, *events: Event) -> tuple[Page, dict[str, object]]:
    write_log(folder, events)
    report = write_report(folder, loading_steps)
    assert (report.html, report.json) == (folder / "report.html", folder / "report.json")
    return Page(report.html.read_text(encoding="utf-8")), json.loads(report.json.read_text())


def check_contained(page: Page) -> None:
    assert {"script", "link", "iframe", "object", "embed", "form"} & set(page.elements) == set()
    for address in page.addresses:
        assert address.startswith(("./", "#", "data:image/jpeg;base64,")), address
    assert len(page.ids) == len(set(page.ids))


class TestWholeRun:
    @pytest.fixture
    def run(self, tmp_path: Path) -> tuple[Page, dict[str, object]]:
        (tmp_path / "cats_high_noise.safetensors").write_bytes(b"x")
        (tmp_path / "cats_low_noise.safetensors").write_bytes(b"x")
        outputs = ("cats_high_noise.safetensors", "cats_low_noise.safetensors")
        return made(tmp_path, *whole_run(tmp_path), end(outputs=outputs))

    def test_it_loads_nothing_and_is_escaped(self, run: tuple[Page, dict[str, object]]) -> None:
        page, _ = run
        check_contained(page)
        assert NASTY in page.text
        assert "https://example.org/x" in page.text, "shown as text, not as a link"

    def test_its_structure(self, run: tuple[Page, dict[str, object]]) -> None:
        page, _ = run
        assert page.headings == [
            "Samples through time", "How to load the result", "Loss", "Speed", "Learning rate and batch", "Memory",
            "Memory plan",
            "Transitions", "Prefetch and cache statistics", "Self-check", "Checkpoints", "Warnings", "Versions",
            "Configuration",
        ]  # fmt: skip
        titles = [label.split(" by step.")[0] for label in page.labels]
        assert titles == [
            "Training loss; the heavy line is smoothed", "Held-out loss at fixed noise levels", "Step time",
            "Learning rate", "Gradient norm before clipping", "Effective batch, all processes",
            "device: memory in use, by owner", "host: memory in use, by owner", "Memory stage",
            "Batches brought to the GPU ahead of their step",
        ]  # fmt: skip
        assert page.elements.count("h1") == page.elements.count("main") == 1
        assert page.elements.count("title") == 3, "of the page, of the switch between experts and of the reclamation"

    def test_a_bar_for_each_part_of_the_preparation(self, run: tuple[Page, dict[str, object]]) -> None:
        page, _ = run
        assert "Before training: 25.0 s" in page.text
        assert [style for style in page.styles if "width" in style] == ["width: 100.0%", "width: 25.0%", "width: 0.0%"]

    def test_every_number_of_every_step_is_on_the_page(self, run: tuple[Page, dict[str, object]]) -> None:
        page, _ = run
        cells = set(page.texts)
        for number in range(1, 21):
            one = step(number)
            wanted = [
                number_format.number(one.loss),
                number_format.number(one.lr["high_noise"]),
                number_format.number(one.grad_norm or 0),
            ]
            wanted += [number_format.duration(one.step_ms / 1000), number_format.duration(one.data_wait_ms / 1000)]
            for owners in memory(number).used_bytes.values():
                wanted += [number_format.size(used) for used in owners.values()]
            assert set(wanted) <= cells, number
        assert {"uvm.prefetch_wait_ms", "5", "cache.latents.hit_rate", "0.97"} <= cells
        assert {"the device is full", "every 1 steps", "the driver does not count them here"} <= cells
        assert {"the ramp", "spilled", "3.00 GiB", "light", "5.00 MiB", "unknown", "7 ms", "memory is tight"} <= cells
        assert {"checkpoints/checkpoint-20", "11.8 MiB", "222 ms", "11 ms", "checkpoint-1"} <= cells
        assert {"2.13.0", "80", "20 of 20"} <= cells
        assert {number_format.number(0.251 - 0.02), "0.9", "0.25"} <= cells

    def test_samples_are_shown_and_linked(self, run: tuple[Page, dict[str, object]], tmp_path: Path) -> None:
        page, _ = run
        assert page.images == 5
        assert page.addresses.count("./samples/clip%20%231.mp4") == 5
        assert "./samples/cat%2020.png" in page.addresses
        assert "../outside.png is not in the run" in page.text
        (first, *_) = [one for one in page.addresses if one.startswith("data:")]
        with Image.open(io.BytesIO(base64.b64decode(first.split(",")[1]))) as image:
            assert image.size == (192, 128)

    def test_the_json_has_every_event_exactly(self, run: tuple[Page, dict[str, object]]) -> None:
        _, facts = run
        assert (facts["format"], facts["version"], facts["outcome"]) == ("gracetune-report", 2, "finished")
        steps = facts["steps"]
        assert isinstance(steps, list)
        assert [one["loss"] for one in steps] == [step(number).loss for number in range(1, 21)]
        assert facts["peak_bytes"] == {
            "device": {"weights": 28 << 30, "activations": 23 << 30, "total": 51 << 30},
            "host": {"caches": 7 << 30, "total": 7 << 30},
        }
        assert facts["seconds_per_step"] == pytest.approx(0.912)
        assert facts["config"]["note"] == NASTY  # type: ignore[index]


class TestOtherRuns:
    def test_a_crashed_run_has_a_report_and_says_so(self, tmp_path: Path) -> None:
        path = write_log(tmp_path, whole_run(tmp_path)[:20])
        with path.open("ab") as log:
            log.write(b'{"v":1,"kind":"StepD')
        page, facts = made(tmp_path)
        assert facts["outcome"] == "unknown"
        assert "killed, or is still running" in page.text
        assert "1 lines of the log could not be read" in page.text
        assert "The run left no result." in page.text
        check_contained(page)

    def test_a_crashed_run_shows_the_adapters_it_left(self, tmp_path: Path) -> None:
        (tmp_path / "cats_000000020.safetensors").write_bytes(b"x")
        page, _ = made(tmp_path, RunStarted(run="cats", adapter="lora"), step(1))
        assert "./cats_000000020.safetensors" in page.addresses
        assert "The file cannot be read" in page.text

    def test_a_failed_run_shows_the_reason(self, tmp_path: Path) -> None:
        page, _ = made(tmp_path, start(), step(1), end(step=1, outcome="failed", reason=f"NaN {NASTY}"))
        assert f"Failed: NaN {NASTY}" in page.text

    def test_nothing_but_a_start(self, tmp_path: Path) -> None:
        page, facts = made(tmp_path, start())
        assert page.labels == []
        assert facts["step"] == 0

    def test_an_empty_log(self, tmp_path: Path) -> None:
        page, _ = made(tmp_path)
        assert "a run without a name" in page.text

    def test_no_log(self, tmp_path: Path) -> None:
        with pytest.raises(TelemetryError, match="name the run's folder"):
            write_report(tmp_path, loading_steps)
        assert not (tmp_path / "report.html").exists()

    def test_a_resumed_run_is_one_curve(self, tmp_path: Path) -> None:
        first = [start(), *(step(number) for number in range(1, 9))]
        page, facts = made(
            tmp_path, *first, start(5), *(step(number, loss=7.0) for number in range(6, 10)), end(step=9)
        )
        steps = facts["steps"]
        assert isinstance(steps, list)
        assert [one["step"] for one in steps] == [*range(1, 10)]
        assert facts["starts"] == 2
        assert "step 5: resumed" in page.text

    def test_non_finite_losses_are_counted_and_break_nothing(self, tmp_path: Path) -> None:
        losses = [1.0, math.nan, 0.9, math.inf, 0.8, 0.7]
        page, facts = made(tmp_path, start(), *(step(n, loss=loss, stage="") for n, loss in enumerate(losses, 1)))
        assert "2 losses are non-finite" in page.text
        assert facts["loss"]["all"]["not_finite"] == 2  # type: ignore[index]
        assert "nan" in page.texts

    def test_long_tables_are_shortened_and_say_so(self, tmp_path: Path) -> None:
        switches = [StageSwitched(step=number, before="a", after="b") for number in range(1000)]
        page, facts = made(tmp_path, start(), *switches)
        assert "Experts (200 of 1,000 rows; all are in logs/events.jsonl)" in page.text
        assert len(facts["stage_transitions"]) == 1000  # type: ignore[arg-type]

    def test_contact_sheets_are_linked(self, tmp_path: Path) -> None:
        (tmp_path / "sheet 5.png").write_bytes(b"x")
        done = [ValidationDone(step=5, files=(), sheet="sheet 5.png"), ValidationDone(step=6, files=(), sheet="gone")]
        page, _ = made(tmp_path, start(), *done)
        assert page.addresses == ["#content", "./sheet%205.png"]

    def test_one_step_is_drawn_as_points(self, tmp_path: Path) -> None:
        """Stacked plots too. A path with one point would be invisible."""
        page, _ = made(tmp_path, start(), step(3), memory(3))
        text = (tmp_path / "report.html").read_text()
        assert page.elements.count("circle") == 11
        assert "path" not in page.elements
        points = {float(x) for x in re.findall(r'<circle [^>]*cx="([0-9.]*)"', text)}
        assert points == {LEFT + (WIDTH - LEFT - RIGHT) / 2}, "in the middle, where nothing is cut off"

    def test_it_can_be_read_on_a_phone(self, tmp_path: Path) -> None:
        """At 390 px: labels of at least 11 px, and headers in one piece."""
        made(tmp_path, *whole_run(tmp_path))
        text = (tmp_path / "report.html").read_text()
        margins = 2 * 16
        assert f"svg text {{ fill: var(--soft); font-size: {TEXT_SIZE}px; }}" in text
        assert TEXT_SIZE * (390 - margins) / WIDTH >= 11
        assert set(re.findall(r'viewBox="0 0 ([0-9]+) ', text)) == {str(WIDTH)}
        assert all(float(size) * 16 >= 11 for size in re.findall(r"font-size: ([0-9.]*)rem", text))
        assert "th { white-space: nowrap; }" in text
        assert "pre-wrap" in text, "code breaks at the edge and can be pasted all the same"

    def test_one_spike_does_not_flatten_the_rest(self, tmp_path: Path) -> None:
        steps = [step(n, loss=500.0 if n == 60 else 0.5 + n / 1000, stage="") for n in range(1, 101)]
        page, _ = made(tmp_path, start(), *steps)
        assert "above the plot, the highest is 500" in page.text

    def test_a_long_run_stays_small(self, tmp_path: Path) -> None:
        page, facts = made(tmp_path, start(), *(step(number) for number in range(1, 5_001)))
        assert (tmp_path / "report.html").stat().st_size < 800_000
        assert "(200 of 5,000 steps; all are in logs/events.jsonl)" in page.text
        assert facts["logged"]["steps"] == 5_000  # type: ignore[index]
        assert len(facts["steps"]) < 2_000  # type: ignore[arg-type]

    def test_the_shortened_lists_of_a_long_run_keep_the_extremes(self, tmp_path: Path) -> None:
        steps = [step(n, loss=0.5 + n % 7 / 100, stage="", step_ms=900.0 + n % 5) for n in range(1, 4_001)]
        steps[1776] = step(1777, loss=9.75, stage="", samples=99_999, epoch=777)
        steps[2222] = step(2223, loss=0.5, stage="", step_ms=7_000.0)
        steps[3000] = step(3001, loss=0.25, stage="", steps=3, compile_ms=5.0)
        samples = [memory(n % 10) for n in range(1, 2_001)]
        samples[777] = memory(90)
        _, facts = made(tmp_path, start(), *steps, *samples, end(step=4_000))
        kept: Any = facts["steps"]
        assert {1, 1777, 2223, 3001, 4000} <= {one["step"] for one in kept}
        assert len(kept) < 3_000
        assert [one["step"] for one in kept] == sorted(one["step"] for one in kept)
        assert (facts["samples"], facts["epochs"], facts["compile_ms"]) == (99_999, 778, 5.0)
        assert facts["loss"]["all"]["lowest"] == 0.25  # type: ignore[index]
        assert facts["logged"]["memory"] == 2_000  # type: ignore[index]
        assert 90 in {one["step"] for one in facts["memory"]}  # type: ignore[attr-defined]
        assert len(facts["memory"]) < 1_500  # type: ignore[arg-type]
        assert facts["peak_bytes"]["device"]["activations"] == 93 << 30  # type: ignore[index]

    @pytest.mark.full
    def test_the_report_of_160_000_log_steps_fits_into_little_memory(self, tmp_path: Path) -> None:
        write_log(tmp_path, (start(), *(step(number) for number in range(1, 160_001)), end(step=160_000)))
        program = (
            "import re, sys; from pathlib import Path; from gracetune.telemetry.report import write_report; "
            "write_report(Path(sys.argv[1]), lambda start, files: {}); "
            "print(int(re.search(r'VmHWM:\\s+(\\d+) kB', Path('/proc/self/status').read_text())[1]) >> 10)"
        )
        done = subprocess.run(
            [sys.executable, "-c", program, str(tmp_path)], check=True, capture_output=True, text=True
        )  # fmt: skip
        assert int(done.stdout) < 400, "MiB"
        assert (tmp_path / "report.json").stat().st_size < 5_000_000

    @settings(max_examples=60)
    @given(st.lists(any_event, max_size=8))
    @example([MemoryStageChanged(step=-9_007_199_254_740_995, before=0, after=0)])
    @example([MemoryStageChanged(step=2**60, before=0, after=0)])
    def test_any_log_gives_a_well_formed_page(self, events: list[Event]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            page, _ = made(Path(folder), *events)
            check_contained(page)
            assert not re.search(r"\bnan\b", " ".join(page.addresses))
            svg = re.findall(r' d="([^"]*)"', (Path(folder) / "report.html").read_text())
            assert all(re.fullmatch(r"[ML0-9. Z-]*", path) for path in svg)

    @settings(max_examples=60)
    @given(st.lists(st.tuples(st.integers(0, 100), st.floats(), st.floats()), min_size=1, max_size=12))
    def test_any_curve_gives_a_well_formed_plot(self, values: list[tuple[int, float, float]]) -> None:
        events = [step(number, loss=loss, step_ms=pace) for number, loss, pace in values]
        with tempfile.TemporaryDirectory() as folder:
            made(Path(folder), start(), *events)
            svg = re.findall(r' d="([^"]*)"', (Path(folder) / "report.html").read_text())
            assert all(re.fullmatch(r"[ML0-9. Z-]*", path) for path in svg)


class TestImages:
    @pytest.mark.parametrize("path", ["/etc/passwd", "../x.png", "a/../../x.png", "gone.png", "a\0b", "", "."])
    def test_nothing_outside_the_run_is_linked(self, tmp_path: Path, path: str) -> None:
        (tmp_path / "run" / "a").mkdir(parents=True)
        (tmp_path / "x.png").write_bytes(b"outside")
        assert link_to(path, tmp_path / "run") is None

    def test_a_file_that_is_not_an_image_is_linked_without_a_thumbnail(self, tmp_path: Path) -> None:
        (tmp_path / "x.png").write_bytes(b"not an image")
        files = (SampleFile(path="x.png", kind="image", prompt="p"),)
        (row,) = grid([ValidationDone(step=3, files=files)], tmp_path).rows
        assert (row.cells[0].link, row.cells[0].image) == ("./x.png", None)

    def test_many_validations_are_spread_evenly_with_a_note(self, tmp_path: Path) -> None:
        files = tuple(SampleFile(path="x.png", kind="image", prompt=str(number)) for number in range(30))
        found = grid([ValidationDone(step=number, files=files) for number in range(50)], tmp_path)
        assert len(found.rows) == 24
        assert [cell.step for cell in found.rows[0].cells][:: len(found.rows[0].cells) - 1] == [0, 49]
        assert found.notes[0].startswith("12 of 50 validations")
        assert found.notes[1].startswith("24 of 30 samples")


def test_sections_of_commands_are_shown_while_they_hold(tmp_path: Path) -> None:
    image = ReportCard(f"Step 5 {NASTY}", "a text", (("samples/cat 5.png", "a cat"), ("../outside.png", "gone")))
    write_section(tmp_path, "a", ReportSection("Which checkpoint?", ("a note",), (image,)))
    (tmp_path / "report" / "b.json").write_text('{"format": "something else"}')
    events = [event for event in whole_run(tmp_path) if not isinstance(event, RunStarted)]
    write_log(tmp_path, [])
    page, _ = made(tmp_path)
    assert {"Which checkpoint?", "a note", "a text", f"Step 5 {NASTY}"} <= set(page.texts)
    assert "./samples/cat%205.png" in page.addresses
    assert "gone: ../outside.png is not in the run" in page.text
    assert "report/b.json cannot be read: KeyError" in page.text
    check_contained(page)
    page, _ = made(tmp_path, start(), *events)  # of 2027
    assert "The run went on after this was made" in page.text
    assert "a note" not in page.texts


def test_loading_instructions_of_the_run_itself_come_first(tmp_path: Path) -> None:
    page, _ = made(tmp_path, start(), end(how_to_load={"Krita": "open it"}))
    assert "Krita" in page.text
