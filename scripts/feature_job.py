"""What the feature tests train: a tiny model, generated data, a config with every GH200 feature on. And what is seen.

feature_job.py make FOLDER FAMILY [--steps N] [--attention NAME]    writes FOLDER/config.yaml; exit 77, and why, where
                                                                    that attention cannot run here
feature_job.py verify CONFIG                                        did its run do what the config asks for?
feature_job.py ask CONFIG                                           runs it, and asks it for a validation meanwhile
feature_job.py busy A B TOLERANCE                                   exit 77 where two baselines tell of the machine only
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
from PIL import Image

from gracetune.adapters.adapter_files import open_adapter
from gracetune.adapters.statistics import norms
from gracetune.baselines.baseline import read_baseline
from gracetune.baselines.regression import compare, parse_tolerance
from gracetune.config import Environment, load
from gracetune.config.native import write
from gracetune.config.run_config import RunConfig
from gracetune.errors import ConfigError
from gracetune.models.attention import BACKENDS, attention_facts, choose_attention
from gracetune.models.registry import spec_of
from gracetune.optim.batch_ramp import ramp_of
from gracetune.telemetry.events import Event, MemorySampled, RunEnded, StepDone, ValidationDone
from gracetune.telemetry.sinks.jsonl import read_log
from gracetune.testing.tiny_models import cached
from gracetune.train.run_requests import is_running

SKIPPED = 77
PATIENCE_S = 240
FLAVOURS = {"wan": "t2v-14b-2.2", "flux": "dev", "sdxl": "base-1.0", "qwen_image": "t2i", "stable_audio": "open-1.0"}
COMMAND = (sys.executable, "-m", "gracetune.cli.main")


# -- making -----------------------------------------------------------------------------------------------------------


def make(folder: Path, family: str, steps: int, attention: Any) -> int:
    why_not = obstacle(family, attention)
    if why_not is not None:
        print(why_not)
        return SKIPPED
    precision = "bf16" if torch.cuda.is_available() else "fp32"
    values: dict[str, Any] = {
        "name": family,
        "output_dir": str(folder / "run"),
        "model": {
            "family": family,
            "flavour": FLAVOURS[family],
            "path": str(cached(family, FLAVOURS[family], folder / "models")),
            "base_precision": precision,
        },
        "adapter": {"kind": "lora", "rank": 4},
        "datasets": [sounds(folder / "sounds") if family == "stable_audio" else images(folder / "pictures")],
        "cache": {"vae_cache_type": "unified_memory", "text_cache_type": "unified_memory"},
        "memory": {"use_uvm": True, "enable_uvm_hints": True},
        "training": {
            "max_steps": steps,
            "batch_size": 2,
            "mixed_precision": precision,
            "attention": attention,
            "compile": "off",
            "ramp": {
                "enabled": True,
                "initial_effective_batch_size": 1,
                "target_effective_batch_size": 6,
                "batch_rampup_steps": 8,
            },
        },
        "optimizer": {"lr": 1e-3},
        "validation": {"prompts": [{"prompt": "a trial"}], "steps": 2, "width": 64, "height": 64, "num_frames": 5},
        "checkpoints": {"every_steps": None},
        "logging": {"every_steps": 1, "trackers": []},
    }
    (folder / "config.yaml").write_text(write(RunConfig.model_validate(values)))
    return 0


def obstacle(family: str, attention: Any) -> str | None:
    """Asks what training would ask, before it does."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    facts = attention_facts(device, dtype, spec_of(family).attention)
    try:
        choose_attention(attention, facts)
    except ConfigError as error:
        return error.problems[0].found
    return None


def images(folder: Path) -> dict[str, Any]:
    folder.mkdir(parents=True)
    for number in range(6):
        pixels = np.random.default_rng(number).integers(0, 255, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((64, 64)).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"image number {number}")
    return {"id": "pictures", "path": str(folder), "type": "in_memory", "resolution": 64.0}


def sounds(folder: Path) -> dict[str, Any]:
    folder.mkdir(parents=True)
    for number in range(2):
        wave = np.random.default_rng(number).uniform(-0.3, 0.3, (44100, 2)).astype(np.float32)
        soundfile.write(folder / f"{number}.wav", wave, 44100)
        (folder / f"{number}.txt").write_text(f"sound number {number}")
    more = {"dataset_type": "audio", "audio": {"duration_interval": 1.0}}
    return {"id": "sounds", "path": str(folder), "type": "in_memory", **more}


# -- looking ----------------------------------------------------------------------------------------------------------


def verify(config: RunConfig) -> int:
    """Everything that is not as the config asks for, on a line each."""
    events = events_of(config)
    wrong = [*ramp_wrong(config, events), *caches_wrong(config, events)]
    end = next((event for event in events if isinstance(event, RunEnded)), None)
    if end is None or end.outcome != "finished":
        wrong.append(f"the run did not finish: {end}")
    else:
        wrong += [] if end.outputs else ["the run names no file that it wrote"]
        for name in end.outputs:
            state = open_adapter(Path(config.output_dir) / name, config.model.family).state()
            if not norms(state).largest > 0:
                wrong.append(f"{name}: nothing was learned")
    return messages(wrong)


def events_of(config: RunConfig) -> list[Event]:
    log = read_log(Path(config.output_dir) / "logs" / "events.jsonl")
    return [record.event for record in log.merged()]


