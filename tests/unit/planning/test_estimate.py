"""The needs of an estimate: their sizes and phases."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gracetune.adapters.computation import AdapterPath
from gracetune.config.run_config import RunConfig
from gracetune.models.footprint import AudioLatents, Footprint, PixelLatents, SampleShape
from gracetune.models.registry import FOOTPRINTS, footprint_of
from gracetune.planning.dataset_facts import DatasetFacts
from gracetune.planning.demand import Demand, Need
from gracetune.planning.estimate import estimate
from gracetune.units import GIB, MIB

SQUARE = SampleShape(1024, 1024)


def run_config(family: str = "wan", **sections: Any) -> RunConfig:
    """A config with one dataset of 1024x1024 images; `sections` replace or extend the ones below."""
    tree: dict[str, Any] = {
        "name": "run",
        "output_dir": "out",
        "model": {"family": family},
        "datasets": [{"id": "data", "path": "/nowhere", "dataset_type": "audio" if "audio" in family else "image"}],
        "training": {"max_steps": 10},
        "validation": {"enabled": False},
    }
    for key, value in sections.items():
        tree[key] = {**tree[key], **value} if isinstance(tree.get(key), dict) else value
    return RunConfig.model_validate(tree)


def demand_of(
    config: RunConfig, *, samples: int = 260, compiled: bool = True, adapter_path: AdapterPath = "auto"
) -> Demand:
    footprint, _ = footprint_of(config.model)
    facts = tuple(DatasetFacts(dataset.id, samples, samples * MIB) for dataset in config.datasets)
    return estimate(config, footprint, facts, compiled=compiled, adapter_path=adapter_path)


def need(demand: Demand, name: str) -> Need:
    return next(entry for entry in demand.needs if entry.name == name)


class TestLatents:
    def test_260_latents_of_sd_are_34_megabytes(self) -> None:
        demand = demand_of(run_config("sdxl", cache={"vae_cache_type": "unified_memory"}))
        cache = need(demand, "latents of data")
        assert cache.bytes == 260 * 4 * 128 * 128 * 2
        assert cache.bytes / 1e6 == pytest.approx(34, abs=0.1)

    @pytest.mark.parametrize(("frames", "planes"), [(1, 1), (5, 2), (81, 21), (121, 31)])
    def test_wan_latents_have_one_frame_and_one_more_per_four_frames(self, frames: int, planes: int) -> None:
        latents = FOOTPRINTS["wan"][0].latents
        assert isinstance(latents, PixelLatents)
        assert latents.elements(SampleShape(832, 480, frames)) == 16 * planes * 104 * 60
        assert latents.tokens(SampleShape(832, 480, frames)) == planes * 52 * 30

    def test_the_long_clip_of_the_benchmark_has_32760_tokens(self) -> None:
        assert FOOTPRINTS["wan"][0].latents.tokens(SampleShape(832, 480, 81)) == 32_760

    @pytest.mark.parametrize(
        ("family", "tokens"), [("wan", 4096), ("qwen_image", 4096), ("flux", 4096), ("sdxl", 128 * 128)]
    )
    def test_a_megapixel_in_tokens(self, family: str, tokens: int) -> None:
        assert FOOTPRINTS[family][0].latents.tokens(SQUARE) == tokens

    def test_audio_has_the_longest_duration_of_the_model(self) -> None:
        latents = FOOTPRINTS["stable_audio"][0].latents
        assert isinstance(latents, AudioLatents)
        assert latents.tokens(SampleShape(seconds=1000)) == 1024 + 1
        assert latents.elements(SampleShape(seconds=10)) == 64 * 216

    def test_references_of_edit_models_join_the_tokens(self) -> None:
        edit, plain = FOOTPRINTS["qwen_image"][3], FOOTPRINTS["qwen_image"][0]
        assert edit.token_counts(SQUARE, (SQUARE, SQUARE))["image"] == 3 * 4096
        assert plain.token_counts(SQUARE, (SQUARE,))["image"] == 4096

    @pytest.mark.parametrize(("family", "tokens"), [("flux2", ["4096", "8192"]), ("qwen_image", ["8192", "8192"])])
    def test_references_that_are_optional_count_if_a_dataset_has_them(self, family: str, tokens: list[str]) -> None:
        model = {"flavour": "edit"} if family == "qwen_image" else {}
        data = [
            {"id": "before", "path": "/nowhere", "dataset_type": "conditioning"},
            {"id": "alone", "path": "/nowhere"},
            {"id": "pairs", "path": "/nowhere", "conditioning": ["before"]},
        ]
        workloads = demand_of(run_config(family, model=model, datasets=data)).workloads
        assert [one.label.split()[1] for one in workloads] == tokens


class TestTrained:
    def test_a_lora_costs_sixteen_bytes_a_parameter_with_adamw(self) -> None:
        demand = demand_of(run_config("flux", adapter={"kind": "lora", "rank": 16}))
        adapter, gradients, optimizer = (need(demand, n) for n in ("lora", "gradients", "optimizer (adamw)"))
        assert adapter.bytes == gradients.bytes == optimizer.bytes // 2
        assert need(demand, "compute copy").bytes == adapter.bytes // 2

    def test_two_experts_have_two_adapters_and_one_set_of_gradients(self) -> None:
        both, one = (demand_of(run_config(model={"experts": experts})) for experts in ("both", "high"))
        for name in ("lora", "optimizer (adamw)"):
            assert need(both, name).bytes == 2 * need(one, name).bytes
        assert need(both, "gradients").bytes == need(one, "gradients").bytes
        assert len(both.denoisers) == 2
        assert [denoiser.name for denoiser in one.denoisers] == ["high-noise expert"]

    def test_the_untrained_expert_is_loaded_only_to_sample(self) -> None:
        sampling = {"enabled": True, "every_steps": 100, "prompts": [{"prompt": "a lighthouse"}]}
        demand = demand_of(run_config(model={"experts": "low"}, validation=sampling))
        assert [(d.name, d.idle_in_training) for d in demand.denoisers] == [
            ("low-noise expert", False), ("high-noise expert", True),
        ]  # fmt: skip

    def test_ema_is_another_copy(self) -> None:
        demand = demand_of(run_config(training={"max_steps": 1, "ema": {"enabled": True}}))
        assert need(demand, "EMA").bytes == need(demand, "lora").bytes

    def test_a_full_finetune_has_master_weights_and_no_adapter(self) -> None:
        config = run_config("sdxl", adapter={"kind": "full_finetune"})
        demand = demand_of(config)
        parameters = FOOTPRINTS["sdxl"][0].parameters
        assert demand.denoisers[0].size("trained") == 4 * parameters
        assert need(demand, "gradients").bytes == 4 * parameters
        assert need(demand, "compute copy").bytes == 2 * parameters
        assert not demand.settings.can_store_8_bits

    def test_lycoris_has_no_compute_copy_but_rebuilt_weights(self) -> None:
        config = run_config(adapter={"kind": "lokr", "factor": 16, "full_rank": True})
        demand = demand_of(config, adapter_path="reference")
        assert "compute copy" not in [entry.name for entry in demand.needs]
        assert demand.workloads[0].under("off").rebuilt > 20 * GIB
        ours = demand_of(config)
        assert need(ours, "compute copy").bytes == need(ours, "gradients").bytes / 2
        assert ours.workloads[0].under("off").rebuilt == 0

    @pytest.mark.parametrize("kind", ["ia3", "diag_oft"])
    def test_kinds_without_a_plain_form_rebuild_weights_in_our_layers_too(self, kind: str) -> None:
        config = run_config(adapter={"kind": kind})
        assert demand_of(config).workloads == demand_of(config, adapter_path="reference").workloads

    @pytest.mark.parametrize(("precision", "size"), [("bf16", 2), ("fp16", 2), ("fp32", 4)])
    def test_frozen_weights_by_precision(self, precision: str, size: int) -> None:
        demand = demand_of(run_config(model={"base_precision": precision}))
        assert demand.denoisers[0].size(precision) == size * FOOTPRINTS["wan"][0].parameters

    def test_fp8_saves_memory_only_in_one_layout(self) -> None:
        denoiser = demand_of(run_config()).denoisers[0]
        assert denoiser.size("fp8") == pytest.approx(denoiser.size("bf16"), rel=0.01)
        assert denoiser.size("fp8 one layout") == pytest.approx(denoiser.size("bf16") / 2, rel=0.03)


class TestActivations:
    @given(st.integers(1, 64), st.integers(1, 8), st.sampled_from(sorted(FOOTPRINTS)))
    @settings(deadline=None)
    def test_a_larger_batch_or_image_never_needs_less(self, batch: int, cells: int, family: str) -> None:
        def totals(count: int, side: int) -> list[int]:
            datasets = [{"id": "data", "path": "/nowhere", "resolution": side}]
            if "audio" in family:
                datasets = [{"id": "data", "path": "/nowhere", "dataset_type": "audio",
                             "audio": {"max_duration_seconds": side / 64}}]  # fmt: skip
            training = {"max_steps": 1, "batch_size": count}
            demand = demand_of(run_config(family, datasets=datasets, training=training))
            load = demand.workloads[0]
            return [entry.total(load.batch) for entry in load.activations]

        current = totals(batch, 128 * cells)
        assert all(more >= less for more, less in zip(totals(batch + 1, 128 * cells), current, strict=True))
        # The compiler keeps whole tensors under a budget, and fewer of them beyond some size.
        larger = totals(batch, 128 * (cells + 1))
        assert all(larger[place] >= current[place] for place in (0, -1))
        assert current == sorted(current, reverse=True)

    def test_without_a_compiler_there_is_no_half(self) -> None:
        assert demand_of(run_config(), compiled=False).settings.policies == ("off", "full")
        assert demand_of(run_config(), compiled=True).settings.policies == ("off", "half", "quarter", "tenth", "full")

    def test_a_dataset_with_its_own_batch_size_is_named(self) -> None:
        datasets = [{"id": "a", "path": "/nowhere"}, {"id": "b", "path": "/nowhere", "batch_size": 3}]
        loads = demand_of(run_config(datasets=datasets, training={"max_steps": 1, "batch_size": 2})).workloads
        assert [(load.key, load.batch) for load in loads] == [
            ("training.batch_size", 2), ("datasets[1].batch_size", 3),
        ]  # fmt: skip

    def test_fp32_computation_doubles_what_is_kept(self) -> None:
        half, whole = (
            demand_of(run_config("flux", training={"max_steps": 1, "mixed_precision": precision})).workloads[0]
            for precision in ("bf16", "fp32")
        )
        assert whole.under("off").kept == pytest.approx(2 * half.under("off").kept, rel=0.05)


class TestPhases:
    def test_encoders_are_busy_in_their_own_pass_only(self) -> None:
        demand = demand_of(run_config())
        text, vae = need(demand, "text encoder (UMT5-XXL)"), need(demand, "VAE (Wan 2.1)")
        assert (text.busy, text.idle) == (("encode text",), ("encode latents", "train"))
        assert (vae.busy, vae.idle) == (("encode latents",), ("train",))
        assert text.bytes == 2 * 5_680_910_336
        assert demand.phases == ("encode text", "encode latents", "train")

    def test_augmentations_without_a_cache_need_the_vae_in_every_step(self) -> None:
        datasets = [{"id": "data", "path": "/nowhere", "augmentation": {"transforms": [{"name": "blur"}]}}]
        demand = demand_of(run_config(datasets=datasets))
        assert need(demand, "VAE (Wan 2.1)").busy == ("encode latents", "train")
        assert need(demand, "encoding in the step").busy == ("train",)
        assert not any(entry.role == "latent cache" for entry in demand.needs)

    def test_refreshing_needs_the_vae_beside_the_step(self) -> None:
        """With or without `transforms`: crops are random in every epoch too."""
        for transforms in ([], [{"name": "blur"}]):
            augmentation = {"transforms": transforms, "cache_mode": "refresh_each_epoch"}
            demand = demand_of(run_config(datasets=[{"id": "d", "path": "/nowhere", "augmentation": augmentation}]))
            vae = need(demand, "VAE (Wan 2.1)")
            assert (vae.busy, vae.idle) == (("encode latents", "train"), ())
            assert "next epoch" in vae.why
            assert demand.codec.refresh == demand.codec.encode > demand.codec.refresh_tiled > 0
            assert need(demand, "text encoder (UMT5-XXL)").busy == ("encode text",)

    @pytest.mark.parametrize(("flavour", "stays"), [("t2i", False), ("edit-2509", True)])
    def test_an_encoder_that_sees_the_references_is_needed_with_them(self, flavour: str, stays: bool) -> None:
        datasets = [
            {
                "id": "d",
                "path": "/nowhere",
                "conditioning": ["c"],
                "augmentation": {"cache_mode": "refresh_each_epoch"},
            },
            {"id": "c", "path": "/elsewhere", "dataset_type": "conditioning"},
        ]
        demand = demand_of(
            run_config("qwen_image", model={"family": "qwen_image", "flavour": flavour}, datasets=datasets)
        )
        assert ("train" in need(demand, "text encoder (Qwen2.5-VL 7B)").busy) == stays

    @pytest.mark.parametrize("edges", [None, {}])
    def test_an_encoder_sees_edges_too(self, edges: dict[str, float] | None) -> None:
        dataset = {"id": "d", "path": "/nowhere", "canny_reference": edges, "cache_latents": "none"}
        demand = demand_of(run_config("qwen_image", model={"family": "qwen_image", "flavour": "edit-2509"},
                                      datasets=[dataset]))  # fmt: skip
        assert ("train" in need(demand, "text encoder (Qwen2.5-VL 7B)").busy) == (edges is not None)

    def test_sampling_is_a_separate_phase(self) -> None:
        prompts = [{"prompt": "a lighthouse", "width": 1280, "height": 720, "num_frames": 81}]
        validation = {"enabled": True, "every_steps": 100, "prompts": prompts}
        demand = demand_of(run_config(validation=validation))
        assert demand.phases[-1] == "sample"
        assert demand.codec.decode > 4 * 1280 * 720 * 4000
        assert demand.codec.decode_tiled < demand.codec.decode

    def test_prompts_without_a_schedule_add_no_phase(self) -> None:
        demand = demand_of(run_config(validation={"enabled": True, "prompts": [{"prompt": "a lighthouse"}]}))
        assert "sample" not in demand.phases


class TestCaches:
    def test_in_memory_and_on_disk_by_configuration(self) -> None:
        def kinds(**cache: Any) -> set[str]:
            roles = ("latent cache", "text cache")
            return {entry.home for entry in demand_of(run_config(cache=cache)).needs if entry.role in roles}

        assert kinds() == {"disk"}
        assert kinds(vae_cache_type="memory", text_cache_type="unified_memory") == {"host", "disk"}
        # Encoded entries are always written to disk; here they are removed at the end.
        passing = {"vae_cache_type": "memory", "text_cache_type": "memory", "persistent_cache": False}
        assert kinds(**passing) == {"host", "disk"}
        assert "removed at the end" in need(demand_of(run_config(cache=passing)), "captions on disk").why

    def test_a_caption_of_wan_is_four_mebibytes(self) -> None:
        demand = demand_of(run_config(cache={"text_cache_type": "memory"}), samples=100)
        assert need(demand, "captions").bytes == 100 * 4 * MIB

    def test_flips_and_refreshing_multiply_latents(self) -> None:
        def latents(**augmentation: Any) -> int:
            datasets = [{"id": "data", "path": "/nowhere", "augmentation": augmentation}]
            return need(demand_of(run_config(datasets=datasets)), "latents of data on disk").bytes

        once = latents()
        assert latents(flip_x=True) == 2 * once
        assert latents(flip_x=True, flip_y=True) == 4 * once
        assert latents(transforms=[{"name": "blur"}], cache_mode="refresh_each_epoch") == 2 * once
        assert latents(transforms=[{"name": "blur"}], cache_mode="static") == once

    def test_staged_files_have_their_own_size_and_a_limit_is_checked(self) -> None:
        datasets = [{"id": "data", "path": "/nowhere", "type": "in_memory", "in_memory": {"memory_limit_gb": 0.1}}]
        staged = need(demand_of(run_config(datasets=datasets), samples=260), "files of data")
        assert staged.bytes == 260 * MIB
        assert "staging will fail" in staged.why

    def test_a_folder_that_two_datasets_share_is_staged_once(self) -> None:
        def files(**second: Any) -> dict[str, int]:
            one: dict[str, Any] = {"path": "/nowhere", "type": "in_memory"}
            demand = demand_of(run_config(datasets=[{**one, "id": "a"}, {**one, "id": "b", **second}]), samples=260)
            return {found.name: found.bytes for found in demand.needs if found.role == "staged data"}

        assert files() == {"files of a, b": 260 * MIB}
        again = files(in_memory={"compression": "lz4"})
        assert again == {"files of a": 260 * MIB, "files of b": 260 * MIB}


class TestRemarks:
    def test_an_unmeasured_family_says_so(self) -> None:
        assert any("not yet compared" in line for line in demand_of(run_config("stable_audio")).assumptions)
        assert not any("not yet compared" in line for line in demand_of(run_config()).assumptions)

    def test_an_unknown_target_is_named(self) -> None:
        demand = demand_of(run_config(adapter={"targets": ["to_q", "to_nothing"]}))
        assert any("'to_nothing'" in line for line in demand.assumptions)

    def test_remarks_name_what_is_not_counted(self) -> None:
        config = run_config("sdxl", training={"max_steps": 1, "attention": "math"})
        assert "attention matrix" in " ".join(demand_of(config).assumptions)

    @pytest.mark.parametrize(
        ("family", "adapter", "idle"),
        [
            ("sdxl", {"conv_rank": 4}, None),
            ("sdxl", {"conv_rank": 4, "targets": ["to_q"]}, "adapter.targets names no convolution"),
            ("wan", {"conv_rank": 4, "conv_alpha": 2.0}, "no convolution is among"),
        ],
    )
    def test_a_rank_for_convolutions_is_counted_or_reported_as_unused(
        self, family: str, adapter: dict[str, Any], idle: str | None
    ) -> None:
        with_it, without = demand_of(run_config(family, adapter=adapter)), demand_of(run_config(family))
        message = [line for line in with_it.assumptions if "no effect" in line]
        assert [line for line in message if str(idle) in line] == message
        assert bool(message) == (idle is not None)
        if idle is None:
            # Convolutions in front of the first attention now have a gradient, and keep their inputs for it.
            assert with_it.training_peak("off") > without.training_peak("off")

    @pytest.mark.parametrize("family", FOOTPRINTS)
    def test_every_family_gives_positive_numbers(self, family: str) -> None:
        footprint: Footprint = FOOTPRINTS[family][0]
        demand = demand_of(run_config(family))
        assert all(entry.bytes > 0 for entry in demand.needs)
        assert demand.training_peak("off") > demand.training_peak("full") > 2 * footprint.parameters


class TestTokenRouting:
    HALF = {"routes": [{"skip_ratio": 0.5, "first_block": 2, "last_block": -2}]}  # noqa: RUF012

    @staticmethod
    def kept(demand: Demand, policy: str) -> int:
        return next(one.kept for one in demand.workloads[0].activations if one.policy == policy)

    @pytest.mark.parametrize(("family", "blocks"), [("wan", 40), ("flux", 57), ("qwen_image", 60)])
    def test_blocks_in_a_route_keep_only_its_tokens(self, family: str, blocks: int) -> None:
        """Inputs of recomputed blocks: all but three blocks see half of the image tokens, and all text tokens."""
        plain = demand_of(run_config(family))
        routed = demand_of(run_config(family, training={"token_routing": self.HALF}))
        footprint, _ = footprint_of(run_config(family).model)
        if len(footprint.blocks) == 1:
            (block,) = footprint.blocks
            width = sum(entry.width for entry in block.enters if entry.stream in ("image", "joint"))
            assert self.kept(plain, "full") - self.kept(routed, "full") == 2 * width * 2048 * (blocks - 3)
        assert self.kept(plain, "full") > self.kept(routed, "full") > self.kept(plain, "full") // 2
        assert plain.training_peak("full") > routed.training_peak("full")
        assert plain.training_peak("off") > routed.training_peak("off")

    def test_several_routes_through_both_kinds_of_blocks(self) -> None:
        """A route through both kinds of FLUX.1 blocks equals the sum of one route per kind."""
        across, apart = (
            demand_of(run_config("flux", training={"token_routing": {"routes": [
                {"skip_ratio": 0.5, "first_block": first, "last_block": last} for first, last in spans]}}))
            for spans in ([(10, 30)], [(10, 18), (19, 30)])
        )  # fmt: skip
        assert self.kept(across, "off") == self.kept(apart, "off")

    @pytest.mark.parametrize(
        ("routes", "data", "why"),
        [
            ([{"skip_ratio": 0.5, "first_block": 2, "last_block": 90}], {}, "no routes through this model's blocks"),
            ([{"skip_ratio": 0.5, "first_block": 2, "last_block": 9}], {"mask": {"path": "/masks"}},
             "masked tokens are always kept"),
        ],
    )  # fmt: skip
    def test_remarks_name_what_is_not_counted(self, routes: list[Any], data: dict[str, Any], why: str) -> None:
        datasets = [{"id": "data", "path": "/nowhere", **data}]
        demand = demand_of(run_config(datasets=datasets, training={"token_routing": {"routes": routes}}))
        assert f"training.token_routing: no token is counted as skipped: {why}" in demand.assumptions
        assert self.kept(demand, "full") == self.kept(demand_of(run_config()), "full")
