from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings

from gracetune.config import Environment, Resolved, UnresolvedError, load
from gracetune.config.machine_checks import path_problems, size_warnings
from gracetune.errors import ConfigError, Problem
from gracetune.memory.placement import hints_of
from unit.config.strategies import mutated

EMPTY = Environment({})
GOOD: dict[str, Any] = {
    "gracetune": 1,
    "name": "run",
    "output_dir": "out",
    "model": {"family": "wan", "flavour": "t2v-14b-2.2"},
    "datasets": [
        {"id": "clips", "path": "data/clips", "dataset_type": "video", "video": {"num_frames": 17}},
        {"id": "stills", "path": "data/stills", "type": "in_memory", "in_memory": {"compression": "lz4"}},
    ],
    "training": {"max_steps": 100},
}


def write(folder: Path, data: Any, name: str = "run.yaml") -> Path:
    path = folder / name
    path.write_text(yaml.safe_dump(data), encoding="utf-8")
    return path


def resolve(folder: Path, changes: dict[str, Any] | None = None, **options: Any) -> Resolved:
    return load(write(folder, {**GOOD, **(changes or {})}), environment=options.pop("environment", EMPTY), **options)


def problems(folder: Path, changes: dict[str, Any] | None = None, **options: Any) -> dict[str, Problem]:
    with pytest.raises(ConfigError) as caught:
        resolve(folder, changes, **options)
    return {problem.key: problem for problem in caught.value.problems}


def test_a_good_file_is_complete_and_frozen(tmp_path: Path) -> None:
    resolved = resolve(tmp_path)
    assert resolved.dialect == "native"
    assert resolved.config.training.batch_size == 1
    with pytest.raises(ValueError, match="frozen"):
        resolved.config.name = "other"


def test_flags_beat_the_file_and_the_file_beats_the_environment(tmp_path: Path) -> None:
    environment = Environment({"GH200_UVM_OVERSUBSCRIPTION_RATIO": "3", "GH200_UVM_ACCESS_PATTERN": "balanced",
                               "GH200_UVM_STAGE1_THRESHOLD": "0.2"})  # fmt: skip
    file = {"memory": {"uvm_oversubscription_ratio": 4.0, "uvm_stage1_threshold": 0.3}}
    resolved = resolve(tmp_path, file, environment=environment, overrides=["memory.uvm_stage1_threshold=0.4"])
    memory = resolved.config.memory
    assert (memory.uvm_access_pattern, memory.uvm_oversubscription_ratio, memory.uvm_stage1_threshold) == (
        "balanced",
        4.0,
        0.4,
    )
    kinds = {path[1]: origin.kind for path, origin in resolved.origins.items() if path[0] == "memory"}
    assert kinds["uvm_access_pattern"] == "environment"
    assert kinds["uvm_oversubscription_ratio"] == "file"
    assert kinds["uvm_stage1_threshold"] == "flag"


@pytest.mark.parametrize(
    ("cache", "memory", "variable", "switch", "hints"),
    [
        ({"vae_cache_type": "unified_memory"}, {}, None, None, True),
        ({"text_cache_type": "unified_memory"}, {}, "0", None, True),
        ({"vae_cache_type": "unified_memory"}, {"enable_uvm_hints": False}, "1", False, False),
        ({"vae_cache_type": "unified_memory"}, {}, "1", True, True),
        ({"vae_cache_type": "disk"}, {}, "1", True, True),
        ({"vae_cache_type": "disk"}, {}, "0", False, False),
        ({"vae_cache_type": "disk"}, {}, None, None, False),
        ({}, {"enable_uvm_hints": True}, "0", True, True),
    ],
)
def test_the_switch_decides_and_else_the_caches(
    tmp_path: Path,
    cache: dict[str, str],
    memory: dict[str, bool],
    variable: str | None,
    switch: bool | None,
    hints: bool,
) -> None:
    environment = Environment({"SIMPLETUNER_GH200_ENABLE_UVM_HINTS": variable} if variable else {})
    resolved = resolve(tmp_path, {"cache": cache, "memory": memory}, environment=environment)
    assert resolved.config.memory.enable_uvm_hints is switch
    found = hints_of(resolved.config)
    assert (found.on, found.requested) == (hints, switch is True)
    overruled = [note for note in resolved.notes if "overruled" in note]
    assert bool(overruled) == (variable == "0" and "text_cache_type" in cache)


