"""Train a LoRA on a randomly filled Wan of about a billion parameters: is a resumed run the same, and what is a step?

python benchmarks/train_1b.py --output benchmarks/results/train-1b-NAME.json

Real runs with caches in unified memory, first with deterministic algorithms: one without interruption and one that
SIGTERM stops half way and that is resumed. Then, with torch's ordinary algorithms, step time and memory against a plain
loop of diffusers and peft with the same model, adapter, batch and optimizer; the plain loop has its data on the GPU.

To stop it from outside use SIGKILL (`timeout -s KILL`): SIGTERM is a request to the run that is under way, and ends the
workers torch compiles with.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any, Final

from gracetune.config.environment import Environment, make_cublas_deterministic

make_cublas_deterministic()  # before CUDA starts

import numpy as np  # noqa: E402
import torch  # noqa: E402
from diffusers import WanTransformer3DModel  # noqa: E402
from peft import LoraConfig  # noqa: E402
from PIL import Image  # noqa: E402

from gracetune.bench.results import result_of, write_result  # noqa: E402
from gracetune.bench.row import BenchRow  # noqa: E402
from gracetune.cli.bench import print_rows  # noqa: E402
from gracetune.cli.console import out  # noqa: E402
from gracetune.config.run_config import RunConfig  # noqa: E402
from gracetune.errors import GracetuneError  # noqa: E402
from gracetune.hardware import probe  # noqa: E402
from gracetune.memory import placement  # noqa: E402
from gracetune.models.tiny import build  # noqa: E402
from gracetune.telemetry.events import MemorySampled, StepDone  # noqa: E402
from gracetune.telemetry.sinks.jsonl import read_log  # noqa: E402
from gracetune.train.run import Result, RunOptions, train  # noqa: E402
from gracetune.train.view import View  # noqa: E402

FLAVOUR: Final = "t2v-1.3b-2.1"
RANK: Final = 16
TARGETS: Final = r"blocks\.\d+\.(attn[12]\.(to_[qkv]|to_out\.0)|ffn\.net\.(0\.proj|2))"
"""The layers our own choice for Wan trains, in peft's spelling."""
LOG_EVERY: Final = 10
RATE: Final = 1e-3
CLOSE: Final = 0.01


@dataclass(frozen=True)
class Size:
    layers: int = 30
    heads: int = 12
    ffn: int = 8960
    images: int = 64
    side: int = 512
    batch: int = 4
    steps: int = 200
    timed_steps: int = 60
    checkpointing: str = "off"


class Listening(View):
    """Prints what a run says, and may stop it as a scheduler would."""

    def __init__(self, stop_after: int | None = None) -> None:
        super().__init__()
        self._stop_after = stop_after

    def report(self, text: str) -> None:
        print(f"  {text}", flush=True)

    def warn(self, text: str) -> None:
        super().warn(text)
        self.report(f"warning: {text}")

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.report(f"{name}: {time.perf_counter() - began:.1f} s")

    def on_step(self, step: int, steps: int) -> None:
        if step == self._stop_after:
            os.kill(os.getpid(), signal.SIGTERM)


