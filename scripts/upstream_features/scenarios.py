"""Runs of the real upstream on a CPU, plain and with the overlay, and what must be equal between them.

Run by scripts/test_upstream_features.sh with the Python of an environment that has upstream; `src` of gracetune and of
the overlay are on PYTHONPATH. What cannot be run ends with 77 and the reason as the last line.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import json
import os
import platform
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import IO, Any

from bench_media import lend_ffmpeg, paint, sing

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
UPSTREAM = "4.10.1"
"""The version all of this was run with."""
SKIPPED = 77
STEPS = 10
LONGEST_RUN_S = 1200
"""A run takes a minute or two; one that is not through by then waits for something that never comes."""
CPU_KERNELS = ("kohaku-fa-auto", "diffusers", "native-math")

_PLAIN = "from simpletuner.cli import main; import sys; sys.exit(main())"
_THROUGH_US = """
import sys
from gracetune.config.environment import Environment
from gracetune.integrations.launch import run_upstream
sys.exit(run_upstream("simpletuner", sys.argv[1:], off={off}, environment=Environment.capture()))
"""


class SkipError(Exception):
    """This cannot be run here; says why."""


@dataclass(frozen=True)
class Run:
    """What one run left behind."""

    name: str
    folder: Path
    losses: list[float]
    opens: Mapping[str, Mapping[str, int]]
    files: Mapping[str, list[str]]
    seconds: float

    @property
    def opened_in_training(self) -> dict[str, int]:
        return {"media": 0, "caption": 0, "cache": 0} | dict(self.opens.get("training", {}))

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The overlay's telemetry; empty where it wrote none."""
        file = self.folder / "output" / "gracetune-overlay.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []

    def counts(self, feature: str) -> dict[str, Any]:
        (finished,) = (line for line in self.messages if line["event"] == "finished")
        return dict(finished["counts"].get(feature, {}))


