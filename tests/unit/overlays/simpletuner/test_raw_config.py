from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from gracetune_simpletuner import raw_config
from gracetune_simpletuner.hooks import AfterImport
from gracetune_simpletuner.overlay import Launch, Overlay

from gracetune.config.environment import Environment

BLOCK = {"vae_cache_type": "memory"}


@pytest.fixture
def overlay(job: Path) -> Overlay:
    del job
    found = Overlay(Environment({}), Launch())
    sys.meta_path.insert(0, AfterImport(raw_config.actions(found)))
    return found


def load() -> Any:
    return importlib.import_module("simpletuner.helpers.configuration.loader").load_config()


def write(kind: str, text: str) -> None:
    Path("config/config.json").unlink()
    Path(f"config/config.{kind}").write_text(text)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json", json.dumps({"output_dir": "here", "cache_config": BLOCK})),
        ("toml", 'output_dir = "here"\n[cache_config]\nvae_cache_type = "memory"\n'),
        ("env", f"--output_dir=here\n--cache_config={json.dumps(BLOCK)}"),
    ],
)
def test_our_blocks_are_caught_in_every_kind_of_config(overlay: Overlay, kind: str, text: str) -> None:
    write(kind, text)
    config = load()
    assert config.output_dir == "here"
    assert overlay.blocks == {"cache_config": BLOCK}
    assert overlay.options.wants_caches
    assert {hook.feature for hook in overlay.installer.installed} == {"raw_config", "telemetry", "caches"}


def test_without_blocks_only_the_loaders_are_wrapped(overlay: Overlay) -> None:
    load()
    assert {hook.feature for hook in overlay.installer.installed} == {"raw_config"}
    assert not Path("output").exists()


def test_loading_twice_wraps_once(overlay: Overlay) -> None:
    write("json", json.dumps({"cache_config": BLOCK}))
    load()
    before = len(overlay.installer.installed)
    load()
    assert len(overlay.installer.installed) == before


def test_a_name_that_upstream_no_longer_has_ends_the_process_with_a_message(
    overlay: Overlay, capsys: pytest.CaptureFixture[str]
) -> None:
    write("json", json.dumps({"cache_config": BLOCK}))
    trainer = importlib.import_module("simpletuner.helpers.training.trainer").Trainer
    del trainer.resume_and_prepare
    with pytest.raises(SystemExit) as ended:
        load()
    assert ended.value.code == 1
    assert "Trainer.resume_and_prepare" in capsys.readouterr().err
    assert overlay.options.wants_caches


def test_the_launcher_tells_who_we_are() -> None:
    variables = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_PORT": "1234"}
    launch = Launch.of(Environment(variables))
    assert (launch.rank, launch.count, launch.local_rank, launch.local_count) == (5, 8, 1, 4)
    assert "1234" in launch.key
    assert Launch.of(Environment({})).count == 1
