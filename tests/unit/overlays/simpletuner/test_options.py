from __future__ import annotations

import pytest
from gracetune_simpletuner.options import OverlayOptions, read_options, split_arguments, split_mapping

from gracetune.config.environment import Environment
from gracetune.errors import ConfigError

NOTHING = Environment({})


def read(blocks: dict[str, object], environment: Environment = NOTHING) -> OverlayOptions:
    return read_options(blocks, environment, batch_size=2, accumulation=3, file="config")


def test_our_blocks_leave_a_config_and_everything_else_stays() -> None:
    config = {
        "--seed": 1,
        "cache_config": {"vae_cache_type": "memory"},
        "--gh200_optimizations": {},
        "webhook": {"a": 1},
    }
    rest, ours = split_mapping(config)
    assert rest == {"--seed": 1, "webhook": {"a": 1}}
    assert ours == {"cache_config": {"vae_cache_type": "memory"}, "gh200_optimizations": {}}


def test_our_blocks_leave_arguments_in_both_spellings() -> None:
    rest, ours = split_arguments(
        ["--seed=1", '--cache_config={"a": 1}', "--gh200_optimizations", "{}", "cache_config=x", "--cache_config_x=1"]
    )
    assert rest == ["--seed=1", "cache_config=x", "--cache_config_x=1"]
    assert ours == {"cache_config": {"a": 1}, "gh200_optimizations": {}}


def test_what_the_guides_write_at_the_top_level_is_ours_too() -> None:
    config = {"seed": 1, "use_uvm": True, "initial_effective_batch_size": 4, "target_effective_batch_size": 8}
    rest, ours = split_mapping(config)
    assert rest == {"seed": 1}
    options = read(ours)
    assert options.memory.use_uvm
    assert (options.ramp.enabled, options.ramp.target_effective_batch_size) == (True, 8)
    rest, ours = split_arguments(["--use_uvm", "--seed=1", "--uvm_oversubscription_ratio=2.5"])
    assert rest == ["--seed=1"]
    assert read(ours).memory.uvm_oversubscription_ratio == 2.5


@pytest.mark.parametrize("arguments", [["--cache_config=no json"], ["--cache_config"]])
def test_a_block_that_is_no_json_is_said(arguments: list[str]) -> None:
    with pytest.raises(ConfigError, match="a JSON object"):
        split_arguments(arguments)


def test_nothing_asked_for_asks_for_nothing() -> None:
    options = read({})
    assert not options.wants_anything
    assert not read({"cache_config": {"vae_cache_type": "disk"}}).wants_anything


def test_unified_memory_switches_hints_on_unless_they_are_switched_off() -> None:
    unified = {"cache_config": {"vae_cache_type": "Unified_Memory"}}
    options = read(unified)
    assert (options.wants_caches, options.wants_memory, options.wants_placement) == (True, True, True)
    assert not read(unified | {"gh200_optimizations": {"enable_uvm_hints": False}}).wants_placement
    plain = read({"cache_config": {"text_cache_type": "memory"}})
    assert (plain.wants_caches, plain.wants_memory, plain.wants_placement) == (True, False, False)


def test_the_environment_asks_too_and_the_config_beats_it() -> None:
    environment = Environment({"GH200_UVM_OVERSUBSCRIPTION_RATIO": "3.0"})
    assert read({}, environment).wants_memory
    assert read({}, environment).memory.uvm_oversubscription_ratio == 3.0
    assert not read({"gh200_optimizations": {"use_uvm": False}}, environment).wants_anything


def test_a_ramp_gets_the_guides_defaults() -> None:
    ramp = read({"gh200_optimizations": {"enable_batch_size_rampup": True, "target_effective_batch_size": 32}}).ramp
    assert ramp.enabled
    assert (ramp.initial_effective_batch_size, ramp.target_effective_batch_size) == (6, 32)
    assert ramp.batch_rampup_steps == 400


def test_every_problem_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as rejected:
        read(
            {
                "cache_config": {"vae_cache_type": "ram", "persistant_cache": True},
                "gh200_optimizations": {"enable_batch_size_rampup": True, "batch_rampup_steps": -4},
            },
            Environment({"GH200_UVM_ACCES_PATTERN": "x"}),
        )
    text = str(rejected.value)
    for part in ("vae_cache_type", "'ram'", "persistent_cache", "batch_rampup_steps", "GH200_UVM_ACCESS_PATTERN"):
        assert part in text


def test_what_has_no_meaning_here_is_noted() -> None:
    notes = read({"cache_config": {"vae_cache_type": "memory", "cache_dir": "x", "persistent_cache": False}}).notes
    assert [note.split(" ")[0] for note in notes] == ["cache_config.cache_dir", "cache_config.persistent_cache"]
