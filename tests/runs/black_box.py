"""Everything gracetune shows to the outside, as `scripts/record_black_box.py` records it: printed JSON, adapter files,
schemas, and a run that an earlier commit began.

Only the commands and public files are used, so that moving code needs no change here. A snapshot is a folder of JSON
files, one for each group of `GROUPS`: case -> what the command printed. `differences` compares two snapshots.

What is normalised, and why, is all in this place:

- `Work.normalised`: the folder of the snapshot is written `<work>` and the repository `<repo>`; both differ each time.
- `VARYING`: values that differ from run to run or between machines. Their type is kept, their value is not.
- `adapter_file`, `Work.normalised`: the date and the version of gracetune in an adapter's header.
- `OF_THIS_CPU`: values that hold for one kind of CPU only, as digests of trained weights do. They are compared where
  `cpu_probe` gives what it gave on the machine of the snapshot; elsewhere numbers are compared within `TOLERANCE`.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import os
import re
import runpy
import shutil
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
RECORDED = ROOT / "tests" / "golden" / "black_box"
PEERS = ROOT / "tests" / "golden" / "peers"
UPSTREAM = ROOT / "tests" / "golden" / "upstream"
MACHINES = ROOT / "tests" / "fixtures" / "machines"
TOLERANCE = 1e-4
"""Relative, for numbers that another kind of CPU computed: one that was seen differs by 1.8e-5 after two steps of
training. The recorded losses of `golden.py` have the same tolerance."""

Group = dict[str, Any]

VARYING: Mapping[str, str] = {
    r"/(first_)?seconds(_per_step)?$|/hours$|/cost$|_ms$|_s$|/preparation_s/": "a duration",
    r"/peak_bytes(/|$)|/(used|capacity)_bytes/": "the memory of this process and this machine",
    r"/plan/(verdict|summary)$": "the memory plan of a run is for the machine it runs on",
    r"/versions/|^/machine$|/(began|ended)$": "the machine, the time and the installed versions",
    r"/data_wait_share$|/counters/": "how far the loader was ahead, and how long it was waited for",
    r"/unavailable/": "which sensors this machine has",
    r"/size_bytes$": "a checkpoint's manifest holds times and versions, whose length varies",
    r"/file_difference$": "a rounding error of float32, far below what is compared",
}
"""Pattern of the path of a value inside a case -> why it varies."""

OF_THIS_CPU = re.compile(r"/(sha256|sshs_model_hash|sshs_legacy_hash|modelspec\.hash_sha256|encoder/weights)$")


# -- commands ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """A new folder in which commands run. Examples and images are copied there, so nothing is written elsewhere."""

    folder: Path
    models: Path
    """The folder of the tiny models, shared by all groups."""

    @classmethod
    def prepared(cls, folder: Path, models: Path) -> Work:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copytree(ROOT / "config", folder / "config")
        shutil.copytree(ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("extending"))
        return cls(folder.resolve(), models)

    def run(self, *arguments: str, script: str | None = None, **variables: str) -> Group:
        """`gracetune` with these arguments (or a script of the repository), in this process and this folder."""
        out, errors = io.StringIO(), io.StringIO()
        with (
            contextlib.chdir(self.folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors),
            changed_environment(variables), changed_arguments([script or "gracetune", *arguments]),
        ):  # fmt: skip
            code = _exit_code(script, arguments)
        printed = out.getvalue()
        with contextlib.suppress(json.JSONDecodeError):
            return {"exit": code, "json": self.normalised(json.loads(printed))}
        return {"exit": code, "out": self.lines(printed), "errors": self.lines(errors.getvalue())}

    def file(self, name: str, value: Any) -> str:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(value if isinstance(value, str) else json.dumps(value, indent=1), encoding="utf-8")
        return name

    def lines(self, text: str) -> list[str]:
        return [self._text(line.rstrip()) for line in text.splitlines() if line.strip()]

    def normalised(self, value: Any, path: str = "") -> Any:
        if any(re.search(pattern, path) for pattern in VARYING) and not isinstance(value, dict | list):
            return f"<{type(value).__name__}>"
        if path.endswith("/modelspec.date"):
            return "<date>"
        if isinstance(value, dict):
            return {self._text(key): self.normalised(inner, f"{path}/{key}") for key, inner in value.items()}
        if isinstance(value, list):
            return [self.normalised(inner, f"{path}[{number}]") for number, inner in enumerate(value)]
        return self._text(value) if isinstance(value, str) else value

    def _text(self, text: str) -> str:
        return text.replace(str(self.folder), "<work>").replace(str(ROOT), "<repo>")


def _exit_code(script: str | None, arguments: Sequence[str]) -> int:
    from gracetune.cli.main import main

    try:
        if script is None:
            main([*arguments])
        else:
            runpy.run_path(str(ROOT / script), run_name="__main__")
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


@contextlib.contextmanager
def changed_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Restore the environment: a command may also remove variables."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def changed_arguments(words: list[str]) -> Iterator[None]:
    before, sys.argv = sys.argv, words
    try:
        yield
    finally:
        sys.argv = before


# -- configuration files ----------------------------------------------------------------------------------------------


class Shown:
    """`config show --json`, reduced to the differences from one small config that is recorded completely."""

    def __init__(self, work: Work, base: str = "config/examples/minimal.json") -> None:
        self._work = work
        self.base = self._shown(base, {})
        self._leaves = leaves(self.base["json"])

    def _shown(self, file: str, variables: Mapping[str, str], *options: str) -> Group:
        """Omit the file's name from origins, because most values come from the file."""
        found = self._work.run("config", "show", file, *options, "--json", **variables)
        return {**found, "json": _replaced(found["json"], file, "<file>")}

    def of(self, file: str, *options: str, **variables: str) -> Group:
        found = self._shown(file, variables, *options)
        if "config" not in found["json"]:
            return found
        now = leaves(found["json"])
        changed = {path: value for path, value in now.items() if value != self._leaves.get(_first(path), ABSENT)}
        expected = {_first(path) for path in self._leaves}
        absent = sorted(expected - {_first(path) for path in now})
        return {"exit": found["exit"], "changed": changed, "absent": absent}


