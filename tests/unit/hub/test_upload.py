"""Uploads: target paths, uploading in the background, and the messages of failures."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from gracetune.config.environment import Environment
from gracetune.config.run_config import RunConfig
from gracetune.hub.access import HubAccess
from gracetune.hub.upload import HubUploads
from gracetune.storage.transfer import RetryPolicy
from gracetune.train.run_uploads import model_card
from servers.hub import TOKEN, HubServer


class CollectedLines:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.warned: list[str] = []


@pytest.fixture
def stated() -> CollectedLines:
    return CollectedLines()


def uploads(
    folder: Path, stated: CollectedLines, repo: str = "owner/results", *, private: bool = True, card: str = "# A card"
) -> HubUploads:
    access = HubAccess.of(Environment.capture())
    return HubUploads(
        repo, folder, access, private=private, card=card, report=stated.lines.append, warn=stated.warned.append,
        retry_policy=RetryPolicy(attempts=3, first_pause=0.05),
    )  # fmt: skip


@pytest.fixture
def token(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> HubServer:
    """A hub with a valid token."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return hub


@pytest.mark.parametrize("private", [True, False])
def test_the_repository_is_created_as_configured(
    token: HubServer, tmp_path: Path, stated: CollectedLines, private: bool
) -> None:
    uploads(tmp_path, stated, "mine", private=private).begin()
    assert token.repos["model", "owner/mine"].private is private
    assert stated.lines == ["push_to_hub: results are uploaded to owner/mine"]
    uploads(tmp_path, stated, "mine", private=not private).begin()  # one that is there stays as it is
    assert token.repos["model", "owner/mine"].private is private
    assert stated.warned == []


def test_files_are_uploaded_as_they_were_when_queued(token: HubServer, tmp_path: Path, stated: CollectedLines) -> None:
    made = uploads(tmp_path, stated)
    made.begin()
    small, large, folder = tmp_path / "a.txt", tmp_path / "b.safetensors", tmp_path / "model"
    small.write_bytes(b"small")
    large.write_bytes(b"L" * 5000)
    (folder / "unet").mkdir(parents=True)
    (folder / "unet" / "config.json").write_bytes(b"{}")
    made.add([small], below="checkpoint-5", message="Checkpoint at step 5")
    small.unlink()  # a checkpoint that is not kept
    made.add([large, folder], message="Trained for 9 steps")
    made.drain()
    repo = token.repos["model", "owner/results"]
    assert repo.files == {
        "README.md": b"# A card", "checkpoint-5/a.txt": b"small", "b.safetensors": b"L" * 5000,
        "model/unet/config.json": b"{}",
    }  # fmt: skip
    assert repo.commits == ["Checkpoint at step 5", "Trained for 9 steps"]
    assert stated.warned == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.safetensors", "model"]


def test_an_existing_card_is_kept(token: HubServer, tmp_path: Path, stated: CollectedLines) -> None:
    token.model("owner/results", {"README.md": b"# Written by hand"})
    made = uploads(tmp_path, stated)
    (tmp_path / "a.txt").write_bytes(b"x")
    made.add([tmp_path / "a.txt"], message="m")
    made.drain()
    assert token.repos["model", "owner/results"].files["README.md"] == b"# Written by hand"


def test_a_failure_gives_a_command(hub: HubServer, tmp_path: Path, stated: CollectedLines) -> None:
    """Without a token."""
    made = uploads(tmp_path, stated)
    made.begin()
    (tmp_path / "a.txt").write_bytes(b"x")
    made.add([tmp_path / "a.txt"], below="checkpoint-5", message="m")
    began = time.monotonic()
    made.drain()
    assert time.monotonic() - began > 0.05 + 0.1
    first, second = stated.warned
    assert "cannot be created on the hub" in first
    assert "hf auth login" in first
    assert f"by hand: hf upload owner/results {tmp_path / 'a.txt'} checkpoint-5/a.txt" in second
    assert hub.repos == {}


def test_offline_sends_no_request(
    hub: HubServer, tmp_path: Path, stated: CollectedLines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    made = uploads(tmp_path, stated)
    made.begin()
    (tmp_path / "a.txt").write_bytes(b"x")
    made.add([tmp_path / "a.txt"], message="m")
    made.drain()
    assert len(stated.warned) == 1
    assert "HF_HUB_OFFLINE=1 forbids access to the hub" in stated.warned[0]
    assert hub.requests == []


def test_a_card_names_the_base_model_and_no_folder_of_this_machine() -> None:
    values = {"name": "mine", "output_dir": "o", "model": {"family": "sdxl"}, "datasets": [
        {"id": "a", "path": "/secret/folder", "captions": {"trigger_word": "sks"}}]}  # fmt: skip
    card = model_card(RunConfig.model_validate(values))
    assert "base_model: stabilityai/stable-diffusion-xl-base-1.0" in card
    assert "instance_prompt: sks" in card
    local = model_card(RunConfig.model_validate({**values, "model": {"family": "sdxl", "path": "/home/me/sdxl"}}))
    assert "base_model" not in local
    assert "/home/me" not in card + local
    assert "/secret" not in card + local
