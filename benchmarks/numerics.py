"""Does the quick way of computing adapters train as the libraries' way does? On small models, on a CPU or a GPU.

python benchmarks/numerics.py --output benchmarks/results/numerics-NAME.json

For every model and adapter: the adapter's gradients as a run computes them, against fp32 with the libraries' layers.
Then whole curves: the same run with both ways of computing the adapter, for several seeds. On a GPU ours is compiled
and has our kernels, the other has torch's own and the libraries' layers. Two ways that are one in exact arithmetic part
in the last digits of bf16 and stay together if the difference is noise; the weight of a difference is how far
runs of other seeds are apart.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Final, Literal, get_args

import torch

from gracetune.bench.results import result_of, write_result
from gracetune.bench.row import BenchRow
from gracetune.bench.step.clock import free
from gracetune.bench.step.job import PRESETS, AdapterKind, StepJob, config_of
from gracetune.bench.step.numerics import gradient_check
from gracetune.bench.step.random_model import RandomModel, make_model
from gracetune.bench.step.trainer import decide, trainer
from gracetune.cli.bench import print_rows
from gracetune.cli.console import out
from gracetune.cli.library_output import libraries_quiet
from gracetune.config.environment import Environment
from gracetune.config.run_config import RunConfig
from gracetune.errors import GracetuneError
from gracetune.hardware import probe
from gracetune.train.runtime import Runtime, open_runtime

PATHS: Final[tuple[Literal["auto", "reference"], ...]] = ("auto", "reference")
SIDE: Final = 128
RATE: Final = 1e-3
END: Final = 50
"""Steps whose mean loss is what a run came to."""
GRADIENT_BAR: Final = 1e-2
WORSE_BAR: Final = 1.1
"""Times the libraries' own error."""
CURVE_BARS: Final = {"bf16": 0.1, "fp8": 1.0}
"""Of the seeds' spread. bf16 computes the same numbers in another order; fp8 other numbers, which may be seed noise."""