def test_all_problems_arrive_together(tmp_path: Path) -> None:
    found = problems(
        tmp_path,
        {
            "model": {"family": "wann", "flavor": "x"},
            "datasets": [
                {"id": "a", "path": "p", "resolution": -512, "video": {"num_frames": 16}, "dataset_type": "video"},
                {"id": "a", "path": "q", "crop": {"enabled": "yes"}, "conditioning": ["b"]},
            ],
            "training": {"batch_size": 2.5},
            "optimizer": {"name": "adam", "lr": float("nan")},
        },
        overrides=["training.max_steps=ten", "nonsense"],
        environment=Environment({"PYTORCH_CUDA_ALLOC_CONF": "uvm_oversubscription_ratio:5.0x"}),
    )
    assert set(found) == {
        "model.family", "model.flavor", "datasets[0].resolution", "datasets[0].video.num_frames", "datasets[1].id",
        "datasets[1].crop.enabled", "datasets[1].conditioning", "training.batch_size", "optimizer.name",
        "optimizer.lr", "--set training.max_steps", "--set", "PYTORCH_CUDA_ALLOC_CONF",
    }  # fmt: skip
    assert found["model.family"].hint == "write `wan`"
    assert found["model.flavor"].hint == "write `flavour`"
    assert found["datasets[0].video.num_frames"].hint == "write 13 or 17"
    assert found["training.batch_size"].expected == "a whole number >= 1 and <= 16,384"
    assert found["optimizer.name"].hint == "write `adamw`"
    assert found["--set training.max_steps"].file is None
    assert all(problem.found and problem.expected and problem.hint for problem in found.values())


