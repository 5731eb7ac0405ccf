"""The command `gracetune estimate`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from gracetune.cli.estimate import estimate
from gracetune.errors import ConfigError
from gracetune.hardware.recording import load_recording

MACHINES = Path(__file__).parents[2] / "fixtures" / "machines"
EXAMPLES = Path(__file__).parents[3] / "examples"
CONFIG = """\
gracetune: 1
name: lighthouse
output_dir: out
model: {family: wan}
datasets:
  - {id: stills, path: /nowhere/stills}
  - {id: clips, path: /nowhere/clips, dataset_type: video, resolution: 640}
training: {max_steps: 100}
adapter: {kind: lokr, factor: 16, full_rank: true}
optimizer: {name: automagic}
cache: {vae_cache_type: unified_memory, text_cache_type: unified_memory}
validation: {every_steps: 50, prompts: [{prompt: a lighthouse at dusk}]}
"""
app = typer.Typer()
app.command()(estimate)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    return path


@pytest.fixture
def report(tmp_path: Path) -> Path:
    """A doctor report of a GH200, where the machine is one key among others."""
    machine = load_recording(MACHINES / "gh200-numa").model_dump(mode="json")
    path = tmp_path / "doctor.json"
    path.write_text(json.dumps({"format": 1, "checks": [], "machine": machine}))
    return path


def run(*arguments: object, columns: int = 120) -> tuple[int, str]:
    result = CliRunner(env={"COLUMNS": str(columns)}).invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout


def run_json(*arguments: object) -> tuple[int, dict[str, Any]]:
    code, text = run(*arguments, "--json")
    return code, json.loads(text)


class TestJson:
    def test_shows_the_whole_plan(self, config: Path, report: Path) -> None:
        code, found = run_json(config, "--machine", report)
        assert code == 0
        assert found["verdict"] in ("fits", "fits with these changes")
        for key in ("changes", "tiers", "lines", "phases", "assumptions"):
            assert isinstance(found[key], list)
        assert {line["tier"] for line in found["lines"]} == {"device", "host", "disk"}
        assert set(found["lines"][0]) == {"name", "role", "bytes", "tier", "phases", "processes", "managed", "reason"}
        assert found["processes"] == {"count": 1, "per_machine": 1, "sharded": False, "reshard": True}
        managed = [line for line in found["lines"] if line["managed"]]
        assert {line["role"] for line in managed} == {"latent cache", "text cache", "frozen weights"}
        assert [phase["phase"] for phase in found["phases"]] == ["encode text", "encode latents", "train", "sample"]
        assert set(found["changes"][0]) == {"key", "from", "to", "saves", "reason", "automatic"}
        assert set(found["training_peak_gib"]) == {"off", "half", "quarter", "tenth", "full"}

    def test_accepts_a_machine_without_a_report(self, config: Path, report: Path, tmp_path: Path) -> None:
        bare = tmp_path / "machine.json"
        bare.write_text(json.dumps(json.loads(report.read_text())["machine"]))
        assert run_json(config, "--machine", bare) == run_json(config, "--machine", report)

    def test_samples_and_overrides_reach_the_plan(self, config: Path, report: Path) -> None:
        def latents(*more: object) -> int:
            _, found = run_json(config, "--machine", report, *more)
            return next(line["bytes"] for line in found["lines"] if line["name"] == "latents of stills")

        assert latents("--samples", 260) == 260 * 16 * 128 * 128 * 2
        assert latents("--samples", 260, "--set", "datasets[0].resolution=512") == 260 * 16 * 64 * 64 * 2

    def test_assumptions_are_listed(self, config: Path, report: Path) -> None:
        _, found = run_json(config, "--machine", report)
        assert any("a guess; say --samples N" in text for text in found["assumptions"])

    def test_exit_code_1_when_it_does_not_fit(self, config: Path, tmp_path: Path) -> None:
        path = tmp_path / "small.json"
        path.write_text(load_recording(MACHINES / "cpu-only").model_dump_json())
        code, found = run_json(config, "--machine", path)
        assert code == 1
        assert found["verdict"] == "does not fit"
        assert "main memory" in found["summary"]

    def test_exit_code_1_when_it_is_unknown(self, config: Path, report: Path, tmp_path: Path) -> None:
        data = json.loads(report.read_text())
        data["machine"]["gpus"][0]["memory_total"] = None
        path = tmp_path / "unknown.json"
        path.write_text(json.dumps(data))
        code, found = run_json(config, "--machine", path)
        assert (code, found["verdict"], found["missing"]) == (1, "unknown", ["gpus[0].memory_total"])

    def test_this_machine_is_the_default(self, config: Path) -> None:
        code, found = run_json(config)
        assert code in (0, 1)
        assert next(tier for tier in found["tiers"] if tier["tier"] == "disk")["capacity"] is not None
        assert any("--machine" in note for note in found["notes"]) == (found["machine"]["profile"] == "cpu")

    def test_several_processes(self, config: Path, report: Path) -> None:
        """With one GPU per machine there are as many machines as processes; sharded weights are divided."""
        _, alone = run_json(config, "--machine", report)
        code, four = run_json(config, "--machine", report, "--processes", 4)
        assert (code, four["processes"]["count"], four["processes"]["per_machine"]) == (0, 4, 1)
        assert four["tiers"][0]["peak"] == alone["tiers"][0]["peak"]
        _, spread = run_json(config, "--machine", report, "--processes", 4, "--fsdp")

        def expert(found: dict[str, Any]) -> int:
            return int(next(line["bytes"] for line in found["lines"] if line["name"] == "high-noise expert"))

        assert expert(spread) * 4 == pytest.approx(expert(alone), abs=4)
        assert [phase["phase"] for phase in spread["phases"]][2] == "load"
        assert any("never been measured" in note for note in spread["notes"])


class TestText:
    def test_one_screen_of_80_columns(self, config: Path, report: Path) -> None:
        code, text = run(config, "--machine", report, "--samples", 260, columns=80)
        lines = text.splitlines()
        assert code == 0
        assert max(map(len, lines)) <= 80
        assert len(lines) <= 50
        assert lines[-1].startswith(("FITS", "and "))
        for words in ("GPU memory", "CPU memory (coherent link)", "phases", "checkpointing", "assumed"):
            assert words in text

    def test_several_processes_name_whose_memory_is_shown(self, config: Path, report: Path) -> None:
        code, text = run(config, "--machine", report, "--processes", 2, "--fsdp", columns=80)
        assert code == 0
        assert max(map(len, text.splitlines())) <= 80
        words = " ".join(text.split())
        assert "processes 2 processes on 2 machines like this one: FSDP2, each holds 1/2 of the weights;" in words
        assert "GPU memory is one GPU's, main memory one machine's" in words

    def test_a_run_that_does_not_fit_is_reported_with_what_was_tried(self, config: Path, tmp_path: Path) -> None:
        path = tmp_path / "small.json"
        path.write_text(load_recording(MACHINES / "cpu-only").model_dump_json())
        code, text = run(config, "--machine", path, "--set", "training.batch_size=4")
        assert code == 1
        assert "even with" in text
        assert "training.batch_size: 4 -> 1" in text
        assert "DOES NOT FIT" in text


class TestRejections:
    @pytest.mark.parametrize(
        ("content", "words"),
        [
            (None, "No such file"),
            ("{", "not JSON"),
            (b"\xff\xfe\x00", "not JSON"),
            ("[]", "the whole file"),
            ('{"machine": {"profile": 3}}', "profile"),
            ('{"machine": null}', "the whole file"),
            ('{"bench": "data", "rows": [], "machine": {}}', "another kind of file, with bench, rows, machine"),
        ],
    )
    def test_a_file_without_a_machine(self, config: Path, tmp_path: Path, content: Any, words: str) -> None:
        path = tmp_path / "machine.json"
        if content is not None:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(ConfigError) as rejection:
            run(config, "--machine", path)
        (problem,) = rejection.value.problems
        assert problem.key == "--machine"
        assert words in problem.found
        assert "gracetune doctor" in problem.hint
        assert problem.file == str(path)

    @pytest.mark.parametrize(
        ("outer", "host", "gpu", "words"),
        [
            ({"format": 99}, {}, {}, "format 99; this release reads format 1"),
            ({}, {}, {"memory_total": -1}, "gpus[0].memory_total: -1 bytes"),
            ({}, {"cpu_mem_available": -5}, {}, "host.cpu_mem_available: -5 bytes"),
        ],
    )
    def test_an_unsuitable_report(
        self, config: Path, report: Path, outer: Any, host: Any, gpu: Any, words: str
    ) -> None:
        data = json.loads(report.read_text())
        data |= outer
        data["machine"]["host"] |= host
        data["machine"]["gpus"][0] |= gpu
        report.write_text(json.dumps(data))
        with pytest.raises(ConfigError) as rejection:
            run(config, "--machine", report)
        (problem,) = rejection.value.problems
        assert words in problem.found
        assert "gracetune doctor --output" in problem.hint

    def test_sharding_needs_several_processes(self, config: Path, report: Path) -> None:
        with pytest.raises(ConfigError) as rejection:
            run(config, "--machine", report, "--fsdp")
        (problem,) = rejection.value.problems
        assert (problem.key, problem.hint) == ("--fsdp", "--processes 2 --fsdp")

    def test_a_config_that_cannot_be_read(self, tmp_path: Path, report: Path) -> None:
        path = tmp_path / "config.yaml"
        path.write_text("gracetune: 1\nname: x\n")
        with pytest.raises(ConfigError):
            run(path, "--machine", report)


CONFIGS = sorted(p.name for p in EXAMPLES.glob("*.*") if p.suffix in (".json", ".yaml") and p.name != "index.json")


@pytest.mark.parametrize("example", CONFIGS)
def test_the_examples_fit_a_gh200(example: str, report: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    code, found = run_json(Path("examples") / example, "--machine", report)
    assert code == 0, found["summary"]


def test_torch_is_not_imported(config: Path, report: Path) -> None:
    code = (
        "import sys, typer\n"
        "from gracetune.cli.estimate import estimate\n"
        "app = typer.Typer(); app.command()(estimate)\n"
        f"app([{str(config)!r}, '--machine', {str(report)!r}, '--json'], standalone_mode=False)\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("processes", "place"), [(1, "managed_host"), (2, "shared_host")])
def test_hints_are_reported_for_the_planned_processes(processes: int, place: str, config: Path, tmp_path: Path) -> None:
    """Processes of one machine share one copy of a cache, which is not managed memory, as in a run."""
    machine = load_recording(MACHINES / "gb200").model_dump(mode="json")
    report = tmp_path / "gb200.json"
    report.write_text(json.dumps({"format": 1, "checks": [], "machine": machine}))
    _, printed = run(config, "--machine", report, "--processes", processes, "--samples", 100, "--json")
    assert any(note.startswith(f"latents: {place};") for note in json.loads(printed)["notes"])
