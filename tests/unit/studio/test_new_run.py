"""A new run: form, check of texts of all dialects, changes of single values, saving."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from gracetune.config import Environment, load
from gracetune.studio.replies import StudioError
from gracetune.studio.yaml_edits import with_values
from unit.data.folders import images, write
from unit.studio.clients import StudioClient, client_of

NATIVE = """\
gracetune: 1
name: cats  # what it shows
output_dir: output/cats
model: {family: sdxl, flavour: base-1.0}

datasets:
  - id: photos  # mine
    path: photos
    captions: {trigger_word: sks}
adapter:
  kind: lora
  rank: 8  # small

training: {max_steps: 20}
"""


@pytest.fixture
def client(tmp_path: Path) -> StudioClient:
    (tmp_path / "photos").mkdir()
    return client_of(tmp_path)


def job(root: Path) -> dict[str, Any]:
    process = {
        "type": "sd_trainer",
        "training_folder": "output",
        "network": {"type": "lora", "linear": 4, "linear_alpha": 4},
        "datasets": [{"folder_path": str(root / "photos"), "resolution": [512], "default_caption": "a cat: # 1"}],
        "train": {"steps": 5, "noise_scheduler": "ddpm", "dtype": "bf16", "lr": 1e-3, "optimizer": "adamw"},
        "model": {"name_or_path": "stabilityai/stable-diffusion-xl-base-1.0", "arch": "sdxl"},
    }
    return {"job": "extension", "config": {"name": "cats", "process": [process]}}


def test_the_form_has_every_option_with_its_help(client: StudioClient) -> None:
    form = client.get("form")
    fields = {field["path"]: field for group in form["groups"] for field in group["fields"]}
    assert fields["adapter.rank"]["type"] == "integer"
    assert fields["adapter.rank"]["common"]
    assert fields["adapter.kind"]["choices"][:2] == ["lora", "dora"]
    assert fields["datasets[0].path"]["type"] == "path"
    assert fields["training.deterministic"] | {"help": ""} == {
        "path": "training.deterministic", "label": "deterministic", "help": "", "type": "boolean", "choices": [],
        "expects": "true or false", "default": False, "required": False, "common": False,
    }  # fmt: skip
    assert all(field["help"] for field in fields.values())
    assert {"wan", "sdxl"} <= {family["name"] for family in form["families"]}
    assert {"style", "motion"} <= {preset["name"] for preset in form["presets"]}


def test_a_text_of_our_own_dialect_is_checked_and_kept(client: StudioClient, tmp_path: Path) -> None:
    checked = client.post("new/check", {"text": NATIVE, "name": "cats.yaml"})
    problems = [problem["key"] for problem in checked["problems"]]
    assert (checked["dialect"], checked["yaml"]) == ("native", NATIVE)
    assert problems == ["datasets[0].path"] or not problems  # relative to where the tests were started
    assert checked["values"]["adapter.rank"] == 8
    assert checked["values"]["datasets[0].captions.trigger_word"] == "sks"
    wrong = client.post("new/check", {"text": NATIVE.replace("rank: 8", "rank: none"), "name": "cats.yaml"})
    assert not wrong["ok"]
    assert wrong["problems"][0]["key"] == "adapter.rank"
    assert wrong["problems"][0]["try"]
    assert wrong["values"]["training.max_steps"] == 20  # the form keeps what can be read
    assert str(tmp_path) not in json.dumps(wrong)


def test_an_ai_toolkit_job_becomes_the_same_config_in_our_dialect(client: StudioClient, tmp_path: Path) -> None:
    text = yaml.safe_dump(job(tmp_path))
    checked = client.post("new/check", {"text": text, "name": "a job/../of mine.yaml"})
    assert checked["ok"], checked["problems"]
    assert checked["dialect"] == "ai-toolkit"
    assert checked["values"]["adapter.rank"] == 4
    for name, content in (("theirs.yaml", text), ("ours.yaml", checked["yaml"])):
        (tmp_path / name).write_text(content)
    theirs, ours = (load(tmp_path / name, environment=Environment({})).config for name in ("theirs.yaml", "ours.yaml"))
    assert ours == theirs
    again = client.post("new/check", {"text": checked["yaml"], "name": "ours.yaml"})
    assert (again["dialect"], again["ok"]) == ("native", True)


def test_a_simpletuner_config_with_its_dataset_file(client: StudioClient, tmp_path: Path) -> None:
    config = {
        "model_family": "sdxl", "model_type": "lora", "optimizer": "adamw_bf16",
        "lora_rank": 4, "max_train_steps": 5, "num_train_epochs": 0,
        "output_dir": str(tmp_path / "out"), "data_backend_config": "backends.json", "train_batch_size": 1,
        "pretrained_model_name_or_path": "stabilityai/stable-diffusion-xl-base-1.0",
    }  # fmt: skip
    backends = [{"id": "photos", "type": "local", "instance_data_dir": str(tmp_path / "photos"), "resolution": 512,
                 "resolution_type": "pixel_area", "caption_strategy": "textfile"},
                {"id": "text", "type": "local", "dataset_type": "text_embeds", "default": True}]  # fmt: skip
    alone = client.post("new/check", {"text": json.dumps(config), "name": "config.json"})
    assert alone["dialect"] == "simpletuner"
    assert not alone["ok"]
    files = {"backends.json": json.dumps(backends)}
    both = client.post("new/check", {"text": json.dumps(config), "name": "config.json", "files": files})
    assert both["ok"], both["problems"]
    assert both["values"]["datasets[0].id"] == "photos"


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("adapter.rank", 32, "  rank: 32  # small"),
        ("training.max_steps", 1e3, "training: {max_steps: 1000.0}"),
        ("datasets[0].captions.trigger_word", "x: y", "    captions: {trigger_word: 'x: y'}"),
        ("datasets[0].resolution", 64, "    resolution: 64"),
        ("adapter.alpha", 4, "  alpha: 4"),
        ("optimizer.lr", 0.001, "optimizer: {lr: 0.001}"),
        ("training.ema.enabled", True, "training: {max_steps: 20, ema: {enabled: true}}"),
    ],
)
def test_one_value_is_changed_in_place(key: str, value: Any, line: str, client: StudioClient) -> None:
    changed = client.post("new/check", {"text": NATIVE, "name": "cats.yaml", "set": {key: value}})["yaml"]
    assert line in changed.splitlines()
    assert {"name: cats  # what it shows", "  - id: photos  # mine"} <= {*changed.splitlines()}
    assert len(changed.splitlines()) - len(NATIVE.splitlines()) in (0, 1)


def test_a_value_is_removed_or_the_text_is_written_anew() -> None:
    without = with_values(NATIVE, {("adapter", "rank"): None})
    assert without == NATIVE.replace("  rank: 8  # small\n", "")
    flow = with_values(NATIVE, {("model", "flavour"): None})
    assert flow is not None
    assert yaml.safe_load(flow) == {**yaml.safe_load(NATIVE), "model": {"family": "sdxl"}}
    short = with_values("gracetune: 1\ndatasets: photos\n", {("datasets", 0, "repeats"): 2})
    assert yaml.safe_load(short or "")["datasets"] == [{"id": "photos", "path": "photos", "repeats": 2}]
    second = with_values(NATIVE, {("datasets", 1, "path"): "more"})
    assert yaml.safe_load(second or "")["datasets"][1] == {"path": "more"}
    whole = with_values(NATIVE.replace("rank: 8", "rank: 8.0"), {("adapter", "rank"): 8})
    assert whole == NATIVE
    assert with_values("a: [", {("name",): "x"}) is None
    assert with_values(NATIVE, {("nothing", "here"): None}) == NATIVE


def test_a_config_is_saved_once_and_never_over_another(client: StudioClient, tmp_path: Path) -> None:
    saved = client.post("new/save", {"text": NATIVE, "file_name": "cats.yaml", "start": False})
    assert saved == {"path": str(tmp_path / "configs" / "cats.yaml"), "job": None}
    assert Path(saved["path"]).read_text() == NATIVE
    status, error = client.rejected("POST", "new/save", {"text": "x", "file_name": "cats.yaml"})
    assert (status, error["hint"]) == (409, "cats-2.yaml")
    for name in ("../cats.yaml", "a/b.yaml", "cats.txt", ".yaml", "", "a\0.yaml", "-" * 300 + ".yaml"):
        assert client.rejected("POST", "new/save", {"text": "x", "file_name": name})[0] == 400
    assert [path.name for path in (tmp_path / "configs").iterdir()] == ["cats.yaml"]


def test_a_folder_of_configs_that_leads_out_is_rejected(client: StudioClient, tmp_path: Path) -> None:
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    outside.mkdir()
    (tmp_path / "configs").symlink_to(outside)
    assert client.rejected("POST", "new/save", {"text": "x", "file_name": "a.yaml"})[0] == 409
    assert not [*outside.iterdir()]


def test_secrets_of_the_environment_stay_out_of_the_yaml(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    text = yaml.safe_dump(job(tmp_path)).replace("name: cats", "name: ${SOME_TOKEN}")
    secret = "hf_abcdefghijklmnopqrstuvwxyz0123456789"
    client = client_of(tmp_path, environment=Environment({"SOME_TOKEN": secret}))
    assert secret not in json.dumps(client.post("new/check", {"text": text, "name": "job.yaml"}))


def test_a_folder_becomes_a_proposal_that_can_be_checked_and_planned(tmp_path: Path) -> None:
    write(tmp_path / "cats & dogs", images(12))
    client = client_of(tmp_path)
    request = {"folder": "cats & dogs", "model": "sdxl", "preset": "style", "trigger": "sks", "steps": 500}
    found = client.post("new/propose", request)
    assert (found["media"], found["files"], found["preset"], found["steps"]) == ("image", 12, "style", 500)
    assert found["plan"]["verdict"]
    assert [path.name for path in tmp_path.iterdir()] == ["cats & dogs"]  # nothing is written
    checked = client.post("new/check", {"text": found["yaml"], "name": "cats.yaml"})
    assert checked["ok"], checked["problems"]
    assert checked["values"]["datasets[0].path"] == str(tmp_path / "cats & dogs")
    assert checked["values"]["datasets[0].captions.trigger_word"] == "sks"
    status, error = client.rejected("POST", "new/propose", {"folder": "--help"})
    assert (status, error["expected"]) == (422, "a folder of images, clips or sounds")
    status, error = client.rejected("POST", "new/propose", {**request, "preset": "--yes"})
    assert status == 422


def test_a_plan_needs_a_valid_config(client: StudioClient, tmp_path: Path) -> None:
    status, error = client.rejected("POST", "new/plan", {"text": NATIVE.replace("rank: 8", "rank: none")})
    assert (status, error["found"]) == (422, 'adapter.rank: "none"')
    assert str(tmp_path) not in json.dumps(error)


def test_a_studio_that_stops_ends_its_commands(client: StudioClient) -> None:
    runner = client.studio.commands
    with ThreadPoolExecutor(1) as pool:
        began = time.monotonic()
        waiting = pool.submit(runner.json, "bench", "cache", "--json", timeout_s=100)
        time.sleep(0.5)
        runner.close()
        with pytest.raises(StudioError, match="exit code -9"):
            waiting.result()
        with pytest.raises(StudioError, match="exit code -9"):
            runner.json("doctor", "--json", timeout_s=100)
        assert time.monotonic() - began < 20
    with pytest.raises(StudioError, match="took more than 0"):
        client_of(client.studio.root).studio.commands.json("doctor", "--json", timeout_s=0.01)