STREAMED = {"adapter": {"kind": "full_finetune"}, "optimizer": {"state": {"home": "streamed"}}}


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"training": {}}, "training.max_steps"),
        ({"training": {"max_steps": 1, "epochs": 1}}, "training.epochs"),
        ({"training": {"max_steps": 1, "ramp": {"enabled": True}}}, "training.ramp.batch_rampup_steps"),
        ({"training": {"max_steps": 1, "ramp": {"enabled": True, "initial_effective_batch_size": 8,
          "target_effective_batch_size": 4, "batch_rampup_steps": 4}}}, "training.ramp.initial_effective_batch_size"),
        ({"model": {"family": "wan", "flavour": "ti2v-5b-2.2", "experts": "high"}}, "model.experts"),
        ({"model": {"family": "wan", "flavour": "t2v-14b-2.3"}}, "model.flavour"),
        ({"model": {"family": "sdxl"}}, "datasets[0].dataset_type"),
        ({"adapter": {"kind": "full_finetune", "init_from": "x"}}, "adapter.kind"),
        ({"optimizer": {"state": {"home": "streamed"}}}, "optimizer.state.home"),
        ({**STREAMED, "optimizer": {"name": "lion", "state": {"home": "streamed"}}}, "optimizer.state.home"),
        ({**STREAMED, "model": {"family": "wan", "flavour": "t2v-14b-2.2", "base_precision": "fp32"}},
         "optimizer.state.home"),
        ({**STREAMED, "training": {"max_steps": 1, "ema": {"enabled": True}}}, "optimizer.state.home"),
        ({"optimizer": {"high_noise": {"min_lr": 1e-5}}}, "optimizer.high_noise.min_lr"),
        ({"optimizer": {"name": "automagic", "limits": {"min_lr": 1e-3, "max_lr": 1e-5}}}, "optimizer.limits.min_lr"),
        ({"objective": {"min_timestep": 500, "max_timestep": 500}}, "objective.min_timestep"),
        ({"datasets": []}, "datasets"),
        ({"datasets": [{"id": "a", "path": "p", "disabled": True}]}, "datasets"),
        ({"datasets": [{"id": "a", "path": "p", "maximum_size": 2048}]}, "datasets[0].downsample_to"),
        ({"datasets": [{"id": "a", "path": "p", "minimum_aspect_ratio": 2.0, "maximum_aspect_ratio": 1.0}]},
         "datasets[0].minimum_aspect_ratio"),
        ({"datasets": [{"id": "a", "path": "p", "crop": {"enabled": True, "aspect": "closest"}}]},
         "datasets[0].crop.aspect_buckets"),
        ({"datasets": [{"id": "a", "path": "p", "start_epoch": 3, "end_epoch": 2}]}, "datasets[0].end_epoch"),
        ({"datasets": [{"id": "a", "path": "p", "start_step": 3, "end_step": 3}]}, "datasets[0].end_step"),
        ({"datasets": [{"id": "a", "path": "p", "conditioning": ["a"]}]}, "datasets[0].conditioning"),
        ({"datasets": [{"id": "a", "path": "p", "adapter_strength": 0}]}, "datasets[0].adapter_strength"),
        ({"adapter": {"strength": 0.0}}, "adapter.strength"),
        ({"gracetune": 2}, "gracetune"),
    ],
)  # fmt: skip
def test_each_rule_between_values(tmp_path: Path, changes: dict[str, Any], key: str) -> None:
    found = problems(tmp_path, changes)
    assert any(name.startswith(key.rsplit(".", 1)[0]) for name in found), found
    assert key in found or key.rsplit(".", 1)[0] in found


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        ({"optimizer": {"betas": [0.9]}}, ["optimizer.betas"]),
        ({"optimizer": {"betas": [0.9, 2.0]}}, ["optimizer.betas[1]"]),
        ({"adapter": {"targets": ["a", 3]}}, ["adapter.targets[1]"]),
        ({"logging": {"trackers": ["comet"]}}, ["logging.trackers[0]"]),
        ({"validation": {"prompts": [5, {"prompt": "p"}]}}, ["validation.prompts[0]"]),
        ({"datasets": ...}, ["datasets"]),
        ({"datasets": 3}, ["datasets"]),
        ({"datasets": [3, {"id": "a", "path": "p"}]}, ["datasets[0]"]),
        (
            {"datasets": [{"id": 5, "path": "p"}, {"id": "b", "path": "p", "conditioning": ["five"]}]},
            ["datasets[0].id"],
        ),
        ({"datasets": [{"path": "p"}, {"path": "p"}]}, ["datasets[0].id", "datasets[1].id"]),
        (
            {"datasets": [{"id": "a", "path": "p", "dataset_type": "audio"}], "model": {"family": "wam"}},
            ["model.family"],
        ),
        ({"model": {}, "datasets": [{"id": "a", "path": "p", "dataset_type": "audio"}]}, ["model.family"]),
        (
            {
                "model": {"family": "qwen_image", "flavour": "edit"},
                "datasets": [{"id": "a", "path": "p", "conditioning": [5]}],
            },
            ["datasets[0].conditioning[0]"],
        ),
        ({"training": {"epochs": "x"}}, ["training.epochs"]),
        ({"optimizer": {"name": "adamm", "limits": {"min_lr": 1e-3}}}, ["optimizer.name"]),
        ({"objective": {"min_timestep": 1000, "max_timestep": "x"}}, ["objective.max_timestep"]),
        ({"optimizer": {"lr": float("nan")}}, ["optimizer.lr"]),
        ({"training": {"max_steps": float("nan")}}, ["training.max_steps"]),
    ],
)
def test_one_mistake_is_one_problem(tmp_path: Path, changes: dict[str, Any], keys: list[str]) -> None:
    data = {key: value for key, value in {**GOOD, **changes}.items() if value is not ...}
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path, data), environment=EMPTY)
    assert [problem.key for problem in caught.value.problems] == keys


def test_an_id_twice_names_the_other_dataset_as_its_key_does(tmp_path: Path) -> None:
    again = [*GOOD["datasets"], {"id": "stills", "path": "data/more"}]
    found = problems(tmp_path, {"datasets": again})
    assert found["datasets[2].id"].hint == "datasets[1] has this id: rename one of the two"


