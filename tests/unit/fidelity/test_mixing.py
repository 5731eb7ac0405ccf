"""How datasets are mixed and batches made up: configs of the peers, against the sequences their own code gave."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from gracetune.config.run_config import RunConfig
from gracetune.data.index_builder import build_index
from gracetune.data.loader import EpochEnd, Exhausted, Loader
from gracetune.data.refs import BatchRef
from unit.data.folders import image
from unit.fidelity.recorded import aitoolkit, geometry, recorded, simpletuner, values

AITOOLKIT = recorded("aitoolkit", "loaders")
SIMPLETUNER = recorded("simpletuner", "mixing")


def folder(tmp_path: Path, name: str, sides: list[int]) -> str:
    """Different images of these sides."""
    path = tmp_path / name
    path.mkdir()
    for number, side in enumerate(sides):
        (path / f"{name}{number}.png").write_bytes(image(side, side, seed=number))
    return str(path)


def epoch_of(config: RunConfig) -> list[BatchRef]:
    loader = Loader(build_index(config, geometry(config)), batch_size=config.training.batch_size, epochs=1)
    batches: list[BatchRef] = []
    while not isinstance(outcome := loader.next_batch(step=len(batches)), EpochEnd | Exhausted):
        batches.append(outcome)
    return batches


# -- ai-toolkit --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case", AITOOLKIT["cases"], ids=lambda case: "-".join(str(case[key]) for key in ("save_every", "sample_every"))
)
def test_regularisation_batches_come_at_the_same_steps(tmp_path: Path, case: dict[str, Any]) -> None:
    """`sample_start_step` alone is not known here: the steps from there on are compared."""
    datasets = [
        {"folder_path": folder(tmp_path, "n", [64] * 7), "resolution": 64},
        {"folder_path": folder(tmp_path, "r", [64] * 3), "resolution": 64, "is_reg": True},
    ]
    accumulation = case["gradient_accumulation"]
    train = {"gradient_accumulation": accumulation, "disable_sampling": case.get("disable_sampling", False)}
    sample = {"sample_every": case["sample_every"], "prompts": ["a cat"]}
    save = {"save_every": case["save_every"]}
    config = aitoolkit(tmp_path, "sdxl", datasets=datasets, train=train, sample=sample, save=save).config
    batches = values(config, AITOOLKIT["steps"] * accumulation)
    ours = [one.samples[0].path[0] for one in batches]
    theirs = [name[0] for step in case["loaders"] for name in step]
    begin = case["sample_start_step"] * accumulation
    assert ours[begin:] == theirs[begin:]
    # Each loader gives all of its images before any comes again.
    reg = [one.samples[0].path for one in batches if one.samples[0].path[0] == "r"]
    assert all(len({*reg[at : at + 3]}) == 3 for at in range(0, len(reg) - 2, 3))
    normal = [one.samples[0].path for one in batches if one.samples[0].path[0] == "n"]
    assert all(len({*normal[at : at + 7]}) == 7 for at in range(0, len(normal) - 6, 7))


def test_ai_toolkit_fills_its_batches(tmp_path: Path) -> None:
    """As many batches, all of the whole size. Theirs repeats the samples of a short batch, ours takes others, too."""
    images = folder(tmp_path, "i", [64, 96, 96, 96, 128, 128, 128, 128, 128])
    entry = {"folder_path": images, "resolution": 256}
    config = aitoolkit(tmp_path, "sdxl", datasets=[entry], train={"batch_size": AITOOLKIT["batch_size"]}).config
    batches = epoch_of(config)
    theirs = AITOOLKIT["batches"]
    assert sorted(len(batch.samples) for batch in batches) == sorted(map(len, theirs))
    assert len({index for batch in batches for index in batch.indexes}) == 4 * len(theirs)  # each copy its own noise
    assert len({sample.path for batch in batches for sample in batch.samples}) == 9


def test_flips_are_as_many_visits_more(tmp_path: Path) -> None:
    images = folder(tmp_path, "i", [64, 64, 64])
    entry = {"folder_path": images, "resolution": 64, "num_repeats": 2, "flip_x": True, "flip_y": True}
    batches = epoch_of(aitoolkit(tmp_path, "sdxl", datasets=[entry]).config)
    shown = Counter(
        (one.path, one.augmentation.flip_x, one.augmentation.flip_y) for batch in batches for one in batch.samples
    )
    assert len(shown) == 12
    assert {*shown.values()} == {2}


# -- SimpleTuner -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", SIMPLETUNER["weights"], ids=lambda case: f"{case['sampling']}-{len(str(case))}")
def test_simpletuner_s_datasets_have_their_shares(tmp_path: Path, case: dict[str, Any]) -> None:
    """Of the first batches of many runs, before any dataset is used up."""
    entries = [
        {"instance_data_dir": folder(tmp_path, "xy"[number], [64] * one["images"]), "resolution": 64,
         "train_batch_size": one["batch_size"], "repeats": one["repeats"], "probability": one["probability"]}
        for number, one in enumerate(case["datasets"])
    ]  # fmt: skip
    options = {"data_backend_sampling": case["sampling"], "train_batch_size": 2}
    config = simpletuner(tmp_path, "sdxl", datasets=entries, **options).config
    index = build_index(config, geometry(config))
    order = index.order(config.training.batch_size)
    counts: Counter[int] = Counter()
    for epoch in range(2000):
        cursor = order.start()
        found = order.next_batch(type(cursor)(cursor.taken, epoch=epoch), 2, 0, 1)
        assert found is not None
        counts[found[0].source] += 1
    assert [counts[position] / 2000 for position in range(2)] == pytest.approx(case["shares"], abs=0.04)


def test_simpletuner_takes_sliders_in_turn(tmp_path: Path) -> None:
    entries = [
        {"id": name, "instance_data_dir": folder(tmp_path, name[0], [64] * count), "resolution": 64,
         **({} if strength is None else {"slider_strength": strength})}
        for name, strength, count in (("down", -1.0, 5), ("plain", None, 9), ("up", 1.0, 4))
    ]  # fmt: skip
    config = simpletuner(tmp_path, "sdxl", datasets=entries, train_batch_size=1).config
    found = [batch.samples[0].dataset for batch in values(config, 9)]
    assert found == SIMPLETUNER["sliders"]


def test_simpletuner_fills_its_batches_and_ours_loses_no_bucket(tmp_path: Path) -> None:
    """Theirs leaves out the bucket that comes after one it has filled: b, c and d are never trained in this epoch."""
    assert {name for batch in SIMPLETUNER["batches"] for name in batch}.isdisjoint("bcd")
    sizes = [(64, 64), (64, 128), (64, 128), (64, 128), *[(128, 64)] * 5]
    path = tmp_path / "images"
    path.mkdir()
    for number, (width, height) in enumerate(sizes):
        (path / f"{number}.png").write_bytes(image(width, height, seed=number))
    options = {"train_batch_size": SIMPLETUNER["batch_size"]}
    entry = {"instance_data_dir": str(path), "resolution": 128}
    batches = epoch_of(simpletuner(tmp_path, "flux", datasets=[entry], **options).config)
    assert {len(batch.samples) for batch in batches} == {4}
    assert len({sample.path for batch in batches for sample in batch.samples}) == 9
    last = next(batch for batch in batches if len({sample.path for sample in batch.samples}) == 3)
    assert len(last.samples) == 4
