"""Which loader ai-toolkit takes each step's batches from (`is_reg` or not), and how its batches are made up.

The statement of its training loop that fetches batches is taken out of its function and run, with loaders that give
their own names. Batches of short buckets come from its dataset.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import random
import tempfile
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from aitoolkit_base import dataset, prepare
from common import record

STEPS = 50
CASES = [
    {"save_every": 1000, "sample_every": 100, "sample_start_step": 0, "gradient_accumulation": 1},
    {"save_every": 8, "sample_every": 100, "sample_start_step": 0, "gradient_accumulation": 1},
    {"save_every": 250, "sample_every": 6, "sample_start_step": 20, "gradient_accumulation": 1},
    {"save_every": 5, "sample_every": 7, "sample_start_step": 0, "gradient_accumulation": 2},
    {"save_every": 250, "sample_every": 4, "sample_start_step": 0, "gradient_accumulation": 1,
     "disable_sampling": True},
]  # fmt: skip


def fetching(process: Any) -> Any:
    """The body of the loop up to where batches are there, as code that reads and writes plain names."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(process.run)))
    loop = next(
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.For) and ast.unparse(node.iter).startswith("range(start_step_num")
    )
    chosen = next(node for node in loop.body if isinstance(node, ast.With) and "batch_list = []" in ast.unparse(node))
    return compile(ast.Module(chosen.body, []), "the training loop", "exec")


class Loader:
    def __init__(self, name: str, length: int) -> None:
        self.name, self.length, self.len = name, length, None
        self.dataset: list[Any] = []

    def __iter__(self) -> Iterator[str]:
        return iter([f"{self.name}{number}" for number in range(self.length)])


def sequence(case: dict[str, Any], normal: int, reg: int) -> list[list[str]]:
    from jobs.process.BaseSDTrainProcess import BaseSDTrainProcess
    from toolkit.data_loader import trigger_dataloader_setup_epoch

    code = fetching(BaseSDTrainProcess)
    loaders = Loader("n", normal), Loader("r", reg)
    this = types.SimpleNamespace(
        step_num=0, epoch_num=0, is_grad_accumulation_step=True, grad_accumulation_step=0,
        save_config=types.SimpleNamespace(save_every=case["save_every"]),
        sample_config=types.SimpleNamespace(
            sample_every=case["sample_every"], sample_start_step=case["sample_start_step"]
        ),
        train_config=types.SimpleNamespace(
            disable_sampling=case.get("disable_sampling", False), gradient_accumulation_steps=1,
            gradient_accumulation=case["gradient_accumulation"],
        ),
        timer=lambda name: contextlib.nullcontext(),
    )  # fmt: skip
    names: dict[str, Any] = {
        "self": this, "dataloader": loaders[0], "dataloader_reg": loaders[1], "dataloader_iterator": iter(loaders[0]),
        "dataloader_iterator_reg": iter(loaders[1]),
        "trigger_dataloader_setup_epoch": trigger_dataloader_setup_epoch,
    }  # fmt: skip
    found = []
    for step in range(STEPS):
        this.step_num = names["step"] = step
        exec(code, names)
        found.append(names["batch_list"])
    return found


def batches(images: dict[str, int], batch_size: int) -> list[list[str]]:
    """Of images by name and side; each of its batches, sorted."""
    from PIL import Image

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for image, side in images.items():
            Image.new("RGB", (side, side)).save(folder / f"{image}.png")
        found = dataset(folder, 16, batch_size, resolution=256)
        return sorted(
            sorted(Path(found.file_list[index].path).stem for index in batch) for batch in found.batch_indices
        )


def values(peer: Path) -> Any:
    prepare(peer)
    random.seed(0)
    return {
        "steps": STEPS,
        "cases": [{**case, "loaders": sequence(case, normal=7, reg=3)} for case in CASES],
        "batch_size": 4,
        "batches": batches({"a": 64, "b": 96, "c": 96, "d": 96, "e": 128, "f": 128, "g": 128, "h": 128, "i": 128}, 4),
    }


if __name__ == "__main__":
    record("loaders", values)
