"""What of ours other dialects' files may have: the guides' blocks, datasets in memory, a `gracetune` block."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gracetune.config import Environment, Resolved, load
from gracetune.errors import ConfigError, Problem
from unit.config.aitoolkit_jobs import PROCESS, QWEN_EDIT, dataset, job, note, problems, read, write
from unit.config.simpletuner_files import resolve

CACHES = {"vae_cache_type": "unified_memory", "text_cache_type": "memory", "cache_dir": "c", "persistent_cache": False}
RAMP = {
    "enable_uvm_hints": True,
    "enable_batch_size_rampup": True,
    "initial_effective_batch_size": 4,
    "target_effective_batch_size": 32,
    "batch_rampup_steps": 400,
}


def simpletuner(folder: Path, block: Any, **keys: Any) -> Resolved:
    return resolve(folder, {**keys, "gracetune": block})


def set_flags(folder: Path, *flags: str, **sections: Any) -> Resolved:
    return load(write(folder, job(**sections)), environment=Environment({}), overrides=flags)


class TestGuideBlocks:
    def test_of_an_aitoolkit_process_are_those_of_a_simpletuner_file(self, tmp_path: Path) -> None:
        theirs = read(tmp_path, cache_config=CACHES, gh200_optimizations=RAMP)
        ours = resolve(tmp_path, {"cache_config": CACHES, "gh200_optimizations": RAMP})
        assert theirs.config.training.ramp == ours.config.training.ramp
        assert theirs.config.memory == ours.config.memory
        assert theirs.config.memory.enable_uvm_hints
        assert theirs.config.cache.model_dump(include={*CACHES}) == CACHES
        origin = theirs.origins["cache", "vae_cache_type"]
        assert (origin.kind, origin.key) == ("file", f"{PROCESS}cache_config.vae_cache_type")

    def test_misspelt_keys_are_named_with_the_nearest(self, tmp_path: Path) -> None:
        found = problems(
            tmp_path, cache_config={"vae_cache_typ": "disk"}, gh200_optimizations={"enable_uvm_hint": True}
        )
        assert found["cache_config.vae_cache_typ"].hint == "write `vae_cache_type`"
        assert found["gh200_optimizations.enable_uvm_hint"].hint == "write `enable_uvm_hints`"

    def test_they_belong_to_the_process(self, tmp_path: Path) -> None:
        document = job()
        document["config"]["cache_config"] = CACHES
        assert problems(tmp_path, document)["config.cache_config"].hint == "move it to `config.process[0]`"


class TestInMemory:
    def test_a_dataset_and_its_references_are_staged(self, tmp_path: Path) -> None:
        staging = {"compression": "lz4", "num_workers": "8", "memory_limit_gb": 4}
        entry = dataset(type="in_memory", in_memory=staging, control_path="/data/before", resolution=[512, 768])
        found = read(tmp_path, model=QWEN_EDIT, datasets=entry, train={"noise_scheduler": "flowmatch"}).config.datasets
        assert len(found) == 4
        for one in found:
            assert (one.type, one.in_memory.compression, one.in_memory.num_workers) == ("in_memory", "lz4", 8)

    @pytest.mark.parametrize(("kind", "ours"), [(None, "local"), ("image", "local"), ("local", "local")])
    def test_other_types(self, tmp_path: Path, kind: str | None, ours: str) -> None:
        assert read(tmp_path, datasets=dataset(type=kind)).config.datasets[0].type == ours

    def test_mistakes(self, tmp_path: Path) -> None:
        found = problems(tmp_path, datasets=dataset(type="in_memry", in_memory={"compresion": "lz4"}))
        assert found["datasets[0].type"].hint == "write `type: in_memory`"
        assert found["datasets[0].in_memory.compresion"].hint == "write `compression`"


BLOCK = {"memory": {"use_uvm": True}, "training": {"max_steps": 7}, "datasets": [{"max_samples": 3}]}


class TestGracetuneBlock:
    def check(self, resolved: Resolved, key: str, old: str) -> None:
        config = resolved.config
        assert config.memory.use_uvm
        assert config.training.max_steps == 7
        assert config.datasets[0].max_samples == 3
        assert config.datasets[0].path != ""
        origin = resolved.origins["memory", "use_uvm"]
        assert (origin.kind, origin.key) == ("file", f"{key}.memory.use_uvm")
        assert note(resolved, "takes the place").startswith(f"{key}.training.max_steps: 7 takes the place of `{old}`")

    def test_in_an_aitoolkit_process(self, tmp_path: Path) -> None:
        self.check(read(tmp_path, gracetune=BLOCK), f"{PROCESS}gracetune", f"{PROCESS}train.steps")

    def test_in_a_simpletuner_file(self, tmp_path: Path) -> None:
        resolved = simpletuner(tmp_path, BLOCK, max_train_steps=100, num_train_epochs=0)
        assert resolved.dialect == "simpletuner"
        self.check(resolved, "gracetune", "max_train_steps")

    def test_flags_win_over_it(self, tmp_path: Path) -> None:
        assert set_flags(tmp_path, "training.max_steps=9", gracetune=BLOCK).config.training.max_steps == 9

    def test_it_wins_over_the_guides_blocks(self, tmp_path: Path) -> None:
        found = read(tmp_path, cache_config=CACHES, gracetune={"cache": {"vae_cache_type": "memory"}})
        assert found.config.cache.vae_cache_type == "memory"
        assert "cache_config.vae_cache_type" in note(found, "takes the place")

    def test_what_it_does_not_change_is_not_noted(self, tmp_path: Path) -> None:
        found = read(tmp_path, gracetune={"training": {"max_steps": 100}, "logging": {"every_steps": 2}})
        assert not [text for text in found.notes if "takes the place" in text]

    def test_what_config_show_prints_can_be_pasted_into_it(self, tmp_path: Path) -> None:
        shown = {"gracetune": 1, "schedule": {"name": "cosine"}}
        assert read(tmp_path, gracetune=shown).config.schedule.name == "cosine"
        assert problems(tmp_path, gracetune={"gracetune": 2})["gracetune.gracetune"].expected == "format version 1"

    @pytest.mark.parametrize("dialect", ["ai-toolkit", "simpletuner"])
    def test_mistakes(self, tmp_path: Path, dialect: str) -> None:
        def found(block: Any) -> Problem:
            with pytest.raises(ConfigError) as caught:
                read(tmp_path, gracetune=block) if dialect == "ai-toolkit" else simpletuner(tmp_path, block)
            (problem,) = caught.value.problems
            return problem

        prefix = PROCESS if dialect == "ai-toolkit" else ""
        misspelt = found({"memory": {"use_uvmm": True}})
        assert (misspelt.key, misspelt.hint) == (f"{prefix}gracetune.memory.use_uvmm", "write `use_uvm`")
        assert found({"memry": {}}).hint == "write `memory`"
        if dialect == "ai-toolkit":  # at the top of a file it would be the version of our own dialect
            assert "sections" in found(True).expected
        assert found({"cache": {"vae_cache_type": "ram"}}).key == f"{prefix}gracetune.cache.vae_cache_type"


class TestLatents:
    """`cache_latents_to_disk` asks that latents outlive the run, and does not exclude reading them from memory."""

    @pytest.mark.parametrize("keys", [{"cache_latents_to_disk": True}, {}, {"cache_latents": True}])
    @pytest.mark.parametrize("way", ["flag", "cache_config", "gracetune"])
    def test_a_cache_type_that_is_given_holds_for_every_dataset(
        self, tmp_path: Path, way: str, keys: dict[str, Any]
    ) -> None:
        flags = ["cache.vae_cache_type=unified_memory"] if way == "flag" else []
        sections: dict[str, Any] = {
            "flag": {},
            "cache_config": {"cache_config": {"vae_cache_type": "unified_memory"}},
            "gracetune": {"gracetune": {"cache": {"vae_cache_type": "unified_memory"}}},
        }[way]
        resolved = set_flags(tmp_path, *flags, datasets=dataset(**keys), **sections)
        assert resolved.config.datasets[0].cache_latents == ("memory" if "cache_latents" in keys else None)
        assert not [text for text in resolved.notes if "vae_cache_type" in text]

    def test_without_one_it_is_as_upstream(self, tmp_path: Path) -> None:
        assert read(tmp_path, datasets=dataset(cache_latents_to_disk=True)).config.datasets[0].cache_latents == "disk"
        assert read(tmp_path).config.datasets[0].cache_latents == "none"

    def test_a_dataset_that_says_disk_by_our_own_name_means_it(self, tmp_path: Path) -> None:
        flags = ("cache.vae_cache_type=unified_memory", "datasets[0].cache_latents=disk")
        resolved = set_flags(tmp_path, *flags, datasets=dataset(cache_latents_to_disk=True))
        assert resolved.config.datasets[0].cache_latents == "disk"
        assert "no effect" in note(resolved, "--set cache.vae_cache_type")

    def test_augmentations_that_change_at_every_visit_are_noted(self, tmp_path: Path) -> None:
        augmented = dataset(augmentations=[{"method": "ColorJitter", "p": 0.5}])
        resolved = set_flags(tmp_path, "cache.vae_cache_type=memory", datasets=augmented)
        assert "augmentation.cache_mode=static" in note(resolved, "--set cache.vae_cache_type")