class Bench:
    """A folder with a tiny model, generated images, and one folder for every run."""

    def __init__(self, work: Path) -> None:
        self.work = work.absolute()
        self.images = self.work / "pictures"
        self.model = self.work / "model"

    def prepare(self) -> None:
        if (self.work / "ready").is_file():
            return
        from gracetune.testing.tiny_models import build

        self.work.mkdir(parents=True, exist_ok=True)
        build("sdxl", "base-1.0", self.model)
        paint(self.images)
        (self.work / "ready").touch()

    def run(
        self,
        name: str,
        *,
        mode: str = "plain",
        steps: int = STEPS,
        config: Mapping[str, Any] | None = None,
        dataset: Mapping[str, Any] | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> Run:
        """`mode`: plain (upstream's own command), off (ours, with the overlay off), overlay."""
        folder = self.work / "runs" / name
        (folder / "config").mkdir(parents=True)
        self._write_config(folder, {"max_train_steps": steps} | dict(config or {}), dataset or {})
        for note in self.images.glob("aspect_ratio_bucket_*"):
            note.unlink()  # of the run before: each finds the same folder
        code = {"plain": _PLAIN, "off": _THROUGH_US.format(off=True), "overlay": _THROUGH_US.format(off=False)}[mode]
        began = time.monotonic()
        with (folder / "log.txt").open("w") as log:
            ended = _ended([sys.executable, "-c", code, "train"], folder, self._environment(folder, variables), log)
        text = (folder / "log.txt").read_text(errors="replace")
        _check(ended is not None, f"{name} was not through after {LONGEST_RUN_S} s\n{text[-4000:]}")
        _check(ended == 0, f"{name} ended with {ended}\n{text[-4000:]}")
        record = folder / "record-0.json"
        _check(record.is_file(), f"{name} did not train\n{text[-4000:]}")
        return Run(name, folder, **json.loads(record.read_text()), seconds=time.monotonic() - began)

    def _write_config(self, folder: Path, config: Mapping[str, Any], dataset: Mapping[str, Any]) -> None:
        images = {
            "id": "pictures",
            "type": "local",
            "dataset_type": "image",
            "instance_data_dir": str(self.images),
            "cache_dir_vae": "cache/vae",
            "caption_strategy": "textfile",
            "resolution": 64,
            "resolution_type": "pixel",
            "crop": True,
            "crop_style": "center",
            "crop_aspect": "square",
            "minimum_image_size": 0,
        }
        text = {
            "id": "text",
            "type": "local",
            "dataset_type": "text_embeds",
            "default": True,
            "cache_dir": "cache/text",
        }
        datasets = folder / "config" / "multidatabackend.json"
        datasets.write_text(json.dumps([images | dict(dataset), text | {"cache_dir": "cache/text"}], indent=1))
        whole = {
            "model_family": "sdxl",
            "model_type": "lora",
            "lora_type": "standard",
            "lora_rank": 4,
            "pretrained_model_name_or_path": str(self.model),
            "pretrained_vae_model_name_or_path": str(self.model),
            "output_dir": "output",
            "data_backend_config": "config/multidatabackend.json",
            "optimizer": "adamw_bf16",
            "learning_rate": 1e-4,
            "lr_scheduler": "constant",
            "lr_warmup_steps": 0,
            "num_train_epochs": 0,
            "train_batch_size": 2,
            "seed": 42,
            "resolution": 64,
            "resolution_type": "pixel",
            "minimum_image_size": 0,
            "mixed_precision": "bf16",
            "caption_dropout_probability": 0.0,
            "checkpoint_step_interval": 1000,
            "disable_benchmark": True,
            "validation_disable": True,
            "report_to": "none",
            "gradient_checkpointing": False,
            "disable_bucket_pruning": True,
        } | dict(config)
        (folder / "config" / "config.json").write_text(json.dumps(whole, indent=1))

    def _environment(self, folder: Path, variables: Mapping[str, str] | None) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("GH200_", "ACCELERATE_"))}
        paths = [str(FOLDER), str(ROOT / "src"), str(ROOT / "overlays" / "simpletuner" / "src")]
        return {
            **kept,
            "PATH": f"{Path(sys.executable).parent}:{kept.get('PATH', '')}",
            "PYTHONPATH": ":".join(paths),
            "PYTHONDONTWRITEBYTECODE": "1",
            "GRACETUNE_RECORD_TO": str(folder),
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(self.work / "hub"),
            "OMP_NUM_THREADS": "1",
            **(variables or {}),
        }


UNIFIED = {"cache_config": {"vae_cache_type": "unified_memory", "text_cache_type": "unified_memory"}}
STAGED = {"type": "in_memory", "in_memory": {"compression": "lz4", "num_workers": 2, "memory_limit_gb": 1}}


def proof(bench: Bench, result: Path | None) -> None:
    """Plain, off, with nothing requested, and with everything on: the same losses; and then no file is opened."""
    plain = bench.run("plain")
    off = bench.run("off", mode="off")
    idle = bench.run("idle", mode="overlay")
    on = bench.run("on", mode="overlay", config=UNIFIED, dataset=STAGED)
    for run in (off, idle, on):
        _check(run.losses == plain.losses, f"{run.name}: {run.losses}\n  expected {plain.losses}")
    _check(len(plain.losses) == STEPS, f"{len(plain.losses)} losses, expected {STEPS}")
    _check(not idle.messages, "the overlay wrote telemetry although nothing was asked of it")
    _check(plain.opened_in_training["cache"] > 0, "the plain run opened no cache file: the recorder does not work")
    _check(plain.opened_in_training["caption"] > 0, "the plain run opened no caption: the recorder does not work")
    _check(not any(on.opened_in_training.values()), f"opened while training: {on.opens} {on.files.get('training')}")
    hits, wanted = on.counts("caches").get("hits"), plain.opened_in_training["cache"]
    _check(hits == wanted, f"{hits} entries came from memory, expected {wanted}")

    media = bench.run("media", config={"vae_cache_disable": True})
    staged = bench.run("media-staged", mode="overlay", config={"vae_cache_disable": True} | UNIFIED, dataset=STAGED)
    _check(media.opened_in_training["media"] > 0, "without a VAE cache no image was opened: the recorder does not work")
    _check(staged.losses == media.losses, f"{staged.losses}\n  expected {media.losses}")
    _check(not any(staged.opened_in_training.values()), f"opened: {staged.opens} {staged.files.get('training')}")
    if result is not None:
        result.write_text(json.dumps(_summary((plain, off, idle, on), (media, staged)), indent=2) + "\n")


