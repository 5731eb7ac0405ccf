from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gracetune.config import Environment, load
from gracetune.config.dialects.aitoolkit.reader import looks_like
from gracetune.errors import ConfigError
from unit.config.aitoolkit_jobs import dataset, job, note, only_problem, problems, read, write

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.parametrize(
    ("data", "is_job"),
    [
        (job(), True),
        ({"job": "extension", "config": None}, True),
        ({"config": {"process": []}}, True),
        ({"job": "extension"}, False),
        ({"model_family": "wan", "config": "x"}, False),
        ({"gracetune": 1, "model": {}}, False),
        (["job", "config"], False),
        (None, False),
    ],
)
def test_a_job_is_told_from_the_other_dialects(data: Any, is_job: bool) -> None:
    assert looks_like(data) is is_job


@pytest.mark.parametrize("name", ["job.yaml", "job.yml", "job.json", "job.jsonc"])
def test_every_format_gives_the_same_run(tmp_path: Path, name: str) -> None:
    resolved = load(write(tmp_path, job(), name), environment=Environment({}))
    assert resolved.dialect == "ai-toolkit"
    assert resolved.config == read(tmp_path).config


def test_a_number_in_e_notation_is_a_number(tmp_path: Path) -> None:
    text = """
job: extension
config:
  name: cats
  process:
    - type: sd_trainer
      training_folder: output
      network: {linear: 4}
      datasets: [{folder_path: /data/cats}]
      train: {lr: 1e-4, noise_scheduler: flowmatch, dtype: bf16, optimizer_params: {weight_decay: 1e-2}}
      model: {name_or_path: black-forest-labs/FLUX.1-dev, is_flux: true}
      sample: {prompts: [a cat]}
"""
    optimizer = read(tmp_path, text).config.optimizer
    assert (optimizer.lr, optimizer.weight_decay) == (1e-4, 1e-2)


def test_variables_are_put_into_the_text_itself(tmp_path: Path) -> None:
    document = job(datasets=dataset(folder_path="${DATA}/cats"), train={"steps": "${STEPS}"})
    path = write(
        tmp_path, "# ${NOT_THIS_ONE}, ${\n" + write(tmp_path, document).read_text().replace("'${STEPS}'", "${STEPS}")
    )
    config = load(path, environment=Environment({"DATA": "/mnt/data", "STEPS": "250"})).config
    assert config.datasets[0].path == "/mnt/data/cats"
    assert config.training.max_steps == 250


def test_all_unset_variables_are_named_at_once(tmp_path: Path) -> None:
    document = job(datasets=dataset(folder_path="${DATA}/cats", mask_path="${DATA}/${MASKS}"), trigger_word="${WORD}")
    found = problems(tmp_path, document)
    assert set(found) == {"${DATA}", "${MASKS}", "${WORD}"}
    assert found["${MASKS}"].hint == "export MASKS=..."


def test_a_value_that_breaks_the_file_is_reported_where_it_breaks_it(tmp_path: Path) -> None:
    path = write(tmp_path, job(trigger_word="${WORD}"), "job.json")
    with pytest.raises(ConfigError, match="valid JSON"):
        load(path, environment=Environment({"WORD": 'say "cheese"'}))


def test_the_name_is_put_wherever_it_is_asked_for(tmp_path: Path) -> None:
    config = read(tmp_path, datasets=dataset(folder_path="/data/[name]"), sample={"prompts": ["a [name] photo"]}).config
    assert config.datasets[0].path == "/data/cats"
    assert config.validation.prompts[0].prompt == "a cats photo"


def test_a_run_lives_where_upstream_would_put_it(tmp_path: Path) -> None:
    resolved = read(tmp_path, training_folder="/runs/", training_seed=7)
    assert (resolved.config.name, resolved.config.output_dir) == ("cats", "/runs/cats")
    assert resolved.config.training.seed == 7
    assert resolved.origins["output_dir",].key == "config.process[0].training_folder"


def test_what_the_process_leaves_out_is_taken_from_the_job(tmp_path: Path) -> None:
    document = job(training_folder=None)
    document["config"] |= {"training_folder": "/jobs", "training_seed": 3}
    config = read(tmp_path, document).config
    assert (config.output_dir, config.training.seed) == ("/jobs/cats", 3)


