"""Whole runs with every memory mechanism at work, each beside a plain twin: equal losses, counters, no host sync.

python benchmarks/whole_runs.py --output benchmarks/results/whole-runs-NAME.json
python benchmarks/whole_runs.py --only caches | experts | overflow

    caches      staging in memory, latent and text caches in managed memory with hints, look-ahead, CUDA graphs, several
                buckets, generated samples, checkpoints; beside local files, caches on disk, no hints, no CUDA graphs
    experts     two experts that take turns without room for both, several buckets, a batch ramp, stopped by SIGTERM in
                the middle of an expert's turn and resumed; beside resident experts without interruption
    overflow    the overflow arena on a GPU made small: memory stages 1, 2 and 1, a reclamation; beside a GPU of its
                full size

Every run is the command `gracetune train CONFIG` in a process of its own, on a small model with random weights and
generated images, with `training.deterministic`. Where a run needs something no user would type, the command is called
in a process that was prepared for it (`Preparation`): synchronizing operations inside a step are counted there, memory
is limited by `set_per_process_memory_fraction`, and experts are parked although they fit. At most 4 GiB of managed
memory, never real oversubscription. --smoke runs tiny models, on a CPU too.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Literal, TextIO

import numpy as np
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file

from gracetune.bench.results import result_of, write_result
from gracetune.bench.row import BenchRow
from gracetune.cli.bench import print_rows
from gracetune.cli.console import out
from gracetune.errors import GracetuneError
from gracetune.hardware import probe
from gracetune.models.tiny import build
from gracetune.telemetry.events import CheckpointWritten, MemorySampled, RunEnded, RunStarted, StepDone, ValidationDone
from gracetune.telemetry.sinks.jsonl import read_log
from gracetune.units import MIB

SECONDS: Final = 150
"""After which a run is ended: a scenario is to take at most 90."""
WAITING: Final = 140
"""Seconds after which a run writes the stack of every thread to its log, again and again."""
INTERRUPTED: Final = 3
"""The exit code of a run that was asked to stop and saved its state."""
SYNC: Final = "called a synchronizing CUDA operation"
SHOWN: Final = ("CUDA graph", "overflow arena", "entries,", "experts:", "memory stage")
"""Words of the lines a run prints about what it decided; a result keeps these lines."""
SECOND_HALF: Final = "-- second half of the steps: from here on nothing may synchronize --"
ROOM: Final = 1.35
"""Times what small batches need: so large a GPU is left for the overflow scenario, as in `bench/overflow.py`."""

# -- what a scenario has to show --------------------------------------------------------------------------------------

Source = Literal["counter", "event", "fact"]


@dataclass(frozen=True)
class Evidence:
    """One mechanism, and where its trace is found. `least` is what counts as having happened."""

    mechanism: str
    source: Source
    name: str
    """A counter of the last MemorySampled event, an event's class, or a fact of `Facts`."""
    least: float = 1
    gpu: bool = True
    """Only a run on a GPU can show it."""


EVIDENCE: Final[Mapping[str, tuple[Evidence, ...]]] = {
    "caches": (
        Evidence("files staged in memory", "fact", "staged_bytes", gpu=False),
        Evidence("reads of staged files", "fact", "staged_reads", gpu=False),
        Evidence("latent cache in memory", "counter", "cache.latents.hits", gpu=False),
        Evidence("text cache in memory", "counter", "cache.texts.hits", gpu=False),
        Evidence("no read of a cache from disk", "counter", "cache.latents.hit_rate", gpu=False),
        Evidence("managed memory with hints", "counter", "uvm.hinted_bytes"),
        Evidence("look-ahead", "counter", "uvm.prefetched_bytes"),
        Evidence("steps captured as CUDA graphs", "counter", "cuda_graph.captures", 3),
        Evidence("steps replayed", "counter", "cuda_graph.replays", 20),
        Evidence("CUDA graphs replayed, by torch's own class", "fact", "graph_replays", 40),
        Evidence("several buckets", "fact", "shapes", 3, gpu=False),
        Evidence("generated samples", "event", "ValidationDone", 2, gpu=False),
        Evidence("checkpoints", "event", "CheckpointWritten", 2, gpu=False),
    ),
    "experts": (
        Evidence("experts take turns", "event", "StageSwitched", 4, gpu=False),
        Evidence("switches of parked experts", "fact", "expert_switches", 4),
        Evidence("experts brought behind a backward pass", "fact", "expert_followed_bytes"),
        Evidence("several buckets", "fact", "shapes", 3, gpu=False),
        Evidence("batch ramp", "event", "EffectiveBatchChanged", 2, gpu=False),
        Evidence("effective batch sizes", "fact", "effective_batches", 2, gpu=False),
        Evidence("resumed", "fact", "resumed_step", gpu=False),
    ),
    "overflow": (
        Evidence("arena reserved", "counter", "uvm.arena_reserved_bytes"),
        Evidence("arena used", "counter", "uvm.arena_peak_bytes", MIB),
        Evidence("changes of the memory stage", "counter", "uvm.transitions", 2),
        Evidence("changes of the memory stage, as events", "event", "MemoryStageChanged", 2),
        Evidence("light reclamations", "counter", "uvm.light_reclamations"),
        Evidence("reclamations, as events", "event", "MemoryReclaimed"),
        Evidence("arena use, as events", "event", "OverflowArenaChanged", 2),
        Evidence("several buckets", "fact", "shapes", 2, gpu=False),
    ),
}