def ramp(bench: Bench) -> None:
    """A ramp that does not grow is upstream's own accumulation; one that grows has the steps it should have."""

    def options(first: int, last: int) -> dict[str, Any]:
        sizes = {"initial_effective_batch_size": first, "target_effective_batch_size": last, "batch_rampup_steps": 8}
        return {"gh200_optimizations": {"enable_batch_size_rampup": True, **sizes}}

    plain = bench.run("accumulated", steps=6, config={"gradient_accumulation_steps": 2})
    level = bench.run("ramp-level", mode="overlay", steps=6, config=options(4, 4))
    _check(level.losses == plain.losses, f"{level.losses}\n  expected {plain.losses}")
    grown = bench.run("ramp-grown", mode="overlay", steps=6, config=options(2, 8))
    lengths = [line["accumulation"] for line in grown.messages if line["event"] == "ramp"]
    _check(lengths == [1, 2, 3], f"steps grew to {lengths}")
    counts = grown.counts("ramp")
    _check((counts["windows"], counts["micro_batches"]) == (6, 9), f"{counts}, expected 6 steps of 9 micro-batches")
    _check(len(grown.losses) == 9, f"{len(grown.losses)} backward passes, expected 9")


def attention(bench: Bench, name: str) -> None:
    kernel = name.replace("_", "-")
    if kernel not in CPU_KERNELS and not _has_gpu():
        raise SkipError(f"{name} needs a CUDA GPU, and torch sees none")
    plain = bench.run(f"attention-{kernel}", steps=3, config={"attention_mechanism": kernel})
    ours = bench.run(
        f"attention-{kernel}-on",
        mode="overlay",
        steps=3,
        config={"attention_mechanism": kernel} | UNIFIED,
        dataset=STAGED,
    )
    _check(ours.losses == plain.losses, f"{ours.losses}\n  expected {plain.losses}")


def manual_validation(bench: Bench) -> None:
    """A validation requested by hand, in the middle of a ramp: it happens, and the steps are as without it."""
    signal = bench.work / "signal.json"
    signal.write_text(json.dumps({"manual_validation": 1}))
    requested = {
        "validation_disable": False,
        "validation_prompt": "a image number 3",
        "validation_resolution": "64x64",
        "validation_num_inference_steps": 2,
        "validation_step_interval": 1000,
        "validation_seed": 1,
        "num_eval_images": 1,
        "gh200_optimizations": {
            "enable_batch_size_rampup": True,
            "initial_effective_batch_size": 2,
            "target_effective_batch_size": 8,
            "batch_rampup_steps": 4,
        },
    }
    variables = {"SIMPLETUNER_ACCELERATE_SIGNAL_FILE": str(signal)}
    run = bench.run("manual-validation", mode="overlay", steps=4, config=requested | UNIFIED, variables=variables)
    images = list((run.folder / "output" / "validation_images").rglob("*.png"))
    _check(bool(images), "no image of the validation")
    lengths = [line["accumulation"] for line in run.messages if line["event"] == "ramp"]
    _check(lengths == sorted(lengths), f"steps {lengths}")
    _check(run.counts("ramp")["micro_batches"] == len(run.losses), "a micro-batch was counted twice")