@pytest.mark.parametrize(
    ("changes", "key", "hint"),
    [
        ({"train": {"stepps": 5}}, "train.stepps", "write `steps`"),
        ({"network": {"linaer": 5}}, "network.linaer", "write `linear`"),
        ({"model": {"arch_": "x"}}, "model.arch_", "write `arch`"),
        ({"model": {"model_kwargs": {"train_high_nois": True}}}, "model.model_kwargs.train_high_nois",
         "write `train_high_noise`"),
        ({"datasets": dataset(resolutions=[512])}, "datasets[0].resolutions", "write `resolution`"),
        ({"sample": {"promts": []}}, "sample.promts", "write `prompts`"),
        ({"sample": {"samples": [{"prompt": "a", "hight": 5}]}}, "sample.samples[0].hight", "write `height`"),
        ({"save": {"save_evry": 5}}, "save.save_evry", "write `save_every`"),
        ({"logging": {"log_evry": 5}}, "logging.log_evry", "write `log_every`"),
        ({"trigger_wrod": "cat"}, "trigger_wrod", "write `trigger_word`"),
        ({"train": {"ema_config": {"use_ema": False, "decay": 0.9}}}, "train.ema_config.decay", "write `ema_decay`"),
        ({"network": {"network_kwargs": {"ignore_contains": []}}}, "network.network_kwargs.ignore_contains",
         "write `ignore_if_contains`"),
        ({"train": {"lora_path": "x"}}, "train.lora_path", "move it to `model`"),
        ({"network": {"lr": 1e-4}}, "network.lr", "move it to `train`"),
    ],
)  # fmt: skip
def test_a_key_upstream_would_ignore_is_an_error(tmp_path: Path, changes: dict[str, Any], key: str, hint: str) -> None:
    problem = only_problem(tmp_path, **changes)
    assert problem.key == f"config.process[0].{key}"
    assert problem.hint == hint


def test_keys_outside_the_process_are_checked_too(tmp_path: Path) -> None:
    document = job()
    document["metta"] = {}
    document["config"]["proces"] = []
    assert set(problems(tmp_path, document)) == {"metta", "config.proces"}


def test_harmless_keys_share_one_note(tmp_path: Path) -> None:
    resolved = read(
        tmp_path,
        sqlite_db_path="./aitk_db.db",
        performance_log_every=10,
        device="cuda:1",
        save={"push_to_hub": False, "hf_private": True},
        model={"low_vram": True, "layer_offloading": False},
    )
    text = note(resolved, "harmless")
    assert text == (
        "harmless here, and not used: performance_log_every, sqlite_db_path, model.low_vram, save.hf_private, device"
    )


def test_another_device_is_said_not_to_be_used(tmp_path: Path) -> None:
    assert "CUDA GPU" in note(read(tmp_path, device="mps"), "mps")


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"job": "generate"}, "job"),
        ({"job": "extnsion"}, "job"),
        ({"job": None}, "job"),
        ({"config": None}, "config"),
        ({"config": {"name": "x"}}, "config.process"),
        ({"config": {"name": "x", "process": {}}}, "config.process"),
        ({"config": {"name": "x", "process": ["sd_trainer"]}}, "config.process"),
        ({"config": {"name": "x", "process": [{"type": "slider"}]}}, "type"),
        ({"config": {"name": "x", "process": [{"type": "sd_trainr"}]}}, "type"),
    ],
)
def test_what_is_no_training_job_is_named_and_nothing_else(tmp_path: Path, change: dict[str, Any], key: str) -> None:
    assert set(problems(tmp_path, {**job(), **change})) == {key}


def test_a_misspelt_job_or_trainer_gets_the_right_spelling(tmp_path: Path) -> None:
    assert only_problem(tmp_path, {**job(), "job": "extnsion"}).hint == "write `job: extension`"
    assert only_problem(tmp_path, type="sd_trainr").hint == "write `type: sd_trainer`"
    assert "ai-toolkit" in only_problem(tmp_path, type="textual_inversion_trainer").hint


def test_a_second_trainer_is_a_problem_and_the_first_is_still_checked(tmp_path: Path) -> None:
    document = job(train={"stepps": 1})
    document["config"]["process"] *= 2
    assert set(problems(tmp_path, document)) == {"config.process", "train.stepps"}