ABSENT = "<absent>"


def _replaced(value: Any, old: str, new: str) -> Any:
    return json.loads(json.dumps(value).replace(json.dumps(old)[1:-1], new))


def _first(path: str) -> str:
    """Every dataset and every prompt is compared with the first one of the small config."""
    return re.sub(r"\[\d+\]", "[0]", path)


def leaves(value: Any, path: str = "") -> dict[str, Any]:
    """Path -> value of every leaf."""
    inner: Iterator[tuple[str, Any]]
    if isinstance(value, dict) and value:
        inner = ((f"{path}/{key}", one) for key, one in value.items())
    elif isinstance(value, list) and value:
        inner = ((f"{path}[{number}]", one) for number, one in enumerate(value))
    else:
        return {path: value}
    return {name: leaf for place, one in inner for name, leaf in leaves(one, place).items()}


def example_files(work: Work) -> list[str]:
    found = [*(work.folder / "examples").glob("*.*"), *(work.folder / "config").rglob("*.json")]
    return sorted(str(path.relative_to(work.folder)) for path in found if path.is_file() and path.name != "index.json")


def examples(work: Work) -> Group:
    """Every example of the repository: resolved, written in our own dialect, and checked."""
    shown, files = Shown(work), example_files(work)
    found: Group = {"base": shown.base}
    for name in files:
        found[f"config show {name}"] = shown.of(name)
    text = work.run("config", "show", "examples/wan22_dual_expert_lokr.yaml")
    found["config show, as text"] = text
    found["config check --no-paths"] = work.run("config", "check", *files, "--no-paths", "--json")
    elsewhere = ("--set", "datasets[0].path=nowhere/at/all")
    found["config check"] = work.run("config", "check", "config/examples/minimal.json", "--json")
    found["config check, no such folder"] = work.run(
        "config", "check", "config/examples/minimal.json", *elsewhere, "--json"
    )
    name = "examples/gh200_in_memory.json"
    found["--set"] = shown.of(name, "--set", "training.max_steps=7", "--set", "adapter.kind=dora")
    found["variables of the GH200 guide"] = shown.of(
        name, GH200_UVM_OVERSUBSCRIPTION_RATIO="1.5", SIMPLETUNER_GH200_ENABLE_UVM_HINTS="1"
    )
    found["the allocator's variable"] = shown.of(
        name, PYTORCH_CUDA_ALLOC_CONF="use_uvm:True,uvm_oversubscription_ratio:2.0,uvm_access_pattern:gpu_first"
    )
    return found


def aitoolkit(work: Work) -> Group:
    """The jobs that ai-toolkit, its web interface and its forks publish."""
    shown = Shown(work)
    found: Group = {}
    for peer in json.loads((PEERS / "aitoolkit.json").read_text(encoding="utf-8")):
        job = work.file("aitoolkit/job.json", peer["keys"])
        found[peer["name"]] = shown.of(job)
        if found[peer["name"]]["exit"]:
            found[f"{peer['name']} --allow-unsupported"] = shown.of(job, "--allow-unsupported")
    return found


