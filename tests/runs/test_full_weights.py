"""The files of a full fine-tune are flushed before they are renamed, and are complete or absent."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from diffusers import UNet2DConditionModel
from safetensors.torch import load_file, save_file

from gracetune.errors import GracetuneError
from gracetune.train.output import MODEL_FILE
from runs.made_runs import TinyModel, config_for, run

SECTIONS = {"adapter": {"kind": "full_finetune"}, "training": {"max_steps": 1}, "optimizer": {"lr": 1e-4}}


def test_every_file_is_flushed_before_the_folder_has_its_name(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def recording_fsync(descriptor: int) -> None:
        log.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        fsync(descriptor)

    def recording_rename(path: Path, target: Path) -> Path:
        log.append(f"{path} -> {target}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", recording_fsync)
    monkeypatch.setattr(Path, "rename", recording_rename)
    config = config_for("sdxl", tiny_model, tmp_path, **SECTIONS, checkpoints={"save_dtype": "bf16"})
    (folder,) = run(config).files
    assert folder == Path(config.output_dir) / "tiny" / "unet"
    (named,) = [position for position, line in enumerate(log) if line.endswith(f" -> {folder}")]
    temporary = log[named].split(" -> ")[0]
    before = set(log[:named])
    assert {f"{temporary}/{MODEL_FILE}", f"{temporary}/config.json", temporary} <= before
    assert log[named + 1] == str(folder.parent)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", MODEL_FILE]
    # What others read: the library writes the same bytes, and diffusers loads the folder.
    save_file(load_file(folder / MODEL_FILE), tmp_path / "theirs", {"format": "pt"})
    assert (folder / MODEL_FILE).read_bytes() == (tmp_path / "theirs").read_bytes()
    UNet2DConditionModel.from_pretrained(folder)


def test_a_disk_that_fails_leaves_no_half_model(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def failing_fsync(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").readlink().name == MODEL_FILE:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(descriptor)

    config = config_for("sdxl", tiny_model, tmp_path, **SECTIONS)
    results = Path(config.output_dir) / "tiny"
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing_fsync)
        with pytest.raises((GracetuneError, OSError), match="Input/output error"):
            run(config)
    assert [*results.rglob("*")] == []
    left = results / f".gracetune-{'0' * 32}.tmp"
    left.mkdir(parents=True)  # by a process that was killed here
    (folder,) = run(config).files
    assert [*results.iterdir()] == [folder]
    assert (folder / MODEL_FILE).is_file()
