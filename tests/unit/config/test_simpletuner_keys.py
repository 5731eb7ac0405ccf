"""Every option SimpleTuner registers has one place in our tables, and the tables hold nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gracetune.config.dialects.gh200 import GUIDES
from gracetune.config.dialects.simpletuner.files import ENV_NAMES
from gracetune.config.dialects.simpletuner.keys import (
    ALIASES,
    GATED,
    HARMLESS,
    NOT_DONE,
    PASSED_ON,
    REMOVED_UPSTREAM,
    SAMPLES_ONLY,
    WITHOUT_EFFECT,
    Off,
)
from gracetune.config.dialects.simpletuner.optimizer import MATCHES, OTHERS
from gracetune.config.dialects.simpletuner.reader import OPTIONS, OURS, SUPPORTED
from gracetune.config.dialects.table import Effect
from gracetune.config.families import readable_names
from gracetune.errors import ConfigError
from unit.config.simpletuner_files import LYCORIS, problems, resolve, write

GOLDEN = Path(__file__).parents[2] / "golden" / "peers" / "simpletuner_options.json"
UPSTREAM: dict[str, Any] = json.loads(GOLDEN.read_text(encoding="utf-8"))["options"]
ADDED = {*OURS, *GUIDES, "datasets", "data_backend"}
"""What the GH200 guides and we ourselves add to the dialect."""
REMOVED = {key.name for key in REMOVED_UPSTREAM}
REJECTED: dict[str, Off] = {key.name: key.unless for key in NOT_DONE if isinstance(key.unless, Off)}
GATES: dict[str, str] = {key.name: key.unless.behind for key in GATED if isinstance(key.unless, Off)}


def listed(heading: str) -> set[str]:
    return {name for name, key in OPTIONS.keys.items() if key.note == heading} - REMOVED - {*GATES}


TABLES = {
    "read": {*OPTIONS.names(Effect.ACTS)} - {*PASSED_ON} - ADDED,
    "passed on": {*PASSED_ON},
    "harmless": listed(HARMLESS),
    "samples only": listed(SAMPLES_ONLY),
    "inert": listed(WITHOUT_EFFECT),
    "refused": {*REJECTED},
    "gated": {*GATES},
}
NOT_UPSTREAM = ADDED | REMOVED | set(ALIASES)
SWITCHED_ON: dict[str, Any] = {
    "layer_freeze_strategy": "bitfit", "peft_lora_mode": "singlora", "lora_init_type": "pissa", "snr_weight": 0.5,
    "flux_guidance_mode": "random-range", "flux_guidance_value": 3.5, "t5_padding": "zero",
    "timestep_bias_strategy": "later", "scheduled_sampling_max_step_offset": 5, "max_grounding_entities": 3,
    "pretrained_transformer_subfolder": "other", "pretrained_unet_subfolder": "other", "ema_warmup_steps": 10,
    "input_perturbation_steps": 10, "soft_min_snr_sigma_data": 0.5, "init_lora_step": 10, "init_lokr_norm": 1e-3,
    "max_upscale_threshold": 0.2,
}  # fmt: skip


def test_the_recorded_list_is_the_whole_of_release_4_10_1() -> None:
    assert len(UPSTREAM) == 572


def test_each_option_stands_in_exactly_one_table() -> None:
    found = {name: [table for table, names in TABLES.items() if name in names] for name in UPSTREAM}
    assert {name: tables for name, tables in found.items() if len(tables) != 1} == {}


def test_the_tables_hold_nothing_that_nobody_knows() -> None:
    for table, names in TABLES.items():
        assert names <= set(UPSTREAM), (table, names - set(UPSTREAM))
    assert not NOT_UPSTREAM & set(UPSTREAM)


def test_rejections_know_the_default_they_compare_with() -> None:
    assert {name: rejection.defaults for name, rejection in REJECTED.items()} == {
        name: (UPSTREAM[name],) for name in REJECTED
    }


def test_switches_and_the_options_behind_them_exist() -> None:
    wanted = {
        name for rejection in REJECTED.values() for name in (rejection.switch, rejection.same_as, rejection.off_by)
    }
    assert (wanted - {""}) | set(GATES.values()) <= set(UPSTREAM)


def test_env_names_lead_to_known_options() -> None:
    assert {option.partition("=")[0] for option in ENV_NAMES.values()} <= SUPPORTED


@pytest.mark.parametrize("name", sorted(REJECTED))
def test_an_option_we_do_not_do_is_rejected_when_on_and_passes_when_off(tmp_path: Path, name: str) -> None:
    rejection = REJECTED[name]
    acts = [names.family for names in readable_names() if name in names.simpletuner.unsupported_options]
    assert bool(acts) == rejection.of_families
    family = acts[0] if acts else "wan"
    flavours = {"wan": "t2v-480p-14b-2.1", "flux": "dev", "krea2": "raw", "sdxl": "base-1.0"}
    around: dict[str, Any] = {"model_family": family, "model_flavour": flavours[family]}
    if rejection.switch:
        around[rejection.switch] = True if rejection.switch.startswith("use_") else 0.1
    if rejection.lora_type == "lycoris":
        around |= {"lora_type": "lycoris", "lycoris_config": "lycoris.json"}
        (tmp_path / "lycoris.json").write_text('{"algo": "lokr", "apply_preset": {"target_module": ["Attention"]}}')
    datasets = [{"id": "a", "instance_data_dir": "a", "dataset_type": "image"}]
    value = SWITCHED_ON.get(name, True if rejection.defaults == (False,) else "something")
    found = problems(tmp_path, {**around, name: value}, datasets=datasets)
    assert list(found) == [name]
    assert found[name].expected == OPTIONS.keys[name].note
    allowed = resolve(tmp_path, {**around, name: value}, datasets=datasets, allow_unsupported=True)
    assert any(note.startswith(f"{name}:") for note in allowed.notes)
    resolve(tmp_path, {**around, name: rejection.defaults[0]}, datasets=datasets)


@pytest.mark.parametrize("name", sorted(TABLES["harmless"] | TABLES["samples only"] | TABLES["inert"] | REMOVED))
def test_an_option_without_consequences_is_accepted_and_named(tmp_path: Path, name: str) -> None:
    resolved = resolve(tmp_path, {name: "something"})
    assert any(name in note.replace(",", "").split() for note in resolved.notes), resolved.notes


@pytest.mark.parametrize("name", sorted(GATES))
def test_an_option_behind_a_switch_that_is_off_says_so(tmp_path: Path, name: str) -> None:
    notes = resolve(tmp_path, {name: "something"}).notes
    assert [note for note in notes if name in note.replace(",", "").split()] == [notes[-1]]
    assert notes[-1].startswith("without effect")


def test_what_stands_behind_a_rejected_switch_is_not_said_to_be_without_effect(tmp_path: Path) -> None:
    found = problems(tmp_path, {"crepa_enabled": True, "crepa_lambda": 0.5})
    assert list(found) == ["crepa_enabled"]


CONTEXTS: dict[str, dict[str, Any]] = {
    "wan": {},
    "qwen_image": {"model_family": "qwen_image", "model_flavour": "v1.0"},
    "flux": {"model_family": "flux", "model_flavour": "dev"},
    "sdxl": {"model_family": "sdxl", "model_flavour": "base-1.0"},
    "full fine-tune": {"model_type": "full"},
    "lycoris": {"lora_type": "lycoris", "lycoris_config": "lycoris.json"},
}


@pytest.mark.parametrize("name", sorted({*OPTIONS.names(Effect.ACTS)} - {"optimizer_config"}))
def test_no_option_is_dropped_in_silence(tmp_path: Path, name: str) -> None:
    """Nonsense in an option that is read must be noticed; where it has no say, a note must name it."""
    write(tmp_path, "lycoris.json", LYCORIS)
    write(tmp_path, "datasets.json", [{"id": "stills", "instance_data_dir": "data/stills"}])
    for context, changes in CONTEXTS.items():
        try:
            notes = resolve(tmp_path, {**changes, name: {"nonsense": True}}).notes
            assert any(name in note.replace(",", "").replace(":", "").split() for note in notes), context
        except ConfigError as error:
            assert any(problem.key.startswith(name) for problem in error.problems), context


def test_optimizers_are_either_matched_or_known_to_be_missing() -> None:
    assert not MATCHES.keys() & OTHERS