# -- a run in a prepared process --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Preparation:
    """What is done to a process before the command runs in it."""

    watch: bool = False
    """Count synchronizing operations inside optimizer steps."""
    graphs: bool = True
    """False: no CUDA graphs, as where the GPU is never waiting for Python."""
    park: bool = False
    """Experts leave the GPU, and there is never room for both. A plan parks what does not fit, and these fit."""
    limit: int | None = None
    """Bytes torch may hold beside the overflow arena, from the first step on."""
    peaks: bool = False
    """Write down the most memory each step held."""
    stop_after: int | None = None
    """Optimizer steps after which the process gets SIGTERM, as from a scheduler."""


@dataclass
class Facts:
    """What a prepared process saw of its run."""

    steps: int = 0
    shapes: list[str] = field(default_factory=list)
    effective_batches: list[int] = field(default_factory=list)
    syncs: list[tuple[int, str]] = field(default_factory=list)
    """Optimizer step, and where."""
    peaks: list[int] = field(default_factory=list)
    """Bytes torch had reserved at most in each step."""
    limited_to: int | None = None
    staged_bytes: int = 0
    """Of the datasets in memory, as they lie there."""
    staged_reads: int = 0
    graph_captures: int = 0
    graph_replays: int = 0
    expert_switches: int = 0
    expert_followed_bytes: int = 0
    expert_waited_ms: float = 0.0


def run_prepared(preparation: Preparation, arguments: list[str], file: Path) -> int:
    """`gracetune ARGUMENTS` in this process, and what was seen of it in `file`."""
    from gracetune.cli.main import main as command

    facts = Facts()
    hosts = prepare(preparation, facts)
    faulthandler.dump_traceback_later(WAITING, repeat=True)  # the log of a run that does not end shows where it was
    try:
        command(arguments)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    for host in hosts:
        facts.expert_switches += host.switches.count
        facts.expert_followed_bytes += host.switches.followed_bytes
        facts.expert_waited_ms += host.switches.waited_ms
    file.write_text(json.dumps(asdict(facts)))
    return code


def prepare(requested: Preparation, facts: Facts) -> list[Any]:
    """The experts' hosts of the run end up in the list that is given back."""
    names = ("models.experts", "train.assembly", "train.loop", "train.cuda_graphs", "train.load")
    modules: list[Any] = [import_module(f"gracetune.{name}") for name in names]
    experts, assembly, loop, replay, load = modules
    for owner, name in (
        (replay.GraphDevice, "is_launch_bound"),
        (assembly, "choose_parking"),
        (experts, "device_room"),
    ):
        assert hasattr(owner, name), f"{owner} has no {name} to replace"  # on a CPU too, where not all are replaced
    hosts: list[Any] = []
    loop.run_step = _seen_step(requested, facts, loop.run_step)
    open_host = load.open_host

    def opened(*given: Any, **named: Any) -> Any:
        hosts.append(open_host(*given, **named))
        return hosts[-1]

    load.open_host = opened
    _count_graphs(facts)
    _count_staging(facts)
    if not requested.graphs:
        replay.GraphDevice.is_launch_bound = lambda self: False
    if requested.park and torch.cuda.is_available():
        choice = experts.ParkingChoice("pinned_copy", "pinned copy: requested by this benchmark")
        assembly.choose_parking = lambda *_, **__: choice
        experts.device_room = lambda device: lambda *, on_device, elsewhere: 0
    return hosts


