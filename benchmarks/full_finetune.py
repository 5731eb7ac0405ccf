"""A full fine-tune whose optimizer state is streamed from host memory, beside one whose state is resident on the GPU.

python benchmarks/full_finetune.py --output benchmarks/results/full-finetune-NAME.json

First the rate of the streamed update alone. Then random Wans of about two and five billion parameters take the same
steps several times in one process: with all states resident, and with all states streamed. The parts are the trainer's
own: `load_trained_model`, `begin`, `assemble`, `run_step`. Kernels are deterministic, so that weights can be compared
bit for bit; attention is torch's flash kernel, which has a deterministic backward pass.

Host memory is pinned once and used by all measurements: 64 GiB at most. No memory is managed.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final, Literal

from gracetune.config.environment import Environment, make_cublas_deterministic

make_cublas_deterministic()  # before CUDA starts

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from gracetune.bench.results import git_commit, result_of, write_result  # noqa: E402
from gracetune.bench.row import BenchRow  # noqa: E402
from gracetune.bench.step.clock import between, free, mark, synchronize  # noqa: E402
from gracetune.bench.step.flops import count  # noqa: E402
from gracetune.bench.step.job import StepJob, config_of  # noqa: E402
from gracetune.bench.step.random_data import random_data  # noqa: E402
from gracetune.bench.step.random_model import RandomModel, make_model  # noqa: E402
from gracetune.bench.step.trainer import assemble_unresumed  # noqa: E402
from gracetune.cli.bench import print_rows  # noqa: E402
from gracetune.cli.console import out  # noqa: E402
from gracetune.config.run_config import RunConfig, StatePrecision  # noqa: E402
from gracetune.errors import GracetuneError  # noqa: E402
from gracetune.hardware import probe  # noqa: E402
from gracetune.models.attention import attention_facts, choose_attention  # noqa: E402
from gracetune.models.experts import ExpertHost  # noqa: E402
from gracetune.models.parking import NoParking  # noqa: E402
from gracetune.optim.chunked_adamw import RESIDENT, ChunkedAdamW, StateChoice  # noqa: E402
from gracetune.optim.state_precision import LAYOUTS  # noqa: E402
from gracetune.optim.state_sizes import CHUNK, SLOTS  # noqa: E402
from gracetune.optim.state_streams import REGION, host_memory  # noqa: E402
from gracetune.train.control import Stop  # noqa: E402
from gracetune.train.loop import run_step  # noqa: E402
from gracetune.train.runtime import Runtime, open_runtime  # noqa: E402
from gracetune.train.trained_model import DenoiserChoices, load_trained_model  # noqa: E402
from gracetune.train.view import CollectingView  # noqa: E402
from gracetune.units import format_bytes  # noqa: E402

MOST_HOST: Final = 64 << 30
MANY_SLOTS: Final = 40
"""Chunks on the GPU at a time, where there is room: about half of the five billion parameters' states."""
MUST: Final = 1.25
COMPILING: Final = 30
PINNING: Final = 20
"""Seconds."""
LEFT: Final = 1 << 30
"""Bytes of GPU memory that may be left of an earlier measurement."""
WIDTH: Final = {"num_attention_heads": 24, "ffn_dim": 14336}
"""Wan's 5B. The 14B's latents give 4,096 tokens for an image of 1024 x 1024."""
TOKENS: Final = 65_536
_RATE_STEPS: Final = 4


@dataclass(frozen=True)
class Row(BenchRow):
    samples: tuple[float, ...] = field(default=())
    git_commit: str | None = field(default_factory=git_commit)
    """Rows of several runs may be in one file (`--merge`)."""


class HostPool:
    """Pinned memory for one measurement after the other."""

    def __init__(self, device: torch.device) -> None:
        self._new = host_memory(device)
        self._regions: list[Tensor] = []
        self._used = 0
        self.seconds = 0.0

    def new_memory(self, size: int) -> Tensor:
        if self._used == len(self._regions):
            if (self._used + 1) * REGION > MOST_HOST and size > 1 << 20:
                raise GracetuneError(f"more than {MOST_HOST >> 30} GiB of host memory")
            began = time.perf_counter()
            on_gpu = torch.cuda.is_available()
            self._regions.append(self._new(REGION if on_gpu else size))
            self.seconds += time.perf_counter() - began
        region = self._regions[self._used]
        self._used += 1
        return region[:size] if region.numel() >= size else self._new(size)

    def reset(self) -> None:
        self._used = 0

    @property
    def bytes(self) -> int:
        return sum(region.numel() for region in self._regions)