def simpletuner(work: Work) -> Group:
    """The configs that SimpleTuner publishes for our families, with datasets of a hub and of a folder."""
    shown = Shown(work)
    found: Group = {}
    for number, peer in enumerate(json.loads((PEERS / "simpletuner.json").read_text(encoding="utf-8"))):
        folder = f"simpletuner/{number}"
        for name, data in peer["files"].items():
            work.file(f"{folder}/{name}.json", data)
        config = work.file(f"{folder}/config.json", peer["keys"])
        found[peer["name"]] = shown.of(config)
        if "data_backend_config" in peer["files"]:
            local = [_in_a_folder(entry) for entry in peer["files"]["data_backend_config"]]
            work.file(f"{folder}/data_backend_config.json", local)
        found[f"{peer['name']}, a folder"] = shown.of(config, "--allow-unsupported")
    return found


def _in_a_folder(entry: dict[str, Any]) -> dict[str, Any]:
    if entry.get("type") != "huggingface":
        return entry
    of_the_hub = ("dataset_name", "huggingface", "metadata_backend")
    kept = {key: value for key, value in entry.items() if key not in of_the_hub}
    captions = "textfile" if entry.get("caption_strategy") == "huggingface" else entry.get("caption_strategy")
    return {**kept, "type": "local", "instance_data_dir": "datasets/{id}", "caption_strategy": captions}


VALUES = (2, "text")


def aitoolkit_keys(work: Work) -> Group:
    """Every key that ai-toolkit reads, with values of two types."""
    shown = Shown(work, work.file("aitoolkit/base.json", _job_with("train", "steps", 100)))
    found: Group = {"base": shown.base}
    for block, keys in json.loads((PEERS / "aitoolkit_keys.json").read_text(encoding="utf-8")).items():
        for key in keys:
            for value in VALUES:
                job = work.file("aitoolkit/key.json", _job_with(block, key, value))
                found[f"{block}.{key}={value}"] = _in_short(shown.of(job))
    return found


def _job_with(block: str, key: str, value: Any) -> dict[str, Any]:
    process: dict[str, Any] = {
        "type": "diffusion_trainer",
        "training_folder": "output",
        "network": {"type": "lora", "linear": 16, "linear_alpha": 16},
        "datasets": [{"folder_path": "/data/cats", "resolution": [512]}],
        "train": {"steps": 100, "noise_scheduler": "flowmatch", "dtype": "bf16", "lr": 1e-4},
        "model": {"name_or_path": "Wan-AI/Wan2.2-T2V-A14B-Diffusers", "arch": "wan22_14b"},
        "sample": {"sample_every": 50, "samples": [{"prompt": "a cat"}]},
    }
    places: dict[str, dict[str, Any]] = {
        "process": process,
        "datasets": process["datasets"][0],
        "samples": process["sample"]["samples"][0],
        "ema_config": process["train"].setdefault("ema_config", {}) if block == "ema_config" else {},
    }
    place = places.get(block)
    (process.setdefault(block, {}) if place is None else place)[key] = value
    return {"job": "extension", "config": {"name": "cats", "process": [process]}}


def simpletuner_keys(work: Work) -> Group:
    """Every option of SimpleTuner, with its default and values of two types."""
    good = {
        "model_family": "wan", "model_flavour": "t2v-480p-14b-2.1", "model_type": "lora", "output_dir": "output/run",
        "optimizer": "adamw_bf16", "max_train_steps": 100, "num_train_epochs": 0,
        "data_backend_config": "simpletuner/datasets.json",
    }  # fmt: skip
    datasets = [
        {"id": "stills", "instance_data_dir": "data/stills", "caption_strategy": "textfile"},
        {"id": "texts", "dataset_type": "text_embeds", "default": True, "cache_dir": "cache/text"},
    ]
    work.file("simpletuner/datasets.json", datasets)
    shown = Shown(work, work.file("simpletuner/base.json", good))
    found: Group = {"base": shown.base}
    options = json.loads((PEERS / "simpletuner_options.json").read_text(encoding="utf-8"))["options"]
    for key, default in options.items():
        for value in dict.fromkeys(map(json.dumps, (default, *VALUES))):
            config = work.file("simpletuner/key.json", {**good, key: json.loads(value)})
            found[f"{key}={value}"] = _in_short(shown.of(config))
    return found


def _in_short(found: Group) -> list[str]:
    """One line for each problem, or for each value that differs."""
    if "changed" in found:
        return [f"{path}: {json.dumps(value, ensure_ascii=False)}" for path, value in found["changed"].items()]
    problems = found["json"]["problems"]
    return [
        "refused",
        *(" | ".join(f"{one[part]}" for part in ("key", "found", "expected", "hint")) for one in problems),
    ]


# -- commands that need no model --------------------------------------------------------------------------------------


