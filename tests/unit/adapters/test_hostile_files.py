"""For any file, every command ends quickly and within a memory limit: with a typed error or a correct result."""

from __future__ import annotations

import io
import json
import math
import random
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

import pytest
import torch
import typer
from rich.console import Console
from safetensors.torch import save_file
from torch import Tensor, nn

from gracetune.adapters.adapter_files import open_adapter
from gracetune.adapters.algorithms.matrices import is_finite
from gracetune.adapters.attach import Attached, attach
from gracetune.adapters.formats.record import FORMATS
from gracetune.adapters.statistics import norms
from gracetune.adapters.verification import verify
from gracetune.cli import adapter as commands
from gracetune.cli import adapter_view
from gracetune.config.run_config import Adapter
from gracetune.errors import ConfigError, GracetuneError
from gracetune.storage.safetensors_headers import MAX_HEADER
from gracetune.units import MIB
from unit.adapters.mutations import SHAPES, Valid, spoiled, valid_files

SECONDS, MEMORY = 2.0, 500 * MIB


@contextmanager
def bounded() -> Iterator[None]:
    """Limits on the memory and the CPU time of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    held = next(int(line.split()[1]) for line in lines if line.startswith("VmData")) * 1024
    before = resource.getrlimit(resource.RLIMIT_DATA)
    started = time.process_time()
    resource.setrlimit(resource.RLIMIT_DATA, (held + MEMORY, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
    assert time.process_time() - started < SECONDS


def check_every_command(path: Path, family: str, target: Attached, chance: random.Random) -> bool:
    """Inspect, convert and verify the file, and start a run from it. Returns whether any of these accepted it."""
    for again in path.parent.glob("out*"):
        again.unlink()
    took = [inspected(path)]
    format = chance.choice(list(FORMATS))
    took += [converted(path, path.with_name(f"out{rank}.safetensors"), format, rank) for rank in (None, 2)]
    try:
        opened = open_adapter(path, family)
        adapter_view.print_verified(
            opened, "x", verify(opened.reading, {"": SHAPES[family]}), Console(file=io.StringIO())
        )
        target.load(opened.state())
    except ConfigError as error:
        assert all(len(line) < 4_000 and line.isprintable() for line in str(error).splitlines())
    return any(took)


def inspected(path: Path) -> bool:
    printed = io.StringIO()
    for as_json in (False, True):
        with redirect_stdout(printed), pytest.raises(typer.Exit) as done:
            commands.inspect([path], as_json=as_json)
        if not as_json:
            assert all(line.isprintable() for line in printed.getvalue().splitlines())
            printed.truncate(printed.seek(0))
    (report,) = json.loads(printed.getvalue())["files"]
    assert done.value.exit_code == (0 if report.get("usable") else 1)
    return bool(report.get("usable"))


def converted(path: Path, output: Path, format: str, rank: int | None) -> bool:
    with redirect_stdout(io.StringIO()):
        try:
            commands.convert(path, to=format, output=output, lora_rank=rank, split=False)
        except GracetuneError:
            assert not output.exists()
            return False
    before, after = open_adapter(path).state(), open_adapter(output, open_adapter(path).detected.family).state()
    if rank is None:
        assert_same_effect(norms(before).largest, norms(after).largest)
    return True


def assert_same_effect(before: float, after: float) -> None:
    if math.isfinite(before) and before > 1e-20:
        assert after == pytest.approx(before, rel=0.02)


def started(family: str, kind: str) -> Attached:
    """A model with the layers of the files, as a run has it."""
    model = nn.Module()
    for path, (outputs, inputs, *kernel) in SHAPES[family].items():
        *parents, name = path.split(".")
        current = model
        for parent in parents:
            if parent not in dict(current.named_children()):
                current.add_module(parent, nn.Module())
            current = current.get_submodule(parent)
        make = {0: nn.Linear, 2: nn.Conv2d, 3: nn.Conv3d}[len(kernel)]
        current.add_module(name, make(inputs, outputs, *([tuple(kernel)] if kernel else [])))
    options = Adapter(kind=kind, targets=tuple(SHAPES[family]), rank=2, conv_rank=2)  # type: ignore[arg-type]
    return attach(model, options, family=family, default_targets=(), seed=0)


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> tuple[Valid, ...]:
    return valid_files(tmp_path_factory.mktemp("valid"))


def fuzz(valid: tuple[Valid, ...], folder: Path, seeds: range) -> tuple[int, int]:
    """The number of files that some command accepted, and the number of all files."""
    targets: dict[tuple[str, str], Attached] = {}
    took = 0
    for seed in seeds:
        chance = random.Random(seed)
        one = valid[seed % len(valid)]
        target = targets.get((one.family, one.kind)) or started(one.family, one.kind)
        targets[one.family, one.kind] = target
        path = folder / f"{seed}.safetensors"
        path.write_bytes(spoiled(one.content, chance))
        try:
            with bounded():
                took += check_every_command(path, one.family, target, chance)
        except BaseException as error:
            error.add_note(f"seed {seed} of {one}, kept as {path}")
            raise
        path.unlink()
    return took, len(seeds)


def test_there_is_a_file_of_every_format_and_algorithm(valid: tuple[Valid, ...]) -> None:
    assert {one.format for one in valid} == set(FORMATS)
    assert len({one.kind for one in valid}) == 8
    assert len(valid) > 100


def test_spoiled_files_end_with_an_error_or_a_right_answer(valid: tuple[Valid, ...], tmp_path: Path) -> None:
    took, all_of_them = fuzz(valid, tmp_path, range(len(valid)))
    assert 0 < took < all_of_them, "a fuzz that breaks all of them, or none, finds nothing"


@pytest.mark.full
@pytest.mark.timeout(900)
def test_many_more_of_them(valid: tuple[Valid, ...], tmp_path: Path) -> None:
    took, all_of_them = fuzz(valid, tmp_path, range(1_000, 5_000))
    assert 0 < took < all_of_them


# -- small files that stand for large weights --------------------------------------------------------------------------

STEM = "diffusion_model.blocks.0.self_attn.q"


def file_of(tensors: dict[str, tuple[int, ...]], folder: Path) -> Path:
    made: dict[str, Tensor] = {name: torch.full(size, 0.5, dtype=torch.float16) for name, size in tensors.items()}
    path = folder / "small.safetensors"
    save_file({f"{STEM}.{name}": one for name, one in made.items()} | {f"{STEM}.alpha": torch.tensor(1.0)}, path)
    assert path.stat().st_size < 4 * MIB
    return path


def products(n: int, rank: int = 1) -> dict[str, dict[str, tuple[int, ...]]]:
    """Layers of an n x n weight."""
    side, tall, wide = math.isqrt(n), (n, rank), (rank, n)
    return {
        "lora": {"lora_A.weight": wide, "lora_B.weight": tall},
        "loha": {"hada_w1_a": tall, "hada_w1_b": wide, "hada_w2_a": tall, "hada_w2_b": wide},
        "lokr": {"lokr_w1_a": (side, rank), "lokr_w1_b": (rank, side), "lokr_w2_a": (side, rank),
                 "lokr_w2_b": (rank, side)},
        "lokr, one factor": {"lokr_w1": (1, 1), "lokr_w2_a": tall, "lokr_w2_b": wide},
        "loha, tucker": {"hada_t1": (rank, rank, 1, 1), "hada_w1_a": wide, "hada_w1_b": wide,
                         "hada_t2": (rank, rank, 1, 1), "hada_w2_a": wide, "hada_w2_b": wide},
        "locon, tucker": {"lora_mid.weight": (rank, rank, 8, 8), "lora_down.weight": (rank, n // 64, 1, 1),
                          "lora_up.weight": (n, rank, 1, 1)},
        "lokr, tucker": {"lokr_w1": (1, 1), "lokr_t2": (rank, rank, 8, 8), "lokr_w2_a": wide,
                         "lokr_w2_b": (rank, n // 64)},
    }  # fmt: skip


@pytest.mark.parametrize("kind", products(4))
def test_a_small_file_of_a_large_weight(kind: str, tmp_path: Path) -> None:
    """A 16 GiB matrix is measured and converted by its factors. One with sixteen times the elements is rejected."""
    path = file_of(products(1 << 16)[kind], tmp_path)
    with bounded():
        (state,) = open_adapter(path).states()
        assert norms(state).largest > 0
        assert inspected(path)
        took = converted(path, tmp_path / "lora.safetensors", "lycoris", 2)
    assert took == ("tucker" not in kind)  # a convolution's shape is in the model's weights alone
    path = file_of(products(1 << 18)[kind], tmp_path)
    with bounded():
        assert not inspected(path)
        assert not converted(path, tmp_path / "larger.safetensors", "lycoris", None)
    with pytest.raises(ConfigError, match="no model has a weight of more than"):
        open_adapter(path).states()


@pytest.mark.parametrize("rank", [1, 8, 16, 40])
def test_the_norm_of_a_large_loha_is_right(rank: int, tmp_path: Path) -> None:
    """By Gram matrices, row by row, and estimated. All numbers are 0.5, so every element is (rank / 4)^2 times the
    scale of 1 / rank."""
    n = 1 << 12
    (state,) = open_adapter(file_of(products(n, rank)["loha"], tmp_path)).states()
    with bounded():
        assert norms(state).largest == pytest.approx(n * (rank / 4) ** 2 / rank, rel=1e-5)


def test_the_norm_of_a_larger_loha_is_estimated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rank 128 the exact norm takes two products as large as the weight. Rows differ by an order of magnitude."""
    n, rank, random_ = 2_048, 128, torch.Generator().manual_seed(1)
    uneven = torch.randn(n, 1, generator=random_).exp()
    made = {
        name: torch.randn(size, generator=random_) * (uneven if size[0] == n else 1)
        for name, size in products(n, rank)["loha"].items()
    }
    path = tmp_path / "a.safetensors"
    save_file({f"{STEM}.{name}": one for name, one in made.items()} | {f"{STEM}.alpha": torch.tensor(1.0)}, path)
    (state,) = open_adapter(path).states()
    report = adapter_view.inspection_json(open_adapter(path))
    assert "the norms of 1 layers are estimated, each from 128 of its rows" in report["notes"]
    found = norms(state).largest
    assert found == norms(state).largest == report["adapters"][0]["norm"]["largest"]
    monkeypatch.setattr("gracetune.adapters.algorithms.matrices._MAX_EXACT", 1 << 40)
    exact = norms(state).largest
    assert found != exact
    assert found == pytest.approx(exact, rel=0.02)
    assert not adapter_view.inspection_json(open_adapter(path))["notes"]


