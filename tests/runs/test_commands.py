"""`gracetune train`, `train.py`, `gracetune validate-now`, `gracetune demo`: as they are typed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gracetune.cli.main import main
from gracetune.cli.train_flags import main as train_script
from gracetune.cli.train_flags import read_arguments
from gracetune.config.environment import Environment
from gracetune.errors import ConfigError
from gracetune.train.runtime import LaunchEnvironment
from runs.launched import ROOT, command_line, start, write_config
from runs.made_runs import TinyModel, config_for, images, run
from runs.test_resume import DUAL_EXPERT, STEPS, assert_same_end, losses

GUIDES = ROOT / "config" / "gh200_in_memory_example.json"


def gracetune(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main([*arguments])
    return int(str(ended.value.code))


def small(tiny_model: TinyModel, tmp_path: Path, family: str, flavour: str) -> list[str]:
    """A published example made small: other weights, images and sizes, the same settings."""
    values: dict[str, Any] = {
        "model.path": tiny_model(family, flavour),
        "output_dir": tmp_path / "out",
        "datasets[0].path": images(tmp_path / "data"),
        "datasets[0].resolution": 64.0,
        "validation.width": 64,
        "validation.height": 64,
        "validation.steps": 2,
    }
    return [word for key, value in values.items() for word in ("--set", f"{key}={value}")]


def test_the_launch_line_of_the_guides(
    tiny_model: TinyModel, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`train.py --config config/gh200_in_memory_example.json`, with SimpleTuner's flags."""
    monkeypatch.chdir(tmp_path)  # the example's text cache is relative
    flags = ["--attention_mechanism", "diffusers", "--enable_manual_validation", "--max_train_steps", "2", "--json"]
    warmup = ["--set", "schedule.warmup_steps=1"]
    words = ["--config", str(GUIDES), *flags, *warmup, *small(tiny_model, tmp_path, "flux", "dev")]
    code = train_script(words, help=None)
    captured = capsys.readouterr()
    assert code == 0, captured.err
    message = json.loads(captured.out)
    assert (message["outcome"], message["step"], message["steps"]) == ("finished", 2, 2)
    assert Path(message["files"][0]).name == "gh200_in_memory.safetensors"
    assert load_file(message["files"][0])
    assert "validate-now" in captured.err