def machines(work: Work) -> Group:
    """The output of `doctor` for each recorded machine, and of `estimate` on it."""
    found: Group = {}
    for folder in sorted(path for path in MACHINES.iterdir() if path.is_dir()):
        report = f"{folder.name}.json"
        found[f"doctor {folder.name}"] = work.run(
            "doctor", "--from-recording", str(folder), "--json", "--output", report
        )
        found[f"estimate for {folder.name}"] = work.run(
            "estimate", "examples/wan22_dual_expert_lokr.yaml", "--machine", report, "--json"
        )
    return found


def estimates(work: Work) -> Group:
    """Every example, every adapter, several processes."""
    found: Group = {}
    for machine in ("gh200-numa", "x86-h200"):
        report = f"{machine}.json"
        work.run("doctor", "--from-recording", str(MACHINES / machine), "--output", report)
        for name in example_files(work):
            found[f"{name} on {machine}"] = work.run("estimate", name, "--machine", report, "--json")

    def wan(*options: str) -> Group:
        return work.run("estimate", "examples/wan22_dual_expert_lokr.yaml", "--machine", report, "--json", *options)

    for kind in KINDS:
        setting = ("--set", f"adapter.kind={kind}", "--set", "adapter.full_rank=false", "--set", "adapter.factor=-1")
        found[f"adapter {kind}"] = wan(*setting)
    for name in ("adamw", "adamw_8bit", "lion", "automagic"):
        found[f"optimizer {name}"] = wan("--set", f"optimizer.name={name}", "--set", "optimizer.options={}")
    for precision in ("fp32", "bf16", "fp8"):
        found[f"precision {precision}"] = wan("--set", f"model.base_precision={precision}")
    for place in ("unified_memory", "memory", "disk"):
        found[f"latents in {place}"] = wan("--set", f"cache.vae_cache_type={place}", "--samples", "5000")
    found["8 processes"] = wan("--processes", "8")
    found["8 processes, FSDP"] = wan("--processes", "8", "--fsdp")
    return found


def tools(work: Work) -> Group:
    """overlay check, baseline compare, data show, bench's names, and errors."""
    found: Group = {}
    for upstream, version in (("simpletuner", "3.1.6"), ("simpletuner", "4.10.1"), ("ai-toolkit", "0.2.7")):
        path = UPSTREAM / f"{upstream}-{version}.json"
        found[f"overlay check {path.stem}"] = work.run("overlay", "check", upstream, "--source", str(path), "--json")
    work.file("before/baseline.json", _baseline(100.0))
    work.file("after/baseline.json", _baseline(110.0))
    found["baseline compare"] = work.run("baseline", "compare", "before", "after", "--json")
    found["baseline compare, as text"] = work.run("baseline", "compare", "before", "after")
    found["data show"] = work.run("data", "show", "config/examples/minimal.json", "--no-sheets", "--json")
    found["data show, sheets"] = work.run(
        "data", "show", "config/examples/minimal.json", "--output", "sheets", "--json"
    )
    found["bench, an unknown name"] = work.run("bench", "wan15b", "--json")
    found["train, no such file"] = work.run("train", "missing.yaml", "--json")
    small = "config/examples/minimal.json"
    found["train, no such folder"] = work.run("train", small, "--set", "datasets[0].path=nowhere/at/all", "--json")
    found["train, --resume without a value"] = work.run("train", small, "--resume", "", "--json")
    found["train.py, flags it does not know"] = work.run(
        "--max_train_step", "10", "--log-level", "loud", script="train.py"
    )
    wrong = {"gracetune": 1, "name": "x", "trainin": {}, "model": {"family": "wann"}, "adapter": {"rank": "many"}}
    found["config check, mistakes"] = work.run("config", "check", work.file("wrong.json", wrong), "--json")
    found["config check, no JSON"] = work.run("config", "check", work.file("torn.json", '{"name": '), "--json")
    found["validate-now, no run"] = work.run("validate-now", "missing")
    found["adapter inspect, no adapter"] = work.run("adapter", "inspect", "wrong.json", "--json")
    found["adapter convert, no format"] = work.run("adapter", "convert", "wrong.json", "--json")
    return found


def _baseline(ms: float) -> dict[str, Any]:
    return {
        "format": "gracetune-baseline", "version": 1, "name": "tiny", "date": "2026-01-01T00:00:00+00:00",
        "versions": {"torch": "2.13.0"}, "environment": {},
        "hardware": {"cpu": "a CPU", "cores": 2, "threads": 1, "profile": "cpu"}, "machine": {}, "device": "cpu",
        "config_fingerprint": "abc", "config": {"model.family": "flux", "training.batch_size": 1},
        "steps": {"warm_up": 10, "ms": [ms] * 30, "samples": [2] * 30, "data_wait_ms": [0.5] * 30},
        "throughput_samples_per_s": 2000 / ms, "compile_s": 1.0, "duration_s": 5.0,
        "memory": {"peak_bytes": {"host": 1 << 30}, "owners_bytes": {"host": {"other": 1 << 30}}},
        "counters": {"cache.latents.hit_rate": 1.0}, "unavailable": {"uvm.stage": "not open"},
        "final_losses": {"": 0.5}, "nvidia_smi": "not available: no nvidia-smi on the PATH",
        "probe": {"what": "a product on cpu", "gemm_ms": [10.0] * 5, "copy_ms": [5.0] * 5},
    }  # fmt: skip