def test_an_edit_model_without_edit_sources_is_rejected(tmp_path: Path) -> None:
    edit = {"model": {"family": "qwen_image", "flavour": "edit-2509"}}
    target = {"id": "after", "path": "a"}
    sources = {"id": "before", "path": "b", "dataset_type": "conditioning", "conditioning_type": "reference_loose"}
    found = problems(tmp_path, {**edit, "datasets": [target]})
    assert list(found) == ["datasets[0].conditioning"]
    assert "conditioning_data" in found["datasets[0].conditioning"].hint
    mask = {**sources, "conditioning_type": "mask"}
    assert list(problems(tmp_path, {**edit, "datasets": [{**target, "conditioning": ["before"]}, mask]})) == [
        "datasets[0].conditioning"
    ]
    resolve(tmp_path, {**edit, "datasets": [{**target, "conditioning": ["before"]}, sources]})
    resolve(tmp_path, {**edit, "datasets": [target, {**sources, "source_dataset_id": "after"}]})
    resolve(tmp_path, {**edit, "datasets": [{**target, "canny_reference": {}}]})
    resolve(tmp_path, {"model": {"family": "qwen_image", "flavour": "t2i"}, "datasets": [target]})


def test_edges_are_references_of_images_for_a_model_that_edits(tmp_path: Path) -> None:
    edit = {"model": {"family": "qwen_image", "flavour": "edit-2509"}}
    target = {"id": "after", "path": "a", "canny_reference": {"low_threshold": 60, "high_threshold": 50}}
    found = problems(tmp_path, {**edit, "datasets": [target]})
    assert list(found) == ["datasets[0].canny_reference.low_threshold"]
    assert found["datasets[0].canny_reference.low_threshold"].expected == "at most high_threshold, 50"
    source = {"id": "before", "path": "b", "dataset_type": "conditioning", "canny_reference": {}}
    pair = [{"id": "after", "path": "a", "conditioning": ["before"]}, source]
    assert list(problems(tmp_path, {**edit, "datasets": pair})) == ["datasets[1].canny_reference"]
    plain = {"model": {"family": "qwen_image", "flavour": "t2i"}}
    found = problems(tmp_path, {**plain, "datasets": [{"id": "after", "path": "a", "canny_reference": {}}]})
    assert list(found) == ["datasets[0].canny_reference"]
    assert "a model that edits" in found["datasets[0].canny_reference"].expected


@pytest.mark.parametrize(
    ("override", "key", "hint"),
    [
        ("name=123", "--set name", "--set name='\"123\"'"),
        ("datasets[1].in_memory.memory_limit_gb=200GB", "--set datasets[1].in_memory.memory_limit_gb", "=200`"),
        ("training.batch_size=0", "--set training.batch_size", "--set training.batch_size=1"),
        ("optimizer.betas=[0.9]", "--set optimizer.betas", "[0.5, 0.5]"),
        (f"name={'[' * 5000}", "--set name", "nest less deeply"),
        (f"{'.'.join('a' * 2000)}=1", "--set", "shorten"),
        ("name=\udcff", "--set name", "\\udcff"),
        ("optimizer.options.a=.nan", "--set optimizer.options.a", "finite"),
        ("optimizer.options=&a {b: *a}", "--set optimizer.options", "write the alias out"),
    ],
)
def test_overrides_that_cannot_be_used(tmp_path: Path, override: str, key: str, hint: str) -> None:
    found = problems(tmp_path, overrides=[override])
    assert list(found) == [key]
    assert hint in found[key].hint


def test_a_peers_name_in_an_override_gets_ours(tmp_path: Path) -> None:
    peer = {"model_family": "wan", "model_type": "lora", "output_dir": "o", "optimizer": "adamw_bf16",
            "max_train_steps": 5, "train_batch_size": 4,
            "datasets": [{"id": "a", "instance_data_dir": "d"}]}  # fmt: skip
    path = write(tmp_path, peer)
    for name, ours in {"train_batch_size": "training.batch_size", "learning_rate": "optimizer.lr"}.items():
        with pytest.raises(ConfigError) as caught:
            load(path, environment=EMPTY, overrides=[f"{name}=2"])
        (problem,) = caught.value.problems
        assert f"--set {ours}=" in problem.hint


