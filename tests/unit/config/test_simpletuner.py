"""SimpleTuner files as a whole: recognizing them, the GH200 guides' blocks, formats, names, what must be there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gracetune.config import Environment, load
from gracetune.config.dialects.simpletuner import SIMPLETUNER
from gracetune.config.run_config import RunConfig
from gracetune.errors import ConfigError
from unit.config.simpletuner_files import DATASETS, EMPTY, GOOD, IMAGES, problems, resolve, write

EXAMPLES = Path(__file__).parents[3] / "examples"


def config(folder: Path, changes: dict[str, Any] | None = None, **options: Any) -> RunConfig:
    return resolve(folder, changes, **options).config


@pytest.mark.parametrize(
    "data",
    [
        {"model_family": "wan"},
        {"--train_batch_size": 4},
        {"datasets": [{"id": "a", "instance_data_dir": "b"}]},
        {"use_gh200_trainer": True},
        {"MODEL_FAMILY": "wan"},
        {"_metadata": {}, "config": {"--seed": 1}},
        [{"id": "a", "dataset_type": "image"}],
    ],
)
def test_simpletuner_files_are_recognized(data: Any) -> None:
    assert SIMPLETUNER.recognizes(data)


@pytest.mark.parametrize(
    "data",
    [None, 3, "text", [], {}, {"job": "extension", "config": {}}, {"seed": 3, "resolution": 4}, {"output_dir": "x"},
     {"datasets": [{"id": "a", "path": "b"}]}],
)  # fmt: skip
def test_other_files_are_not(data: Any) -> None:
    assert not SIMPLETUNER.recognizes(data)


def test_a_file_of_datasets_alone_says_what_is_missing(tmp_path: Path) -> None:
    path = write(tmp_path, "multidatabackend.json", DATASETS)
    with pytest.raises(ConfigError, match="data_backend_config"):
        load(path, environment=EMPTY)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("gh200_*.json")), ids=lambda path: path.stem)
def test_our_examples_are_accepted_and_strict_json(path: Path) -> None:
    json.loads(path.read_text(encoding="utf-8"))
    assert load(path, environment=EMPTY).dialect == "simpletuner"


def test_examples_work_from_the_repository_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    resolved = load(Path("examples/gh200_caches_and_ramp.json"), environment=EMPTY)
    assert [dataset.id for dataset in resolved.config.datasets] == ["edited", "originals"]


def test_the_in_memory_fragment(tmp_path: Path) -> None:
    fragment = {"id": "train_images", "type": "in_memory", "dataset_type": "image", "instance_data_dir": "/data/set",
                "in_memory": {"compression": "lz4", "memory_limit_gb": 360, "num_workers": 64}}  # fmt: skip
    (dataset,) = config(tmp_path, {"datasets": [fragment], "data_backend_config": ...}).datasets
    assert (dataset.type, dataset.path) == ("in_memory", "/data/set")
    assert dataset.in_memory.model_dump(exclude_none=True) == {
        "compression": "lz4", "memory_limit_gb": 360, "num_workers": 64,
    }  # fmt: skip


def test_the_cache_and_ramp_blocks(tmp_path: Path) -> None:
    found = config(tmp_path, {
        "cache_config": {"vae_cache_type": "unified_memory", "text_cache_type": "unified_memory",
                         "cache_dir": "cache/gh200", "persistent_cache": False},
        "gh200_optimizations": {"enable_uvm_hints": False, "enable_batch_size_rampup": True,
                                "initial_effective_batch_size": 4, "target_effective_batch_size": 32,
                                "batch_rampup_steps": 400},
    })  # fmt: skip
    assert found.cache.model_dump(include={"vae_cache_type", "text_cache_type", "cache_dir", "persistent_cache"}) == {
        "vae_cache_type": "unified_memory", "text_cache_type": "unified_memory", "cache_dir": "cache/gh200",
        "persistent_cache": False,
    }  # fmt: skip
    assert found.training.ramp.model_dump() == {
        "enabled": True, "initial_effective_batch_size": 4, "target_effective_batch_size": 32,
        "batch_rampup_steps": 400,
    }  # fmt: skip
    assert found.memory.enable_uvm_hints is False


def test_the_checklist_needs_no_more_than_it_names(tmp_path: Path) -> None:
    resolved = resolve(tmp_path, {
        "data_backend": {"type": "in_memory", "instance_data_dir": "/data", "compression": "zlib"},
        "cache_config": {"vae_cache_type": "unified_memory"}, "train_batch_size": 32,
        "initial_effective_batch_size": 4, "use_gh200_trainer": True, "data_backend_config": ...,
    })  # fmt: skip
    ramp = resolved.config.training.ramp
    assert (ramp.enabled, ramp.initial_effective_batch_size, ramp.target_effective_batch_size) == (True, 4, 32)
    assert ramp.batch_rampup_steps == 400
    assert resolved.config.datasets[0].in_memory.compression == "zlib"
    assert resolved.config.memory.enable_uvm_hints is None, "the cache type decides"
    assert [note.partition(":")[0] for note in resolved.notes if "400" in note or "one trainer" in note]


def test_a_ramp_that_is_switched_off_stays_off(tmp_path: Path) -> None:
    changes = {"initial_effective_batch_size": 2, "gh200_optimizations": {"enable_batch_size_rampup": False}}
    assert not config(tmp_path, changes).training.ramp.enabled


def test_a_data_backend_without_a_folder_says_how_datasets_are_kept(tmp_path: Path) -> None:
    backend = {"type": "in_memory", "num_workers": 8, "in_memory": {"compression": "snappy"}}
    datasets = [*IMAGES, {"id": "b", "type": "local", "instance_data_dir": "b"}]
    first, second = config(tmp_path, {"data_backend": backend}, datasets=datasets).datasets
    assert (first.type, first.in_memory.num_workers, first.in_memory.compression) == ("in_memory", 8, "snappy")
    assert second.type == "local"


def test_memory_options_at_the_top_and_in_the_block(tmp_path: Path) -> None:
    changes = {"use_uvm": True, "uvm_oversubscription_ratio": "3.5",
               "gh200_optimizations": {"uvm_access_pattern": "gpu_first", "uvm_stage1_threshold": 0.2}}  # fmt: skip
    environment = Environment({"GH200_UVM_OVERSUBSCRIPTION_RATIO": "9"})
    memory = config(tmp_path, changes, environment=environment).memory
    assert (memory.use_uvm, memory.uvm_oversubscription_ratio) == (True, 3.5)
    assert (memory.uvm_access_pattern, memory.uvm_stage1_threshold) == ("gpu_first", 0.2)


@pytest.mark.parametrize(
    ("block", "key", "hint"),
    [
        ({"cache_config": {"vae_cache_typ": "disk"}}, "cache_config.vae_cache_typ", "vae_cache_type"),
        ({"gh200_optimizations": {"enable_uvm_hint": True}}, "gh200_optimizations.enable_uvm_hint", "enable_uvm_hints"),
        ({"gh200_optimizations": 3}, "gh200_optimizations", "{…}"),
        ({"use_gh200_trainer": "perhaps"}, "use_gh200_trainer", "write true"),
        ({"data_backend": {"typ": "in_memory"}}, "data_backend.typ", "type"),
        ({"data_backend": "in_memory"}, "data_backend", "in_memory"),
    ],
)
def test_mistakes_in_the_guides_blocks(tmp_path: Path, block: dict[str, Any], key: str, hint: str) -> None:
    assert hint in problems(tmp_path, block)[key].hint


def test_keys_with_dashes_and_aliases(tmp_path: Path) -> None:
    changes = {"--train_batch_size": 3, "validation_steps": 7, "checkpointing_steps": 8, "--save_total_limit": 9}
    resolved = resolve(tmp_path, changes)
    assert resolved.config.training.batch_size == 3
    assert resolved.config.validation.every_steps == 7
    assert (resolved.config.checkpoints.every_steps, resolved.config.checkpoints.keep_last) == (8, 9)
    assert resolved.origins["training", "batch_size"].key == "--train_batch_size"


def test_two_spellings_that_disagree(tmp_path: Path) -> None:
    assert (
        "keep one"
        in problems(tmp_path, {"validation_step_interval": 5, "validation_steps": 6})["validation_steps"].hint
    )
    assert config(tmp_path, {"validation_step_interval": 5, "validation_steps": 5}).validation.every_steps == 5


def test_the_web_interface_wraps_its_configs(tmp_path: Path) -> None:
    write(tmp_path, "datasets.json", DATASETS)
    path = write(tmp_path, "saved.json", {"_metadata": {"name": "x"}, "config": {f"--{k}": v for k, v in GOOD.items()}})
    assert load(path, environment=EMPTY).config.training.max_steps == 100


def test_null_and_empty_text_are_as_good_as_absent(tmp_path: Path) -> None:
    found = config(tmp_path, {"seed": None, "learning_rate": None, "revision": "", "resume_from_checkpoint": ""})
    assert (found.training.seed, found.optimizer.lr, found.model.revision) == (42, 4e-7, None)
    assert found.checkpoints.resume == "none"


def test_toml(tmp_path: Path) -> None:
    write(tmp_path, "datasets.json", DATASETS)
    lines = [f"{key} = {json.dumps(value)}" for key, value in GOOD.items()]
    path = write(tmp_path, "config.toml", "\n".join([*lines, "[gh200_optimizations]", "enable_uvm_hints = true"]))
    found = load(path, environment=EMPTY).config
    assert found.memory.enable_uvm_hints
    assert found.model.flavour == "t2v-14b-2.1"


def test_env_file(tmp_path: Path) -> None:
    write(tmp_path, "datasets.json", DATASETS)
    path = write(tmp_path, "config.env", """
        # a comment
        export MODEL_FAMILY=wan
        MODEL_TYPE='lora'
        OUTPUT_DIR="output/${RUN}"
        OPTIMIZER=adamw_bf16
        MAX_NUM_STEPS=100
        NUM_EPOCHS=0
        TRAIN_BATCH_SIZE=2
        USE_EMA=true
        LEARNING_RATE=1e-4
        DATALOADER_CONFIG=datasets.json
        TRAINER_EXTRA_ARGS="--model_flavour=t2v-480p-14b-2.1"
        TRAINER_EXTRA_ARGS="${TRAINER_EXTRA_ARGS} --flow_schedule_auto_shift --lora_rank 8"
        PYTORCH_CUDA_ALLOC_CONF=use_uvm:True,uvm_oversubscription_ratio:2.5
        WANDB_API_KEY=x
    """)  # fmt: skip
    resolved = load(path, environment=Environment({"RUN": "mine"}))
    found = resolved.config
    assert (found.output_dir, found.training.batch_size, found.optimizer.lr) == ("output/mine", 2, 1e-4)
    assert (found.objective.flow_shift, found.adapter.rank, found.training.ema.enabled) == ("resolution", 8, True)
    assert (found.memory.use_uvm, found.memory.uvm_oversubscription_ratio) == (True, 2.5)
    assert resolved.origins["training", "batch_size"].key == "TRAIN_BATCH_SIZE"
    assert any("WANDB_API_KEY" in note for note in resolved.notes)


@pytest.mark.parametrize(
    ("line", "key", "hint"),
    [
        ("TRAIN_BATCHSIZE=2", "TRAIN_BATCHSIZE", "TRAIN_BATCH_SIZE"),
        ("MODEL_FLAVOUR=dev", "MODEL_FLAVOUR", "--model_flavour=dev"),
        ("TRAINER_EXTRA_ARGS=loose", "TRAINER_EXTRA_ARGS", "remove loose"),
        ("TRAINER_EXTRA_ARGS=--lora_rnk=3", "--lora_rnk", "lora_rank"),
        ("GH200_UVM_OVERSUBSCRIPTION_RATIO=5.0x", "GH200_UVM_OVERSUBSCRIPTION_RATIO", "5.0"),
    ],
)
def test_mistakes_in_env_files(tmp_path: Path, line: str, key: str, hint: str) -> None:
    path = write(tmp_path, "config.env", f"MODEL_FAMILY=wan\n{line}\n")
    with pytest.raises(ConfigError) as caught:
        load(path, environment=EMPTY)
    assert hint in next(problem for problem in caught.value.problems if problem.key == key).hint


def test_bitfit_in_an_env_file_is_the_option_it_stands_for(tmp_path: Path) -> None:
    path = write(tmp_path, "config.env", "MODEL_FAMILY=wan\nUSE_BITFIT=true\n")
    with pytest.raises(ConfigError) as caught:
        load(path, environment=EMPTY)
    assert "USE_BITFIT" in {problem.key for problem in caught.value.problems}


def test_placeholders(tmp_path: Path) -> None:
    datasets = [
        {**DATASETS[0], "instance_data_dir": "{env:DATA}/clips", "cache_dir_vae": "{output_dir}/{model_family}/{id}"}
    ]
    environment = Environment({"DATA": "/mnt", "HOME_DIR": "/home"})
    found = config(tmp_path, {"output_dir": "{env:HOME_DIR}/run"}, datasets=datasets, environment=environment)
    assert found.output_dir == "/home/run"
    assert found.datasets[0].path == "/mnt/clips"
    assert found.datasets[0].cache_dir == "/home/run/wan/clips"


def test_an_unset_variable_is_a_problem_where_it_stands(tmp_path: Path) -> None:
    datasets = [{**DATASETS[0], "instance_data_dir": "{env:DATA}/clips"}]
    found = problems(tmp_path, {"output_dir": "{env:NOPE}/x"}, datasets=datasets)
    assert "export NOPE=" in found["output_dir"].hint
    assert found["[0].instance_data_dir"].file == str(tmp_path / "datasets.json")


def test_a_misspelt_option(tmp_path: Path) -> None:
    found = problems(tmp_path, {"train_batchsize": 4, "no_such_thing_at_all": 1})
    assert found["train_batchsize"].hint == "write `train_batch_size`"
    assert found["no_such_thing_at_all"].hint == "remove `no_such_thing_at_all`"


def test_numbers_may_be_written_as_text_and_wrong_types_are_named_with_the_users_key(tmp_path: Path) -> None:
    found = config(tmp_path, {"train_batch_size": "2", "learning_rate": "1e-5", "use_ema": "true", "seed": "7"})
    assert (found.training.batch_size, found.optimizer.lr, found.training.ema.enabled) == (2, 1e-5, True)
    wrong = problems(tmp_path, {"train_batch_size": "many", "learning_rate": [], "use_ema": "perhaps", "seed": 1.5})
    assert set(wrong) == {"train_batch_size", "learning_rate", "use_ema", "seed"}


@pytest.mark.parametrize("name", ["model_family", "model_type", "output_dir", "optimizer", "data_backend_config"])
def test_required_options_are_asked_for_by_their_own_name(tmp_path: Path, name: str) -> None:
    found = problems(tmp_path, {name: ...})
    assert list(found) == [name]
    assert name in found[name].hint


def test_steps_and_epochs(tmp_path: Path) -> None:
    found = problems(tmp_path, {"max_train_steps": 10, "num_train_epochs": 2})
    assert list(found) == ["num_train_epochs"]
    assert "write 0" in found["num_train_epochs"].hint
    assert list(problems(tmp_path, {"max_train_steps": ..., "num_train_epochs": 0})) == ["max_train_steps"]
    assert config(tmp_path, {"num_train_epochs": ...}).training.max_steps == 100
    assert config(tmp_path, {"max_train_steps": 0, "num_train_epochs": 3}).training.epochs == 3
    assert config(tmp_path, {"max_train_steps": ..., "num_train_epochs": ...}).training.epochs == 1


def test_the_run_is_named_after_the_tracker_or_the_folder(tmp_path: Path) -> None:
    assert config(tmp_path).name == "run"
    assert config(tmp_path, {"tracker_run_name": "a/b"}).name == "a-b"
