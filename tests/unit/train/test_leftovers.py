"""Leftovers of a killed process are removed by the next one; other files stay."""

from __future__ import annotations

from pathlib import Path

import pytest

from gracetune.checkpoint.store import CheckpointStore
from gracetune.config.run_config import RunConfig
from gracetune.models.spec import Expert
from gracetune.storage.atomic import temporary_name, unfinished
from gracetune.train.leftovers import remove_leftovers
from gracetune.train.output import MODEL_FILE, RunFolder
from unit.checkpoint.states import IDENTITY, METADATA, Weights

EXPERTS = (Expert("high_noise", "transformer", 0.5), Expert("low_noise", "transformer_2", 0.0, 0.5))


def config_of(root: Path, kind: str) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "a [b]", "output_dir": str(root / "out"), "model": {"family": "wan"},
            "datasets": [{"id": "d", "path": "p"}], "training": {"max_steps": 1}, "adapter": {"kind": kind},
        }
    )  # fmt: skip


def location(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")


def model(folder: Path, *components: str) -> list[Path]:
    return [folder / component / name for component in components for name in ("config.json", MODEL_FILE)]


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")} - {
        "checkpoints",
        "checkpoints/.gracetune.lock",
    }


def tidied(config: RunConfig, journal: str, steps: tuple[int, ...] = ()) -> list[str]:
    folder = RunFolder.of(config)
    with CheckpointStore(folder.checkpoints, keep_last=9) as store:
        for step in steps:
            store.write(step, [Weights(step)], metadata=METADATA)
    folder.checkpoints.mkdir(parents=True, exist_ok=True)
    (folder.checkpoints / ".gracetune.lock").write_text(f"{journal}\n")
    with CheckpointStore(folder.checkpoints, keep_last=9) as store:
        store.begin(IDENTITY, None if not steps else store.open(folder.checkpoints / f"checkpoint-{steps[-1]}"))
        return remove_leftovers(config, folder, store, EXPERTS)


def test_temporary_files_of_processes_that_are_no_more(tmp_path: Path) -> None:
    config = config_of(tmp_path, "lora")
    out = tmp_path / "out"
    for folder in (out, out / "samples", out / "cache", out / "cache" / "scan"):
        location(folder / temporary_name(), folder / "mine.tmp", folder / ".gracetune-mine.tmp")
    with unfinished(out) as (_, held):
        assert tidied(config, "{}") == []
        assert held.exists(), "another process writes it"
    kept = {name for folder in ("", "samples/", "cache/", "cache/scan/") for name in (folder, f"{folder}mine.tmp")}
    kept |= {f"{folder}.gracetune-mine.tmp" for folder in ("", "samples/", "cache/", "cache/scan/")}
    assert files(out) == {name.rstrip("/") for name in kept if name}


def test_step_files_go_only_where_the_journal_says_so(tmp_path: Path) -> None:
    config = config_of(tmp_path, "lora")
    folder = RunFolder.of(config)
    for step in (1, 2, 3, 4):
        location(*(folder.adapter(one.name, step) for one in EXPERTS))
    location(folder.path / "a [b]_000000004_other.safetensors")
    before = files(folder.path)
    # Checkpoint 1 was retired, the process was killed when it saved step 4; checkpoint 2 was removed by hand.
    assert tidied(config, '{"saving": [4], "retiring": [1]}', (3,)) == []
    gone = {folder.adapter(one.name, step).name for one in EXPERTS for step in (1, 4)}
    assert {name for name in files(folder.path) if "checkpoint" not in name} == before - gone
    with CheckpointStore(folder.checkpoints, keep_last=9) as store:
        assert (store.unfinished("saving"), store.unfinished("retiring")) == ((), ())


def test_a_step_whose_checkpoint_is_complete_keeps_its_files(tmp_path: Path) -> None:
    config = config_of(tmp_path, "lora")
    folder = RunFolder.of(config)
    location(folder.adapter("high_noise", 3))
    assert tidied(config, '{"saving": [3], "retiring": [3]}', (3,)) == []
    assert folder.adapter("high_noise", 3).exists()


@pytest.mark.parametrize("prefix", ["", "set-aside-", "finished-", "finished-2-"])
def test_half_a_model_never_stays(tmp_path: Path, prefix: str) -> None:
    config = config_of(tmp_path, "full_finetune")
    out = RunFolder.of(config).path
    whole = model(out / f"{prefix}a [b]_000000003", "transformer")
    temporary = [out / f"{prefix}a [b]_000000003" / temporary_name() / "config.json"]
    temporary += [
        out / f"{prefix}a [b]_000000004" / name / MODEL_FILE for name in (".transformer.tmp", temporary_name())
    ]
    others = [out / "a [b] copy" / temporary_name() / "config.json", out / "other" / ".transformer.tmp" / MODEL_FILE]
    location(*whole, *temporary, *others)
    assert tidied(config, "{}") == []
    assert {path for path in out.rglob("*") if path.is_file()} - {out / "checkpoints" / ".gracetune.lock"} == {
        *whole,
        *others,
    }
    assert not (out / f"{prefix}a [b]_000000004").exists()


def test_half_of_the_final_files(tmp_path: Path) -> None:
    """The process was killed between the two experts: one file is not a result, both are."""
    config = config_of(tmp_path, "full_finetune")
    folder = RunFolder.of(config)
    location(*model(folder.model(), "transformer"), folder.model() / "vae" / "config.json")
    assert tidied(config, '{"finishing": [5]}', (5,)) == []
    assert files(folder.model()) == {"vae", "vae/config.json"}, "which a user put there"
    location(*model(folder.model(), "transformer", "transformer_2"))
    both = files(folder.model())
    assert tidied(config, '{"finishing": [5]}') == []
    assert files(folder.model()) == both


def test_foreign_files_beside_a_models_files_stay(tmp_path: Path) -> None:
    folder = RunFolder.of(config_of(tmp_path, "full_finetune"))
    mine = folder.model(3) / "transformer" / "notes.txt"
    location(*model(folder.model(3), "transformer", "transformer_2"), mine)
    folder.model(4).symlink_to(folder.model(3))
    assert folder.remove_step(EXPERTS, 4) == []
    assert folder.model(4).is_symlink()
    assert folder.remove_step(EXPERTS, 3) == []
    assert mine.exists()
    assert not (folder.model(3) / "transformer_2").exists()
