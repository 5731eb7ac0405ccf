"""Complete runs, started by commands, whose model and data come from a hub and whose result goes to one."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load, load_file

from runs.launched import command_line, start
from runs.made_runs import TinyModel
from runs.test_commands import gracetune
from servers.hub import TOKEN, HubServer
from unit.data.copies.sample_sources import parquet, rows, shard, tar

PETS = "someone/a-dataset"
COLUMNS: dict[str, Any] = {"strategy": "jsonl", "table": {"path": "metadata.jsonl", "filename_column": "file_name",
                                                          "caption_column": "text"}}  # fmt: skip


TABLE = {"train.parquet": parquet(rows(3))}


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def native(folder: Path, **sections: Any) -> Path:
    values: dict[str, Any] = {
        "gracetune": 1, "name": "tiny", "output_dir": str(folder / "out"),
        "model": {"family": "sdxl", "flavour": "base-1.0", "path": "owner/tiny-sdxl", "base_precision": "fp32"},
        "datasets": [{"id": "pets", "path": f"hf://datasets/{PETS}", "resolution": 64.0, "captions": COLUMNS}],
        "training": {"max_steps": 2, "mixed_precision": "fp32", "seed": 3}, "adapter": {"rank": 4},
        "checkpoints": {"every_steps": 1}, "logging": {"every_steps": 1, "trackers": []},
    }  # fmt: skip
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section} if isinstance(section, dict) else section
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.mark.full
def test_from_a_hub_to_a_hub(
    hub: HubServer, tiny_model: TinyModel, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.model("owner/tiny-sdxl", files_of(tiny_model("sdxl", "base-1.0")), private=True)
    hub.dataset(PETS, {"data/train-00000-of-00001.parquet": parquet(rows(3))}, private=True)
    push = {"repo_id": "results", "every_checkpoint": True}
    config = native(tmp_path, checkpoints={"push_to_hub": push, "keep_last": 1})
    assert gracetune("config", "check", str(config)) == 0
    assert gracetune("config", "show", str(config)) == 0
    assert hub.requests == []  # neither of them sends a request
    capsys.readouterr()
    code = gracetune("train", str(config))
    captured = capsys.readouterr()
    assert code == 0, captured.err
    # The sizes are reported before anything is fetched.
    lines = captured.err.splitlines()
    planned = next(number for number, line in enumerate(lines) if "about 3 samples (parquet)" in line)
    model = next(number for number, line in enumerate(lines) if line.startswith("model owner/tiny-sdxl"))
    assert planned < model
    assert "free" in lines[planned + 1]
    assert "free" in lines[model]
    repo = hub.repos["model", "owner/results"]
    assert repo.private, captured.err
    assert set(repo.files) == {
        "README.md", "tiny.safetensors", "checkpoint-1/tiny_000000001.safetensors",
        "checkpoint-2/tiny_000000002.safetensors",
    }, captured.err  # fmt: skip
    assert repo.files["tiny.safetensors"] == (tmp_path / "out" / "tiny.safetensors").read_bytes()
    assert load(repo.files["checkpoint-1/tiny_000000001.safetensors"])
    assert b"base_model: owner/tiny-sdxl" in repo.files["README.md"]
    assert not (tmp_path / "out" / ".uploads").exists()
    written = b"".join(
        path.read_bytes()
        for path in (tmp_path / "out").rglob("*")
        if path.suffix in (".json", ".jsonl", ".yaml", ".html")
    )
    assert TOKEN.encode() not in written + captured.err.encode() + captured.out.encode()
    # The captions are the columns'.
    shown = gracetune("data", "show", str(config), "--json", "--no-sheets")
    message = json.loads(capsys.readouterr().out)
    assert (shown, message["datasets"][0]["samples"]) == (0, 3)
    # A second start has everything.
    sent = hub.sent
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert gracetune("train", str(config), "--max-steps", "3") == 0
    stated = capsys.readouterr().err
    assert hub.sent == sent
    assert "HF_HUB_OFFLINE=1 forbids access to the hub, so nothing is uploaded" in stated
    assert "hf upload" in stated


@pytest.mark.full
@pytest.mark.parametrize("status", [403, 500])
def test_a_failed_upload_stops_nothing(
    hub: HubServer, tiny_model: TinyModel, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch, status: int,
) -> None:  # fmt: skip
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    hub.model("owner/tiny-sdxl", files_of(tiny_model("sdxl", "base-1.0")))
    hub.dataset(PETS, {"train.parquet": parquet(rows(2))})
    hub.faults.reject_uploads = status
    config = native(tmp_path, checkpoints={"push_to_hub": {"repo_id": "owner/results"}, "every_steps": None})
    assert gracetune("train", str(config), "--json") == 0
    captured = capsys.readouterr()
    message = json.loads(captured.out)
    assert message["outcome"] == "finished"
    assert load_file(message["files"][0])
    assert "cannot be created on the hub" in captured.err
    assert f"hf upload owner/results {message['files'][0]} tiny.safetensors" in captured.err


@pytest.mark.full
def test_plans_are_shown_and_nothing_is_fetched(
    hub: HubServer, tiny_model: TinyModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.model("owner/tiny-sdxl", files_of(tiny_model("sdxl", "base-1.0")))
    hub.dataset(PETS, {"0.tar": b"x" * 5000, "1.tar": b"y" * 5000})
    config = native(tmp_path)
    assert gracetune("estimate", str(config)) in (0, 1)
    assert "2 files of 9.77 KiB" in capsys.readouterr().out
    assert gracetune("data", "show", str(config)) == 1
    captured = capsys.readouterr()
    assert "9.77 KiB to download" in captured.out
    assert "--download" in captured.err
    assert gracetune("cache", "audit", str(config)) == 1
    assert "no complete copy" in capsys.readouterr().err
    assert hub.sent == 0
    hub.faults.claimed_sizes["1.tar"] = 10**16
    assert gracetune("estimate", str(config)) == 1
    assert "DOES NOT FIT" in capsys.readouterr().out
    assert gracetune("train", str(config)) == 1
    assert "a disk with room for the copy" in capsys.readouterr().err
    assert hub.sent == 0
    assert not (tmp_path / "out").exists()


@pytest.mark.full
def test_a_model_that_is_killed_while_it_downloads(hub: HubServer, tmp_path: Path, tiny_model: TinyModel) -> None:
    script = """