def schemas(work: Work) -> Group:
    """The JSON Schema of a config, and that of an event as docs/events.md prints it; another test holds that page to
    the code."""
    page = (ROOT / "docs" / "events.md").read_text(encoding="utf-8")
    return {
        "config schema": work.run("config", "schema")["json"],
        "event schema": json.loads(page.rpartition("```json\n")[2].rpartition("```")[0]),
    }


# -- runs on tiny models ----------------------------------------------------------------------------------------------

KINDS = ("lora", "dora", "lokr", "loha", "locon", "ia3", "diag_oft", "full_delta", "full_finetune")
FORMATS = ("comfyui", "diffusers", "kohya", "lycoris")
FLAVOURS = {"sdxl": "base-1.0", "wan": "t2v-14b-2.2", "flux": "dev", "qwen_image": "t2i", "stable_audio": "open-1.0"}
EVERYDAY_KINDS: Mapping[str, Mapping[str, Any]] = {
    "lora": {"kind": "lora", "conv_rank": 2},
    "lokr": {"kind": "lokr"},
}
OTHER_KINDS: Mapping[str, Mapping[str, Any]] = {
    "dora": {"kind": "dora"},
    "lokr, full rank": {"kind": "lokr", "full_rank": True, "factor": 4},
    "lokr, both decomposed": {"kind": "lokr", "rank": 2, "decompose_both": True, "conv_rank": 2},
    "loha": {"kind": "loha", "conv_rank": 2, "conv_alpha": 1.0},
    "locon": {"kind": "locon", "alpha": 2.0, "conv_rank": 2},
    "ia3": {"kind": "ia3"},
    "diag_oft": {"kind": "diag_oft", "rank": 4},
    "full_delta": {"kind": "full_delta"},
    "full_finetune": {"kind": "full_finetune"},
    "by module": {"kind": "lokr", "by_module": {"Attention": {"algo": "loha", "dim": 2}}},
}


def model(work: Work, family: str) -> str:
    """The tiny model, built from a seed."""
    from gracetune.testing.tiny_models import cached

    if not (work.folder / "models" / family).exists():
        shutil.copytree(cached(family, FLAVOURS[family], work.models), work.folder / "models" / family)
    return f"models/{family}"