# -- the streamed update alone ----------------------------------------------------------------------------------------


def rate(precision: StatePrecision, elements: int, device: torch.device, pool: HostPool) -> Row:
    """Seconds per billion parameters of an update whose whole state passes through the GPU."""
    pool.reset()
    count_, size = max(1, elements // CHUNK), min(elements, CHUNK)
    weights = {
        f"{number}": nn.Parameter(torch.full((size,), 0.02, dtype=torch.bfloat16, device=device))
        for number in range(count_)
    }
    gradient = torch.full((size,), 1e-3, dtype=torch.bfloat16, device=device)
    optimizer = ChunkedAdamW(
        [{"params": [*weights.items()]}], lr=1e-4, state=StateChoice(precision, new_memory=pool.new_memory)
    )
    times = []
    for _ in range(_RATE_STEPS):
        for weight in weights.values():
            optimizer.sums[0].add(weight, gradient)
        synchronize(device)
        optimizer.settle()
        began = time.perf_counter()
        optimizer.step()
        optimizer.settle()
        times.append(time.perf_counter() - began)
    seconds, each = median(times[1:]), count_ * size
    moved = LAYOUTS[precision].bytes_per_element * each
    return Row(
        f"update_{precision}", seconds / each * 1e9, "s per billion parameters",
        detail=f"{each / 1e9:.2f} billion, {LAYOUTS[precision].bytes_per_element} bytes each; "
        f"{moved / seconds / 1e9:.1f} GB/s each way, {SLOTS} slots; nothing else runs",
        samples=tuple(times[1:]),
    )  # fmt: skip


# -- steps -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    name: str
    accumulation: int
    warm_up: int
    steps: int
    state: StateChoice


@dataclass(frozen=True)
class Measured:
    samples: tuple[float, ...]
    """Seconds of each timed step."""
    weights: dict[str, Tensor]
    """After all steps, on the host."""
    peak: int
    state_device: int
    state_host: int
    parameters: int

    @property
    def seconds(self) -> float:
        return median(self.samples)


@dataclass(frozen=True)
class Bench:
    job: StepJob
    machine: Any
    runtime: Runtime
    pool: HostPool
    attention: Literal["auto", "flash"]
    compiled: bool

    @property
    def device(self) -> torch.device:
        return self.runtime.device

    def config(self, model: RandomModel, folder: Path, case: Case) -> RunConfig:
        requested = config_of(self.job, model.source.folder, folder).model_dump()
        requested["adapter"] = {"kind": "full_finetune"}
        # `begin` gets the state itself; the config says only that weights stay bf16.
        requested["optimizer"] = {"name": "adamw", "lr": 1e-4, "state": {"home": "streamed"}}
        steps = case.warm_up + case.steps + 1
        requested["training"] |= {"max_steps": steps, "gradient_accumulation_steps": case.accumulation}
        return RunConfig.model_validate(requested)

    def choices(self, model: RandomModel) -> DenoiserChoices:
        facts = attention_facts(self.device, torch.bfloat16, model.spec.attention)
        backend = choose_attention(self.attention if self.device.type == "cuda" else "auto", facts).backend
        return DenoiserChoices(compiled=self.compiled, attention=backend, shapes="one")

    def measure(self, model: RandomModel, case: Case) -> Measured:
        tidy(self.device)
        self.pool.reset()
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gracetune-bench-")))
            config = self.config(model, folder, case)
            host = ExpertHost(lambda module: NoParking(), "for this measurement")
            trained_model = load_trained_model(
                config, model.spec, model.source, model.facts, self.runtime, self.choices(model), host
            )
            ready = random_data(self.job, config, model, pinned=on_gpu)
            state = replace(case.state, new_memory=self.pool.new_memory)
            run = assemble_unresumed(config, trained_model, ready, self.runtime, CollectingView(), stack, state)
            optimizer = run.state.optimizer
            assert isinstance(optimizer, ChunkedAdamW)
            marks: list[Any] = []
            loss = torch.zeros(())
            for step in range(case.warm_up + case.steps):
                if step == case.warm_up:
                    marks.append(mark(self.device))
                if isinstance(done := run_step(run), Stop):
                    raise GracetuneError(f"the run ended in the middle of the measurement: {done.reason}")
                loss = done.loss
                if step >= case.warm_up:
                    # Each time contains the wait for one update: that of the step before.
                    marks.append(mark(self.device))
            synchronize(self.device)
            optimizer.settle()
            if not bool(loss.isfinite()) or bool(run.state.skipped):
                raise GracetuneError(f"the last loss is {float(loss)}: what was timed is no training")
            times = tuple(between(one, two) / 1000 for one, two in pairwise(marks))
            peak = torch.cuda.max_memory_allocated(self.device) if on_gpu else 0
            parameters = trained_model.parameters()
            weights = {name: one.detach().to("cpu", copy=True) for name, one in parameters.items()}
            elements = sum(one.numel() for one in weights.values())
            return Measured(times, weights, peak, optimizer.device_bytes, optimizer.host_bytes, elements)


def against(
    bench: Bench, case: Case, resident: Measured, streamed: Measured, forward_flops: int, *, bar: bool
) -> Iterator[Row]:  # fmt: skip
    label, tokens_of_a_sample = case.name, bench.job.tokens * bench.job.batch
    tokens = tokens_of_a_sample * case.accumulation
    ratio = streamed.seconds / resident.seconds
    rates = [3 * forward_flops * case.accumulation / one.seconds / 1e12 for one in (resident, streamed)]
    yield Row(
        f"{label}_over_resident", ratio, "ratio", f"<= {MUST:g}" if bar else "", ratio <= MUST if bar else None,
        f"{resident.parameters / 1e9:.2f} billion parameters, {tokens:,} tokens per step in {case.accumulation} "
        f"micro-batches: {streamed.seconds:.3f} s streamed ({rates[1]:.0f} TFLOP/s of the model), "
        f"{resident.seconds:.3f} s resident ({rates[0]:.0f}); {case.state.slots} slots",
        samples=streamed.samples,
    )  # fmt: skip
    yield Row(
        f"{label}_peak", streamed.peak / 2**30, "GiB",
        detail=f"{resident.peak / 2**30:.2f} GiB resident; state on the GPU {streamed.state_device / 2**30:.2f} GiB "
        f"({resident.state_device / 2**30:.2f} resident), in host memory {streamed.state_host / 2**30:.2f}",
    )  # fmt: skip
    if case.state.precision != "fp32":
        return
    different = sum(not torch.equal(streamed.weights[name], one) for name, one in resident.weights.items())
    yield Row(
        f"{label}_tensors_that_differ", different, f"of {len(resident.weights)}", "== 0", different == 0,
        f"bit for bit, after {case.warm_up + case.steps} steps",
    )  # fmt: skip


def tidy(device: torch.device) -> None:
    """Free what the last measurement held. Compiled code is kept if it holds nothing."""
    gc.collect()
    if device.type != "cuda":
        return
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    if torch.cuda.memory_allocated(device) > LEFT and (held := free(device)) > LEFT:
        raise GracetuneError(f"the last measurement still holds {format_bytes(held)} of GPU memory")


def measure(
    bench: Bench, folder: Path, *, smoke: bool, only: str | None, within: Callable[[float], bool]
) -> Iterator[Row]:  # fmt: skip
    """`within(seconds)` says whether a measurement that takes so long may begin."""
    device = bench.device
    for precision in LAYOUTS if only in (None, "update") else ():
        yield rate(precision, 1 << 14 if smoke else 16 * CHUNK, device, bench.pool)
        tidy(device)
    chunk = 1 << 12 if smoke else CHUNK
    accumulation = 2 if smoke else max(1, TOKENS // (bench.job.tokens * bench.job.batch))
    # Layers, micro-batches, steps before those that are timed, timed steps, and seconds that one measurement may take.
    sizes = {"2b": (12, 1, 4, 16, 20), "5b": (30, accumulation, 1, 2, 28)}
    for label, (layers, micro_batches, warm_up, steps, seconds) in sizes.items():
        if only not in (None, label):
            continue
        preset = replace(bench.job.preset, small={**WIDTH, "num_layers": layers})
        model = make_model(preset, folder / label, "tiny" if smoke else "small")
        forward = count(bench.job, model, ["blocks.0.attn1.to_q"]).forward
        case = Case(label, micro_batches, warm_up, steps, StateChoice("fp32", RESIDENT, chunk_elements=chunk))
        if not within(seconds + COMPILING):
            return
        resident = bench.measure(model, case)
        yield Row(f"{label}_resident", resident.seconds, "s/step", samples=resident.samples)
        states = {"streamed": StateChoice("fp32", chunk_elements=chunk)}
        if label == "5b":
            ahead = StateChoice("fp32", slots=MANY_SLOTS, chunk_elements=chunk)
            half = StateChoice("bf16_moments", chunk_elements=chunk)
            states = {"streamed_ahead": ahead, **states, "streamed_bf16_moments": half}
        for name, state in states.items():
            if not within(seconds + (PINNING if name == next(iter(states)) else 0)):
                return
            streamed = bench.measure(model, replace(case, state=state))
            bar = name == "streamed_ahead" and not smoke
            named = replace(case, name=f"{label}_{name}", state=state)
            yield from against(bench, named, resident, streamed, forward, bar=bar)
            del streamed
        yield Row(f"{label}_pinning", bench.pool.seconds, "s", detail=f"{bench.pool.bytes / 2**30:.1f} GiB so far")


def kept(earlier: Path | None, rows: Sequence[BenchRow]) -> list[Row]:
    """The rows of an earlier result that were not measured again, each with the commit that measured it."""
    if earlier is None:
        return []
    result = json.loads(earlier.read_text())
    measured = {row.name for row in rows}
    return [
        Row(**{"git_commit": result["git_commit"], **row, "samples": tuple(row["samples"])})
        for row in result["rows"]
        if row["name"] not in measured
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--attention", choices=("auto", "flash"), default="flash", help="auto is faster and may not be deterministic"
    )
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--seconds", type=float, default=225, help="begin no measurement that would end later")
    parser.add_argument("--only", choices=("update", "2b", "5b"), help="one of the three parts")
    parser.add_argument("--merge", type=Path, help="an earlier result, whose other rows are kept")
    parser.add_argument("--smoke", action="store_true", help="tiny models, on a CPU too: does everything run?")
    parser.add_argument("--output", type=Path, help="also write the result there, as JSON")
    requested = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    if not on_gpu and not requested.smoke:
        parser.error("needs a CUDA GPU; --smoke runs tiny models on this machine's CPU")
    began = time.perf_counter()
    machine, job = probe(), StepJob("wan14b", smoke=requested.smoke)
    rows: list[BenchRow] = []
    torch.use_deterministic_algorithms(requested.attention != "auto")
    # That fills memory that is not written yet, to show programs that read it; here it would only be time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]

    def within(seconds: float) -> bool:
        if requested.smoke or time.perf_counter() - began + seconds <= requested.seconds:
            return True
        print(f"left out: the next measurement would end after {requested.seconds:g} s", flush=True)
        return False

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gracetune-bench-")))
        runtime = stack.enter_context(open_runtime("bf16", Environment({})))
        compiled = runtime.device.type == "cuda" and not requested.no_compile
        bench = Bench(job, machine, runtime, HostPool(runtime.device), requested.attention, compiled)
        for row in measure(bench, folder, smoke=requested.smoke, only=requested.only, within=within):
            rows.append(row)
            print_rows(out(), [row])
            print(f"  after {time.perf_counter() - began:.0f} s", flush=True)
            if requested.output is not None:  # what was measured stays, whatever happens to the rest
                write_result(
                    requested.output, result_of("full_finetune", [*kept(requested.merge, rows), *rows], machine)
                )
    return 1 if any(row.ok is False for row in rows) and not requested.smoke else 0


if __name__ == "__main__":
    sys.exit(main())
