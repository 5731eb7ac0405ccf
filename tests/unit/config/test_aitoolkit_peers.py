"""Jobs as people have them: the examples ai-toolkit publishes, what its web interface writes, and damaged ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gracetune.config import Environment, Resolved, load
from gracetune.config.dialects.aitoolkit.dataset_parts import DATASET
from gracetune.config.dialects.aitoolkit.model import MODEL
from gracetune.config.dialects.aitoolkit.network import NETWORK
from gracetune.config.dialects.aitoolkit.reader import PROCESS as PROCESS_KEYS
from gracetune.config.dialects.aitoolkit.samples import ITEM, SAMPLE
from gracetune.config.dialects.aitoolkit.train import EMA, LOGGING, SAVE, TRAIN
from gracetune.errors import ConfigError
from unit.config.aitoolkit_jobs import PROCESS, QWEN_EDIT, SDXL, dataset, job, write
from unit.config.strategies import mutated

GOLDEN = Path(__file__).parents[2] / "golden" / "peers"
PEERS: list[dict[str, Any]] = json.loads((GOLDEN / "aitoolkit.json").read_text(encoding="utf-8"))
KEYS: dict[str, list[str]] = json.loads((GOLDEN / "aitoolkit_keys.json").read_text(encoding="utf-8"))
"""What ai-toolkit 0.13.19 and the forks of the seeds read from each block."""
TABLES = {
    "train": TRAIN, "datasets": DATASET, "model": MODEL, "network": NETWORK, "sample": SAMPLE, "samples": ITEM,
    "save": SAVE, "logging": LOGGING, "ema_config": EMA, "process": PROCESS_KEYS,
}  # fmt: skip
BY_NAME = {peer["name"]: peer for peer in PEERS}


@pytest.mark.parametrize("block", KEYS)
def test_every_key_upstream_reads_is_mapped_harmless_or_rejected(block: str) -> None:
    assert not set(KEYS[block]) - set(TABLES[block])


def outcome(path: Path, *, allow: bool) -> str | list[str]:
    try:
        load(path, environment=Environment({}), allow_unsupported=allow)
    except ConfigError as error:
        return [problem.key.removeprefix(PROCESS) for problem in error.problems]
    return "accepted"


@pytest.mark.parametrize("name", BY_NAME)
def test_a_published_job_is_accepted_or_rejected_for_named_keys(tmp_path: Path, name: str) -> None:
    peer = BY_NAME[name]
    path = write(tmp_path, peer["keys"], "job.json")
    assert outcome(path, allow=False) == peer["outcome"]
    assert outcome(path, allow=True) == peer["with_allow_unsupported"]


def allowed(folder: Path, name: str) -> Resolved:
    path = write(folder, BY_NAME[name]["keys"], "job.json")
    return load(path, environment=Environment({}), allow_unsupported=True)


def test_the_collection_covers_every_family_ai_toolkit_shares_with_us(tmp_path: Path) -> None:
    accepted = [peer["name"] for peer in PEERS if peer["with_allow_unsupported"] == "accepted"]
    families = {allowed(tmp_path, name).config.model.family for name in accepted}
    assert families == {"wan", "qwen_image", "flux", "flux2", "sdxl", "z_image", "krea2"}


def test_the_published_wan22_job_trains_as_upstream_would(tmp_path: Path) -> None:
    config = allowed(tmp_path, "train_lora_wan22_14b_24gb").config
    assert (config.model.flavour, config.model.experts, config.model.switch_experts_every) == (
        "t2v-14b-2.2",
        "both",
        10,
    )
    assert (config.adapter.kind, config.adapter.rank, config.adapter.alpha) == ("lora", 32, None)
    assert [item.id for item in config.datasets] == ["images-512", "images-768", "images-1024"]
    assert {item.cache_latents for item in config.datasets} == {"none"}
    assert (config.optimizer.name, config.optimizer.lr, config.optimizer.weight_decay) == ("adamw_8bit", 1e-4, 1e-4)
    assert (config.objective.timesteps, config.objective.flow_shift) == ("uniform", 1.0)
    assert (config.training.max_steps, config.training.mixed_precision) == (2000, "bf16")
    assert (config.checkpoints.save_dtype, config.checkpoints.keep_last) == ("fp16", 4)


def test_the_published_edit_job_finds_its_three_references(tmp_path: Path) -> None:
    config = allowed(tmp_path, "train_lora_qwen_image_edit_2509_32gb").config
    targets = [item for item in config.datasets if item.dataset_type == "image"]
    assert [len(item.conditioning) for item in targets] == [3, 3, 3]
    assert len(config.datasets) == 12
    assert config.validation.prompts[0].references == ("/path/to/1.png", "/path/to/2.png")


def test_the_published_kontext_job_finds_its_images_inside_the_prompts(tmp_path: Path) -> None:
    prompt = allowed(tmp_path, "train_lora_flux_kontext_24gb").config.validation.prompts[0]
    assert (prompt.prompt, prompt.references) == ("a red kite above a beach", ("/path/to/control.jpg",))


FULL: list[dict[str, Any]] = [
    job(
        network={"type": "lokr", "lokr_factor": 16, "network_kwargs": {"ignore_if_contains": ["x"]}},
        datasets=[*dataset(resolution=[512, 768], num_frames=41, num_repeats=2, cache_latents_to_disk=True),
                  *dataset(is_reg=True, mask_path="/m", flip_x=True, loss_multiplier=0.5)],
        train={"optimizer": "automagic", "optimizer_params": {"lr_bump": 1e-6, "high_noise_max_lr": 1e-3},
               "gradient_accumulation_steps": 2, "ema_config": {"use_ema": True}, "min_denoising_steps": 10,
               "lr_scheduler": "cosine", "lr_scheduler_params": {"eta_min": 1e-7}, "reg_weight": 0.5},
        sample={"samples": [{"prompt": "a cat --seed 5", "width": 64}], "seed": 3},
        save={"save_every": 5, "dtype": "bf16"},
        logging={"log_every": 2, "use_wandb": True},
        trigger_word="c4t",
    ),
    job(
        model=QWEN_EDIT,
        datasets=dataset(control_path=["/a", "/b"], augmentations=[{"method": "Blur"}], cache_latents=True),
        optimizer={"name": "prodigy", "d_coef": 2.0},
        validation={"prompts": ["a dog"]},
        sample={"prompts": []},
    ),
    job(model=SDXL, network=None, train={"noise_scheduler": "ddpm", "min_snr_gamma": 5, "lr_scheduler": "linear"}),
]  # fmt: skip


@pytest.mark.parametrize("document", FULL[:2])
def test_the_jobs_to_be_damaged_are_sound(tmp_path: Path, document: Any) -> None:
    assert outcome(write(tmp_path, document), allow=False) == "accepted"


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(document=st.sampled_from(FULL).flatmap(mutated))
def test_a_damaged_job_gives_a_config_or_our_own_error(tmp_path: Path, document: Any) -> None:
    path = tmp_path / "job.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    for allow in (False, True):
        try:
            load(path, environment=Environment({}), allow_unsupported=allow)
        except ConfigError as error:
            assert all(
                problem.key and problem.found and problem.expected and problem.hint for problem in error.problems
            )


_WEIRD = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=True), st.text(max_size=8),
    st.sampled_from(["nan", "1e999", "-1", "${X}", "[name]", "--", "0x10", 10**400, -(10**400)]),
    st.lists(st.integers(-2, 2), max_size=2), st.dictionaries(st.text(max_size=3), st.none(), max_size=2),
)  # fmt: skip


def _places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inside = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [path, *(place for key, item in inside for place in _places(item, (*path, key)))]


def _with(node: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    copy = dict(node) if isinstance(node, dict) else list(node)
    copy[path[0]] = _with(node[path[0]], path[1:], value)
    return copy


@st.composite
def _one_weird_value(draw: st.DrawFn) -> Any:
    document = draw(st.sampled_from(FULL))
    return _with(document, draw(st.sampled_from(_places(document)[1:])), draw(_WEIRD))


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(document=_one_weird_value())
def test_any_value_anywhere_gives_a_config_or_our_own_error(tmp_path: Path, document: Any) -> None:
    path = tmp_path / "job.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    try:
        load(path, environment=Environment({}))
    except ConfigError as error:
        assert error.problems