def _count_graphs(facts: Facts) -> None:
    """Of torch's own class, so that it holds however the trainer calls it."""
    graph: Any = torch.cuda.CUDAGraph
    end, replay = graph.capture_end, graph.replay

    def capture_end(self: Any) -> None:
        end(self)
        facts.graph_captures += 1

    def replayed(self: Any) -> None:
        replay(self)
        facts.graph_replays += 1

    graph.capture_end, graph.replay = capture_end, replayed


def _count_staging(facts: Facts) -> None:
    from gracetune.data.backends.in_memory import InMemoryBackend

    backend: Any = InMemoryBackend
    read = backend.read

    def counted(self: Any, path: str) -> Any:
        facts.staged_reads += 1
        facts.staged_bytes = max(facts.staged_bytes, self.stored)
        return read(self, path)

    backend.read = counted


def _seen_step(requested: Preparation, facts: Facts, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    shapes: dict[str, None] = {}
    sizes: dict[int, None] = {}

    def run_step(job: Any) -> Any:
        on_gpu = job.device.type == "cuda"
        if facts.steps == 0 and on_gpu and (requested.peaks or requested.limit is not None):
            torch.cuda.empty_cache()  # what encoders left there is no part of a step
        if facts.steps == 0 and on_gpu and requested.limit is not None:
            facts.limited_to = make_small(requested.limit)
        if requested.peaks and on_gpu:
            torch.cuda.reset_peak_memory_stats()
        if requested.watch and job.position.step == job.length.steps // 2:
            os.write(2, f"{SECOND_HALF}\n".encode())
        found: list[str] = []
        with counted_syncs(found, on=requested.watch and on_gpu):
            done = original(job)
        if not hasattr(done, "batches"):
            return done  # the run is over
        facts.steps += 1
        facts.syncs += [(done.step, text) for text in found]
        if requested.peaks and on_gpu:
            facts.peaks.append(torch.cuda.max_memory_reserved())
        for batch in done.batches:
            bucket = batch.bucket
            shapes.setdefault(f"{bucket.width}x{bucket.height}x{bucket.frames}, {len(batch.samples)} samples")
        sizes.setdefault(done.samples)
        facts.shapes, facts.effective_batches = [*shapes], [*sizes]
        if done.step == requested.stop_after:
            os.kill(os.getpid(), signal.SIGTERM)
        return done

    return run_step


def make_small(room: int) -> int:
    """Let torch believe that the GPU ends `room` bytes above the overflow arena; that limit, in bytes."""
    from gracetune import gh200

    arena = int(gh200.memory_stats().get("uvm.arena_reserved_bytes", 0))
    if arena == 0:
        raise GracetuneError("the overflow arena is not there: a GPU made small would only run out of memory")
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((arena + room) / total, 0)
    return arena + room


@contextmanager
def counted_syncs(found: list[str], *, on: bool) -> Iterator[None]:
    """What makes this thread wait for the GPU, and where. Autograd's thread prints its own (`Ended.printed_syncs`)."""
    if not on:
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        shown = warnings.showwarning

        def show(
            message: Warning | str, category: type[Warning], filename: str, lineno: int, file: TextIO | None = None,
            line: str | None = None,
        ) -> None:  # fmt: skip
            if SYNC in str(message):
                found.append(f"{Path(filename).name}:{lineno}")
            elif "Synchronization debug mode is a prototype" not in str(message):
                shown(message, category, filename, lineno, file, line)

        warnings.filterwarnings("always", message=f".*{SYNC}")
        warnings.showwarning = show
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)


# -- models and data --------------------------------------------------------------------------------------------------


def write_model(folder: Path, family: str, flavour: str, parts: Mapping[str, Mapping[str, Any]], tiny: bool) -> Path:
    """The tiny model, its denoisers replaced by wider ones with random weights: `parts` says how wide."""
    import diffusers

    build(family, flavour, folder)
    for number, (part, options) in enumerate(parts.items()):
        if tiny:
            break
        config = json.loads((folder / part / "config.json").read_text())
        cls = getattr(diffusers, config["_class_name"])
        shutil.rmtree(folder / part)
        torch.manual_seed(number)
        wide: Any = cls(**{name: value for name, value in config.items() if not name.startswith("_")} | dict(options))
        wide.to(torch.bfloat16).save_pretrained(str(folder / part))
    return folder