@pytest.mark.parametrize(
    ("changes", "key", "hint"),
    [
        ({"training": {"max_steps": 5, "batch_size": "4"}}, "training.batch_size", "write `4`"),
        ({"training": {"max_steps": 5, "batch_size": 2.0}}, "training.batch_size", "write `2`"),
        ({"training": {"max_steps": 5, "batch_size": 2.5}}, "training.batch_size", "give `training.batch_size` 1"),
        ({"name": 123}, "name", 'write `"123"`'),
        ({"name": True}, "name", 'write `"true"`'),
        ({"cache": {"persistent_cache": "yes"}}, "cache.persistent_cache", "write `true`"),
        ({"training": {"max_steps": "10,000"}}, "training.max_steps", "write `10000`"),
        ({"training": {"max_steps": "10k"}}, "training.max_steps", "give `training.max_steps` "),
        ({"training": {"max_steps": "1.000.000"}}, "training.max_steps", "give `training.max_steps` "),
        ({"optimizer": {"lr": "0.000123456789"}}, "optimizer.lr", "write `0.000123456789`"),
        ({"optimizer": {"betas": 0.9}}, "optimizer.betas", "give `optimizer.betas` [0.5, 0.5], for example"),
        ({"adapter": {"targets": "to_q"}}, "adapter.targets", "write `[to_q]`"),
        ({"adapter": {"targets": "to_q, to_k"}}, "adapter.targets", "write `[to_q, to_k]`"),
        ({"adapter": {"targets": "re: ^to_(q|k)$"}}, "adapter.targets", "write `['re: ^to_(q|k)$']`"),
        ({"adapter": {"by_module": {"attn": 8}}}, "adapter.by_module.attn", "give `adapter.by_module.attn` {}"),
        ({"logging": {"trackers": "wandbb"}}, "logging.trackers", "write `[wandb]`"),
        ({"datasets": [{"id": "a", "path": "hf://datasets/a/b", "local_copy": {"filter": "size"}}]},
         "datasets[0].local_copy.filter", "write `[{column: size}]`"),
        ({"adapter": {"kind": "lokrr"}}, "adapter.kind", "write `lokr`"),
        ({"model": "./sdxl"}, "model", "write `model: {family: sdxl, path: ./sdxl}`"),
        ({"model": "flux"}, "model", "write `model: {family: flux}`"),
        ({"model": 5}, "model", "give `model` {family: wan}, for example"),
        ({"adapter": "lokrr"}, "adapter", "write `lokr`"),
        ({"adapter": 16}, "adapter", "write `adapter: {rank: 16}`"),
        ({"training": 500}, "training", "write `training: {max_steps: 500}`"),
        ({"training": 0}, "training", "give `training` {max_steps: 1}, for example"),
        ({"optimizer": 0.0001}, "optimizer", "write `optimizer: {lr: 0.0001}`"),
        ({"checkpoints": 100}, "checkpoints", "write `checkpoints: {every_steps: 100}`"),
        ({"validation": "a cat"}, "validation", "write `validation: {prompts: [{prompt: a cat}]}`"),
        ({"logging": "wandb"}, "logging", "write `logging: {trackers: [wandb]}`"),
        ({"validation": {"prompts": [{"prompt": "a cat"}, 5]}}, "validation.prompts[1]", "prompt: "),
        ({"adapter": {"dropout": "some"}}, "adapter.dropout", "0.5"),
        ({"datasets": [{"id": "a", "path": "p", "in_memory": {"memory_limit_gb": "200GB"}}]},
         "datasets[0].in_memory.memory_limit_gb", "write `200`"),
        ({"datasets": [{"id": "a", "path": "p", "in_memory": {"memory_limit_gb": "512MB"}}]},
         "datasets[0].in_memory.memory_limit_gb", "1, for example"),
    ],
)  # fmt: skip
def test_hints_say_what_to_type(tmp_path: Path, changes: dict[str, Any], key: str, hint: str) -> None:
    problem = problems(tmp_path, changes)[key]
    assert hint in problem.hint
    assert problem.expected not in problem.hint