@pytest.mark.full
def test_an_ai_toolkit_job_runs(tiny_model: TinyModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = ROOT / "examples" / "wan22_t2v_automagic.yaml"
    options = ["--max-steps", "2", "--json", *small(tiny_model, tmp_path, "wan", "t2v-14b-2.2")]
    code = gracetune("train", str(job), *options, "--set", "datasets[0].dataset_type=image")
    captured = capsys.readouterr()
    assert code == 0, captured.err
    names = [Path(path).name for path in json.loads(captured.out)["files"]]
    assert [name.rpartition("automagic")[2] for name in names] == ["_high_noise.safetensors", "_low_noise.safetensors"]


def test_a_dry_run_trains_nothing_and_tells_hours_and_cost(
    tiny_model: TinyModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_config(config_for("flux", tiny_model, tmp_path, training={"max_steps": 1000}), tmp_path / "c.yaml")
    assert gracetune("train", str(file), "--dry-run", "--price-per-hour", "3.5", "--json") == 0
    message = json.loads(capsys.readouterr().out)
    estimate = message["estimate"]
    assert message["outcome"] == "dry run"
    assert estimate["hours"] == pytest.approx(1000 * message["first_batch"]["seconds"] / 3600)
    assert estimate["cost"] == pytest.approx(3.5 * estimate["hours"])
    assert not list((tmp_path / "out").glob("*.safetensors"))
    idle = ["--set", "adapter.full_rank=true", "--set", "memory.enable_uvm_hints=true"]
    assert gracetune("train", str(file), "--dry-run", "--price-per-hour", "3.5", *idle) == 0
    captured = capsys.readouterr()
    assert re.search(r"s/it x 1000 steps = \S+ hours", captured.out)
    assert "at 3.5 an hour" in captured.out
    heard = " ".join(captured.err.split())  # what was requested and is not done is reported, wherever lines break
    assert "adapter.full_rank: no effect, because adapter.kind is lora" in heard
    assert "memory.enable_uvm_hints: not available" in heard or torch.cuda.is_available()
    assert "residency hints: off, this run has no GPU" in heard or torch.cuda.is_available()
    assert "latents-0: 0 entries, 0 B, in disk (as configured" in heard, "with hints set, every cache is named"


def test_mistakes_are_told_without_a_traceback(
    tiny_model: TinyModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_for("flux", tiny_model, tmp_path)
    moved = config.datasets[0].model_copy(update={"path": str(tmp_path / "nothing")})
    file = write_config(config.model_copy(update={"datasets": (moved,)}), tmp_path / "c.yaml")
    assert gracetune("train", str(file)) == 1
    message = capsys.readouterr()
    assert "datasets[0].path" in message.err
    assert "Traceback" not in message.err
    assert not message.out
    assert gracetune("validate-now", str(tmp_path / "nothing")) == 1
    assert "no such folder" in capsys.readouterr().err


def test_flags_of_train_py() -> None:
    launch = read_arguments(
        ["--config", "c.json", "--max_train_steps=10", "--attention_mechanism", "flash_attn_3", "--use_ema",
         "--learning_rate", "1e-4", "--enable-manual-validation", "--dry-run", "--force-oversubscription",
         "--set", "a.b=1", "--log_level", "debug", "--checkpointing_steps", "5"]
    )  # fmt: skip
    assert launch.request.config == Path("c.json")
    assert launch.request.dry_run
    assert launch.request.force_oversubscription
    assert launch.request.log_level == "debug"
    assert set(launch.request.overrides) == {
        "training.max_steps=10", "training.epochs=null", "training.attention=flash_attn_3", "optimizer.lr=0.0001",
        "a.b=1", "training.ema.enabled=true", "checkpoints.every_steps=5",
    }  # fmt: skip
    with pytest.raises(ConfigError) as error:
        read_arguments(["--max_train_step", "10", "--log-level", "loud"])
    assert [problem.key for problem in error.value.problems] == ["--max_train_step", "--config", "--log-level"]
    assert error.value.problems[2].expected == "one of debug, info, warning"
    assert "max_train_steps" in error.value.problems[0].hint


def wait_for(file: Path, text: str, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not (file.exists() and text in file.read_text()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["kill-9", "ctrl-c"])
def test_a_killed_process_loses_nothing_that_was_saved(number: int, tiny_model: TinyModel, tmp_path: Path) -> None:
    whole = config_for("wan", tiny_model, tmp_path / "whole", **DUAL_EXPERT)
    run(whole)
    killed = config_for("wan", tiny_model, tmp_path / "killed", checkpoints={"every_steps": 2}, **DUAL_EXPERT)
    file = write_config(killed, tmp_path / "killed.yaml")
    process = start(command_line("train", str(file)))
    wait_for(Path(killed.output_dir) / "logs" / "events.jsonl", '"kind":"StepDone"', process)
    wait_for(Path(killed.output_dir) / "logs" / "events.jsonl", '"step":3', process)
    os.kill(process.pid, number)
    process.communicate()
    assert process.returncode == (-9 if number == signal.SIGKILL else 3)
    result = run(killed)
    assert result.step == STEPS
    assert losses(killed) == losses(whole)
    assert_same_end(whole, killed)


@pytest.mark.full
def test_accelerate_launches_it(tiny_model: TinyModel, tmp_path: Path) -> None:
    file = write_config(config_for("flux", tiny_model, tmp_path, training={"max_steps": 1}), tmp_path / "c.yaml")
    command = [
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        str(ROOT / "config" / "accelerate_config_gh200.yaml"),
    ]
    process = start([*command, "--cpu", str(ROOT / "train.py"), "--config", str(file)])
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    assert (tmp_path / "out" / "tiny.safetensors").is_file()


@pytest.mark.parametrize(
    ("file", "sharded"), [("accelerate_config_gh200.yaml", False), ("accelerate_config_gh200_fsdp.yaml", True)]
)
def test_accelerates_files_ask_for_what_they_say(file: str, sharded: bool) -> None:
    """Through accelerate's own launcher, as far as its processes' environment: it starts no FSDP without GPUs."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    words = ["--config_file", str(ROOT / "config" / file), "--num_processes", "2", "--main_process_port", "0"]
    requested, _, _ = _validate_launch_command(launch_command_parser().parse_args([*words, "train.py"]))
    launch = LaunchEnvironment.from_environment(Environment(prepare_multi_gpu_env(requested)), "bf16")
    assert (launch.sharded, launch.reshard, launch.notes) == (sharded, True, ())


@pytest.mark.full
def test_the_demo_with_two_experts_learns_and_says_so(tmp_path: Path) -> None:
    """What the demo without `--wan` learns is in test_wheel.py."""
    process = start(command_line("demo", "--wan", "--output", str(tmp_path / "demo")), COLUMNS="200")
    out, errors = process.communicate(timeout=280)
    assert process.returncode == 0, out + errors
    assert "the control did not learn, and diffusers reproduces what was learned" in out
    assert (tmp_path / "demo" / "run_1" / "demo_low_noise.safetensors").is_file()


@pytest.mark.full
def test_a_demo_that_was_stopped_claims_nothing(tmp_path: Path) -> None:
    process = start(command_line("demo", "--output", str(tmp_path / "demo")), COLUMNS="200")
    wait_for(tmp_path / "demo" / "run" / "logs" / "events.jsonl", '"kind":"StepDone"', process)
    process.terminate()
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "(SIGTERM): start the demo again" in errors
    assert "with the adapter" not in out