@pytest.mark.parametrize("name", ["adapter", "embedding", "decorator", "guidance", "slider", "first_sample"])
def test_other_things_to_train_are_rejected_by_name(tmp_path: Path, name: str) -> None:
    assert only_problem(tmp_path, **{name: {"train": True}}).key == f"config.process[0].{name}"


def test_every_problem_arrives_together(tmp_path: Path) -> None:
    found = problems(
        tmp_path,
        model={"split_model_over_gpus": True},
        train={"steps": "many", "optimizer": "automagic3", "weight_jitter": 0.1},
        datasets=dataset(num_repeats="often", augments=["blur"]),
        network={"linear": -1},
    )
    assert set(found) == {
        "model.split_model_over_gpus", "train.steps", "train.optimizer", "train.weight_jitter", "datasets[0].augments",
        "datasets[0].num_repeats", "network.linear",
    }  # fmt: skip


def test_rejections_can_be_passed(tmp_path: Path) -> None:
    keys = {"split_model_over_gpus": True}
    path = write(tmp_path, job(model=keys, train={"diff_output_preservation": True}))
    resolved = load(path, environment=Environment({}), allow_unsupported=True)
    assert resolved.config.model.base_precision == "bf16"
    assert "left out" in note(resolved, "model.split_model_over_gpus")


def test_nothing_below_the_sections_has_to_be_there(tmp_path: Path) -> None:
    config = read(tmp_path, save=None, logging=None, sample={"prompts": None}).config
    assert (config.checkpoints.every_steps, config.checkpoints.save_dtype, config.logging.every_steps) == (
        1000,
        "fp16",
        100,
    )


@pytest.mark.parametrize("section", ["train", "model", "network", "save", "logging", "sample"])
def test_a_section_that_is_no_mapping_is_a_problem(tmp_path: Path, section: str) -> None:
    assert section in problems(tmp_path, **{section: ["x"]})


@pytest.mark.parametrize(
    "text",
    [
        "job: extension\nconfig: &c {name: x, process: [*c]}\n",
        f"job: extension\nconfig: {{name: x, process: [{{type: sd_trainer, train: {{steps: 0x{'f' * 9000}}}}}]}}\n",
    ],
)
def test_yaml_that_is_no_plain_data_is_rejected(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"contains itself|hundreds of digits"):
        load(write(tmp_path, text), environment=Environment({}))


def test_the_seeds_blocks_beside_train_are_understood(tmp_path: Path) -> None:
    resolved = read(
        tmp_path,
        datasets=None,
        dataset={"folder_path": "/data/cats", "resolution": 1024, "cache_latents_to_disk": True},
        optimizer={"name": "automagic", "lr": 1e-6, "high_noise_lr_bump": 1e-6, "low_noise_max_lr": 5e-4},
        train={"mixed_precision": "fp16", "lr": None},
    )
    optimizer = resolved.config.optimizer
    assert (optimizer.name, optimizer.high_noise.lr_bump, optimizer.low_noise.max_lr) == ("automagic", 1e-6, 5e-4)
    assert (resolved.config.training.mixed_precision, resolved.config.model.base_precision) == ("fp16", "bf16")
    assert resolved.config.datasets[0].resolution == 1024
    assert resolved.origins["optimizer", "name"].key == "config.process[0].optimizer.name"
    assert resolved.origins["datasets", 0, "path"].key == "config.process[0].dataset.folder_path"


def test_a_block_written_twice_is_a_problem(tmp_path: Path) -> None:
    found = problems(tmp_path, optimizer={"name": "lion"}, train={"optimizer": "adamw"}, dataset={"folder_path": "x"})
    assert set(found) == {"optimizer", "dataset"}
    found = problems(tmp_path, optimizer={"name": "lion", "lr": 1e-5}, train={"lr": 1e-4})
    assert found["optimizer"].hint == "move it into `train.lr`"


@pytest.mark.parametrize("name", ["wan22_t2v_automagic", "wan22_dual_expert_lokr", "qwen_image_edit_2509"])
def test_our_examples_are_accepted(name: str) -> None:
    resolved = load(EXAMPLES / f"{name}.yaml", environment=Environment({}))
    assert resolved.dialect == "ai-toolkit"
    assert resolved.config.name == name