@dataclass(frozen=True)
class Curve:
    bench: str
    adapter: str
    precision: str
    path: str
    compiled: bool
    seed: int
    losses: tuple[float, ...]

    @property
    def end(self) -> float:
        return mean(self.losses[-END:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", choices=[*PRESETS], action="append", help="all without it")
    parser.add_argument("--adapter", choices=get_args(AdapterKind), action="append", help="all without it")
    parser.add_argument("--precision", choices=("bf16", "fp8"), default="bf16")
    parser.add_argument("--curves", choices=[*PRESETS], action="append", help="whole runs of these; wan14b without it")
    parser.add_argument(
        "--curve-adapter", choices=get_args(AdapterKind), action="append", help="as --adapter without it"
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--output", type=Path, help="also write the result there, as JSON")
    requested = parser.parse_args()
    machine = probe()
    rows: list[BenchRow] = []
    curves: list[Curve] = []
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            libraries_quiet(),
            open_runtime("bf16", Environment({})) as runtime,
        ):
            for row in measured(requested, Path(folder), runtime, curves):
                rows.append(row)
                print_rows(out(), [row])
                if requested.output is not None:  # what was measured stays, whatever happens to the rest
                    result = result_of("numerics", rows, machine)
                    write_result(requested.output, {**result, "curves": [asdict(curve) for curve in curves]})
    except GracetuneError as error:
        print(error, file=sys.stderr)
        return 1
    return 1 if any(row.ok is False for row in rows) else 0


def measured(requested: argparse.Namespace, folder: Path, runtime: Runtime, curves: list[Curve]) -> Iterator[BenchRow]:
    adapters = requested.adapter or get_args(AdapterKind)
    with_curves = requested.curves or ["wan14b"]
    gradients = requested.bench or [*PRESETS]
    models = {name: make_model(PRESETS[name], folder / name, "small") for name in {*gradients, *with_curves}}
    for bench in gradients:
        for adapter in adapters:
            yield gradient_row(StepJob(bench, adapter, requested.precision), models[bench], runtime.device)
    for bench in with_curves:
        for adapter in requested.curve_adapter or adapters:
            job = StepJob(bench, adapter, requested.precision, width=SIDE, height=SIDE, checkpointing="off")
            found = []
            for path in PATHS:
                free(runtime.device)  # a path's graphs serve all its seeds; torch keeps only a few of one block
                found += [
                    curve(job, models[bench], path, seed, requested.steps, folder, runtime)
                    for seed in range(requested.seeds)
                ]
            curves += found
            yield from curve_rows(job, found)


def gradient_row(job: StepJob, model: RandomModel, device: torch.device) -> BenchRow:
    found = gradient_check(job, model, device)
    bar = max(GRADIENT_BAR, WORSE_BAR * found.library_relative_error)
    # fp8 is reported, not judged: it computes other numbers, and its curves say whether that matters.
    judged = job.precision == "bf16"
    return BenchRow(
        f"gradients_{job.bench}_{job.adapter}",
        found.relative_error,
        "relative error",
        f"<= {bar:.2g}" if judged else "",
        found.relative_error <= bar if judged else None,
        f"{job.precision}, {'compiled' if found.compiled else 'uncompiled'} blocks; cosine {found.cosine:.6f}; "
        f"the libraries' layers in bf16 {found.library_relative_error:.2e}",
    )


def curve(
    job: StepJob, model: RandomModel, path: Literal["auto", "reference"], seed: int, steps: int, folder: Path,
    runtime: Runtime,
) -> Curve:  # fmt: skip
    held: Any = job.precision if path == "auto" else "bf16"
    job = replace(job, precision=held)
    config = _config(job, model, seed, folder)
    decided = decide(job, config, probe(), model, runtime.device)
    # Our kernels run in compiled graphs only.
    compiled = decided.choices.compiled and path == "auto"
    decided = replace(decided, choices=replace(decided.choices, adapter_path=path, compiled=compiled))
    with trainer(job, config, decided, probe(), model, runtime) as run:
        losses = torch.stack([run.step() for _ in range(steps)]).tolist()
    return Curve(job.bench, job.adapter, job.precision, path, compiled, seed, tuple(round(loss, 6) for loss in losses))


def _config(job: StepJob, model: RandomModel, seed: int, folder: Path) -> RunConfig:
    config = config_of(job, model.source.folder, folder / "out")
    return config.model_copy(
        update={
            "training": config.training.model_copy(update={"seed": seed}),
            "optimizer": config.optimizer.model_copy(update={"lr": RATE}),
        }
    )


def curve_rows(job: StepJob, curves: list[Curve]) -> Iterator[BenchRow]:
    """What the two ways of one seed differ by, beside what seeds differ by."""
    ours, reference = ([one for one in curves if one.path == path] for path in PATHS)
    apart = [abs(one.end - two.end) for one, two in zip(ours, reference, strict=True)]
    each = mean(
        abs(a - b)
        for one, two in zip(ours, reference, strict=True)
        for a, b in zip(one.losses, two.losses, strict=True)
    )
    spread = stdev(one.end for one in reference)
    learned = mean(mean(one.losses[:END]) for one in ours), mean(one.end for one in ours)
    message = (
        f"{job.precision}, {len(ours)} seeds, {len(ours[0].losses)} steps; loss {learned[0]:.4f} -> {learned[1]:.4f} "
        f"(means of {END}); paths end {max(apart):.1e} apart at most, {each:.1e} in a step; "
        f"seeds end {spread:.1e} apart"
    )
    ratio, bar = max(apart) / spread, CURVE_BARS[job.precision]
    yield BenchRow(
        f"curves_{job.bench}_{job.adapter}", ratio, "of the seeds' spread", f"<= {bar:g}", ratio <= bar, message
    )


if __name__ == "__main__":
    sys.exit(main())