def images(folder: Path, count: int = 4, size: int = 64) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        pixels = np.random.default_rng(number).integers(0, 255, (size // 8, size // 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((size, size), Image.Resampling.NEAREST).save(folder / f"{number:02}.png")
        (folder / f"{number:02}.txt").write_text(f"image number {number}")


def config_of(work: Work, family: str, name: str, **sections: Any) -> str:
    """A config file on generated images, in float32: numbers are compared."""
    if not (work.folder / "pictures").exists():
        images(work.folder / "pictures")
    values: dict[str, Any] = {
        "gracetune": 1,
        "name": "tiny",
        "output_dir": f"runs/{name}",
        "model": {
            "family": family, "flavour": FLAVOURS[family], "path": model(work, family), "base_precision": "fp32"
        },
        "datasets": [{"id": "pictures", "path": "pictures", "resolution": 64.0}],
        "adapter": {"kind": "lora", "rank": 4},
        "cache": {"cache_dir": f"caches/{family}"},
        "training": {"max_steps": 2, "mixed_precision": "fp32", "seed": 3},
        "optimizer": {"lr": 1e-3},
        "checkpoints": {"every_steps": None, "format": "comfyui"},
        "logging": {"every_steps": 1},
    }  # fmt: skip
    for section, changes in sections.items():
        values[section] = {**values.get(section, {}), **changes} if isinstance(changes, dict) else changes
    return work.file(f"configs/{name}.json", values)


def adapter_file(path: Path) -> Group:
    """An adapter's file: its header, the layout of its tensors, and digests of their bytes."""
    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    layout = json.loads(raw[8 : 8 + size])
    header = {name: _header_value(name, value) for name, value in layout.pop("__metadata__", {}).items()}
    places = [[name, one["dtype"], one["shape"], one["data_offsets"]] for name, one in layout.items()]
    return {
        "header": header,
        "tensors": len(layout),
        "layout": digest(json.dumps(places).encode()),
        "sha256": digest(raw[8 + size :]),
        "norm": math.sqrt(sum(_square_sum(raw[8 + size :], one) for one in layout.values())),
    }


def _header_value(name: str, value: str) -> str:
    if name == "modelspec.date":
        return "<date>"
    return re.sub(r'"gracetune": "[^"]+"', '"gracetune": "<version>"', value)


def _square_sum(data: bytes, tensor: Mapping[str, Any]) -> float:
    """The norm of a floating-point tensor; 0 for other types."""
    kinds: Mapping[str, Any] = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16}
    if tensor["dtype"] not in kinds:
        return 0.0
    found = np.frombuffer(data[slice(*tensor["data_offsets"])], kinds[tensor["dtype"]])
    if tensor["dtype"] == "BF16":
        found = (found.astype(np.uint32) << 16).view(np.float32)
    return float(np.square(found.astype(np.float64)).sum())


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def trained(work: Work, config: str, *options: str) -> tuple[Group, list[Path]]:
    """`gracetune train --json`, and the adapters it wrote."""
    done = work.run("train", config, "--json", *options)
    return done, written(work, done)


def written(work: Work, done: Group) -> list[Path]:
    if done["exit"]:
        raise AssertionError(f"the run did not end well: {done}")
    return [Path(name.replace("<work>", str(work.folder))) for name in done["json"]["files"]]


def converted(work: Work, file: Path, name: str) -> Group:
    """One adapter: inspected, verified, and converted to every format."""
    source = str(file.relative_to(work.folder))
    found: Group = {
        "file": adapter_file(file),
        "inspect": work.run("adapter", "inspect", source, "--json"),
    }
    for to in FORMATS:
        output = f"converted/{name}-{to}.safetensors"
        done = work.run("adapter", "convert", source, "--to", to, "--output", output, "--json")
        found[to] = {"printed": done, **_written(work, output)}
    output = f"converted/{name}-as-lora.safetensors"
    options = ("--to", "comfyui", "--lora-rank", "2", "--dtype", "bf16")
    found["as a LoRA"] = work.run("adapter", "convert", source, *options, "--output", output, "--json")
    return found


def _written(work: Work, output: str) -> Group:
    path = work.folder / output
    files = sorted(path.rglob("*.safetensors")) if path.is_dir() else [path] if path.is_file() else []
    return {f"file {one.relative_to(work.folder)}": adapter_file(one) for one in files}


def _adapters(work: Work, kinds: Mapping[str, Mapping[str, Any]]) -> Group:
    """Adapters of a tiny SDXL, which has convolutions, trained for two steps and written in every format."""
    found: Group = {}
    for title, adapter in kinds.items():
        name = re.sub(r"\W+", "-", title)
        done = work.run("train", config_of(work, "sdxl", name, adapter=adapter), "--json")
        found[title] = {"train": done}
        if done["exit"]:  # ComfyUI, the default, does not know every algorithm
            other = {"format": "lycoris", "every_steps": None}
            done = found[title]["train, lycoris"] = work.run(
                "train", config_of(work, "sdxl", name, adapter=adapter, checkpoints=other), "--json"
            )
        files = written(work, done)
        if adapter["kind"] != "full_finetune":
            found[title] |= converted(work, files[0], name)
            source = str(files[0].relative_to(work.folder))
            found[title]["verify"] = work.run("adapter", "verify", source, "--model", "models/sdxl", "--json")
        else:
            found[title] |= {f"file {one.name}": adapter_file(one) for one in files if one.suffix == ".safetensors"}
    return found


def adapters(work: Work) -> Group:
    """A LoRA and a LoKr of a tiny SDXL."""
    return _adapters(work, EVERYDAY_KINDS)


def more_adapters(work: Work) -> Group:
    """The other algorithms, and a LoRA of every other family."""
    found = _adapters(work, OTHER_KINDS)
    for family in ("wan", "flux", "qwen_image"):
        _, files = trained(work, config_of(work, family, f"family-{family}"))
        for file in files:
            found[f"{family} {file.stem}"] = converted(work, file, f"{family}-{file.stem}")
    merged = work.run(
        "adapter", "convert", "runs/lokr-full-rank/tiny.safetensors", "--merge-into", "models/sdxl", "--output",
        "merged", "--json",
    )  # fmt: skip
    found["merged"] = {"printed": merged, **_written(work, "merged")}
    return found


def commands(work: Work) -> Group:
    """cache build, audit and clear, train and its dry run: around one run on a tiny SDXL."""
    config = config_of(work, "sdxl", "commands", cache={"cache_dir": "caches/commands"})
    found: Group = {}
    for words in (
        ("cache", "audit"), ("cache", "build"), ("cache", "build"), ("cache", "audit"), ("data", "show", "--no-sheets"),
        ("train", "--dry-run", "--price-per-hour", "3.5"), ("train",), ("train",), ("cache", "clear", "--damaged"),
        ("cache", "clear"),
    ):  # fmt: skip
        command, options = words[: 1 if words[0] == "train" else 2], words[1 if words[0] == "train" else 2 :]
        found[f"{len(found) + 1}. {' '.join(words)}"] = work.run(*command, config, *options, "--json")
    out = work.folder / "runs" / "commands"
    found["events"] = events(work, out)
    report = json.loads((out / "report.json").read_text())
    found["report"] = work.normalised(report | {"plan": sorted(report["plan"])})
    found["files"] = sorted(_file_name(path.relative_to(out)) for path in out.rglob("*") if path.is_file())
    return found


def benches(work: Work) -> Group:
    """Results of measurements: which figures there are. Their values, and the variables of the environment, are this
    machine's."""
    config = config_of(work, "sdxl", "measured")
    measured = {
        "bench sdxl --smoke": work.run("bench", "sdxl", "--smoke", "--steps", "2", "--json"),
        "baseline capture": work.run("baseline", "capture", config, "--steps", "8", "--json"),
    }
    figures = {name: sorted({_first(path) for path in leaves(done["json"])}) for name, done in measured.items()}
    return {
        name: {"exit": done["exit"], "figures": [one for one in figures[name] if not one.startswith("/environment/")]}
        for name, done in measured.items()
    }


def events(work: Work, out: Path) -> list[Any]:
    """The run's log. Memory samples and plans, which depend on the machine, are reduced to the names they have."""
    found = [json.loads(line) for line in (out / "logs" / "events.jsonl").read_text().splitlines()]
    return [
        {"kind": one["kind"], "fields": sorted(one)}
        if one["kind"] in ("MemorySampled", "Planned")
        else work.normalised(one)
        for one in found
    ]


def _file_name(path: Path) -> str:
    """Shards are named at random; TensorBoard's logs after the time, the host and the process."""
    name = re.sub(r"/[0-9a-f]{32}\.safetensors", "/<shard>.safetensors", path.as_posix())
    return re.sub(r"(events\.out\.tfevents)\..*", r"\1.<time>", name)


# -- a run that an earlier commit began -------------------------------------------------------------------------------

STEPS_BEFORE, STEPS_AFTER = 4, 8
RUNS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "wan-lokr-automagic": (
        "wan",
        {
            "adapter": {"kind": "lokr", "rank": 4, "dropout": 0.1},
            "optimizer": {"name": "automagic", "lr": 1e-4},
            "training": {
                "batch_size": 2,
                "ema": {"enabled": True, "decay": 0.9},
                "ramp": {
                    "enabled": True,
                    "initial_effective_batch_size": 1,
                    "target_effective_batch_size": 4,
                    "batch_rampup_steps": 6,
                },
            },
            "model": {"switch_experts_every": 2},
            "objective": {"noise_offset": 0.1, "noise_offset_probability": 0.5},
        },
    ),
    "sdxl-dora-adamw": (
        "sdxl",
        {
            "adapter": {"kind": "dora", "rank": 2},
            "training": {"gradient_accumulation_steps": 2},
            "schedule": {"name": "constant_with_warmup", "warmup_steps": 3},
        },
    ),
}
NOT_KEPT = ("gracetune-fingerprints.json", "report.html", "report.json", "tensorboard", "*.lock")
"""Of a run that is committed: what is known of files by their place on a disk, reports, logs named after the host."""


