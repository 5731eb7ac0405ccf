from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel, WanTransformer3DModel
from hypothesis import given
from hypothesis import strategies as st

from gracetune.adapters import trainable
from gracetune.adapters.attach import attach, describe
from gracetune.adapters.targets import ModuleInfo, Modules, matches_path, select
from gracetune.config.run_config import Adapter
from gracetune.errors import ConfigError
from gracetune.models.flux.names import NAMES as FLUX
from gracetune.models.registry import FOOTPRINTS
from unit.adapters.denoisers import TinyModel, load

_NAMES = st.sampled_from(["blocks", "attn1", "attn2", "to_q", "to_k", "ffn", "net", "proj", "0", "1", "12"])
_CLASSES = st.sampled_from(["Attention", "FeedForward", "WanAttention", "Block", "ModuleList"])
_PATHS = st.lists(_NAMES, min_size=1, max_size=4).map(".".join)
_INFOS = st.builds(
    ModuleInfo,
    st.sampled_from(["Linear", "Conv2d"]),
    st.sampled_from(["linear", "conv"]),
    st.lists(_CLASSES, max_size=3).map(tuple),
)
LINEAR = ModuleInfo("Linear", "linear")
_MODULES = st.dictionaries(_PATHS, _INFOS, min_size=1, max_size=12)


@pytest.fixture(scope="module")
def wan() -> Modules:
    """The published 14B, without its weights."""
    with torch.device("meta"):
        return describe(WanTransformer3DModel(num_layers=40, num_attention_heads=40, ffn_dim=13_824))


def problem_of(modules: Modules, *targets: str, exclude: tuple[str, ...] = ()) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        select(modules, targets, exclude)
    return [str(problem) for problem in caught.value.problems]


class TestWithin:
    @pytest.mark.parametrize(
        ("options", "count"),
        [
            ({"within": ("blocks",)}, 400),
            ({"within": ("blocks.7", "blocks.39")}, 20),
            ({"within": ("blocks",), "targets": ("*to_q*", "*proj*")}, 120),
            ({"within": ("attn2",), "exclude": ("to_out", "blocks.0")}, 117),
            ({"within": ("condition_embedder",)}, 5),
        ],
    )
    def test_layers_of_the_model_and_of_the_plan(self, wan: Modules, options: dict[str, Any], count: int) -> None:
        adapter = Adapter(**options)
        chosen = select(wan, adapter.targets or ("*",), adapter.exclude, within=adapter.within)
        assert len(chosen.paths) == count
        planned = trainable.select(FOOTPRINTS["wan"][0], adapter)
        known = 0 if adapter.within == ("condition_embedder",) else count  # outside the blocks: counted with the rest
        assert sum(target.count for target in planned.targets) == known
        assert planned.unmatched == (() if known else adapter.within)

    def test_convolutions_of_more_than_one_pixel_ask_for_a_rank(self, tiny_model: TinyModel) -> None:
        """Convolutions of one pixel are treated like linear layers."""
        model = load(tiny_model, "sdxl").model
        found = {}
        for rank in (None, 3):
            adapter = Adapter(rank=2, conv_rank=rank, within=("resnets",))
            attached = attach(model, adapter, family="sdxl", default_targets=(), seed=0)
            assert attached.selection is not None
            found[rank] = {path.rpartition(".")[2] for path in attached.selection.paths}
            attached.detach()
        assert found[None] == {"time_emb_proj", "conv_shortcut"}
        assert found[3] == {"conv1", "conv2", "time_emb_proj", "conv_shortcut"}

    def test_what_is_nowhere_and_what_is_outside(self, wan: Modules) -> None:
        with pytest.raises(ConfigError) as caught:
            select(wan, ("*",), within=("block", "blocks"))
        (problem,) = caught.value.problems
        assert (problem.key, problem.found) == ("adapter.within", "block: in no layer's path")
        assert "blocks" in problem.hint
        with pytest.raises(ConfigError) as caught:
            select(wan, ("to_q", "proj_out"), within=("blocks",))
        (problem,) = caught.value.problems
        assert problem.key == "adapter.targets"
        assert problem.found == "proj_out: only matches layers outside adapter.within (blocks): proj_out"
        conv = {"resnets.0.conv1": ModuleInfo("Conv2d", "conv", (), spatial=True), "resnets.0.q": LINEAR}
        with pytest.raises(ConfigError, match=r"conv1: only matches convolutions.*(?s:.*)adapter\.conv_rank=16"):
            select(conv, ("conv1", "q"), within=("resnets",), include_spatial=False)