WIDE_WAN: Final[Mapping[str, Any]] = {
    "num_layers": 6, "num_attention_heads": 8, "attention_head_dim": 64, "ffn_dim": 2048
}  # fmt: skip


def write_images(folder: Path, sizes: Sequence[tuple[int, int]], each: int) -> Path:
    """`each` images of every size, with captions."""
    folder.mkdir(parents=True)
    for number, (width, height) in enumerate([size for size in sizes for _ in range(each)]):
        coarse = np.random.default_rng(number).integers(0, 255, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC).save(folder / f"{number:03}.png")
        (folder / f"{number:03}.txt").write_text(f"pattern number {number}")
    return folder


# -- runs and what they left ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ended:
    """A run when it is over: its log, its weights, what it printed."""

    folder: Path
    log: Path
    seconds: float
    facts: Facts | None = None

    @property
    def events(self) -> list[Any]:
        return [record.event for record in read_log(self.folder / "logs" / "events.jsonl").merged()]

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def losses(self) -> dict[tuple[int, str], tuple[float, float | None]]:
        """Of every log step and expert: the mean loss since the one before, and the mean norm of the gradients."""
        steps = [event for event in self.events if isinstance(event, StepDone)]
        return {(event.step, event.stage): (event.loss, event.grad_norm) for event in steps}

    def weights(self) -> dict[str, torch.Tensor]:
        """Of the files the run ended with, numbered: their names begin with the run's."""
        outputs = [event.outputs for event in self.events if isinstance(event, RunEnded)][-1]
        files = [self.folder / output for output in sorted(outputs) if output.endswith(".safetensors")]
        return {f"{at}:{name}": tensor for at, file in enumerate(files) for name, tensor in load_file(file).items()}

    def counters(self) -> dict[str, float]:
        sampled = [event.counters for event in self.events if isinstance(event, MemorySampled)]
        return dict(sampled[-1]) if sampled else {}

    def event_counts(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for event in self.events:
            counts[type(event).__name__] = counts.get(type(event).__name__, 0) + 1
        return dict(sorted(counts.items()))

    @property
    def printed_syncs(self) -> int:
        """Synchronizing operations that autograd's own thread met in the second half of the steps: torch prints those
        instead of warning in Python."""
        return self.text.partition(SECOND_HALF)[2].count(SYNC)


class Runs:
    """Starts runs, one at a time."""

    def __init__(self, folder: Path, smoke: bool) -> None:
        self.folder, self.smoke = folder, smoke

    def run(
        self, config: Mapping[str, Any], preparation: Preparation | None = None, *, again: bool = False, code: int = 0
    ) -> Ended:
        """`again`: resume in the same folder. `preparation` None: the plain command, nothing in between."""
        name = config["name"]
        file = self.folder / f"{name}.yaml"
        if not again:
            file.write_text(yaml.safe_dump({"gracetune": 1, **config}))
        began = time.perf_counter()
        facts = self.folder / f"{name}{'-resumed' if again else ''}-facts.json"
        log = facts.with_suffix(".log")
        command = [sys.executable, "-m", "gracetune", "train", str(file)]
        if preparation is not None:
            message = json.dumps(asdict(preparation))
            command = [sys.executable, __file__, "--prepared", message, "--facts", str(facts), "train", str(file)]
        # Two threads on two busy cores of a CPU take many times as long as one.
        if self.smoke:
            command = ["env", "OMP_NUM_THREADS=1", *command]
        limit = SECONDS * (4 if self.smoke else 1)
        with log.open("w") as stream:
            try:
                done = subprocess.run(command, stdout=stream, stderr=stream, timeout=limit, check=False)
            except subprocess.TimeoutExpired:
                raise GracetuneError(f"{name} took longer than {limit} s; {_printed(log)}") from None
        if done.returncode != code:
            raise GracetuneError(f"{name} ended with {done.returncode}, not {code}; {_printed(log)}")
        seen = Facts(**json.loads(facts.read_text())) if preparation is not None else None
        return Ended(Path(config["output_dir"]), log, time.perf_counter() - began, seen)

    def config(self, name: str, **sections: Any) -> dict[str, Any]:
        """What all runs have in common."""
        precision = "fp32" if self.smoke else "bf16"
        common: dict[str, Any] = {
            "adapter": {"kind": "lora", "rank": 8},
            "optimizer": {"name": "adamw", "lr": 1e-3},
            "training": {
                "seed": 3, "deterministic": True, "mixed_precision": precision, "gradient_checkpointing": "off",
                "attention": "math",  # torch's other kernels have no repeatable backward pass
            },
            "validation": {"enabled": False},
            "checkpoints": {"every_steps": None, "save_dtype": "fp32"},
            "logging": {"every_steps": 2 if self.smoke else 5, "trackers": []},
        }  # fmt: skip
        for section, values in sections.items():
            common[section] = {**common.get(section, {}), **values} if isinstance(values, dict) else values
        common["model"].setdefault("base_precision", precision)
        return {"name": name, "output_dir": str(self.folder / name), **common}


def _printed(log: Path) -> str:
    return f"it printed:\n{log.read_text(errors='replace')[-3000:]}"


# -- the three scenarios ----------------------------------------------------------------------------------------------


def caches(runs: Runs) -> tuple[Ended, Ended]:
    side = 64 if runs.smoke else 256
    steps = 6 if runs.smoke else 60
    # Of all families, Wan's blocks compile the fastest for any shape: half a minute, where SDXL's take more than one.
    model = write_model(
        runs.folder / "model", "wan", "t2v-1.3b-2.1", {"transformer": {**WIDE_WAN, "num_layers": 3}}, runs.smoke
    )
    images = write_images(runs.folder / "images", [(side, side), (2 * side, side), (side, 2 * side)], 8)
    dataset = {"id": "images", "path": str(images), "resolution": float(side)}
    shared: dict[str, Any] = {
        "model": {"family": "wan", "flavour": "t2v-1.3b-2.1", "path": str(model)},
        # Compiled for any shape, `math` makes kernels for the CPU too, which takes a minute and a half. `flash` is
        # repeatable with torch's deterministic algorithms.
        "training": {
            "max_steps": steps, "batch_size": 2,
            **({"compile": "off"} if runs.smoke else {"compile": "on", "attention": "flash"}),
        },
    }  # fmt: skip
    plain = runs.config("caches-plain", datasets=[dataset], **shared)
    ours = runs.config(
        "caches", **shared,
        datasets=[{**dataset, "type": "in_memory", "in_memory": {"compression": "lz4"}}],
        cache={"vae_cache_type": "unified_memory", "text_cache_type": "unified_memory"},
        memory={"enable_uvm_hints": True},
        validation={
            "enabled": True, "every_steps": steps // 2, "prompts": [{"prompt": "pattern number 1"}], "steps": 2,
            "width": side, "height": side, "num_frames": 1, "seed": 1,
        },
        checkpoints={"every_steps": steps // 3},
    )  # fmt: skip
    return runs.run(plain, Preparation(graphs=False)), runs.run(ours, Preparation(watch=True))


def experts(runs: Runs) -> tuple[Ended, Ended]:
    side = 32 if runs.smoke else 256
    steps = 24
    parts = {"transformer": WIDE_WAN, "transformer_2": WIDE_WAN}
    model = write_model(runs.folder / "model", "wan", "t2v-14b-2.2", parts, runs.smoke)
    images = write_images(runs.folder / "images", [(side, side), (2 * side, side), (side, 2 * side)], 8)
    shared: dict[str, Any] = {
        "model": {"family": "wan", "flavour": "t2v-14b-2.2", "path": str(model), "switch_experts_every": 3},
        "datasets": [{"id": "images", "path": str(images), "resolution": float(side)}],
        "training": {
            "max_steps": steps, "batch_size": 2, "compile": "off",
            "ramp": {
                "enabled": True, "initial_effective_batch_size": 2, "target_effective_batch_size": 8,
                "batch_rampup_steps": 24,
            },
        },
    }  # fmt: skip
    whole = runs.run(runs.config("experts-plain", **shared))
    parted = runs.config("experts", **shared)
    stopped = runs.run(parted, Preparation(watch=True, park=True, stop_after=10), code=INTERRUPTED)
    resumed = runs.run(parted, Preparation(watch=True, park=True), again=True)
    assert stopped.facts is not None
    assert resumed.facts is not None
    return whole, Ended(
        resumed.folder, resumed.log, stopped.seconds + resumed.seconds, _added(stopped.facts, resumed.facts)
    )


def _added(one: Facts, two: Facts) -> Facts:
    """Of two processes of one run. Lists are joined, counts added."""
    first, second = asdict(one), asdict(two)
    joined = {name: first[name] + second[name] for name in first if name != "limited_to"}
    for name in ("shapes", "effective_batches"):
        joined[name] = [*dict.fromkeys(joined[name])]
    return Facts(**joined)


def overflow(runs: Runs) -> tuple[Ended, Ended]:
    small, large = (32, 64) if runs.smoke else (128, 512)
    model = write_model(
        runs.folder / "model", "wan", "t2v-1.3b-2.1", {"transformer": {**WIDE_WAN, "num_layers": 3}}, runs.smoke
    )
    images = {side: write_images(runs.folder / f"images-{side}", [(side, side)], 8) for side in (small, large)}
    first, second, steps = (4, 7, 10) if runs.smoke else (16, 22, 32)
    turns = [("before", small, 0, first), ("large", large, first, second), ("after", small, second, None)]
    shared: dict[str, Any] = {
        "model": {"family": "wan", "flavour": "t2v-1.3b-2.1", "path": str(model)},
        "datasets": [
            {
                "id": name, "path": str(images[side]), "resolution": float(side), "start_step": begin,
                **({} if end is None else {"end_step": end}),
            }
            for name, side, begin, end in turns
        ],
        "training": {"max_steps": steps, "batch_size": 8, "compile": "off"},
        "logging": {"every_steps": 2},
    }  # fmt: skip
    plain = runs.run(runs.config("overflow-plain", **shared), Preparation(graphs=False, peaks=True))
    assert plain.facts is not None
    peaks = plain.facts.peaks
    limit = int(ROOM * max(peaks[1 : first - 1])) if peaks else None
    if limit is not None and limit > 0.8 * max(peaks):
        raise GracetuneError(
            f"small batches need {max(peaks[1 : first - 1]) / MIB:.0f} MiB, large ones {max(peaks) / MIB:.0f} MiB: too "
            "close to each other for a limit between them"
        )
    ours = runs.config("overflow", **shared, memory={"use_uvm": True})
    return plain, runs.run(ours, Preparation(watch=True, limit=limit))


SCENARIOS: Final[Mapping[str, Callable[[Runs], tuple[Ended, Ended]]]] = {
    "caches": caches, "experts": experts, "overflow": overflow
}  # fmt: skip

# -- rows -------------------------------------------------------------------------------------------------------------


def rows(name: str, plain: Ended, ours: Ended, *, on_gpu: bool) -> Iterator[BenchRow]:
    wanted, found = plain.losses(), ours.losses()
    same = sum(found.get(key) == value for key, value in wanted.items())
    equal = wanted.keys() == found.keys() and same == len(wanted) and bool(wanted)
    detail = "mean losses and gradient norms of the log steps, bit for bit"
    different = next((key for key in wanted if found.get(key) != wanted[key]), None)
    if different is not None:
        detail += f"; step {different[0]} {different[1]}: {wanted[different]} plain, {found.get(different)} here"
    yield BenchRow(f"{name}_losses_equal", same, f"of {len(wanted)}", "all", equal, detail)
    one, two = plain.weights(), ours.weights()
    same = sum(key in two and torch.equal(tensor, two[key]) for key, tensor in one.items())
    equal = one.keys() == two.keys() and same == len(one) and bool(one)
    yield BenchRow(f"{name}_weights_equal", same, f"of {len(one)}", "all", equal, "the adapter's tensors, bit for bit")
    facts = ours.facts
    assert facts is not None
    if plain.facts is not None:
        replays = plain.facts.graph_replays
        yield BenchRow(f"{name}_plain_graphs", replays, "replays", "0", replays == 0, "CUDA graphs of the plain twin")
    if on_gpu:
        late = [(step, location) for step, location in facts.syncs if step > facts.steps // 2]
        count = len(late) + ours.printed_syncs
        early = len(facts.syncs) - len(late)
        detail = f"in the second half of {facts.steps} steps; {early} in the first half, where new shapes are met"
        places = sorted({location for _, location in facts.syncs})
        yield BenchRow(f"{name}_host_syncs", count, "synchronizing operations", "0", count == 0, f"{detail}: {places}")
    for requested in EVIDENCE[name]:
        value = evidence(requested, ours)
        if requested.gpu and not on_gpu:
            continue
        detail = f"{requested.source} {requested.name}"
        unit = "bytes" if requested.name.endswith("bytes") else "of " + requested.name.rpartition(".")[2]
        yield BenchRow(
            f"{name}: {requested.mechanism}", value, unit, f">= {requested.least:g}", value >= requested.least, detail
        )
    spent = plain.seconds + ours.seconds
    yield BenchRow(
        f"{name}_seconds", spent, "s", "<= 90", None if not on_gpu else spent <= 90, "both runs, start to end"
    )


def evidence(requested: Evidence, ours: Ended) -> float:
    if requested.source == "counter":
        return ours.counters().get(requested.name, 0.0)
    if requested.source == "event":
        return float(ours.event_counts().get(requested.name, 0))
    if requested.name == "resumed_step":
        steps = [event.resumed_step for event in ours.events if isinstance(event, RunStarted)]
        return float(max((step for step in steps if step is not None), default=0))
    value = getattr(ours.facts, requested.name)
    return float(len(value) if isinstance(value, list) else value)


def message(plain: Ended, ours: Ended) -> dict[str, Any]:
    """For the result: everything the event logs counted."""
    facts = asdict(ours.facts) if ours.facts is not None else {}
    return {
        "losses": [[*key, *value] for key, value in sorted(ours.losses().items())],
        "counters": ours.counters(),
        "events": ours.event_counts(),
        "plain_counters": plain.counters(),
        "plain_events": plain.event_counts(),
        "facts": facts,
        "checkpoints": [event.step for event in ours.events if isinstance(event, CheckpointWritten)],
        "samples": [len(event.files) for event in ours.events if isinstance(event, ValidationDone)],
        "lines": [line.strip() for line in ours.text.splitlines() if any(word in line for word in SHOWN)][:16],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=tuple(SCENARIOS), action="append", help="one scenario; all without it")
    parser.add_argument("--smoke", action="store_true", help="tiny models, on a CPU too: does everything run?")
    parser.add_argument("--output", type=Path, help="also write the result there, as JSON")
    parser.add_argument("--keep", type=Path, help="leave the runs in this folder")
    parser.add_argument("--prepared", help=argparse.SUPPRESS)
    parser.add_argument("--facts", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("command", nargs="*", help=argparse.SUPPRESS)
    requested = parser.parse_args()
    if requested.prepared is not None:
        code = run_prepared(Preparation(**json.loads(requested.prepared)), requested.command, requested.facts)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # torch 2.11 has waited five minutes at exit for a compile worker
    on_gpu = torch.cuda.is_available()
    if not on_gpu and not requested.smoke:
        parser.error("needs a CUDA GPU; --smoke runs tiny models on this machine's CPU")
    machine, found, scenarios = probe(), list[BenchRow](), dict[str, Any]()
    folder = requested.keep or Path(tempfile.mkdtemp(prefix="gracetune-bench-"))
    try:
        for name in requested.only or SCENARIOS:
            (folder / name).mkdir(parents=True)
            try:
                plain, ours = SCENARIOS[name](Runs(folder / name, requested.smoke))
                for row in rows(name, plain, ours, on_gpu=on_gpu):
                    found.append(row)
                    print_rows(out(), [row])
                scenarios[name] = message(plain, ours)
            except GracetuneError as error:
                print(error, file=sys.stderr, flush=True)
                found.append(BenchRow(f"{name}_ran", 0, "runs", "both", ok=False, detail=str(error).splitlines()[0]))
            if requested.output is not None:  # what was found stays, whatever happens to the rest
                result = {**result_of("whole_runs", found, machine), "smoke": requested.smoke, "scenarios": scenarios}
                write_result(requested.output, result)
    finally:
        if requested.keep is None:
            shutil.rmtree(folder)
    return 1 if any(row.ok is False for row in found) else 0


if __name__ == "__main__":
    sys.exit(main())