def begin_run(work: Work, name: str) -> None:
    """Train the first steps, and keep config, images, cache and run folder as files of the repository."""
    family, sections = RUNS[name]
    training = {**sections.get("training", {}), "max_steps": STEPS_BEFORE}
    rest = {**sections, "training": training, "cache": {"cache_dir": f"runs/{name}/cache"}}
    trained(work, config_of(work, family, name, **rest))
    target = RECORDED / "runs" / name
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(work.folder / "runs" / name, target / "runs" / name, ignore=shutil.ignore_patterns(*NOT_KEPT))
    shutil.copytree(work.folder / "pictures", target / "pictures")
    (target / "configs").mkdir()
    shutil.copy(work.folder / "configs" / f"{name}.json", target / "configs")


def resume_run(work: Work, name: str) -> Group:
    """Copy the committed run and train it further, like a user who moved the folder."""
    family, _ = RUNS[name]
    current = Work((work.folder / "resumed" / name).resolve(), work.models)
    shutil.copytree(RECORDED / "runs" / name, current.folder)
    model(current, family)
    config, out = f"configs/{name}.json", current.folder / "runs" / name
    audit = current.run("cache", "audit", config, "--json")
    shards = _shards(out)
    options = ("--resume", "latest", "--max-steps", str(STEPS_AFTER))
    # The built weights can differ in their last bits on another kind of CPU: then it is a run on other weights.
    done, files = trained(current, config, *options, *(() if audit["exit"] == 0 else ("--allow-other-run",)))
    return {
        "cache audit": audit,
        "cache entries are used, not made again": _shards(out) == shards,
        "train": done,
        "steps": steps(out),
        "adapters": {file.name: adapter_file(file) for file in files},
        "checkpoint": {
            path.name: {**adapter_file(path), "norm": "not compared"}  # signs of gradients may differ between CPUs
            for path in sorted((out / "checkpoints" / f"checkpoint-{STEPS_AFTER}").glob("*.safetensors"))
        },
        "inspect": current.run("adapter", "inspect", str(files[0].relative_to(current.folder)), "--json"),
    }


