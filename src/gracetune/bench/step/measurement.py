"""Measure one row in one process: the trainer's step, ceilings, the plain loop, the gradients' error.

The memory of each part is freed before the next one begins. Leftover memory is an error, since it would count in the
next peak.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import torch

from gracetune.bench.step.clock import Pace, ceilings, free, measure
from gracetune.bench.step.flops import StepFlops, count
from gracetune.bench.step.job import FEWEST_SAMPLES, ModelScale, StepJob, check_job, config_of
from gracetune.bench.step.numerics import Numerics, gradient_check
from gracetune.bench.step.plain_loop import PlainLoop
from gracetune.bench.step.random_model import RandomModel, make_model
from gracetune.bench.step.recomputation import counting
from gracetune.bench.step.row import StepRow, gib
from gracetune.bench.step.self_check import time_self_check
from gracetune.bench.step.trainer import StepChoices, decide, trainer
from gracetune.config.environment import Environment
from gracetune.config.run_config import RunConfig
from gracetune.errors import GracetuneError, MachineError
from gracetune.hardware import Machine
from gracetune.train.blocks import Preparation
from gracetune.train.runtime import Runtime, open_runtime
from gracetune.units import MIB, format_bytes

BASELINE_SAMPLES: Final = 10
BASELINE_S: Final = 30.0
"""Time limit for baseline samples. With video a baseline step takes about 15 s, so there are fewer samples."""
_LEFT: Final = 256 * MIB
"""Bytes that may stay allocated after a part: workspaces of libraries."""
_GRAPHS: Final = 4
"""Allowed graphs for models with few blocks: two kinds, and the first block of each may have its own graph."""
_LIBRARIES: Final = ("diffusers", "transformers", "peft", "lycoris-lora", "accelerate")

Report = Callable[[str], None]


@dataclass(frozen=True)
class Stamp:
    """Facts that make a row comparable later."""

    command: str
    git_commit: str | None
    versions: dict[str, Any]


def versions_of(machine: Machine, ours: str) -> dict[str, Any]:
    libraries = {name: version(name) for name in _LIBRARIES}
    software = machine.software
    return {
        "gracetune": ours, "python": software.python, "torch": torch.__version__, "cuda": torch.version.cuda,
        "driver": machine.driver.cuda_version, **libraries,
    }  # fmt: skip


@dataclass(frozen=True)
class Bench:
    """The measurements of one process. Parts that several rows share are measured once."""

    machine: Machine
    runtime: Runtime
    stamp: Stamp
    folder: Path
    report: Report = lambda text: None
    _cached: dict[tuple[object, ...], Any] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        return self.runtime.device

    def row(self, job: StepJob, name: str = "") -> StepRow:
        job = check_job(job)
        if self.device.type != "cuda" and not job.smoke:
            raise MachineError(f"bench {job.bench} needs a CUDA GPU; --smoke runs a tiny model on this machine's CPU")
        with self._limited(job):
            return self._row(job, name)

    def rows(self, job: StepJob) -> list[StepRow]:
        """The row of a job. With token routing the step with all tokens comes first."""
        if not check_job(job).token_routing:
            return [self.row(job)]
        plain = self.row(replace(job, token_routing=0.0), "all tokens")
        routed = self.row(replace(job, baseline=False), "routed")
        return [plain, replace(routed, unrouted_ms=plain.ms_per_step)]

    def _row(self, job: StepJob, name: str) -> StepRow:
        model = self._model(job)
        # A new folder for each row, because files of the same name are not replaced.
        config = config_of(job, model.source.folder, Path(tempfile.mkdtemp(dir=self.folder)) / "out")
        decided = decide(job, config, self.machine, model, self.device)
        for line in decided.reasons:
            self.report(line)
        with trainer(job, config, decided, self.machine, model, self.runtime) as run:
            attached = run.trained_model.attached[model.expert.name]
            assert attached.selection is not None, "only a full fine-tune has none"
            targets, reasons = attached.selection.paths, (*decided.reasons, *run.trained_model.decisions)
            trained = sum(parameter.numel() for parameter in run.trained_model.parameters().values())
            self.report(f"{trained / 1e6:.1f} M trained parameters; first step")
            with counting() as repeated:
                ours = measure(run.step, self.device, job.steps)
            self.report(f"{ours.ms:.1f} ms/step, {ours.once_s:.1f} s once")
            reasons += run.lines
            for prepared in run.trained_model.prepared.values():
                reject_many_graphs(prepared)
            of_adapter, of_file = time_self_check(run, config)
            self_check = of_adapter + of_file
            percent = 100 * self_check / (500 * ours.ms / 1000)
            self.report(f"self-check: {of_adapter:.2f} s + {of_file:.2f} s for the file, {percent:.2f} % of 500 steps")
            del run, attached
        self._free_memory("the trainer")
        flops = self._flops(job, model, targets)
        speeds = self._ceilings(flops)
        plain = self._baseline(job, config, model, targets, trained) if job.baseline else None
        numerics = self._numerics(job)
        return self._build_row(
            job, name, ours, plain, flops, speeds, decided, repeated.share, numerics, reasons, trained,
            self_check,
        )  # fmt: skip

    def _build_row(
        self, job: StepJob, name: str, ours: Pace, plain: Pace | None, flops: StepFlops, speeds: dict[str, float],
        decided: StepChoices, share: float | None, numerics: Numerics, reasons: tuple[str, ...], trained: int,
        self_check: float,
    ) -> StepRow:  # fmt: skip
        """Build the row. The function is long because it has one line per column."""
        seconds = ours.ms / 1000
        ceiling = speeds.get(job.precision, speeds["bf16"])
        rate = flops.model / seconds / 1e12
        hardware = flops.hardware(decided.policy, share)
        return StepRow(
            bench=job.bench,
            adapter=job.adapter,
            precision=job.precision,
            batch=job.batch,
            resolution=job.resolution,
            frames=job.shape.frames,
            checkpointing=job.checkpointing,
            ms_per_step=round(ours.ms, 3),
            tokens_per_s=round(job.batch * job.tokens / seconds, 1),
            tflops=_figures(rate),
            gemm_ceiling_tflops=_figures(ceiling),
            peak_gib=gib(ours.peak_bytes),
            estimated_peak_gib=gib(decided.estimated_peak),
            compile_s=round(ours.once_s, 2),
            baseline_ms=None if plain is None else round(plain.ms, 3),
            ratio=None if plain is None else round(plain.ms / ours.ms, 3),
            samples_ms=tuple(round(sample, 3) for sample in ours.samples_ms),
            smoke=job.smoke,
            gpu=self.machine.gpus[0].name if self.machine.gpus else None,
            git_commit=self.stamp.git_commit,
            command=self.stamp.command,
            versions=self.stamp.versions,
            name=name,
            optimizer=job.optimizer,
            memory_limit_gib=gib(job.memory_limit),
            policy=decided.policy,
            model_flops=flops.model,
            hardware_flops=hardware,
            model_utilisation=_figures(rate / ceiling),
            hardware_utilisation=None if hardware is None else _figures(hardware / seconds / 1e12 / ceiling),
            gemm_shape=str(flops.main),
            gemm_ceilings_tflops={kind: _figures(speed) for kind, speed in speeds.items()},
            trained_parameters=trained,
            baseline=None if plain is None else _baseline_words(job),
            baseline_samples_ms=() if plain is None else tuple(round(sample, 3) for sample in plain.samples_ms),
            baseline_peak_gib=None if plain is None else gib(plain.peak_bytes),
            loss=_figures(ours.loss),
            numerics=numerics.as_json(),
            self_check_s=round(self_check, 3),
            joules_per_step=None if ours.joules is None else _figures(ours.joules),
            clock_mhz=ours.clock_mhz,
            baseline_joules_per_step=None if plain is None or plain.joules is None else _figures(plain.joules),
            token_routing=job.token_routing,
            reasons=reasons,
        )

    # -- measured once ------------------------------------------------------------------------------------------------

    def _once(self, key: tuple[object, ...], make: Callable[[], Any]) -> Any:
        if key not in self._cached:
            self._cached[key] = make()
        return self._cached[key]

    def _model(self, job: StepJob) -> RandomModel:
        return self._model_of(job, job.scale)

    def _model_of(self, job: StepJob, scale: ModelScale) -> RandomModel:
        folder = self.folder / f"{job.bench}-{scale}"
        made: RandomModel = self._once(("model", job.bench, scale), lambda: make_model(job.preset, folder, scale))
        return made

    def _flops(self, job: StepJob, model: RandomModel, targets: tuple[str, ...]) -> StepFlops:
        key = ("flops", job.bench, job.scale, job.batch, job.shape, job.token_routing)
        found: StepFlops = self._once(key, lambda: count(job, model, targets))
        return found

    def _ceilings(self, flops: StepFlops) -> dict[str, float]:
        found: dict[str, float] = self._once(("ceilings", flops.main), lambda: ceilings(flops.main, self.device))
        return found

    def _numerics(self, job: StepJob) -> Numerics:
        key = ("numerics", job.bench, job.scale, job.adapter, job.precision)
        model = self._model_of(job, "tiny" if job.smoke else "small")
        found: Numerics = self._once(key, lambda: gradient_check(job, model, self.device))
        return found

    def _baseline(
        self, job: StepJob, config: RunConfig, model: RandomModel, targets: tuple[str, ...], trained: int
    ) -> Pace:
        """Time the plain loop, which always uses bf16 and AdamW."""

        def timed() -> Pace:
            self.report(f"baseline: {_baseline_words(job)}")
            loop = PlainLoop(job, config, model, targets, self.device)
            if loop.trained_parameters != trained:
                raise GracetuneError(
                    f"not the same adapter: {trained:,} and {loop.trained_parameters:,} trained parameters"
                )
            return measure(loop.step, self.device, BASELINE_SAMPLES, within_s=BASELINE_S)

        key = ("baseline", job.bench, job.scale, job.adapter, job.batch, job.shape)
        pace: Pace = self._once(key, timed)
        self._free_memory("the baseline")
        self.report(f"baseline: {pace.ms:.1f} ms/step")
        return pace

    # -- memory -------------------------------------------------------------------------------------------------------

    def _free_memory(self, what: str) -> None:
        held = free(self.device)
        if held > _LEFT:
            raise GracetuneError(f"{what} still holds {format_bytes(held)} of GPU memory: the next peak would be wrong")

    @contextmanager
    def _limited(self, job: StepJob) -> Iterator[None]:
        """Enforce the memory limit through torch: a step that needs more gets an out-of-memory error."""
        if job.memory_limit is None or self.device.type != "cuda":
            yield
            return
        free(self.device)
        before = torch.cuda.get_per_process_memory_fraction(self.device)
        total = torch.cuda.get_device_properties(self.device).total_memory
        # torch's cached blocks count against the fraction but not in the peak, hence the margin of 5 %.
        torch.cuda.set_per_process_memory_fraction(min(1.0, 1.05 * job.memory_limit / total), self.device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(before, self.device)


@contextmanager
def open_bench(machine: Machine, stamp: Stamp, report: Report = lambda text: None) -> Iterator[Bench]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gracetune-bench-")))
        # An empty environment: one process, even under a launcher.
        runtime = stack.enter_context(open_runtime("bf16", Environment({})))
        runtime.seed(0)
        yield Bench(machine, runtime, stamp, folder, report)


def reject_many_graphs(prepared: Preparation) -> None:
    """Reject a step in which blocks of one shape do not share a graph, which is the point of compiling them."""
    if prepared.stats.graphs > max(_GRAPHS, prepared.blocks // 4):
        raise GracetuneError(f"{prepared.stats.graphs} graphs for {prepared.blocks} blocks of one shape")


def _baseline_words(job: StepJob) -> str:
    library = "peft" if job.adapter in ("lora", "dora") else "lycoris-lora"
    return f"diffusers + {library}, eager, gradient checkpointing, AdamW, bf16"


def _figures(value: float) -> float:
    """Five significant digits: enough to compute with, few enough to read."""
    return float(f"{value:.5g}")


assert BASELINE_SAMPLES <= FEWEST_SAMPLES
