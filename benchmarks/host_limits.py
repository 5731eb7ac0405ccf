"""Times and memory of what the host does around training, each against its bar. No GPU is needed.

python benchmarks/host_limits.py --output benchmarks/results/host-limits-NAME.json

    start      scan of 30,000 files on one core and on two; a warm start with 30,000 images
    report     the report of a run with 160,000 log steps
    text       encoding captions, against a loop over transformers' encoders with the same batch
    hostile    every hostile config file of tests/unit/config
    inspect    `adapter inspect` of a LoHa of rank 128 with 320 layers of 5120 x 5120, 1.7 GB
    storm      the storm lane of `make test-full`
    demo       `gracetune demo` on one core

The machine should be idle; the result has the load averages before and after. Details state CPU time beside wall time.
All take about half an hour on two cores. `--only NAME` measures one and replaces its rows in an existing result.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from gracetune.bench.results import git_commit, result_of, write_result
from gracetune.bench.row import BenchRow
from gracetune.bench.startup import Spent, make_images, starting_rows
from gracetune.cli.bench import print_rows
from gracetune.cli.console import out
from gracetune.errors import GracetuneError
from gracetune.hardware import Machine, probe

TESTS: Final = Path(__file__).resolve().parents[1] / "tests"
STEPS: Final = 160_000
CAPTIONS: Final = 64
ROUNDS: Final = 3
MOST_REPORT_S: Final = 20
"""It took 46 s before the report was thinned out."""
MIB: Final = 1 << 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[*PARTS], action="append", help="all without it")
    parser.add_argument("--output", type=Path, help="also write the result there, as JSON")
    requested = parser.parse_args()
    machine, rows, parts = probe(), list[BenchRow](), dict[str, dict[str, Any]]()
    try:
        for name in requested.only or PARTS:
            before = os.getloadavg()
            with tempfile.TemporaryDirectory(prefix="gracetune-bench-") as folder:
                found = [*PARTS[name](Path(folder), machine)]
            rows += found
            loads = {"load_averages_before": before, "load_averages_after": os.getloadavg()}
            parts[name] = {"rows": [row.name for row in found], "git_commit": git_commit(), **loads}
    except GracetuneError as error:
        print(error, file=sys.stderr)
        return 1
    print_rows(out(), rows)
    if requested.output is not None:
        _write(requested.output, result_of("host-limits", rows, machine), parts)
    return int(any(row.ok is False for row in rows))


def _write(path: Path, result: dict[str, Any], parts: Mapping[str, Any]) -> None:
    """Parts of an existing result that were not measured again are kept."""
    earlier = json.loads(path.read_text()) if path.exists() else {"rows": [], "parts": {}}
    kept = {name: part for name, part in earlier["parts"].items() if name not in parts}
    names = {row for part in kept.values() for row in part["rows"]}
    rows = [*(row for row in earlier["rows"] if row["name"] in names), *result["rows"]]
    write_result(path, {**result, "parts": {**kept, **parts}, "rows": rows})


def report_rows(folder: Path, machine: Machine) -> Iterator[BenchRow]:
    from gracetune.telemetry.events import MemorySampled, Record, RunEnded, RunStarted, StepDone
    from gracetune.telemetry.sinks.jsonl import JsonlSink

    log = JsonlSink(folder / "logs" / "events.jsonl")
    log.write(Record(0.0, RunStarted(run="bench", total_steps=STEPS)))
    for step in range(1, STEPS + 1):
        loss = 1 / step + step % 7 / 100
        log.write(Record(float(step), StepDone(step=step, epoch=0, loss=loss, step_ms=100.0, lr={"all": 1e-4})))
        if step % 100 == 0:
            log.write(
                Record(float(step), MemorySampled(step=step, used_bytes={"device": {"other": step % 1000 * MIB}}))
            )
    log.write(Record(float(STEPS), RunEnded(step=STEPS, outcome="finished")))
    log.close()
    seconds, cpu, peak = _in_new_process("report", folder)
    size = (folder / "report.json").stat().st_size / MIB
    logged = (folder / "logs" / "events.jsonl").stat().st_size / MIB
    detail = f"{STEPS:,} log steps, a log of {logged:.0f} MiB; {cpu:.1f} s of CPU"
    yield BenchRow("report_seconds", seconds, "s", f"< {MOST_REPORT_S}", seconds < MOST_REPORT_S, detail)
    yield BenchRow("report_json", size, "MiB", "< 5", size < 5, "report.json, thinned out like the plots")
    yield BenchRow("report_memory", peak, "MiB", "< 300", peak < 300, "more than the process had before")


def text_rows(folder: Path, machine: Machine) -> Iterator[BenchRow]:
    """Both encode the same captions in this process; loading the encoders is not part of it."""
    from gracetune.cache.encode_passes import PassOptions, encode_texts
    from gracetune.cache.folders import cache_folders
    from gracetune.cache.session import Caches, needs
    from gracetune.config.run_config import RunConfig
    from gracetune.data.index_builder import build_index
    from gracetune.models.encoders import encoders_of
    from gracetune.models.registry import geometry_of

    make_images(folder / "images", CAPTIONS)
    model = _model_with_a_larger_encoder(folder / "model")
    times: list[tuple[Spent, Spent]] = []
    for number in range(ROUNDS):
        config = RunConfig.model_validate({
            "name": "bench", "output_dir": str(folder / f"out-{number}"),
            "training": {"max_steps": 1, "mixed_precision": "fp32"},
            "model": {"family": "flux", "flavour": "dev", "path": str(model)},
            "datasets": [{"id": "images", "path": str(folder / "images"), "resolution": 64.0}],
        })  # fmt: skip
        index = build_index(config, geometry_of(config.model)[0])
        encoders, folders = encoders_of(config, torch.device("cpu")), cache_folders(config)
        wanted = needs(config, index, encoders, folders).texts
        batch, encoder = config.cache.text_encoder_batch_size, encoders.load_text()
        plain = _plain_loop(model, [item.text for item in wanted], batch)
        with Caches(folders, writable=True) as caches:
            began, cpu = time.perf_counter(), time.process_time()
            encode_texts(encoder, wanted, index, caches.store, options=PassOptions(batch_size=batch))
            times.append((Spent(time.perf_counter() - began, time.process_time() - cpu), plain))
        encoder.close()
    ours, plain = min(one for one, _ in times), min(two for _, two in times)
    detail = f"{len(wanted)} captions of 512 tokens, batches of {batch}: {ours} with writing, {plain} without"
    ratio = ours.wall / plain.wall
    yield BenchRow("text_pass_over_loop", ratio, "ratio", "<= 1.2", ratio <= 1.2, detail)


def _model_with_a_larger_encoder(folder: Path) -> Path:
    """The tiny FLUX with a T5 of the width of T5-small. Its time is that of its arithmetic, not of Python."""
    from transformers import AutoTokenizer, T5Config, T5EncoderModel

    from gracetune.models.tiny import build

    build("flux", "dev", folder)
    words = len(AutoTokenizer.from_pretrained(folder / "tokenizer_2"))
    encoder = T5EncoderModel(T5Config(vocab_size=words, num_layers=3, feed_forward_proj="gated-gelu"))
    encoder.save_pretrained(folder / "text_encoder_2")
    return folder


@torch.no_grad()
def _plain_loop(model: Path, texts: Sequence[str], batch: int) -> Spent:
    from transformers import AutoTokenizer, CLIPTextModel, T5EncoderModel

    first, second = (AutoTokenizer.from_pretrained(model / name) for name in ("tokenizer", "tokenizer_2"))
    clip = CLIPTextModel.from_pretrained(model / "text_encoder").eval()
    t5 = T5EncoderModel.from_pretrained(model / "text_encoder_2").eval()
    found, began, cpu = list[Any](), time.perf_counter(), time.process_time()
    for begin in range(0, len(texts), batch):
        some = [*texts[begin : begin + batch]]
        for tokenizer, encoder, length in ((first, clip, 77), (second, t5, 512)):
            tokens = tokenizer(some, padding="max_length", max_length=length, truncation=True, return_tensors="pt")
            found.append(encoder(tokens.input_ids).last_hidden_state)
    return Spent(time.perf_counter() - began, time.process_time() - cpu)


def hostile_rows(folder: Path, machine: Machine) -> Iterator[BenchRow]:
    from unit.config.hostile_files import hostile_files

    paths = []
    for name, text in hostile_files():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="")
        if path.name != "named.json":
            paths.append(path)
    script = TESTS / "unit" / "config" / "measured_reading.py"
    done = subprocess.run([sys.executable, str(script)], input="\n".join(map(str, paths)), stdout=subprocess.PIPE,
                          text=True, check=True)  # fmt: skip
    files = [json.loads(line) for line in done.stdout.splitlines()]
    slowest, largest = max(files, key=lambda one: one["cpu"]), max(files, key=lambda one: one["kib"])
    seconds, kib = slowest["cpu"], largest["kib"]
    count = f"of {len(files)} files"
    yield BenchRow("hostile_seconds", seconds, "s", "< 2", seconds < 2, f"{count}: {Path(slowest['file']).name}")
    yield BenchRow("hostile_memory", kib / 1000, "MB", "< 300", kib < 300_000, f"{count}: {Path(largest['file']).name}")


def inspect_rows(folder: Path, machine: Machine) -> Iterator[BenchRow]:
    from safetensors.torch import save_file

    tensors, one = dict[str, torch.Tensor](), torch.randn(5120, 128, generator=torch.Generator().manual_seed(1)) / 64
    for block in range(40):
        for layer in (f"{part}_attn_{name}" for part in ("self", "cross") for name in "qkvo"):
            stem = f"lycoris_blocks_{block}_{layer}"
            tensors |= {f"{stem}.hada_w{number}_a": (one + block / 1e4).bfloat16() for number in (1, 2)}
            tensors |= {f"{stem}.hada_w{number}_b": (one.T - block / 1e4).bfloat16().contiguous() for number in (1, 2)}
            tensors[f"{stem}.alpha"] = torch.tensor(64.0)
    save_file(tensors, folder / "a.safetensors")
    del tensors
    seconds, cpu, peak = _in_new_process("inspect", folder)
    spent = f"one thread, {cpu:.1f} s of CPU, {peak:,.0f} MiB more than before"
    detail = f"320 layers, norms estimated from 128 rows each; {spent}"
    yield BenchRow("inspect_large_loha", seconds, "s", detail=detail)


def storm_rows(folder: Path, machine: Machine) -> Iterator[BenchRow]:
    began = time.perf_counter()
    command = [sys.executable, "-m", "pytest", "-q", "-m", "full", "-p", "no:cacheprovider", "tests/storm"]
    done = subprocess.run(command, cwd=TESTS.parent, stdout=subprocess.PIPE, text=True, check=False)
    minutes = (time.perf_counter() - began) / 60
    detail = done.stdout.strip().rpartition("\n")[2]
    yield BenchRow("storm_lane", minutes, "min", "<= 6", done.returncode == 0 and minutes <= 6, detail)


def demo_rows(folder: Path, machine: Machine) -> Iterator[BenchRow]:
    command = ["taskset", "-c", "0", sys.executable, "-m", "gracetune", "demo", "--output", str(folder / "demo")]
    began, before = time.perf_counter(), os.times()
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    seconds, after = time.perf_counter() - began, os.times()
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    yield BenchRow("demo", seconds, "s", detail=f"on one core; {spent:.0f} s of CPU")


PARTS: Final[Mapping[str, Callable[[Path, Machine], Iterator[BenchRow]]]] = {
    "start": starting_rows,
    "report": report_rows,
    "text": text_rows,
    "hostile": hostile_rows,
    "inspect": inspect_rows,
    "storm": storm_rows,
    "demo": demo_rows,
}


# -- in a new process -------------------------------------------------------------------------------------------------


def _in_new_process(task: str, folder: Path) -> tuple[float, float, float]:
    """Wall time and CPU time of the task without imports, and by how many MiB it raises its process's peak memory."""
    command = [sys.executable, __file__, f"{_TASK}{task}", str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    seconds, cpu, peak = json.loads(done.stdout.splitlines()[-1])
    return seconds, cpu, peak


_TASK: Final = "task:"


def _measure(task: str, folder: Path) -> None:
    from gracetune.adapters.adapter_files import open_adapter
    from gracetune.adapters.loading_steps import loading_steps
    from gracetune.cli.adapter_view import inspection_json
    from gracetune.telemetry.report.write import write_report

    torch.set_num_threads(1)  # several would spin while they wait for each other, if other programs run
    before, began, cpu = _peak_mib(), time.perf_counter(), time.process_time()
    if task == "report":
        write_report(folder, loading_steps)
    else:
        inspection_json(open_adapter(folder / "a.safetensors"))
    print(json.dumps([time.perf_counter() - began, time.process_time() - cpu, _peak_mib() - before]))


def _peak_mib() -> float:
    """Of this program. `ru_maxrss` would include the memory that the parent process had when it started this one."""
    (line,) = (one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("VmHWM:"))
    return int(line.split()[1]) / 1024


if __name__ == "__main__":
    sys.path.insert(0, str(TESTS))
    if len(sys.argv) == 3 and sys.argv[1].startswith(_TASK):
        _measure(sys.argv[1].removeprefix(_TASK), Path(sys.argv[2]))
    else:
        sys.exit(main())
