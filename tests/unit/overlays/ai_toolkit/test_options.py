from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gracetune.errors import ConfigError
from unit.overlays.ai_toolkit.checkouts import Checkout


def rejected(shared: Checkout, block: Any, **changes: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        shared.job(shared.process(block, **changes))
    return caught.value


class TestUnknownKeys:
    @pytest.mark.parametrize(
        ("block", "key", "hint"),
        [
            ({"memry": {}}, "config.process[0].gracetune.memry", "write `memory`"),
            ({"memory": {"use_uwm": True}}, "config.process[0].gracetune.memory.use_uwm", "write `use_uvm`"),
            ({"caches": {"latent": "memory"}}, "config.process[0].gracetune.caches.latent", "write `latents`"),
            ({"zebra": 1}, "config.process[0].gracetune.zebra", "remove it; known here: memory, caches"),
        ],
    )
    def test_are_rejected_with_the_nearest_name(self, shared: Checkout, block: Any, key: str, hint: str) -> None:
        (problem,) = rejected(shared, block).problems
        assert problem.key == key
        assert problem.hint.startswith(hint)

    def test_all_of_them_at_once(self, shared: Checkout) -> None:
        error = rejected(shared, {"memory": {"use_uwm": True, "uvm_stage1_threshold": 2}, "pairfiles": True})
        assert [problem.key.rpartition(".")[2] for problem in error.problems] == [
            "uvm_stage1_threshold",
            "use_uwm",
            "pairfiles",
        ]


class TestValues:
    @pytest.mark.parametrize(
        ("block", "found", "expected"),
        [
            (True, "True", "a block of keys"),
            (["memory"], "['memory']", "a block of keys"),
            ({"memory": 5}, "5", "a block of keys"),
            ({"automagic": "yes"}, "'yes'", "true or false"),
            ({"caches": {"latents": "ram"}}, "'ram'", "'disk', 'memory' or 'unified_memory'"),
            ({"caches": {"limit_gib": -1}}, "-1", "greater than 0"),
            ({"memory": {"uvm_oversubscription_ratio": 1}}, "1", "greater than 1"),
        ],
    )
    def test_that_cannot_be(self, shared: Checkout, block: Any, found: str, expected: str) -> None:
        (problem,) = rejected(shared, block).problems
        assert (problem.found, problem.expected) == (found, expected)
        assert problem.hint

    @settings(max_examples=50)
    @given(
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(
                    st.sampled_from(["memory", "caches", "latents", "text", "use_uvm", "automagic", "x", ""]),
                    inner,
                    max_size=4,
                )
            ),
            max_leaves=6,
        )
    )
    def test_whatever_stands_there_is_read_or_rejected(self, shared: Checkout, block: Any) -> None:
        config = {"gracetune": block, "train": {"optimizer": "automagic"}, "model": None, "datasets": "none"}
        try:
            shared.ours("options").read_job(config, "config.process[0]")
        except ConfigError as error:
            assert all(problem.key.startswith("config.process[0].") and problem.hint for problem in error.problems)


class TestOtherNotes:
    def test_caches_need_files_on_disk(self, shared: Checkout) -> None:
        error = rejected(
            shared,
            {"caches": {"latents": "memory", "text": "memory"}},
            datasets=[{"folder_path": "x", "cache_latents": True}],
        )
        assert [problem.hint for problem in error.problems] == [
            "write `cache_latents_to_disk: true`",
            "write `cache_text_embeddings: true` in `train`",
        ]

    def test_text_may_be_cached_for_all_datasets(self, shared: Checkout) -> None:
        shared.job(
            shared.process(
                {"caches": {"text": "memory"}}, datasets=[{"folder_path": "x"}], train={"cache_text_embeddings": True}
            )
        )

    def test_unified_memory_needs_a_loader_in_this_process(self, shared: Checkout) -> None:
        dataset = {"folder_path": "x", "cache_latents_to_disk": True}
        block = {"memory": {}, "caches": {"latents": "unified_memory"}}
        (problem,) = rejected(shared, block, datasets=[dataset]).problems
        assert problem.found == "num_workers: 2, prefetch_factor: 2"
        assert problem.hint == "write `num_workers: 0` and `prefetch_factor: null`, or use `memory`"

    def test_unified_memory_needs_the_memory_layer(self, shared: Checkout) -> None:
        (problem,) = rejected(shared, {"caches": {"text": "unified_memory"}}).problems
        assert (problem.found, problem.hint) == (
            "no `memory`",
            "write `memory: {}`, or `memory` for the caches",
        )

    def test_hints_need_something_to_hint(self, shared: Checkout) -> None:
        (problem,) = rejected(shared, {"memory": {"enable_uvm_hints": True}}).problems
        assert problem.key == "config.process[0].gracetune.memory.enable_uvm_hints"

    def test_automagic_needs_automagic(self, shared: Checkout) -> None:
        (problem,) = rejected(shared, {"automagic": True}).problems
        assert (problem.key, problem.found) == ("config.process[0].train.optimizer", "'adamw'")

    def test_pair_files_need_two_experts(self, shared: Checkout) -> None:
        (problem,) = rejected(shared, {"pair_files": True}, model={"arch": "flux"}).problems
        assert (problem.key, problem.found) == ("config.process[0].model.arch", "'flux'")

    def test_an_empty_block_asks_for_nothing(self, shared: Checkout) -> None:
        process = shared.run({})
        assert type(process.optimizer).__name__ == "AdamW"
