"""Plans on the modelled machines: placement by role, order of the choices, messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gracetune.config.run_config import RunConfig
from gracetune.hardware.machine import Machine, PcieLink
from gracetune.hardware.recording import load_recording
from gracetune.models.registry import footprint_of
from gracetune.planning.dataset_facts import survey
from gracetune.planning.demand import Demand
from gracetune.planning.estimate import estimate
from gracetune.planning.memory_tiers import free_on_disk
from gracetune.planning.plan import INPUTS, Change, Plan, link_rate, plan
from gracetune.planning.processes import ONE_PROCESS, Processes
from gracetune.units import GIB, MIB

MACHINES = Path(__file__).parents[2] / "fixtures" / "machines"


def machine(name: str) -> Machine:
    return load_recording(MACHINES / name)


def small_gpu(gigabytes: float, name: str = "x86-h200", **host: Any) -> Machine:
    """A modelled machine with another amount of GPU memory."""
    whole = machine(name)
    gpu = whole.gpus[0].model_copy(update={"memory_total": int(gigabytes * GIB), "memory_free": None})
    return whole.model_copy(update={"gpus": (gpu,), "host": whole.host.model_copy(update=host)})


def config_of(family: str = "wan", **sections: Any) -> RunConfig:
    tree: dict[str, Any] = {
        "name": "run",
        "output_dir": "out",
        "model": {"family": family},
        "datasets": [{"id": "data", "path": "/nowhere"}],
        "training": {},
        "cache": {"vae_cache_type": "unified_memory", "text_cache_type": "unified_memory"},
        "memory": {},
        "validation": {"enabled": False},
    }
    for key, value in sections.items():
        tree[key] = {**tree[key], **value} if isinstance(tree.get(key), dict) else value
    tree["training"] = {"max_steps": 10, **tree["training"]}
    return RunConfig.model_validate(tree)


def demand(
    family: str = "wan", *, compiled: bool = True, processes: Processes = ONE_PROCESS, **sections: Any
) -> Demand:  # fmt: skip
    config = config_of(family, **sections)
    footprint, _ = footprint_of(config.model)
    return estimate(config, footprint, survey(config, 260), compiled=compiled, processes=processes)


def tier_of(found: Plan, name: str, phase: str = "train") -> str:
    return next(line.tier for line in found.lines if line.name == name and phase in line.phases)


def change(found: Plan, key: str) -> Change:
    return next(entry for entry in found.changes if entry.key == key)


class TestPlacement:
    def test_superchip(self) -> None:
        found = plan(demand(), machine("gh200-numa"))
        assert found.verdict == "fits"
        assert tier_of(found, "high-noise expert") == "device"
        assert tier_of(found, "latents of data") == "host"
        assert tier_of(found, "process") == "host"
        assert tier_of(found, "checkpoints") == "disk"

    def test_a_small_text_cache_lives_on_the_gpu_of_a_superchip_only(self) -> None:
        few = demand("sdxl")
        assert tier_of(plan(few, machine("gh200-numa")), "captions") == "device"
        assert tier_of(plan(few, machine("x86-h200")), "captions") == "host"
        message = {"memory": {"enable_uvm_hints": False}}, {"cache": {"text_cache_type": "memory"}}
        for otherwise in message:
            assert tier_of(plan(demand("sdxl", **otherwise), machine("gh200-numa")), "captions") == "host"

    def test_one_pool_holds_everything_once(self) -> None:
        found = plan(demand(), machine("gb10"))
        tiers = {line.tier for line in found.lines}
        assert tiers == {"pool", "disk"}
        assert [use.tier.name for use in found.tiers] == ["pool", "disk"]

    def test_a_machine_without_a_gpu(self) -> None:
        found = plan(demand("sdxl", compiled=False), machine("cpu-only"))
        assert {line.tier for line in found.lines} == {"host", "disk"}
        assert "allowance" not in {line.name for line in found.lines}
        assert found.verdict == "fits"

    def test_hbm_is_not_counted_as_main_memory(self) -> None:
        numa, cdmm = (plan(demand(), machine(name)).tiers[1].tier for name in ("gh200-numa", "gh200-cdmm"))
        assert numa.capacity == pytest.approx(cdmm.capacity, rel=0.02)

    def test_parked_experts_keep_a_home_copy_behind_pcie_only(self) -> None:
        long = {"datasets": [{"id": "data", "path": "/nowhere", "dataset_type": "video", "resolution": 640}]}
        discrete = plan(demand(**long), small_gpu(80))
        assert tier_of(discrete, "low-noise expert") == "host"
        assert tier_of(discrete, "high-noise expert, home copy") == "host"
        superchip = plan(demand(**long), small_gpu(80, "gh200-numa"))
        assert tier_of(superchip, "low-noise expert") == "host"
        assert "high-noise expert, home copy" not in {line.name for line in superchip.lines}

    @pytest.mark.parametrize("memory", [{}, {"use_uvm": True, "enable_uvm_hints": False}])
    def test_a_superchip_without_managed_memory_for_them_parks_pinned_copies(self, memory: dict[str, bool]) -> None:
        """As in a run: both experts then have a copy in main memory."""
        disk = {"vae_cache_type": "disk", "text_cache_type": "disk"}
        plain = plan(
            demand(cache=disk, training={"gradient_checkpointing": "full"}, memory=memory),
            small_gpu(60, "gh200-numa"),
        )
        assert tier_of(plain, "high-noise expert, home copy") == "host"
        line = next(line for line in plain.lines if line.name == "low-noise expert")
        assert "copied from pinned memory" in line.why
        assert plain.managed_bytes == 0

    @pytest.mark.parametrize(("switch", "counted"), [(None, False), (True, True)])
    def test_caches_asked_for_by_name_count_as_managed_behind_pcie_too(
        self, switch: bool | None, counted: bool
    ) -> None:
        """Otherwise the overflow arena would take the whole cap and leave nothing for them."""
        found = plan(demand(memory={"use_uvm": True, "enable_uvm_hints": switch}), machine("x86-h200"))
        assert bool(found.managed_bytes) is counted

    def test_a_control_group_is_the_limit(self) -> None:
        staged = [{"id": "data", "path": "/nowhere", "type": "in_memory", "max_samples": 80_000}]
        assert plan(demand(datasets=staged), machine("x86-h200")).verdict == "fits"
        limited = plan(demand(datasets=staged), machine("x86-h200-cgroup"))
        assert limited.verdict == "does not fit"
        assert "main memory" in limited.summary
        assert "control group" in limited.tiers[1].tier.why

    def test_memory_of_other_programs_is_not_counted_on(self) -> None:
        whole = machine("x86-h200")
        busy = whole.gpus[0].model_copy(update={"memory_free": 20 * GIB})
        found = plan(demand(), whole.model_copy(update={"gpus": (busy,)}))
        assert found.tiers[0].tier.budget == int(20 * GIB * 0.95)
        assert found.verdict != "fits"


class TestLadder:
    """All choices of the ladder, in their order."""

    def test_nothing_is_changed_where_everything_fits(self) -> None:
        found = plan(demand(), machine("x86-h200"))
        assert found.verdict == "fits"
        assert found.changes == ()
        assert found.checkpointing.value == "off"

    def test_the_idle_encoders_go_first_and_then_the_idle_expert(self) -> None:
        """Encoders come back least often. After the next choice both are parked, and stay so."""
        keys, sizes = ["placement: encoders", "placement: idle expert"], {}
        for size in (90, 69, 60, 38):
            found = plan(demand(training={"gradient_checkpointing": "full"}), small_gpu(size))
            assert found.verdict == "fits"
            assert all(entry.automatic for entry in found.changes)
            sizes[size] = [entry.key for entry in found.changes]
        assert sizes == {90: [], 69: keys[:1], 60: keys, 38: keys}
        assert found.changes[1].saves == pytest.approx(26.6 * GIB, rel=0.03)
        assert tier_of(found, "text encoder (UMT5-XXL)") == "host"
        assert tier_of(found, "text encoder (UMT5-XXL)", "encode text") == "device"
        assert tier_of(found, "low-noise expert") == "host"

    def test_main_memory_for_one_of_them_goes_to_the_expert(self) -> None:
        short = small_gpu(60, cpu_mem_total=60 * GIB, cpu_mem_available=71 * GIB)
        found = plan(demand(training={"gradient_checkpointing": "full"}), short)
        assert found.verdict == "fits"
        assert [entry.key for entry in found.changes] == ["placement: idle expert"]

    @pytest.mark.parametrize(
        ("gigabytes", "value", "budget"),
        [(90, "off", 1.0), (60, "auto", 0.45), (46, "auto", 0.25), (40, "auto", 0.1), (36, "full", None)],
    )
    def test_auto_recomputes_as_little_as_possible(self, gigabytes: float, value: str, budget: float | None) -> None:
        found = plan(demand(), small_gpu(gigabytes))
        assert found.verdict == "fits"
        assert (found.checkpointing.value, found.checkpointing.activation_memory_budget) == (value, budget)
        assert all(entry.automatic for entry in found.changes)
        message = {"half": "about 7 %", "quarter": "between 7 %", "tenth": "between 7 %", "full": "1.4x slower"}
        steps = [entry for entry in found.changes if entry.key == "training.gradient_checkpointing"]
        assert all(message[entry.after.removeprefix("auto: ")] in entry.why for entry in steps)
        assert bool(steps) == (value != "off")

    def test_turning_checkpointing_on_is_a_change_if_the_config_says_off(self) -> None:
        found = plan(demand(training={"gradient_checkpointing": "off"}), small_gpu(60))
        assert found.verdict == "fits with these changes"
        entry = change(found, "training.gradient_checkpointing")
        assert (entry.before, entry.after, entry.automatic) == ("off", "auto", False)
        assert entry.saves > 10 * GIB

    def test_without_a_compiler_only_full_remains(self) -> None:
        found = plan(demand(training={"gradient_checkpointing": "off"}, compiled=False), small_gpu(60))
        assert change(found, "training.gradient_checkpointing").after == "full"
        assert found.checkpointing.activation_memory_budget is None

    def test_then_a_smaller_batch_the_largest_that_fits(self) -> None:
        big = demand(training={"batch_size": 16, "gradient_checkpointing": "full"})
        found = plan(big, small_gpu(48))
        entry = change(found, "training.batch_size")
        assert found.verdict == "fits with these changes"
        assert entry.before == "16"
        fitting = int(entry.after)
        smaller = demand(training={"batch_size": fitting, "gradient_checkpointing": "full"})
        larger = demand(training={"batch_size": fitting + 1, "gradient_checkpointing": "full"})
        assert plan(smaller, small_gpu(48)).verdict == "fits"
        assert plan(larger, small_gpu(48)).verdict == "fits with these changes"

    def test_then_8_bits_fp8_where_the_gpu_has_it(self) -> None:
        tight = demand(training={"gradient_checkpointing": "full"})
        found = plan(tight, small_gpu(26))
        entry = change(found, "model.base_precision")
        assert (entry.before, entry.after) == ("bf16", "fp8")
        old = small_gpu(26)
        ampere = old.gpus[0].model_copy(update={"compute_capability": "8.0"})
        unknown = old.gpus[0].model_copy(update={"compute_capability": None})
        for gpu in (ampere, unknown):
            found = plan(tight, old.model_copy(update={"gpus": (gpu,)}))
            assert change(found, "model.base_precision").after == "int8"

    def test_auto_saves_bits_only_where_16_do_not_fit(self) -> None:
        config: dict[str, Any] = {"training": {"gradient_checkpointing": "full"}, "model": {"base_precision": "auto"}}
        roomy, tight = plan(demand(**config), small_gpu(48)), plan(demand(**config), small_gpu(26))
        assert (roomy.verdict, tight.verdict) == ("fits", "fits")
        assert not any(one.key == "model.base_precision" for one in roomy.changes)
        entry = change(tight, "model.base_precision")
        assert (entry.before, entry.after, entry.automatic) == ("auto: bf16", "auto: int8", True)
        assert any(line.role == "frozen weights" and "int8" in line.why for line in tight.lines)
        assert plan(demand(**config), small_gpu(12)).verdict == "does not fit"

    def test_overflow_only_over_a_coherent_link(self) -> None:
        tight = demand(training={"gradient_checkpointing": "full"})
        assert plan(tight, small_gpu(12)).verdict == "does not fit"
        found = plan(tight, small_gpu(12, "gh200-numa"))
        assert found.verdict == "fits with these changes"
        assert change(found, "memory.use_uvm").after == "true"
        assert any("overflow" in line.why and line.tier == "host" for line in found.lines)

    def test_overflow_enabled_in_the_config_needs_no_edit(self) -> None:
        requested = demand(training={"gradient_checkpointing": "off", "batch_size": 4}, memory={"use_uvm": True})
        found = plan(requested, machine("gh200-numa"))
        assert found.verdict == "fits"
        assert change(found, "memory.use_uvm").automatic
        assert not any("use_uvm" in note for note in found.notes)
        elsewhere = plan(requested, machine("x86-h200"))
        assert any("use_uvm" in note for note in elsewhere.notes)

    def test_without_a_coherent_link_only_force_uses_the_arena_and_warns(self) -> None:
        requested = demand(training={"gradient_checkpointing": "off", "batch_size": 8}, memory={"use_uvm": True})
        assert plan(requested, machine("x86-h200")).verdict == "fits with these changes"
        forced = plan(requested, machine("x86-h200"), force_oversubscription=True)
        assert (forced.verdict, forced.spilled_bytes > 100 * GIB) == ("fits", True)
        assert "over PCIe" in change(forced, "memory.use_uvm").why
        assert any("can hang the driver until the machine is rebooted" in note for note in forced.notes)
        unasked = demand(training={"gradient_checkpointing": "off", "batch_size": 8})
        assert plan(unasked, machine("x86-h200"), force_oversubscription=True).spilled_bytes == 0
        pool = plan(requested, machine("gb10"), force_oversubscription=True)
        assert pool.spilled_bytes == 0, "one pool has no memory beyond the GPU's"

    def test_overflow_stops_where_main_memory_ends(self) -> None:
        one = {"family": "wan", "experts": "high"}
        full = demand(adapter={"kind": "full_finetune"}, model=one, optimizer={"name": "adafactor"})
        assert plan(full, small_gpu(96, "gh200-numa")).verdict == "fits with these changes"
        crowded = small_gpu(96, "gh200-numa", cpu_mem_available=100 * GIB)
        assert plan(full, crowded).verdict == "does not fit"

    def test_optimizer_state_never_overflows(self) -> None:
        full = demand(adapter={"kind": "full_finetune"}, model={"family": "wan", "experts": "high"})
        found = plan(full, small_gpu(96, "gh200-numa"))
        assert found.verdict == "does not fit"
        assert all(line.tier == "device" for line in found.lines if line.role == "optimizer state")

    @pytest.mark.parametrize(("home", "verdict"), [("resident", "does not fit"), ("streamed", "fits")])
    def test_streamed_optimizer_state_is_in_main_memory(self, home: str, verdict: str) -> None:
        """Wan's 14 billion parameters, each with 12 bytes of state, on one modelled GH200."""
        optimizer = {"state": {"home": home}}
        full = demand(
            adapter={"kind": "full_finetune"}, model={"family": "wan", "experts": "high"}, optimizer=optimizer
        )
        found = plan(full, small_gpu(96, "gh200-numa"))
        assert found.verdict == verdict
        (state,) = [line for line in found.lines if line.role == "optimizer state"]
        assert state.bytes == pytest.approx(12 * 14.29e9, rel=1e-3)
        assert (state.tier == "device") == (home == "resident")

    def test_a_heavy_encode_pass_is_made_lighter_not_the_training(self) -> None:
        clips = [
            {"id": "data", "path": "/nowhere", "dataset_type": "video", "resolution": 1280, "video": {"num_frames": 5}}
        ]
        heavy = demand(datasets=clips, cache={"vae_batch_size": 8}, training={"gradient_checkpointing": "full"})
        found = plan(heavy, small_gpu(80))
        assert [entry.key for entry in found.changes if not entry.automatic] == ["cache.vae_batch_size"]

    def test_tiling_when_even_one_sample_is_too_much(self) -> None:
        clips = [
            {"id": "data", "path": "/nowhere", "dataset_type": "video", "resolution": 2048, "video": {"num_frames": 5}}
        ]
        model = {"family": "wan", "flavour": "t2v-1.3b-2.1"}
        heavy = demand(datasets=clips, model=model, training={"gradient_checkpointing": "full"})
        found = plan(heavy, small_gpu(40))
        assert change(found, "model.vae_tiling").after == "true"

    def test_configured_fp8_drops_its_second_layout_without_an_edit(self) -> None:
        config = {
            "model": {"family": "qwen_image", "base_precision": "fp8"},
            "training": {"gradient_checkpointing": "full"},
        }
        roomy = plan(demand("qwen_image", **config), small_gpu(80))
        assert "placement: fp8 layouts" not in {entry.key for entry in roomy.changes}
        tight = plan(demand("qwen_image", **config), small_gpu(40))
        assert tight.verdict == "fits"
        assert change(tight, "placement: fp8 layouts").automatic

    def test_block_inputs_wait_in_host_memory_only_if_nothing_less_fits(self) -> None:
        clips = [
            {"id": "data", "path": "/nowhere", "dataset_type": "video", "resolution": 632, "video": {"num_frames": 81}}
        ]
        long = demand(datasets=clips)
        load = long.workloads[0].under("full")
        inputs = load.kept
        assert 0.85 * inputs < load.parkable < inputs
        assert load.total(1) - load.total(1, parked=True) == load.parkable
        assert all(entry.parkable == 0 for entry in long.workloads[0].activations if entry.policy != "full")
        roomy = plan(long, small_gpu(80))
        assert roomy.verdict == "fits"
        assert INPUTS not in {entry.key for entry in roomy.changes}
        for size in range(70, 30, -1):
            tight = plan(long, small_gpu(size))
            if INPUTS in {entry.key for entry in tight.changes}:
                break
        assert tight.verdict == "fits"
        found = change(tight, INPUTS)
        assert found.automatic
        assert found.saves >= load.parkable
        assert "each way in every step" in found.why
        assert tier_of(tight, "parked block inputs") == "host"
        assert tight.checkpointing.value == "full"
        pool = machine("gb10")
        short = pool.host.model_copy(update={"cpu_mem_available": 50 * GIB})
        one = plan(long, pool.model_copy(update={"host": short}))
        assert INPUTS not in {entry.key for entry in one.changes}, "there is nowhere else to wait"

    def test_the_link_rate_is_the_declared_one_or_unknown(self) -> None:
        whole = machine("x86-h200")
        pcie = PcieLink(speed_gts=2.5, width=16, max_speed_gts=32.0, max_width=16)
        gpu = whole.gpus[0].model_copy(update={"pcie": pcie})
        assert link_rate(whole.model_copy(update={"gpus": (gpu,)})) == pytest.approx(63e9, rel=0.01)
        silent = gpu.model_copy(update={"pcie": PcieLink(width=16)})
        assert link_rate(whole.model_copy(update={"gpus": (silent,)})) is None
        assert link_rate(machine("gh200-numa")) is None

    def test_one_pool_releases_encoders_and_never_parks_experts(self) -> None:
        pool = machine("gb10")
        host = pool.host.model_copy(update={"cpu_mem_available": 88 * GIB})
        found = plan(demand(training={"gradient_checkpointing": "full"}), pool.model_copy(update={"host": host}))
        assert [entry.key for entry in found.changes] == ["placement: encoders"]
        assert tier_of(found, "text encoder (UMT5-XXL)") == "disk"
        assert tier_of(found, "low-noise expert") == "pool"


