"""Keys whose switch is off are named in a note with the remedy, and are never an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gracetune.cli.config import check_file
from gracetune.config import Environment, Resolved, load
from gracetune.config.draft import Draft
from gracetune.config.ineffective_options import Switch, switches
from gracetune.errors import ConfigError
from unit.config.simpletuner_files import resolve
from unit.config.test_aitoolkit_peers import PEERS
from unit.config.test_simpletuner_peers import PUBLISHED, in_a_folder

ALONE = Environment({})
PLAIN: dict[str, Any] = {
    "gracetune": 1,
    "name": "a run",
    "output_dir": "out",
    "model": {"family": "sdxl"},
    "datasets": [{"id": "a", "path": "a"}, {"id": "b", "path": "b"}],
    "training": {"max_steps": 10},
}
REQUESTED = [
    ("adapter.full_rank=true", "--set adapter.kind=lokr"),
    ("adapter.factor=4", "--set adapter.kind=lokr"),
    ("adapter.decompose_both=true", "--set adapter.kind=lokr"),
    ("datasets[0].in_memory.compression=lz4", "--set datasets[0].type=in_memory"),
    ("datasets[1].mask.invert=true", "--set datasets[1].mask.path=FOLDER"),
    ("datasets[0].mask.min_weight=0.5", "--set datasets[0].mask.path=FOLDER"),
    ("datasets[0].crop.style=face", "--set datasets[0].crop.enabled=true"),
    ("datasets[0].captions.keep_tags=2", "--set datasets[0].captions.shuffle_tags=true"),
    ("datasets[0].captions.shuffle_written=false", "--set datasets[0].captions.shuffle_tags=true"),
    ("datasets[0].captions.shuffle_trigger=true", "--set datasets[0].captions.shuffle_tags=true"),
    ("datasets[0].captions.dropped_caption=x", "--set datasets[0].captions.dropout=0.1"),
    ("datasets[0].captions.default_for_empty=true", "--set datasets[0].captions.default=TEXT"),
    ("datasets[0].captions.add_trigger=false", "--set datasets[0].captions.trigger_word=WORD"),
    ("datasets[0].mask.normalise=true", "--set datasets[0].mask.path=FOLDER"),
    ("datasets[0].captions.instance_prompt=a dog", "--set datasets[0].captions.prepend_instance_prompt=true"),
    ("training.ramp.target_effective_batch_size=8", "--set training.ramp.enabled=true"),
    ("training.ema.decay=0.9", "--set training.ema.enabled=true"),
    ("objective.huber_delta=0.5", "--set objective.loss=huber"),
    ("objective.sigmoid_scale=0.5", "--set objective.timesteps=sigmoid"),
    ("objective.beta_alpha=3.0", "--set objective.timesteps=beta"),
    ("objective.noise_offset_probability=0.5", "--set objective.noise_offset=0.1"),
    ("memory.uvm_oversubscription_ratio=3.0", "--set memory.use_uvm=true"),
    ("memory.uvm_stage1_threshold=0.2", "--set memory.use_uvm=true"),
    ("model.switch_experts_every=5", "remove it"),
]
NEEDED = {"objective.sigmoid_scale=0.5": ("objective.timesteps=uniform",)}
"""What turns a switch off that is on by default."""


def read(folder: Path, *overrides: str, **sections: Any) -> Resolved:
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump({**PLAIN, **sections}), encoding="utf-8")
    return load(file, environment=ALONE, overrides=overrides)


def idle(resolved: Resolved) -> list[str]:
    return [note for note in resolved.notes if ": no effect, because " in note]


@pytest.mark.parametrize(("requested", "remedy"), REQUESTED)
def test_the_note_names_the_key_and_what_to_type(tmp_path: Path, requested: str, remedy: str) -> None:
    [note] = idle(read(tmp_path, *NEEDED.get(requested, ()), requested))
    assert note.startswith(f"--set {requested.partition('=')[0]}: ")
    assert note.endswith(f"; {remedy}")


@pytest.mark.parametrize(("requested", "remedy"), [row for row in REQUESTED if row[1].startswith("--set")])
def test_what_to_type_makes_the_key_count(tmp_path: Path, requested: str, remedy: str) -> None:
    more = (
        ["training.ramp.initial_effective_batch_size=1", "training.ramp.batch_rampup_steps=4"]
        if "ramp" in requested
        else []
    )
    found = read(tmp_path, *NEEDED.get(requested, ()), requested, *more, *remedy.replace("--set", "").split())
    assert idle(found) == []


def test_nothing_is_said_of_values_that_are_the_default_anyway(tmp_path: Path) -> None:
    written = yaml.safe_load(json.dumps(read(tmp_path).config.model_dump(mode="json")))
    assert idle(read(tmp_path, **written)) == []


def test_a_reason_is_given_once_for_all_datasets(tmp_path: Path) -> None:
    [note] = idle(read(tmp_path, "datasets[0].crop.style=corner", "datasets[1].crop.style=corner"))
    assert note.endswith("--set datasets[0].crop.enabled=true --set datasets[1].crop.enabled=true")
    assert idle(read(tmp_path, "datasets[0].crop.style=corner", "datasets[0].disabled=true")) == []


def test_what_happens_without_a_crop_may_be_asked_for(tmp_path: Path) -> None:
    assert idle(read(tmp_path, "datasets[0].crop.style=center", "datasets[0].crop.aspect=preserve")) == []


def test_experts_that_take_no_turns(tmp_path: Path) -> None:
    model = {"family": "wan", "flavour": "t2v-14b-2.2", "switch_experts_every": 5}
    videos = [{"id": "a", "path": "a", "dataset_type": "video"}]
    assert idle(read(tmp_path, model=model, datasets=videos)) == []
    [note] = idle(read(tmp_path, model={**model, "experts": "low"}, datasets=videos))
    assert note.startswith("model.switch_experts_every: ")
    assert "--set model.experts=both" in note
    unknown = {"family": "wan", "path": "/weights", "switch_experts_every": 5}
    assert idle(read(tmp_path, model=unknown, datasets=videos)) == []


def test_lokr_for_some_modules_has_a_factor(tmp_path: Path) -> None:
    adapter = {"kind": "lora", "factor": 4, "by_module": {"Attention": {"algo": "lokr"}}}
    assert idle(read(tmp_path, adapter=adapter)) == []


def test_a_full_fine_tune_has_no_rank(tmp_path: Path) -> None:
    [note] = idle(read(tmp_path, adapter={"kind": "full_finetune", "rank": 8, "dropout": 0.1}))
    assert note.startswith("adapter.rank, adapter.dropout: ")


def test_peers_see_their_own_names(tmp_path: Path) -> None:
    entry = {"id": "a", "instance_data_dir": "a", "caption_strategy": "textfile", "in_memory": {"compression": "lz4"}}
    found = resolve(tmp_path, {"ema_decay": 0.9}, datasets=[{**entry, "dataset_type": "video"}])
    assert [note.partition(":")[0] for note in idle(found)] == ["ema_decay", "[0].in_memory.compression"]


def test_config_check_shows_them_and_finds_no_fault(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({**PLAIN, "adapter": {"full_rank": True}}), encoding="utf-8")
    checked = check_file(file, ALONE, paths=False)
    assert checked.problems == ()
    assert any(note.startswith("adapter.full_rank: no effect") for note in checked.notes)


def published(folder: Path, keys: dict[str, Any], files: dict[str, Any]) -> set[str]:
    """The keys that are named for a published config, without the places of their blocks."""
    for name, data in {**files, "config": keys}.items():
        entries = [in_a_folder(entry) for entry in data] if name == "data_backend_config" else data
        (folder / f"{name}.json").write_text(json.dumps(entries), encoding="utf-8")
    try:
        notes = idle(load(folder / "config.json", environment=ALONE, allow_unsupported=True))
    except ConfigError:
        return set()
    return {name.rpartition(".")[2] for note in notes for name in note.partition(":")[0].split(", ")}


def test_published_configs_hear_of_nothing_they_do_not_set(tmp_path: Path) -> None:
    """SimpleTuner's examples set an interval beside `use_ema: false`, and edges for models without references. Those of
    ai-toolkit set ranks for convolutions on transformers. Values that a reader fills in are not mentioned."""
    found = [published(tmp_path, peer["keys"], peer.get("files", {})) for peer in (*PUBLISHED, *PEERS)]
    assert set().union(*found) == {"ema_update_interval", "conditioning", "conv", "conv_alpha"}


_VALUES = st.sampled_from([row[0] for row in REQUESTED])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    requested=st.lists(_VALUES, unique_by=lambda text: text.partition("=")[0]), kind=st.sampled_from(["lora", "lokr"])
)
def test_every_key_is_named_once_or_counts(tmp_path: Path, requested: list[str], kind: str) -> None:
    found = read(tmp_path, *requested, f"adapter.kind={kind}")
    named = [name.removeprefix("--set ") for note in idle(found) for name in note.partition(": no")[0].split(", ")]
    rows = [switch for switch in switches(found.config, Draft("x")) if switch.off]
    off = {f"{switch.location}.{key}" for switch in rows for key in switch.keys.split()}
    assert sorted(named) == sorted({text.partition("=")[0] for text in requested} & off)


def test_the_table_names_keys_there_are(tmp_path: Path) -> None:
    rows: list[Switch] = [*switches(read(tmp_path).config, Draft("x"))]
    assert all(set(row.keys.split()) <= set(type(row.section).model_fields) for row in rows)


@pytest.mark.parametrize("adapter", [{"kind": "ia3"}, {"kind": "lora", "by_module": {"Attention": {"algo": "ia3"}}}])
def test_an_adapter_that_no_program_loads(tmp_path: Path, adapter: dict[str, Any]) -> None:
    notes = [note for note in read(tmp_path, adapter=adapter).notes if "no program that we know loads" in note]
    assert len(notes) == 1
    assert "loads ia3 from a file; merge the result" in notes[0]
    assert not any("no program" in note for note in read(tmp_path, adapter={"kind": "lokr"}).notes)