def main() -> int:
    default = Size()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("layers", "heads", "ffn", "images", "side", "batch", "steps", "timed_steps"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=vars(default)[name])
    parser.add_argument("--checkpointing", choices=("off", "full"), default=default.checkpointing)
    parser.add_argument("--device", type=torch.device, default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", choices=("resume", "pace"), help="half of it: the resumed run, or time and memory")
    parser.add_argument("--output", type=Path, help="also write the result there, as JSON")
    requested = parser.parse_args()
    size = Size(**{name: vars(requested)[name] for name in vars(default)})
    machine = probe()
    rows: list[BenchRow] = []
    folder = Path(tempfile.mkdtemp(prefix="gracetune-bench-"))
    try:
        with managed_caches():
            for row in measure(folder, size, requested.device, requested.only):
                rows.append(row)
                print_rows(out(), [row])
                if requested.output is not None:  # what was measured stays, whatever happens to the rest
                    write_result(requested.output, result_of("train_1b", rows, machine))
    except GracetuneError as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(folder)
    return 1 if any(row.ok is False for row in rows) else 0


@contextmanager
def managed_caches() -> Iterator[None]:
    """As a superchip has them. Over PCIe a run takes pinned memory instead, whatever a config asks; these caches are
    a few MiB, so here they can be what they were asked to be."""
    table, before = placement._TABLE, dict(placement._TABLE)
    for role in ("latent_cache", "text_cache"):
        table[role, "discrete"] = table[role, "superchip"]
    try:
        yield
    finally:
        table.update(before)


def measure(folder: Path, size: Size, device: torch.device, only: str | None = None) -> Iterator[BenchRow]:
    model, images = write_model(folder / "model", size, device), write_images(folder / "pictures", size)
    parts = (folder, size, model, images)
    if only != "pace":
        yield from _resumed(*parts, device)
    if only == "resume":
        return
    for compile_ in ("off", "auto") if device.type == "cuda" else ("off",):
        ours = _timed_run(run_config(*parts, f"timed-{compile_}", size.timed_steps, compile_=compile_), device)
        plain = PlainLoop(model, size, device, compiled=compile_ != "off").timed()
        _tidy(device)
        yield from _against(compile_ != "off", ours, plain, size)


# -- what is trained, and on what -------------------------------------------------------------------------------------


def write_model(folder: Path, size: Size, device: torch.device) -> Path:
    """The tiny model's folder with a transformer of real size, drawn as the layers' own constructors draw."""
    build("wan", FLAVOUR, folder)
    part = folder / "transformer"
    narrow = json.loads((part / "config.json").read_text())
    shutil.rmtree(part)
    kept = {name: narrow[name] for name in ("in_channels", "out_channels", "text_dim")}
    torch.manual_seed(0)
    with torch.device(device):
        wide: Any = WanTransformer3DModel(
            num_layers=size.layers, num_attention_heads=size.heads, attention_head_dim=128, ffn_dim=size.ffn, **kept
        )
    wide.to(torch.bfloat16).save_pretrained(str(part))
    return folder


def write_images(folder: Path, size: Size) -> Path:
    folder.mkdir()
    for number in range(size.images):
        draw = np.random.default_rng(number)
        coarse = Image.fromarray(draw.integers(0, 255, (8, 8, 3), dtype=np.uint8))
        coarse.resize((size.side, size.side), Image.Resampling.BICUBIC).save(folder / f"{number:03}.png")
        (folder / f"{number:03}.txt").write_text(f"a photo of pattern number {number}")
    return folder


def run_config(
    folder: Path, size: Size, model: Path, images: Path, name: str, steps: int,
    *, attention: str = "auto", compile_: str = "auto", log_every: int = LOG_EVERY,
) -> RunConfig:  # fmt: skip
    return RunConfig.model_validate(
        {
            "name": name,
            "output_dir": str(folder / name),
            "model": {"family": "wan", "flavour": FLAVOUR, "path": str(model)},
            "datasets": [{"id": "pictures", "path": str(images), "resolution": float(size.side)}],
            "adapter": {"kind": "lora", "rank": RANK},
            "optimizer": {"name": "adamw", "lr": RATE},
            "cache": {
                "vae_cache_type": "unified_memory",
                "text_cache_type": "unified_memory",
                "cache_dir": str(folder / "cache"),
            },
            "training": {
                "max_steps": steps,
                "batch_size": size.batch,
                "gradient_checkpointing": size.checkpointing,
                "attention": attention,
                "compile": compile_,
            },
            "validation": {"enabled": False},
            "checkpoints": {"every_steps": None},
            "logging": {"every_steps": log_every, "trackers": []},
        }
    )


@dataclass(frozen=True)
class Ran:
    result: Result
    peak_bytes: int


def _run(config: RunConfig, stop_after: int | None = None) -> Ran:
    print(f"{config.name}, {'to step ' + str(stop_after) if stop_after else 'to its end'}:", flush=True)
    torch._dynamo.reset()  # as a process of its own would begin
    began = time.perf_counter()
    result = train(config, environment=Environment({}), options=RunOptions(), view=Listening(stop_after))
    print(f"  {time.perf_counter() - began:.1f} s in all", flush=True)
    # Counted since the first batch: a GPU with room to spare keeps the counter as it is.
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    _tidy(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    expected = stop_after or config.training.max_steps
    if result.step != expected:  # a signal from outside: what comes after it would be measured under another name
        raise GracetuneError(f"{config.name} was to end at step {expected}, and was stopped at {result.step}")
    return Ran(result, peak)


def _events(config: RunConfig, kind: type[Any]) -> list[Any]:
    records = read_log(Path(config.output_dir) / "logs" / "events.jsonl").merged()
    return [record.event for record in records if isinstance(record.event, kind)]


# -- a run that is resumed --------------------------------------------------------------------------------------------


def _resumed(folder: Path, size: Size, model: Path, images: Path, device: torch.device) -> Iterator[BenchRow]:
    """cuDNN's attention has no deterministic backward pass; torch's flash kernel has one."""
    attention = "flash" if device.type == "cuda" else "sdpa"
    torch.use_deterministic_algorithms(True)
    # That fills memory that is not written yet, to show programs that read it; here it would only be time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        whole, parted = (
            run_config(folder, size, model, images, name, size.steps, attention=attention, log_every=1)
            for name in ("whole", "parted")
        )
        ended = _run(whole).result
        _run(parted, size.steps // 2)
        resumed = _run(parted).result
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    one, two = ([(each.step, each.loss, each.grad_norm) for each in _events(run, StepDone)] for run in (whole, parted))
    different = sum(a != b for a, b in zip(one, two, strict=True))
    off = mean(abs(a[1] - b[1]) / abs(a[1]) for a, b in zip(one, two, strict=True))
    message = f"deterministic algorithms, {attention} attention; SIGTERM after step {size.steps // 2}, then resumed"
    yield BenchRow(
        "steps_that_differ", different, f"of {size.steps}", "== 0", different == 0, f"loss and gradient norm; {message}"
    )
    yield BenchRow("loss_difference", off, "relative", f"<= {CLOSE}", off <= CLOSE, "mean over the steps")
    tensors = _different_tensors(ended.files, resumed.files)
    yield BenchRow(
        "adapter_tensors_that_differ", tensors, "tensors", "== 0", tensors == 0, "in the files the runs wrote"
    )
    fifth = max(1, size.steps // 5)
    first, last = mean(loss for _, loss, _ in one[:fifth]), mean(loss for _, loss, _ in one[-fifth:])
    yield BenchRow(
        "loss_at_the_end", last / first, "of the start's", detail=f"mean of {fifth} steps: {first:.4f} -> {last:.4f}"
    )
    pace = median(each.step_ms for each in _events(whole, StepDone))
    yield BenchRow("deterministic_step", pace, "ms", detail="with the loss read at every step")
    counters = _events(whole, MemorySampled)[-1].counters
    yield BenchRow(
        "cache_waits", mean(each.data_wait_ms for each in _events(whole, StepDone)), "ms", detail=_report_text(counters)
    )


def _different_tensors(ours: tuple[Path, ...], theirs: tuple[Path, ...]) -> int:
    from safetensors.torch import load_file

    different = 0
    for one, two in zip(ours, theirs, strict=True):
        first, second = load_file(one), load_file(two)
        if first.keys() != second.keys():
            raise GracetuneError(f"{one} and {two} hold other layers")
        different += sum(not torch.equal(first[name], second[name]) for name in first)
    return different


def _report_text(counters: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in sorted(counters.items()) if value)


# -- step time and memory ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pace:
    step_ms: float
    peak_bytes: int
    first_seconds: float
    trained: int
    """Parameters."""


def _timed_run(config: RunConfig, device: torch.device) -> Pace:
    ran = _run(config)
    assert ran.result.first_batch is not None, "a run that had nothing left to do"
    steps = [event.step_ms for event in _events(config, StepDone)]
    trained = _events(config, MemorySampled)[-1].used_bytes["device" if device.type == "cuda" else "host"]
    return Pace(
        median(steps[len(steps) // 3 :]), ran.peak_bytes, ran.result.first_batch.first_seconds,
        trained["trained weights"] // 4,
    )  # fmt: skip


class PlainLoop:
    """What a user of diffusers and peft writes: nothing but the step, and all data on the device."""

    def __init__(self, model: Path, size: Size, device: torch.device, *, compiled: bool) -> None:
        self._size, self._device = size, device
        denoiser = WanTransformer3DModel.from_pretrained(str(model / "transformer"), torch_dtype=torch.bfloat16)
        denoiser.to(device).requires_grad_(False).train()
        denoiser.add_adapter(LoraConfig(r=RANK, lora_alpha=RANK, target_modules=TARGETS))
        if size.checkpointing == "full":
            denoiser.enable_gradient_checkpointing()
        if compiled:
            torch._dynamo.reset()
            denoiser.compile_repeated_blocks()
        self._parameters = [parameter for parameter in denoiser.parameters() if parameter.requires_grad]
        for parameter in self._parameters:
            parameter.data = parameter.data.float()
        self._optimizer = torch.optim.AdamW(self._parameters, lr=RATE, fused=True)
        self._denoiser: Any = denoiser
        cells = size.side // 8
        self._latents = torch.randn(size.batch, denoiser.config.in_channels, 1, cells, cells, device=device)
        self._text = torch.randn(size.batch, 512, denoiser.config.text_dim, device=device, dtype=torch.bfloat16)

    def timed(self) -> Pace:
        on_gpu = self._device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(self._device)
        first = self._seconds(1)
        rounds = [self._seconds(LOG_EVERY) / LOG_EVERY for _ in range(max(2, self._size.timed_steps // LOG_EVERY))]
        peak = torch.cuda.max_memory_allocated(self._device) if on_gpu else 0
        trained = sum(parameter.numel() for parameter in self._parameters)
        return Pace(1000 * median(rounds[len(rounds) // 3 :]), peak, first, trained)

    def _seconds(self, steps: int) -> float:
        began = time.perf_counter()
        for _ in range(steps):
            loss = self._step()
        loss.item()  # waits for the device, as a log step does
        return time.perf_counter() - began

    def _step(self) -> torch.Tensor:
        noise = torch.randn_like(self._latents)
        level = torch.rand(len(noise), device=self._device)
        share = level.view(-1, 1, 1, 1, 1)
        seen = ((1 - share) * self._latents + share * noise).to(torch.bfloat16)
        with torch.autocast(self._device.type, dtype=torch.bfloat16):
            prediction = self._denoiser(
                hidden_states=seen, timestep=1000 * level, encoder_hidden_states=self._text, return_dict=False
            )[0]
        loss = torch.nn.functional.mse_loss(prediction.float(), noise - self._latents)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach()


def _against(compiled: bool, ours: Pace, plain: Pace, size: Size) -> Iterator[BenchRow]:
    kind = "compiled" if compiled else "eager"
    shape = f"batch {size.batch} of {size.side} x {size.side}, checkpointing {size.checkpointing}"
    if ours.trained != plain.trained:
        raise GracetuneError(f"not the same adapter: {ours.trained:,} and {plain.trained:,} parameters")
    firsts = f"first batch {ours.first_seconds:.1f} and {plain.first_seconds:.1f} s"
    yield BenchRow(
        f"{kind}_step", ours.step_ms, "ms",
        detail=f"the plain loop {plain.step_ms:.2f} ms; {shape}; {ours.trained / 1e6:.1f} M trained; {firsts}",
    )  # fmt: skip
    yield BenchRow(f"{kind}_step_over_plain", ours.step_ms / plain.step_ms, "ratio")
    yield BenchRow(
        f"{kind}_peak", ours.peak_bytes / 2**30, "GiB", detail=f"the plain loop {plain.peak_bytes / 2**30:.3f} GiB"
    )
    yield BenchRow(f"{kind}_peak_over_plain", ours.peak_bytes / max(1, plain.peak_bytes), "ratio")


def _tidy(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