class TestPatterns:
    @pytest.mark.parametrize(
        "pattern",
        ["Attention", "FeedForward", "to_q", "to_out.0", "attn1", "blocks", "blocks.*.ffn", "ffn.net.2", "net",
         "blocks.*.attn?.to_k", "*attn1*", "*ffn.net*", "blocks.3", "*blocks.1*.attn2*"],
    )  # fmt: skip
    def test_the_plan_counts_the_same_layers(self, wan: Modules, pattern: str) -> None:
        planned = trainable.select(FOOTPRINTS["wan"][0], Adapter(targets=(pattern,)))
        assert len(select(wan, [pattern]).paths) == sum(target.count for target in planned.targets)

    def test_a_full_path_a_suffix_and_a_class(self, wan: Modules) -> None:
        assert select(wan, ["blocks.3.attn1.to_q"]).paths == ("blocks.3.attn1.to_q",)
        assert len(select(wan, ["attn1.to_q"]).paths) == 40
        assert len(select(wan, ["WanTransformerBlock"]).paths) == 400
        linears = [path for path, info in wan.items() if info.class_name == "Linear"]
        assert list(select(wan, ["Linear"]).paths) == linears

    def test_a_class_under_its_older_name_and_why(self, wan: Modules) -> None:
        chosen = select(wan, ["Attention", "to_q"])
        assert chosen.paths == select(wan, ["WanAttention"]).paths
        assert chosen.why["blocks.0.attn1.to_q"] == "it is, or is inside, a module of class `Attention`"
        assert select(wan, ["to_q"]).why["blocks.0.attn1.to_q"] == "`to_q` is its name"

    def test_an_exact_class_name_is_not_widened(self) -> None:
        modules = {
            "a": ModuleInfo("Linear", "linear", ("Attention",)),
            "b": ModuleInfo("Linear", "linear", ("WanAttention",)),
        }
        assert select(modules, ["Attention"]).paths == ("a",)

    def test_a_part_of_a_name_is_not_a_name(self) -> None:
        assert matches_path("to_q", "blocks.0.to_q")
        assert not matches_path("o_q", "blocks.0.to_q")
        assert not matches_path("blocks.*", "blocks")
        assert not matches_path("blocks.*.to_q", "blocks.0.attn1.to_q")  # a star stays within its part

    def test_words_of_ai_toolkit(self, wan: Modules) -> None:
        chosen = select(wan, ["*blocks.1.*"], ["*attn2*", "*ffn*"])
        assert chosen.paths == tuple(f"blocks.1.attn1.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0"))
        assert chosen.left_out["blocks.1.ffn.net.2"] == "excluded by `*ffn*`"

    def test_what_takes_no_adapter_may_be_excluded(self, wan: Modules) -> None:
        assert select(wan, ["to_q"], ["norm1"]).paths == select(wan, ["to_q"]).paths

    @pytest.mark.parametrize("name", FLUX.simpletuner.targets.groups)
    def test_suffixes_select_what_peft_would(self, name: str) -> None:
        with torch.device("meta"):
            modules = describe(FluxTransformer2DModel(num_layers=2, num_single_layers=21))
        targets = FLUX.simpletuner.targets.groups[name]
        expected = [
            path
            for path, info in modules.items()
            if info.kind == "linear" and any(f".{path}".endswith(f".{suffix}") for suffix in targets)
        ]
        assert list(select(modules, targets).paths) == expected

    def test_layers_without_a_gradient_are_left_out_with_a_reason(self, wan: Modules) -> None:
        chosen = select(wan, ["to_q"], untrained=["blocks.39.attn2.to_q", "no.such.layer"])
        assert len(chosen.paths) == 79
        assert chosen.left_out == {"blocks.39.attn2.to_q": "no gradient ever reaches it"}


class TestRejections:
    def test_every_pattern_that_matches_nothing_is_reported_with_near_misses(self, wan: Modules) -> None:
        first, second, third = problem_of(wan, "to_qq", "to_k", "blocks.*.atn1.to_q", exclude=("FedForward",))
        assert "adapter.targets" in first
        assert "to_qq: matches nothing" in first
        assert "near misses: to_q" in first
        assert "blocks.*.attn1.to_q" in second
        assert "adapter.exclude" in third
        assert "FeedForward" in third

    def test_what_cannot_be_adapted_is_named(self, wan: Modules) -> None:
        (problem,) = problem_of(wan, "norm1")
        assert "blocks.0.norm1 (FP32LayerNorm)" in problem

    def test_a_regular_expression(self, wan: Modules) -> None:
        (problem,) = problem_of(wan, r"blocks\.\d+\.attn1.*")
        assert "no regular expressions" in problem

    def test_nothing_left(self, wan: Modules) -> None:
        (problem,) = problem_of(wan, "attn1", exclude=("blocks",))
        assert "160 layers, all of them left out" in problem


class TestProperties:
    @given(_MODULES)
    def test_every_path_selects_itself_and_the_order_is_the_models(self, modules: Modules) -> None:
        for path in modules:
            assert path in select(modules, [path]).paths
        assert select(modules, reversed([*modules])).paths == tuple(modules)

    @given(_MODULES, st.data())
    def test_every_suffix_selects_its_layer(self, modules: Modules, data: st.DataObject) -> None:
        path = data.draw(st.sampled_from(sorted(modules)))
        parts = path.split(".")
        suffix = ".".join(parts[data.draw(st.integers(0, len(parts) - 1)) :])
        chosen = select(modules, [suffix])
        assert path in chosen.paths
        assert set(chosen.paths) == set(chosen.why)

    @given(_MODULES, st.lists(_PATHS, min_size=1, max_size=3), st.lists(_PATHS, max_size=2))
    def test_selected_or_rejected_never_silently_less(
        self, modules: Modules, targets: list[str], exclude: list[str]
    ) -> None:
        def matched(pattern: str) -> set[str]:
            return {path for path in modules if f".{pattern}." in f".{path}."}

        wanted, unwanted = set().union(*map(matched, targets)), set().union(*map(matched, exclude))
        try:
            chosen = select(modules, targets, exclude)
        except ConfigError as error:
            unmatched = [pattern for pattern in (*targets, *exclude) if not matched(pattern)]
            found = [problem.found.split(":")[0] for problem in error.problems]
            assert found == unmatched or (not unmatched and not wanted - unwanted)
        else:
            assert set(chosen.paths) == wanted - unwanted
            assert set(chosen.left_out) == wanted & unwanted