def audio(bench: Bench) -> None:
    """A sound that is staged and gone from disk, through upstream's own backend object and both its loaders."""
    from gracetune_simpletuner.in_memory import take_datasets
    from gracetune_simpletuner.overlay import Launch, Overlay
    from simpletuner.helpers.data_backend.builders.local import LocalBackendBuilder
    from simpletuner.helpers.data_backend.config.image import ImageBackendConfig

    from gracetune.config.environment import Environment

    tone = bench.work / "sounds" / "tone.wav"
    sing(tone)
    lend_ffmpeg(bench.work / "bin")
    try:
        from simpletuner.helpers.audio import load

        expected = [load.load_audio(str(tone)), load.load_audio_from_video(str(tone))]
    except (ImportError, OSError, RuntimeError) as error:
        raise SkipError(f"upstream itself cannot load a WAV file here: {_first_line(error)}") from error
    overlay = Overlay(Environment({}), Launch(), output_dir=bench.work / "sounds-output")
    block = {"id": "sounds", "dataset_type": "audio", "instance_data_dir": str(tone.parent)}
    (as_upstream_sees_it,) = take_datasets(overlay, [block | STAGED])
    _check(as_upstream_sees_it == block | {"type": "local"}, f"upstream would see {as_upstream_sees_it}")
    backend = LocalBackendBuilder(None)._create_backend(ImageBackendConfig(id="sounds", compress_cache=False))
    tone.unlink()
    found = [backend.read_image(str(tone)), load.load_audio_from_video(str(tone))]
    for (was, rate), (now, rate_now) in zip(expected, found, strict=True):
        _check(rate == rate_now and now.equal(was), "the sound from memory differs from the one from disk")
    reads = overlay.telemetry.of("in_memory").snapshot().get("reads_from_memory")
    _check(reads == 2, f"{reads} reads from memory, expected 2")
    overlay.finish()
    overlay.installer.undo()


def hooks(bench: Bench) -> None:
    """Every name we wrap is in the installed upstream, and goes back to what it was."""
    del bench
    import simpletuner.helpers.training.trainer  # noqa: F401 - upstream in its own order
    from gracetune_simpletuner.hooks import AfterImport, Installer
    from gracetune_simpletuner.points import HOOKS

    waiting = sorted({hook.target.partition(":")[0] for hook in HOOKS if hook.on_import})
    _check(not set(waiting) & set(sys.modules), f"already imported, so nothing would wait for it: {waiting}")
    names = [hook.target for hook in HOOKS if not hook.on_import]
    before = {name: _status_at(name) for name in names}
    installer = Installer()
    for hook in HOOKS:
        installer.wrap(hook, lambda original, *arguments, **options: original(*arguments, **options))
    failed = _why_not_imported(waiting)
    late = [] if failed else [hook.target for hook in HOOKS if hook.on_import]
    before |= {name: _status_at(name).__wrapped__ for name in late}
    for name, original in before.items():
        _check(_status_at(name) is not original, f"{name} was not wrapped")
    _check(len(installer.installed) == len(names) + len(late), f"{len(installer.installed)} of {len(HOOKS)} wrapped")
    installer.undo()
    for name, original in before.items():
        _check(_status_at(name) is original, f"{name} did not go back to what it was")
    _check(not any(isinstance(finder, AfterImport) for finder in sys.meta_path), "an import is still waited for")
    if failed:
        raise SkipError(f"{len(names)} of {len(HOOKS)} names are right; upstream itself cannot import {failed}")


def performance(bench: Bench, result: Path | None) -> None:
    """Seconds of both runs, side by side; a CPU says nothing about what unified memory gains, so nothing is judged."""
    del result
    plain = bench.run("pace-plain", steps=40)
    on = bench.run("pace-on", mode="overlay", steps=40, config=UNIFIED, dataset=STAGED)
    _check(on.losses == plain.losses, f"{on.losses}\n  expected {plain.losses}")
    print(f"40 steps, whole process: plain {plain.seconds:.1f} s, with the overlay {on.seconds:.1f} s")


