"""What a switch between two experts costs where a GPU has no room for both: turns of ten steps, timed one by one.

python benchmarks/expert_switch.py --output benchmarks/results/expert-switch-NAME.json

Blocks of Wan2.2-14B's size, fewer of them: bytes to bring and time to hide them in grow with the blocks alike, so the
share of a turn is the whole model's. Everything else is the trainer's own: `load_trained_model`, `assemble`,
`run_step`. A turn is held against ten of its own steps that have no switch beside them, and against the same turns with
both experts resident.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any, Final

import torch
from torch import nn

from gracetune.bench.results import result_of, write_result
from gracetune.bench.row import BenchRow
from gracetune.bench.step.clock import between, mark, synchronize
from gracetune.bench.step.job import ModelScale, StepJob, config_of
from gracetune.bench.step.random_data import random_data
from gracetune.bench.step.random_model import RandomModel, make_model
from gracetune.bench.step.trainer import assemble_unresumed, decide
from gracetune.cli.bench import print_rows
from gracetune.cli.console import out
from gracetune.config.environment import Environment
from gracetune.config.run_config import RunConfig
from gracetune.errors import GracetuneError
from gracetune.hardware import Machine, probe
from gracetune.models.activation_parking import CudaClock
from gracetune.models.expert_streaming import StreamedParking
from gracetune.models.experts import ExpertHost, SwitchStats
from gracetune.models.parking import InlineLane, NoParking, Parking
from gracetune.train.control import Stop
from gracetune.train.loop import run_step
from gracetune.train.runtime import Runtime, open_runtime
from gracetune.train.trained_model import load_trained_model
from gracetune.train.view import View

TURN: Final = 10
"""Steps between switches."""
WARM_UP: Final = 2 * TURN
"""Each expert's first turn, in which it is compiled."""
MOST: Final = 0.05
"""Of a turn."""


@dataclass(frozen=True)
class Turns:
    step_ms: float
    """The median step inside a turn."""
    turn_ms: float
    """A whole turn, its switch included: the mean."""
    stats: SwitchStats

    @property
    def share(self) -> float:
        return self.turn_ms / (TURN * self.step_ms) - 1


def measure(model: RandomModel, job: StepJob, machine: Machine, runtime: Runtime, turns: int) -> Iterator[BenchRow]:
    with tempfile.TemporaryDirectory(prefix="gracetune-bench-") as folder:
        config = with_turns(config_of(job, model.source.folder, Path(folder)), turns)
        both = timed(model, job, config, machine, runtime, turns, lambda module: NoParking())
        yield BenchRow(
            "resident", 100 * both.share, "% of a turn",
            detail=f"both experts on the device: {both.step_ms:.1f} ms/step, {both.turn_ms:.1f} a turn of {TURN}",
        )  # fmt: skip
        gc.collect()
        moved = timed(model, job, config, machine, runtime, turns, parking_on(model, runtime.device))
        each = moved.stats.followed_bytes / max(1, moved.stats.count) / 1e9
        waited = moved.stats.waited_ms / max(1, moved.stats.count)
        yield BenchRow(
            "streamed", 100 * moved.share, "% of a turn", f"< {100 * MOST:g}", moved.share < MOST,
            f"room for one: {moved.turn_ms:.1f} ms a turn, {moved.step_ms:.1f} a step; {each:.2f} GB came behind the "
            f"last backward pass of each turn, and the device waited {waited:.0f} ms for the rest; a turn took "
            f"{100 * (moved.turn_ms / both.turn_ms - 1):.1f} % longer than with both resident",
        )  # fmt: skip


def steps_of(turns: int) -> int:
    """One more than is timed: the last turn's end is where the next one begins."""
    return WARM_UP + turns * TURN + 1


def with_turns(config: RunConfig, turns: int) -> RunConfig:
    requested = config.model_dump()
    requested["model"] |= {"experts": "both", "switch_experts_every": TURN}
    requested["training"]["max_steps"] = steps_of(turns)
    return RunConfig.model_validate(requested)


def parking_on(model: RandomModel, device: torch.device) -> Callable[[nn.Module], Parking]:
    blocks = model.spec.repeated_blocks
    if device.type == "cuda":
        return lambda module: StreamedParking.pinned(module, blocks, device)
    return lambda module: StreamedParking(module, blocks, device, InlineLane())


def timed(
    model: RandomModel, job: StepJob, config: RunConfig, machine: Machine, runtime: Runtime, turns: int,
    make_parking: Callable[[nn.Module], Parking],
) -> Turns:  # fmt: skip
    device = runtime.device
    decided = decide(job, config_of(job, model.source.folder, Path()), machine, model, device)
    for line in decided.reasons:
        print(f"  {line}", flush=True)
    choices = decided.choices
    clock = CudaClock() if device.type == "cuda" else None
    host = ExpertHost(make_parking, "for this measurement", room=lambda *, on_device, elsewhere: 0, clock=clock)
    with ExitStack() as stack:
        trained_model = load_trained_model(config, model.spec, model.source, model.facts, runtime, choices, host)
        ready = random_data(job, config, model, pinned=device.type == "cuda")
        run = assemble_unresumed(config, trained_model, ready, runtime, View(), stack)
        marks: list[Any] = []
        for step in range(steps_of(turns)):
            if step == WARM_UP:
                synchronize(device)
                host.count_waits()
                host.switches = SwitchStats()
            if step >= WARM_UP:
                marks.append(mark(device))
            if isinstance(done := run_step(run), Stop):
                raise GracetuneError(f"the run ended in the middle of the measurement: {done.reason}")
        synchronize(device)
        times = [between(one, two) for one, two in pairwise(marks)]
        inside = [time for number, time in enumerate(times) if number % TURN not in (0, TURN - 1)]
        whole = [sum(times[first : first + TURN]) for first in range(0, turns * TURN, TURN)]
        host.count_waits()
        return Turns(median(inside), mean(whole), host.switches)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=10, help="of the 40 a real expert has")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--smoke", action="store_true", help="a tiny model, on a CPU too: does everything run?")
    parser.add_argument("--output", type=Path, help="also write the result there, as JSON")
    requested = parser.parse_args()
    if not torch.cuda.is_available() and not requested.smoke:
        parser.error("needs a CUDA GPU; --smoke runs a tiny model on this machine's CPU")
    # A plan is for whole experts; of so few blocks everything fits without repeating work.
    machine, job = probe(), StepJob("wan14b", checkpointing="off", smoke=requested.smoke)
    scale: ModelScale = "tiny" if requested.smoke else "small"
    preset = replace(job.preset, small={"num_layers": requested.layers})
    rows: list[BenchRow] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gracetune-bench-")))
        runtime = stack.enter_context(open_runtime("bf16", Environment({})))
        model = make_model(preset, folder / "model", scale)
        for row in measure(model, job, machine, runtime, requested.turns):
            rows.append(row)
            print_rows(out(), [row])
            if requested.output is not None:  # what was measured stays, whatever happens to the rest
                write_result(requested.output, result_of("expert_switch", rows, machine))
    return 1 if any(row.ok is False for row in rows) and not requested.smoke else 0


if __name__ == "__main__":
    sys.exit(main())