def _shards(out: Path) -> dict[str, str]:
    return {str(path): digest(path.read_bytes()) for path in sorted((out / "cache").glob("*/shards/*.safetensors"))}


def steps(out: Path) -> list[Group]:
    """The expert and the loss of every optimizer step."""
    kept = ("step", "epoch", "stage", "loss", "grad_norm", "lr", "samples", "micro_batch", "accumulation")
    found = [json.loads(line) for line in (out / "logs" / "events.jsonl").read_text().splitlines()]
    return [{name: one[name] for name in kept} for one in found if one["kind"] == "StepDone"]


def uninterrupted_steps(work: Work, name: str) -> list[Group]:
    """The same run without an interruption."""
    family, sections = RUNS[name]
    training = {**sections.get("training", {}), "max_steps": STEPS_AFTER}
    trained(work, config_of(work, family, f"{name}-whole", **{**sections, "training": training}))
    return steps(work.folder / "runs" / f"{name}-whole")


def resumed(work: Work) -> Group:
    """The committed runs, resumed."""
    return {name: resume_run(work, name) for name in RUNS}


# -- snapshots --------------------------------------------------------------------------------------------------------

EVERYDAY: tuple[Callable[[Work], Group], ...] = (
    examples, aitoolkit, simpletuner, machines, tools, schemas, adapters, commands, resumed,
)  # fmt: skip
FULL: tuple[Callable[[Work], Group], ...] = (aitoolkit_keys, simpletuner_keys, estimates, more_adapters, benches)
GROUPS = {group.__name__: group for group in (*EVERYDAY, *FULL)}


def cpu_probe() -> str:
    """A digest of the results of typical operations of models on this CPU with this torch."""
    import torch
    from torch.nn import functional

    generator = torch.Generator().manual_seed(0)
    one, two = (torch.randn(1, 8, 96, 96, generator=generator) for _ in range(2))
    results = (
        one, one @ two, one.softmax(-1), functional.layer_norm(one, (96,)), functional.gelu(one), functional.silu(one),
        functional.conv2d(one, two[:, :, :3, :3].expand(4, -1, -1, -1).contiguous(), padding=1), one.exp(),
        functional.scaled_dot_product_attention(one, two, one), torch.linalg.svdvals(one), one.sum(-1), one.rsqrt(),
    )  # fmt: skip
    return digest(b"".join(result.contiguous().numpy().tobytes() for result in results))


def record(name: str, work: Work) -> Group:
    return {"cpu_probe": cpu_probe(), "cases": json.loads(json.dumps(GROUPS[name](work)))}


def write(name: str, found: Group) -> None:
    RECORDED.mkdir(parents=True, exist_ok=True)
    text = json.dumps(found, indent=1, ensure_ascii=False) + "\n"
    (RECORDED / f"{name}.json").write_text(text, encoding="utf-8")


def read(name: str) -> Group:
    found: Group = json.loads((RECORDED / f"{name}.json").read_text(encoding="utf-8"))
    return found


def differences(before: Group, now: Group) -> list[str]:
    """A line for each value that differs, with its case and its path. Where the CPU is of another kind than the
    snapshot's, numbers are compared within `TOLERANCE` and digests of what it computed are not."""
    exact = before["cpu_probe"] == now["cpu_probe"]
    old, new = leaves(before["cases"]), leaves(now["cases"])
    found = []
    for path in dict.fromkeys([*old, *new]):
        one, two = old.get(path, ABSENT), new.get(path, ABSENT)
        if not (one == two if exact else close(path, one, two)):
            found.append(f"{path}: {_shown(one)} -> {_shown(two)}")
    return found


def close(path: str, one: Any, two: Any) -> bool:
    if OF_THIS_CPU.search(path):
        return type(one) is type(two)
    if isinstance(one, float) and isinstance(two, float):
        return math.isclose(one, two, rel_tol=TOLERANCE, abs_tol=1e-7)
    return bool(one == two)


def _shown(value: Any) -> str:
    return ABSENT if value == ABSENT else json.dumps(value, ensure_ascii=False)