def test_no_estimate_says_that_a_layer_is_unchanged(tmp_path: Path) -> None:
    """All rows of the change but one are 0, and that row is hardly ever sampled."""
    n, rank = 2_048, 128
    sizes = products(n, rank)["loha"]
    made = {name: torch.zeros(size) for name, size in sizes.items()}
    made["hada_w1_a"][:, 0] = made["hada_w2_a"][:, 0] = 1e3  # these meet the zeros of hada_w1_b
    made["hada_w1_a"][7] = made["hada_w2_a"][7] = torch.eye(rank)[1]
    made["hada_w1_b"][1, 3] = made["hada_w2_b"][1, 3] = 2.0
    path = tmp_path / "a.safetensors"
    save_file({f"{STEM}.{name}": one for name, one in made.items()} | {f"{STEM}.alpha": torch.tensor(128.0)}, path)
    (state,) = open_adapter(path).states()
    assert norms(state).unchanged == ()
    assert norms(state).largest == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("begin", "again"),
    [
        (b"", b'{"a":{},'),
        pytest.param(b"", b"[", marks=pytest.mark.full),
        pytest.param(b'{"a":[', b"1,", marks=pytest.mark.full),
        pytest.param(b"", b" ", marks=pytest.mark.full),
        pytest.param(b'{"', b"x", marks=pytest.mark.full),
    ],
    ids=["objects", "brackets", "numbers", "spaces", "one name"],
)
def test_a_header_as_long_as_it_may_be(begin: bytes, again: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    with path.open("wb") as file:
        file.write(MAX_HEADER.to_bytes(8, "little"))
        file.write(begin + again * ((MAX_HEADER - len(begin)) // len(again)))
        file.truncate(8 + MAX_HEADER)
    with bounded():
        assert not inspected(path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_numbers_that_are_not_finite_are_found_anywhere(dtype: torch.dtype) -> None:
    """Reductions read vectors of numbers, and the rest one by one."""
    generator = torch.Generator().manual_seed(1)
    for size in ((1, 1), (7, 1), (64, 17), (129, 65)):
        for value in (1.0, math.nan, math.inf, -math.inf):
            for _ in range(5):
                tensor = torch.randn(size, generator=generator).to(dtype)
                tensor.view(-1)[torch.randint(tensor.numel(), (1,), generator=generator)] = value
                assert is_finite(tensor) == is_finite(tensor.T) == math.isfinite(value)
    assert is_finite(torch.empty(0, dtype=dtype))