def test_options_hold_what_json_can_hold(tmp_path: Path) -> None:
    text = yaml.safe_dump(GOOD) + "optimizer:\n  options: {b: .nan, c: !!binary aGk=, d: 2025-01-01, e: [.inf, 1]}\n"
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load(path, environment=EMPTY)
    keys = [problem.key for problem in caught.value.problems]
    assert keys == ["optimizer.options.b", "optimizer.options.c", "optimizer.options.e[0]"]
    path.write_text(yaml.safe_dump(GOOD) + "optimizer: {options: {d: 2025-01-01}}\n", encoding="utf-8")
    assert load(path, environment=EMPTY).config.optimizer.options == {"d": "2025-01-01"}


def test_the_dialect_of_a_file_too_broken_to_read_on_is_known(tmp_path: Path) -> None:
    job = {"job": "extension", "config": {"name": "x", "process": []}}
    for data, dialect in ((job, "ai-toolkit"), ([{"id": "a", "instance_data_dir": "d"}], "simpletuner")):
        with pytest.raises(UnresolvedError) as caught:
            load(write(tmp_path, data), environment=EMPTY)
        assert caught.value.dialect == dialect


def test_an_empty_file_is_called_so(tmp_path: Path) -> None:
    for name in ("a.json", "a.yaml", "a.toml", "a.env"):
        path = tmp_path / name
        path.write_text("# nothing\n" if name != "a.json" else "", encoding="utf-8")
        with pytest.raises(ConfigError) as caught:
            load(path, environment=EMPTY)
        assert caught.value.problems[0].found == "an empty file"
    (tmp_path / "b.env").write_text("A=1\n", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load(tmp_path / "b.env", environment=EMPTY)
    assert caught.value.problems[0].found == "an env file of another kind"


def test_overrides_reach_into_lists_but_leave_no_holes(tmp_path: Path) -> None:
    resolved = resolve(tmp_path, overrides=["datasets[1].repeats=3", "optimizer.lr=1e-5", "adapter.targets=[a, b]"])
    assert resolved.config.datasets[1].repeats == 3
    assert resolved.config.optimizer.lr == 1e-5
    assert resolved.config.adapter.targets == ("a", "b")
    assert "--set datasets[9].repeats" in problems(tmp_path, overrides=["datasets[9].repeats=3"])


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("", "gracetune init FOLDER"),
        ("- 1\n", "gracetune init FOLDER"),
        ("just text", "gracetune init FOLDER"),
        ("a: 1\n", "gracetune init FOLDER"),
        ("model: ./sdxl\ndatasets: photos\n", "write `gracetune: 1` as the first key"),
    ],
)
def test_files_of_no_known_kind(tmp_path: Path, text: str, hint: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load(path, environment=EMPTY)
    assert hint in caught.value.problems[0].hint


def test_a_file_that_lacks_its_first_line_is_read_with_all_its_problems(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("model: ./sdxl\ndatasets: photos\n", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load(path, environment=EMPTY)
    found = {problem.key: problem.hint for problem in caught.value.problems}
    assert found["model"] == "write `model: {family: sdxl, path: ./sdxl}`"
    assert {"gracetune", "output_dir"} <= found.keys()


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("./sdxl", "add `family: sdxl` to `model`"),
        ("Qwen/Qwen-Image", "add `family: qwen_image` to `model`"),
        ("mine", "add `family: wan`, for example, to `model`"),
    ],
)
def test_a_missing_family_is_read_from_the_models_name(tmp_path: Path, path: str, hint: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"gracetune: 1\nname: a\noutput_dir: out\ndatasets: photos\nmodel: {{path: {path}}}\n")
    with pytest.raises(ConfigError) as caught:
        load(file, environment=EMPTY)
    assert {problem.key: problem.hint for problem in caught.value.problems}["model.family"] == hint


def test_a_misspelt_file_is_suggested(tmp_path: Path) -> None:
    (tmp_path / "photos.yaml").write_text("gracetune: 1\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"check the spelling: \S*photos\.yaml exists"):
        load(tmp_path / "photo.yaml", environment=EMPTY)


def test_what_is_not_on_this_machine(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "file").write_text("x", encoding="utf-8")
    datasets = [
        {"id": "a", "path": str(tmp_path / "here")},
        {"id": "b", "path": str(tmp_path / "gone")},
        {"id": "c", "path": str(tmp_path / "gone too"), "disabled": True},
        {"id": "d", "path": "s3://bucket/x", "type": "url"},
        {"id": "e", "path": str(tmp_path / "here"), "type": "in_memory", "in_memory": {"memory_limit_gb": 200}},
    ]
    model = {"family": "wan", "path": str(tmp_path / "weights")}
    resolved = resolve(tmp_path, {"datasets": datasets, "model": model, "output_dir": str(tmp_path / "file")})
    assert {problem.key for problem in path_problems(resolved)} == {"datasets[1].path", "model.path", "output_dir"}
    (warning,) = size_warnings(resolved, host_bytes=64 * 10**9)
    assert "200" in warning
    assert size_warnings(resolved, host_bytes=10**12) == []


@pytest.mark.parametrize("name", ["~nosuchuser/x", "x" * 300, "nul\0byte", "a/" * 3000])
def test_paths_that_cannot_be_looked_at_are_problems(tmp_path: Path, name: str) -> None:
    changes = {
        "output_dir": name,
        "model": {"family": "wan", "path": f"/{name}" if not name.startswith("~") else name},
        "datasets": [{"id": "a", "path": name, "mask": {"path": name}, "captions": {"table": {"path": name}}}],
        "validation": {"prompts": [{"prompt": "p", "references": [name]}]},
    }
    found = {problem.key for problem in path_problems(resolve(tmp_path, changes))}
    assert found >= {"output_dir", "datasets[0].path", "datasets[0].mask.path", "datasets[0].captions.table.path"}
    assert "validation.prompts[0].references" in found


def test_a_file_is_no_dataset_folder(tmp_path: Path) -> None:
    file = tmp_path / "clip.mp4"
    file.write_text("x", encoding="utf-8")
    (problem,) = path_problems(resolve(tmp_path, {"datasets": [{"id": "a", "path": str(file)}]}))
    assert "which is a file" in problem.found
    assert str(tmp_path) in problem.hint


def test_captions_in_a_table_below_the_folder_or_beside_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "inside.csv").write_text("x", encoding="utf-8")
    (tmp_path / "beside.csv").write_text("x", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for name, count in (("inside.csv", 0), ("beside.csv", 0), ("nowhere.csv", 1)):
        dataset = {"id": "a", "path": "data", "captions": {"table": {"path": name}}}
        assert len(path_problems(resolve(tmp_path, {"datasets": [dataset]}))) == count


def test_without_a_known_size_nothing_is_warned_about(tmp_path: Path) -> None:
    dataset = {"id": "a", "path": "p", "in_memory": {"memory_limit_gb": 1e6}}
    assert size_warnings(resolve(tmp_path, {"datasets": [dataset]}), host_bytes=None) == []


RAMP = {"enabled": True, "initial_effective_batch_size": 4, "target_effective_batch_size": 8, "batch_rampup_steps": 10}
RICH = {**GOOD, "training": {"max_steps": 100, "ramp": RAMP}, "validation": {"prompts": [{"prompt": "x"}]}}


@settings(max_examples=150, deadline=None)
@given(mutated(RICH))
def test_nothing_but_our_own_error_comes_out(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    path = write(tmp_path_factory.getbasetemp(), data)
    try:
        path_problems(load(path, environment=EMPTY))
    except ConfigError as error:
        assert all(problem.found and problem.expected and problem.hint for problem in error.problems)


def test_variables_need_no_quotes_in_an_ai_toolkit_file(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_text(
        '{"job": "extension", "config": {"name": "n", "process": [{"train": {"steps": ${STEPS}}}]}}', "utf-8"
    )
    with pytest.raises(ConfigError) as caught:
        load(path, environment=EMPTY)
    assert "STEPS" in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        load(path, environment=Environment({"STEPS": "10"}))
    assert "STEPS" not in str(caught.value)
    path.write_text('{"model_family": ${FAMILY}}', "utf-8")
    with pytest.raises(ConfigError) as caught:
        load(path, environment=Environment({"FAMILY": "1"}))
    assert caught.value.problems[0].key == "line 1, column 18"