def ramp_wrong(config: RunConfig, events: list[Event]) -> list[str]:
    """Every step as long as the ramp says, whatever happened between them."""
    done = [event for event in events if isinstance(event, StepDone)]
    planned = ramp_of(config.training, 1).step_batches()
    wrong = []
    for event, step in zip(done, planned, strict=False):
        found = (event.micro_batch, event.accumulation)
        if found != (step.micro_batch, step.accumulation):
            wrong.append(f"step {event.step}: {found} samples x micro-batches, the ramp says {step}")
    lengths = {event.micro_batch * event.accumulation for event in done}
    return wrong if len(lengths) > 1 else [*wrong, f"no ramp: every step holds {lengths} samples"]


def caches_wrong(config: RunConfig, events: list[Event]) -> list[str]:
    """Everything trained on comes from memory; what samples are generated with is read from disk, once."""
    counters = [event.counters for event in events if isinstance(event, MemorySampled)][-1]
    most_reads = {"latents": 0, "texts": 2 * len(config.validation.prompts)}
    wrong = []
    for name, most in most_reads.items():
        hits, reads = counters[f"cache.{name}.hits"], counters[f"cache.{name}.disk_reads"]
        if hits == 0 or reads > most:
            wrong.append(f"{name}: {hits:g} reads from memory, {reads:g} from disk")
    return wrong


def messages(wrong: list[str]) -> int:
    print("\n".join(wrong) or "as asked")
    return 1 if wrong else 0


# -- asking -----------------------------------------------------------------------------------------------------------


LONG_RAMP = (
    "training.max_steps=100000",
    "training.ramp.batch_rampup_steps=8000",
    "training.ramp.target_effective_batch_size=8000",
)
"""Still at work when the command that asks has started, on a slow machine and on a fast one."""


def ask(file: Path) -> int:
    """`gracetune validate-now` while the ramp is at work: samples appear, and every step stays as it was."""
    config = load(file, environment=Environment({}), overrides=LONG_RAMP).config
    settings = [word for setting in LONG_RAMP for word in ("--set", setting)]
    running = subprocess.Popen([*COMMAND, "train", str(file), *settings])
    try:
        waited(lambda: is_running(Path(config.output_dir)) and largest_step(config) > 1, running)
        subprocess.run([*COMMAND, "validate-now", config.output_dir], check=True, timeout=PATIENCE_S)
        waited(lambda: bool(requested(config)), running)
        running.send_signal(signal.SIGTERM)
        code = running.wait(PATIENCE_S)
    finally:
        running.kill()
    wrong = [] if code == 3 else [f"exit code {code} after SIGTERM; expected 3, interrupted and saved"]
    event = requested(config)[0]
    files = [Path(config.output_dir) / one.path for one in event.files]
    wrong += [f"{path} is not there" for path in files if not path.is_file()] or ([] if files else ["no samples"])
    ended = ramp_of(config.training, 1).target
    if largest_step(config) >= ended:
        wrong.append(f"the ramp was over ({ended} samples in a step) before the request")
    return messages([*wrong, *ramp_wrong(config, events_of(config))])


def largest_step(config: RunConfig) -> int:
    """In samples; 0 before the first."""
    if not (Path(config.output_dir) / "logs" / "events.jsonl").exists():
        return 0
    done = (event for event in events_of(config) if isinstance(event, StepDone))
    return max((event.micro_batch * event.accumulation for event in done), default=0)


def requested(config: RunConfig) -> list[ValidationDone]:
    return [event for event in events_of(config) if isinstance(event, ValidationDone) and event.requested]


def waited(condition: Any, running: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if running.poll() is not None:
            sys.exit(f"the run ended with {running.returncode}")
        if time.monotonic() > deadline:
            sys.exit(f"nothing happened in {PATIENCE_S} s")
        time.sleep(0.05)


def busy(before: Path, after: Path, tolerance: str) -> int:
    """Two captures that differ in time alone, on a machine whose own probe differs too, tell nothing of our code."""
    share = parse_tolerance(tolerance)
    one, two = read_baseline(before), read_baseline(after)
    pace = two.gemm_ms / one.gemm_ms
    slower = {row.name for row in compare(one, two, share).regressions}
    if slower and slower <= {"step time", "throughput"} and pace > 1 + share:
        print(f"this machine is too busy to measure: its own probe took {pace - 1:+.0%} between the two captures")
        return SKIPPED
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make")
    making.add_argument("folder", type=Path)
    making.add_argument("family", choices=sorted(FLAVOURS))
    making.add_argument("--steps", type=int, default=10)
    making.add_argument("--attention", default="auto", choices=["auto", *BACKENDS])
    for name in ("verify", "ask"):
        commands.add_parser(name).add_argument("config", type=Path)
    judging = commands.add_parser("busy")
    judging.add_argument("before", type=Path)
    judging.add_argument("after", type=Path)
    judging.add_argument("tolerance")
    given = parser.parse_args()
    if given.command == "make":
        return make(given.folder.absolute(), given.family, given.steps, given.attention)
    if given.command == "busy":
        return busy(given.before, given.after, given.tolerance)
    if given.command == "ask":
        return ask(given.config)
    return verify(load(given.config, environment=Environment({})).config)


if __name__ == "__main__":
    raise SystemExit(main())