def _summary(runs: Sequence[Run], without_cache: Sequence[Run]) -> dict[str, Any]:
    plain, *_, on = runs
    names = ("simpletuner", "torch", "torchvision", "diffusers", "transformers", "accelerate", "peft")
    return {
        "format": 1,
        "bench": "overlay-simpletuner",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "what": "10 steps of a tiny SDXL on a CPU: upstream plain, with the overlay idle, and with everything on",
        "command": "scripts/test_upstream_features.sh --level integration --result FILE",
        "neutralised_in_all_runs": "Tensor.pin_memory: upstream stops there without a GPU",
        "python": platform.python_version(),
        "machine": platform.machine(),
        "versions": {name: metadata.version(name) for name in names},
        "losses": {run.name: run.losses for run in runs},
        "losses_identical": all(run.losses == plain.losses for run in runs),
        "files_opened_while_training": {run.name: run.opened_in_training for run in runs},
        "overlay_counts": {feature: on.counts(feature) for feature in ("in_memory", "caches", "placement")},
        "without_vae_cache": {
            "losses": {run.name: run.losses for run in without_cache},
            "losses_identical": without_cache[0].losses == without_cache[1].losses,
            "files_opened_while_training": {run.name: run.opened_in_training for run in without_cache},
        },
    }


def _status_at(target: str) -> Any:
    """What a hook's target is at this moment, as it stands there: no descriptor is called."""
    from gracetune_simpletuner.hooks import Target

    parsed = Target.parse(target)
    found: Any = importlib.import_module(parsed.module)
    for part in (*parsed.owner, parsed.name):
        found = inspect.getattr_static(found, part)
    return found if parsed.key is None else found[parsed.key]


def _why_not_imported(modules: Sequence[str]) -> str | None:
    """The first that upstream cannot import here, and why."""
    for name in modules:
        try:
            importlib.import_module(name)
        except (ImportError, OSError, RuntimeError) as error:
            return f"{name}: {_first_line(error)}"
    return None


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _ended(command: list[str], folder: Path, environment: dict[str, str], log: IO[str]) -> int | None:
    """The exit code; None where it had to be ended, with all that it started."""
    import psutil  # of accelerate's

    process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        return process.wait(LONGEST_RUN_S)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            # Upstream puts its training into a session of its own, which the end of the command does not reach.
            command_itself = psutil.Process(process.pid)
            for one in (command_itself, *command_itself.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
            process.wait()


def _has_gpu() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def _check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise SystemExit(f"FAILED: {otherwise}")


def requirements() -> list[str]:
    """What an environment needs: upstream with the torch that its audio packages were built for, then ours."""
    ours = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    torch = ["torch==2.13.0", "torchvision==0.28.0"]
    return [f"simpletuner[cpu]=={UPSTREAM}", *torch, *(line for line in ours if not line.startswith("torch"))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scenario")
    parser.add_argument("work", nargs="?", type=Path)
    parser.add_argument("--name", default="diffusers")
    parser.add_argument("--result", type=Path)
    given = parser.parse_args()
    if given.scenario == "requirements":
        print("\n".join(requirements()))
        return 0
    bench = Bench(given.work)
    scenarios: dict[str, Callable[[], None]] = {
        "proof": lambda: proof(bench, given.result),
        "ramp": lambda: ramp(bench),
        "attention": lambda: attention(bench, given.name),
        "manual-validation": lambda: manual_validation(bench),
        "audio": lambda: audio(bench),
        "hooks": lambda: hooks(bench),
        "performance": lambda: performance(bench, given.result),
    }
    try:
        bench.prepare()
        os.chdir(given.work)  # upstream writes a debug.log wherever it is imported
        scenarios[given.scenario]()
    except SkipError as why:
        print(why)
        return SKIPPED
    return 0


if __name__ == "__main__":
    sys.exit(main())
