"""Models of a hub: planning, downloading, resuming, and error messages."""

from __future__ import annotations

import os
from typing import Any

import pytest

from gracetune.config.environment import Environment
from gracetune.config.run_config import Model
from gracetune.errors import ConfigError
from gracetune.hub.access import HubAccess
from gracetune.models.hub_download import HubFetcher, HubName
from gracetune.models.source import open_source
from gracetune.storage import transfer
from gracetune.storage.transfer import RetryPolicy
from servers.hub import TOKEN, HubServer

NAME = "owner/tiny"
FILES = {
    "model_index.json": b'{"_class_name": "StableDiffusionXLPipeline", "unet": ["diffusers", "x"]}',
    "unet/config.json": b"{}",
    "unet/diffusion_pytorch_model.safetensors": os.urandom(50_000),
    "unet/diffusion_pytorch_model.bin": b"pickle" * 100,
    "vae/config.json": b"{}",
    "README.md": b"# Tiny",
}


def fetcher(stated: list[str] | None = None, shown: list[tuple[int, int]] | None = None) -> HubFetcher:
    """With the environment as it is now."""

    def show(name: str) -> Any:
        return lambda done, total: None if shown is None else shown.append((done, total))

    report = (lambda text: None) if stated is None else stated.append
    return HubFetcher(HubAccess.of(Environment.capture()), report, show, RetryPolicy(attempts=3, first_pause=0.01))


def rejection(name: str = NAME, revision: str | None = None, **more: Any) -> str:
    with pytest.raises(ConfigError) as rejected:
        fetcher()("model.path", name, revision, None, **more)
    stated = str(rejected.value)
    assert all(word in stated for word in ("found", "expected", "try"))
    return stated


def test_needed_files_are_downloaded_once(hub: HubServer) -> None:
    hub.model(NAME, FILES)
    stated: list[str] = []
    shown: list[tuple[int, int]] = []
    folder = fetcher(stated, shown)("model.path", NAME, None, None)
    assert sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()) == [
        "model_index.json", "unet/config.json", "unet/diffusion_pytorch_model.safetensors", "vae/config.json",
    ]  # fmt: skip
    weights = folder / "unet" / "diffusion_pytorch_model.safetensors"
    assert weights.read_bytes() == FILES["unet/diffusion_pytorch_model.safetensors"]
    assert "3 files, 48.9 KiB to download to" in stated[0]
    assert "free" in stated[0]
    assert shown[-1] == (shown[-1][1], shown[-1][1])
    sent = hub.sent
    assert fetcher(stated)("model.path", NAME, None, None) == folder
    assert hub.sent == sent
    assert len(stated) == 1


def test_files_of_equal_content_are_downloaded_once(hub: HubServer) -> None:
    """For example two experts with equal weights. The hub's cache has one file for both."""
    weights = FILES["unet/diffusion_pytorch_model.safetensors"]
    hub.model(NAME, {**FILES, "unet_2/config.json": b"{}", "unet_2/diffusion_pytorch_model.safetensors": weights})
    stated: list[str] = []
    folder = fetcher(stated)("model.path", NAME, None, None)
    assert [(folder / part / "diffusion_pytorch_model.safetensors").read_bytes() for part in ("unet", "unet_2")] == [
        weights, weights,
    ]  # fmt: skip
    assert "3 files, 48.9 KiB to download to" in stated[0]


def test_earlier_download_is_enough_offline(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the repository has unneeded files that were not downloaded."""
    hub.model(NAME, FILES)
    folder = fetcher()("model.path", NAME, None, None)
    before = len(hub.requests)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert fetcher()("model.path", NAME, None, None) == folder
    assert len(hub.requests) == before
    stated = rejection("owner/another")
    assert "HF_HUB_OFFLINE=1 forbids access to the hub" in stated
    assert "hf download owner/another on a machine with network" in stated
    (folder / "unet" / "diffusion_pytorch_model.safetensors").unlink()
    assert "is incomplete" in rejection()


def test_interrupted_download_resumes(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    monkeypatch.setattr(transfer, "RANGE", 4096)
    monkeypatch.setattr("gracetune.models.hub_download._REQUESTS", 1)
    hub.model(NAME, FILES)
    hub.faults.break_after += [4096] * 8 + [5] * 100
    assert "the hub is out of reach" in rejection()
    hub.faults.break_after.clear()
    before = hub.sent
    fetcher()("model.path", NAME, None, None)
    assert hub.sent - before < 50_000 - 6 * 4096


def test_wrong_content_is_rejected(hub: HubServer) -> None:
    hub.model(NAME, FILES)
    hub.faults.corrupt = 50
    assert "content with sha256" in rejection()


def test_single_files_and_revisions(hub: HubServer) -> None:
    hub.model(NAME, {"x/tuned.safetensors": b"M" * 300, **FILES}, revisions={"v1": {"old.safetensors": b"O" * 300}})
    assert fetcher()("model.path", NAME, None, None, "x/tuned.safetensors").read_bytes() == b"M" * 300
    assert fetcher()("model.path", NAME, "v1", None, "old.safetensors").read_bytes() == b"O" * 300
    assert "v9, which owner/tiny does not have" in rejection(revision="v9")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hf://owner/name", HubName("owner/name")),
        ("hf://owner/name@v1/a/b.safetensors", HubName("owner/name", "v1", "a/b.safetensors")),
        ("https://huggingface.co/owner/name", HubName("owner/name")),
        ("https://huggingface.co/owner/name/blob/main/x.safetensors", HubName("owner/name", None, "x.safetensors")),
        ("https://hf.co/o/n/resolve/v2/x.safetensors?download=true", HubName("o/n", "v2", "x.safetensors")),
        ("https://huggingface.co/owner/name/tree/v2", HubName("owner/name", "v2")),
        ("owner/name", None),
        ("https://example.com/owner/name", None),
    ],
)  # fmt: skip
def test_addresses(text: str, expected: HubName | None) -> None:
    assert HubName.parse(text) == expected


def test_address_opens_like_an_id(hub: HubServer) -> None:
    hub.model(NAME, FILES)
    source = open_source(Model(family="sdxl", path=f"hf://{NAME}"), fetcher())
    assert source.folder == fetcher()("model.path", NAME, None, None)
    with pytest.raises(ConfigError, match=r"a \.safetensors file of the hub"):
        open_source(Model(family="sdxl", path=f"hf://{NAME}/README.md"), fetcher())


def test_missing_access_is_an_error_with_a_remedy(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.model(NAME, FILES, gated=True)
    stated = rejection()
    assert "https://huggingface.co/owner/tiny" in stated
    assert "hf auth login" in stated
    hub.model(NAME, FILES, private=True)
    assert "for a private model: hf auth login" in rejection()
    monkeypatch.setenv("HF_TOKEN", "hf_wrongwrongwrong")
    assert "hf_wrong" not in rejection()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert fetcher()("model.path", NAME, None, None)


def test_too_small_disk_is_an_error(hub: HubServer) -> None:
    hub.model(NAME, FILES)
    hub.faults.claimed_sizes["unet/diffusion_pytorch_model.safetensors"] = 10**15
    stated = rejection()
    assert "909 TiB to download" in stated
    assert "HF_HOME" in stated
    assert hub.sent == 0