import sys
from gracetune.hub.access import HubAccess
from gracetune.models.hub_download import HubFetcher
from gracetune.storage import transfer
transfer.RANGE = 65536
fetch = HubFetcher(HubAccess(sys.argv[1]), print, lambda name: lambda done, total: print(done, flush=True))
print(fetch("model.path", "owner/large", None, None))
"""
    noise = os.urandom(3 << 20)
    hub.model("owner/large", {**files_of(tiny_model("sdxl", "base-1.0")), "unet/more.safetensors": noise})
    hub.faults.delay = 0.02
    kept = {name: value for name, value in os.environ.items() if name not in ("HF_HUB_OFFLINE", "HF_TOKEN")}
    environment = {**kept, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-c", script, hub.url]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.strip().isdigit() and int(line) > 2 << 20:
                break
        os.kill(process.pid, signal.SIGKILL)
    cache = tmp_path / "home" / "hub" / "models--owner--large"
    for blob in (cache / "blobs").iterdir():  # no half file has a whole one's name
        assert blob.name.endswith((".gracetune-part", ".gracetune-part.json")) or len(blob.name) == 64
    hub.faults.delay = 0.0
    whole = sum(map(len, hub.repos["model", "owner/large"].files.values()))
    before = hub.sent
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert hub.sent - before < whole - (1 << 20)
    folder = Path(done.stdout.splitlines()[-1])
    assert (folder / "unet" / "more.safetensors").read_bytes() == noise
    assert not [*(cache / "blobs").glob("*gracetune*")]


@pytest.mark.full
def test_two_processes_of_one_run(hub: HubServer, tiny_model: TinyModel, tmp_path: Path) -> None:
    """One process downloads while the other waits; both train."""
    hub.model("owner/tiny-sdxl", files_of(tiny_model("sdxl", "base-1.0")))
    data = {"data/train-00000-of-00001.parquet": parquet(rows(4))}
    hub.dataset(PETS, data)
    hub.faults.delay = 0.01
    config = native(tmp_path, checkpoints={"every_steps": None})
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
              "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}  # fmt: skip
    processes = [
        start(command_line("train", str(config)), RANK=str(rank), LOCAL_RANK=str(rank), **shared) for rank in range(2)
    ]
    stated = [process.communicate(timeout=240) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], stated
    repo = hub.repos["model", "owner/tiny-sdxl"]
    once = sum(len(file) for path, file in repo.files.items() if path.endswith(".safetensors"))
    tables = sum(map(len, data.values()))
    large = [request.sent for request in hub.requests if request.sent > 20_000 and "signature" in request.path]
    assert sum(large) <= once + 3 * tables  # tables: their columns at preflight and before the copy, then their rows
    assert load_file(tmp_path / "out" / "tiny.safetensors")


BAD_DATA: dict[str, tuple[dict[str, bytes] | None, dict[str, Any], list[str]]] = {
    "no such dataset": (
        None, {}, ["the hub has no such dataset", f"check the spelling of https://huggingface.co/datasets/{PETS}"],
    ),
    "private, without a token": (TABLE, {}, ["for a private dataset: hf auth login"]),
    "a caption column that is missing": (
        TABLE, {"captions": {**COLUMNS, "table": {**COLUMNS["table"], "caption_column": "txt"}}},
        ["no column `txt` in train.parquet; the columns are image, text",
         "--set 'datasets[pets].captions.table.caption_column=text'"],
    ),
    "an image column that is missing": (
        TABLE, {"local_copy": {"media_column": "picture"}},
        ["no column `picture` in train.parquet", "--set 'datasets[pets].local_copy.media_column=image'"],
    ),
    "a split that is missing": (
        TABLE, {"local_copy": {"split": "validation"}},
        ["one of train", "--set 'datasets[pets].local_copy.split=train'"],
    ),
    "a damaged table": (
        {"train.parquet": TABLE["train.parquet"][:-50]}, {},
        ["a damaged Parquet file", "repair it at its source"],
    ),
    "larger than the disk": (
        {"train.tar": tar(shard(3))}, {},
        ["to store in", "choose a larger disk: --set 'datasets[pets].local_copy.folder=FOLDER'",
         "or a part: --set 'datasets[pets].local_copy.split=train[:10%]'"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD_DATA)
def test_bad_remote_data_is_rejected_before_anything_is_downloaded(
    what: str, hub: HubServer, tiny_model: TinyModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files, options, expected = BAD_DATA[what]
    hub.model("owner/tiny-sdxl", files_of(tiny_model("sdxl", "base-1.0")))
    if files is not None:
        hub.dataset(PETS, files, private="private" in what)
    if "disk" in what:
        hub.faults.claimed_sizes["train.tar"] = 10**16
    (dataset,) = yaml.safe_load(native(tmp_path).read_text())["datasets"]
    code = gracetune("train", str(native(tmp_path, datasets=[{**dataset, **options}])))
    stated = capsys.readouterr().err
    assert code == 1
    assert "dataset pets\n" in stated
    assert all(words in stated for words in ("found", "expected", "try", *expected)), stated
    assert hub.sent <= len(TABLE["train.parquet"])  # of tables, their columns
    assert not (tmp_path / "out").exists()


BROKEN = {**shard(4), "000002.png": b"\x89PNG\r\n\x1a\n and no image"}


@pytest.mark.parametrize(
    ("archive", "expected"),
    [
        (tar(shard(4))[:5000], ["0.tar of hf://", "a damaged archive, at or after 000001.txt", "to fetch it again"]),
        (tar(BROKEN), ["1 of 4", "unpacked/0/000002.png", "--set 'datasets[pets].corrupt_threshold=0.25'"]),
    ],
    ids=["cut off", "a member that is no image"],
)  # fmt: skip
def test_a_broken_archive_is_rejected_before_the_model_is_loaded(
    archive: bytes, expected: list[str], hub: HubServer, tiny_model: TinyModel, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    hub.dataset(PETS, {"0.tar": archive})
    data = {"id": "pets", "path": f"hf://datasets/{PETS}", "resolution": 64.0}
    model = {"path": str(tiny_model("sdxl", "base-1.0"))}
    code = gracetune("train", str(native(tmp_path, datasets=[data], model=model)))
    stated = capsys.readouterr().err
    assert code == 1
    assert all(words in stated for words in ("found", "expected", "try", *expected)), stated
    assert "loading the model" not in stated
    assert "latents" not in stated
