"""Whatever a file holds, reading it ends in a RunConfig or in our own error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gracetune.config import Environment, Resolved, load
from gracetune.config.dialects.simpletuner.reader import SUPPORTED
from gracetune.errors import ConfigError
from unit.config.simpletuner_files import GOOD, LYCORIS, write
from unit.config.strategies import PLAIN, TEXT, mutated

RICH: dict[str, Any] = {
    **GOOD,
    "lora_type": "lycoris",
    "lycoris_config": "lycoris.json",
    "user_prompt_library": "prompts.json",
    "validation_prompt": "a prompt",
    "validation_resolution": "512x512,1024x768",
    "validation_input": [{"path": "a.png", "prompt": "b"}],
    "optimizer_config": "eps=1e-6,weight_decay=0.01",
    "flow_schedule_shift": 3,
    "report_to": ["tensorboard", "wandb"],
    "cache_config": {"vae_cache_type": "unified_memory", "cache_dir": "cache/gh200"},
    "gh200_optimizations": {"enable_batch_size_rampup": True, "initial_effective_batch_size": 4},
    "data_backend": {"type": "in_memory", "num_workers": 4},
    "datasets": [
        {"id": "a", "instance_data_dir": "{env:DATA}/a", "in_memory": {"compression": "lz4"}, "conditioning_data": "b"},
        {"id": "b", "dataset_type": "conditioning", "conditioning_type": "mask", "instance_data_dir": "b"},
    ],
}
DATASETS: list[dict[str, Any]] = [
    {"id": "clips", "dataset_type": "video", "instance_data_dir": "clips", "video": {"num_frames": 75}, "crop": True,
     "crop_aspect": "closest", "crop_aspect_buckets": [1.0, 0.5], "caption_shuffle": {"enable": True, "count": 2}},
    {"id": "table", "instance_data_dir": "t", "caption_strategy": "parquet", "parquet": {"path": "t.parquet"}},
    {"id": "urls", "type": "csv", "csv_file": "u.csv", "csv_cache_dir": "c", "caption_strategy": "csv"},
    {"id": "texts", "dataset_type": "text_embeds", "default": True, "cache_dir": "cache"},
]  # fmt: skip
PROMPTS = {"one": "a prompt", "two": {"prompt": "b", "adapter_strength": 0.5}}
FILES = {"config.json": RICH, "datasets.json": DATASETS, "lycoris.json": LYCORIS, "prompts.json": PROMPTS}
ENVIRONMENT = Environment({"DATA": "/data"})

slow_enough = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def outcome(folder: Path, files: dict[str, Any]) -> Resolved | ConfigError:
    for name, data in files.items():
        write(folder, name, json.dumps(data))
    try:
        return load(folder / "config.json", environment=ENVIRONMENT)
    except ConfigError as error:
        assert all(problem.key and problem.expected and problem.hint for problem in error.problems)
        return error


def test_the_file_that_is_mutated_is_a_good_one(tmp_path: Path) -> None:
    result = outcome(tmp_path, FILES)
    assert isinstance(result, Resolved), result


@pytest.mark.parametrize("name", FILES)
@slow_enough
@given(data=st.data())
def test_mutated_files(tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("run")
    outcome(folder, {**FILES, name: data.draw(mutated(FILES[name]))})


@slow_enough
@given(st.dictionaries(st.sampled_from(sorted(SUPPORTED)), PLAIN, min_size=1, max_size=12))
def test_any_value_for_any_option(tmp_path_factory: pytest.TempPathFactory, values: dict[str, Any]) -> None:
    outcome(tmp_path_factory.mktemp("run"), {**FILES, "config.json": {**RICH, **values}})


@slow_enough
@given(st.dictionaries(st.from_regex(r"[A-Z_]{1,20}", fullmatch=True), TEXT, max_size=5), TEXT)
def test_any_env_file(tmp_path_factory: pytest.TempPathFactory, variables: dict[str, str], arguments: str) -> None:
    folder = tmp_path_factory.mktemp("run")
    lines = [f"{name}={value}" for name, value in {**variables, "TRAINER_EXTRA_ARGS": arguments}.items()]
    write(folder, "config.env", "\n".join(["MODEL_FAMILY=wan", *lines]))
    with pytest.raises(ConfigError):
        load(folder / "config.env", environment=ENVIRONMENT)


def test_nesting_beyond_reason_is_an_error_of_ours(tmp_path: Path) -> None:
    deep: Any = "x"
    for _ in range(450):
        deep = [deep]
    assert isinstance(outcome(tmp_path, {**FILES, "config.json": {**RICH, "validation_input": deep}}), ConfigError)