class TestVerdict:
    def test_a_shortage_is_reported_with_the_memory_it_would_take(self) -> None:
        found = plan(demand(), small_gpu(12))
        assert found.verdict == "does not fit"
        assert "too much for GPU memory" in found.summary
        assert "it would take" in found.summary

    @pytest.mark.parametrize(
        ("name", "missing"), [("x86-h200", "gpus[0].memory_total"), ("gh200-numa", "gpus[0].memory_total")]
    )
    def test_an_unknown_gpu_is_unknown(self, name: str, missing: str) -> None:
        whole = machine(name)
        gpu = whole.gpus[0].model_copy(update={"memory_total": None})
        found = plan(demand(), whole.model_copy(update={"gpus": (gpu,)}))
        assert found.verdict == "unknown"
        assert found.missing == (missing,)
        assert missing in found.summary
        assert found.lines

    @pytest.mark.parametrize("name", ["x86-h200", "gb10", "cpu-only"])
    def test_unknown_main_memory_is_unknown(self, name: str) -> None:
        whole = machine(name)
        host = whole.host.model_copy(update={"cpu_mem_available": None, "cgroup": None})
        found = plan(demand(compiled=False), whole.model_copy(update={"host": host}))
        assert found.verdict == "unknown"
        assert found.missing == ("host.cpu_mem_available",)

    def test_a_full_disk_does_not_fit(self) -> None:
        found = plan(demand(), machine("x86-h200"), disk_free=100 * MIB)
        assert found.verdict == "does not fit"
        assert "disk" in found.summary

    def test_needless_checkpointing_is_a_note(self) -> None:
        found = plan(demand(training={"gradient_checkpointing": "full"}), machine("x86-h200"))
        assert found.verdict == "fits"
        assert any("not needed" in note for note in found.notes)

    def test_several_gpus_are_a_note(self) -> None:
        notes = plan(demand(), machine("gb200")).notes
        assert any("2 GPUs" in note and "gracetune estimate CONFIG --processes 2" in note for note in notes)

    @pytest.mark.parametrize("family", ["wan", "qwen_image", "flux", "flux2", "krea2", "sdxl"])
    @pytest.mark.parametrize("name", ["gh200-numa", "gh200-cdmm", "gb200", "gb10", "x86-h200"])
    def test_common_jobs_fit_common_machines(self, family: str, name: str) -> None:
        assert plan(demand(family), machine(name)).verdict == "fits"

    @pytest.mark.parametrize(
        ("flavour", "gigabytes", "precision", "verdict"),
        [
            ("dev", 80, "bf16", "fits"),
            ("dev", 24, "auto", "does not fit"),
            ("klein-base-9b", 24, "auto", "fits"),
            ("klein-base-4b", 24, "bf16", "fits"),
        ],
    )
    def test_flux2_on_smaller_cards(self, flavour: str, gigabytes: float, precision: str, verdict: str) -> None:
        requested = demand("flux2", model={"flavour": flavour, "base_precision": precision})
        assert plan(requested, small_gpu(gigabytes)).verdict == verdict

    @pytest.mark.parametrize(
        ("gigabytes", "verdict", "precision"), [(24, "fits with these changes", "fp8"), (80, "fits", None)]
    )
    def test_krea_2_on_smaller_cards(self, gigabytes: int, verdict: str, precision: str | None) -> None:
        """A LoRA at 1024 x 1024. In 16 bits the weights alone take 24 GiB."""
        found = plan(demand("krea2", adapter={"kind": "lora", "rank": 32}), small_gpu(gigabytes))
        assert found.verdict == verdict
        changed = {entry.key: entry.after for entry in found.changes}
        assert changed.get("model.base_precision") == precision


def test_free_space_is_that_of_the_nearest_folder_or_unknown(tmp_path: Path) -> None:
    assert free_on_disk(str(tmp_path / "not" / "yet")) is not None
    assert free_on_disk(str(tmp_path / ("long" * 100))) is None  # stat fails with ENAMETOOLONG
