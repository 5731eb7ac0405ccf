"""The sensors on real files, and on a model of a GPU with the exact counters of the driver and torch's allocator."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gracetune
from gracetune.hardware.machine import Gpu
from gracetune.hardware.probe import read_host_memory
from gracetune.hardware.recording import load_recording
from gracetune.hostmem.sensors import HostReading, HostSensor
from gracetune.memory.governor import Governor, PressureLimits
from gracetune.memory.reclaim import TorchReclaimer
from gracetune.memory.sensors import (
    ALLOCATED,
    PEAK_ALLOCATED,
    PEAK_RESERVED,
    RESERVED,
    ArenaUsage,
    DeviceReading,
    DeviceSensor,
    MemoryReading,
    Sensors,
    TorchCuda,
    device_reading,
)
from gracetune.units import GIB, MIB

MACHINES = Path(__file__).parents[2] / "fixtures" / "machines"
NAMES = sorted(folder.name for folder in MACHINES.iterdir())
TOTAL = 100 * GIB
LIMITS = PressureLimits(threshold=0.10, min_bytes=0, host_reserve=GIB)
NO_ARENA = ArenaUsage(0, 0)
HOST = HostReading(mem_available=400 * GIB, cgroup_available=None)


@dataclass
class Card:
    """A model of a GPU with torch's caching allocator, and an arena for what does not fit."""

    total: int = TOTAL
    others: int = 0
    """Held by other processes and by the driver itself."""
    held_fraction: float = 1.0
    arena_reserved: int = 0
    cached: int = 0
    own: int = 0
    spilled: int = 0
    peak: int = 0
    peak_reserved: int = 0

    @property
    def reserved(self) -> int:
        return self.own + self.cached

    def allocate(self, size: int) -> None:
        limit = self.total
        if self.held_fraction < 1:
            limit = min(limit, max(0, int(self.held_fraction * self.total) - self.arena_reserved))
        fresh = max(0, size - self.cached)
        if self.reserved + fresh <= min(limit, self.total - self.others):
            self.cached -= size - fresh
            self.own += size
        elif self.spilled + size <= self.arena_reserved:
            self.spilled += size
        self.peak = max(self.peak, self.own + self.spilled)
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def free(self, size: int) -> None:
        unspilled = min(size, self.spilled)
        own = min(size - unspilled, self.own)
        self.spilled -= unspilled
        self.own, self.cached = self.own - own, self.cached + own

    def empty_cache(self) -> None:
        self.cached = 0

    def take(self, size: int) -> None:
        """Allocate memory for another process."""
        self.others = min(size, self.total - self.reserved)

    # What sensors ask:

    def info(self) -> tuple[int, int]:
        return self.total - self.others - self.reserved, self.total

    def stats(self) -> dict[str, Any]:
        return {
            RESERVED: self.reserved + self.arena_reserved,
            ALLOCATED: self.own + self.spilled,
            PEAK_ALLOCATED: self.peak,
            PEAK_RESERVED: max(self.peak_reserved, self.reserved) + self.arena_reserved,
            "allocation.all.current": 7,
        }

    def reset_peaks(self) -> None:
        self.peak = self.own + self.spilled
        self.peak_reserved = self.reserved

    def fraction(self) -> float:
        return self.held_fraction

    def usage(self) -> ArenaUsage:
        return ArenaUsage(self.arena_reserved, self.spilled)


SIZE = st.integers(1, 120 * GIB)
OPERATION = st.one_of(
    st.tuples(st.just("allocate"), SIZE),
    st.tuples(st.just("free"), SIZE),
    st.tuples(st.just("empty_cache")),
    st.tuples(st.just("take"), SIZE),
    st.tuples(st.just("step"), SIZE),
)
CARD = st.builds(
    Card,
    held_fraction=st.sampled_from([1.0, 0.9, 0.5]),
    arena_reserved=st.sampled_from([0, GIB, 40 * GIB, 300 * GIB]),
)


def perform(card: Card, operation: tuple[Any, ...]) -> None:
    if operation[0] == "step":  # up, and down again before the sample
        before = card.own + card.spilled
        card.allocate(operation[1])
        card.free(card.own + card.spilled - before)
    else:
        getattr(card, operation[0])(*operation[1:])


def always(_total: int) -> int:
    return 1 << 62


def never(_total: int) -> int:
    return -1


class TestDeviceAvailable:
    @given(CARD, st.lists(OPERATION))
    def test_is_what_the_step_left_of_what_torch_can_have(self, card: Card, operations: list[tuple[Any, ...]]) -> None:
        for operation in operations:
            perform(card, operation)
        card.reset_peaks()
        reading = DeviceSensor(card, exact_below=never).read(card.usage(), HOST)
        assert reading is not None
        share = TOTAL if card.held_fraction == 1.0 else int(card.held_fraction * TOTAL) - card.arena_reserved
        assert reading.total == max(0, share)
        assert reading.available == max(0, min(reading.total, TOTAL - card.others) - card.own)

    @given(CARD, st.lists(OPERATION))
    def test_does_not_change_when_the_cache_is_emptied(self, card: Card, operations: list[tuple[Any, ...]]) -> None:
        for operation in operations:
            perform(card, operation)
        sensor = DeviceSensor(card, exact_below=never)
        sensor.read(card.usage(), HOST)
        before = sensor.read(card.usage(), HOST)
        card.empty_cache()
        assert sensor.read(card.usage(), HOST) == before

    def test_counts_what_the_step_needed_at_its_highest(self) -> None:
        card = Card()
        sensor = DeviceSensor(card, exact_below=never)
        sensor.read(NO_ARENA, HOST)
        perform(card, ("step", 70 * GIB))
        assert card.own == 0
        assert sensor.read(NO_ARENA, HOST) == DeviceReading(30 * GIB, TOTAL)

    def test_a_spill_that_is_over_before_the_sample_still_shows(self) -> None:
        card = Card(held_fraction=0.8, arena_reserved=40 * GIB)  # leaves 40 GiB on the device
        card.allocate(39 * GIB)
        sensor = DeviceSensor(card, exact_below=never)
        sensor.read(card.usage(), HOST)
        perform(card, ("step", 5 * GIB))
        assert card.usage().active == 0
        assert sensor.read(card.usage(), HOST) == DeviceReading(0, 40 * GIB, spilled=5 * GIB)

    def test_the_governor_sees_a_spill_that_is_over(self) -> None:
        card = Card(held_fraction=0.8, arena_reserved=40 * GIB)
        card.allocate(20 * GIB)
        sensors = Sensors(HostSensor(), DeviceSensor(card, exact_below=never), card)
        sensors.read()
        perform(card, ("step", 25 * GIB))
        assert (card.usage().active, sensors.read().arena_active) == (0, 25 * GIB)

    def test_what_lies_in_the_arena_takes_nothing_from_the_device(self) -> None:
        arena = ArenaUsage(reserved=50 * GIB, active=5 * GIB)
        reading = device_reading(
            free=20 * GIB, total=TOTAL, fraction=1.0, reserved=130 * GIB, used=75 * GIB, arena=arena
        )
        assert reading == DeviceReading(30 * GIB, TOTAL)

    def test_an_arena_larger_than_the_fraction_leaves_nothing_and_not_less(self) -> None:
        reading = device_reading(
            free=TOTAL, total=TOTAL, fraction=0.5, reserved=60 * GIB, used=0, arena=ArenaUsage(60 * GIB, 0)
        )
        assert reading == DeviceReading(0, 0)

    def test_before_torch_first_used_the_gpu_its_statistics_are_empty(self) -> None:
        class Untouched(Card):
            def stats(self) -> dict[str, Any]:
                return {}

        assert DeviceSensor(Untouched(), exact_below=never).read(NO_ARENA, HOST) == DeviceReading(TOTAL, TOTAL)

    def test_with_one_pool_the_page_cache_counts_as_free(self) -> None:
        card = Card(others=90 * GIB)  # most of it page cache
        host = HostReading(mem_available=60 * GIB, cgroup_available=None)
        assert DeviceSensor(card, exact_below=never, one_pool=True).read(NO_ARENA, host) == DeviceReading(
            60 * GIB, TOTAL
        )
        assert DeviceSensor(card, exact_below=never).read(NO_ARENA, host) == DeviceReading(10 * GIB, TOTAL)

    def test_with_one_pool_and_no_meminfo_it_is_unknown(self) -> None:
        sensor = DeviceSensor(Card(), exact_below=never, one_pool=True)
        blind = HostReading(mem_available=None, cgroup_available=None)
        assert sensor.read(NO_ARENA, blind) is None
        assert sensor.read_now(NO_ARENA, blind) is None


class TestTorchsPeakCounter:
    def test_is_left_alone_while_it_does_not_matter(self) -> None:
        card = Card()
        sensor = DeviceSensor(card, exact_below=LIMITS.calm_level)
        for size in (40, 80, 10, 20):
            perform(card, ("step", size * GIB))
            sensor.read(NO_ARENA, HOST)
        assert card.stats()[PEAK_ALLOCATED] == 80 * GIB

    def test_is_restarted_when_an_old_peak_would_look_like_pressure_for_ever(self) -> None:
        card = Card()
        sensor = DeviceSensor(card, exact_below=LIMITS.calm_level)
        sensor.read(NO_ARENA, HOST)
        found = []
        for size in (95, 20, 20):
            perform(card, ("step", size * GIB))
            found.append(sensor.read(NO_ARENA, HOST))
        assert found == [DeviceReading(left * GIB, TOTAL) for left in (5, 80, 80)]

    def test_an_old_peak_exactly_on_the_line_does_not_stay_there(self) -> None:
        card = Card()
        sensor = DeviceSensor(card, exact_below=LIMITS.calm_level)
        sensor.read(NO_ARENA, HOST)
        perform(card, ("step", TOTAL - LIMITS.calm_level(TOTAL)))
        assert sensor.read(NO_ARENA, HOST) == DeviceReading(LIMITS.calm_level(TOTAL), TOTAL)
        assert sensor.read(NO_ARENA, HOST) == DeviceReading(TOTAL, TOTAL)

    def test_what_it_had_comes_back_in_a_copy_of_the_statistics(self) -> None:
        card = Card()
        sensor = DeviceSensor(card, exact_below=always)
        for size in (30, 95, 20):
            perform(card, ("step", size * GIB))
            sensor.read(NO_ARENA, HOST)
        assert card.stats()[PEAK_ALLOCATED] == 0
        assert sensor.with_peaks(card.stats()) == card.stats() | {PEAK_ALLOCATED: 95 * GIB}
        perform(card, ("step", 97 * GIB))
        assert sensor.with_peaks(card.stats())[PEAK_ALLOCATED] == 97 * GIB

    def test_reserving_the_arena_before_the_first_sample_is_no_pressure(self) -> None:
        card = Card(arena_reserved=300 * GIB, peak=300 * GIB)  # every reserved block was allocated for a moment
        sensor = DeviceSensor(card, exact_below=LIMITS.calm_level)
        found = [sensor.read(card.usage(), HOST) for _ in range(3)]
        assert found == [DeviceReading(TOTAL, TOTAL)] * 3

    def test_the_watchdog_does_not_touch_it(self) -> None:
        card = Card()
        sensor = DeviceSensor(card, exact_below=always)
        card.allocate(20 * GIB)
        perform(card, ("step", 75 * GIB))
        assert sensor.read_now(NO_ARENA, HOST) == DeviceReading(80 * GIB, TOTAL)
        assert card.stats()[PEAK_ALLOCATED] == 95 * GIB

    @given(CARD, st.lists(st.lists(OPERATION, max_size=4)))
    def test_leaving_it_alone_never_hides_pressure(self, card: Card, steps: list[list[tuple[Any, ...]]]) -> None:
        twin = Card(held_fraction=card.held_fraction, arena_reserved=card.arena_reserved)
        lazy = DeviceSensor(card, exact_below=LIMITS.calm_level)
        exact = DeviceSensor(twin, exact_below=always)
        restarted = True
        for step in steps:
            for operation in step:
                perform(card, operation)
                perform(twin, operation)
            found, truth = lazy.read(card.usage(), HOST), exact.read(twin.usage(), HOST)
            assert found is not None
            assert truth is not None
            line = LIMITS.calm_level(found.total)
            assert found.available <= truth.available
            assert found == truth or not restarted or found.available > line
            restarted = card.peak == card.own + card.spilled


class TestStageOverAModelledCard:
    @given(CARD.filter(lambda card: card.arena_reserved < 50 * GIB), st.lists(st.tuples(OPERATION, st.booleans())))
    def test_no_moment_for_emptying_the_cache_leaves_a_wrong_stage(
        self, card: Card, operations: list[tuple[tuple[Any, ...], bool]]
    ) -> None:
        governor = Governor(sensors_over(card), Idle(), LIMITS)
        total = governor_total(card)
        for operation, empty in operations:
            perform(card, operation)
            if empty:
                card.empty_cache()
            left = min(total, TOTAL - card.others) - card.own
            governor.sample()
            if card.spilled or left < LIMITS.floor(total):
                assert governor.state.stage == 2
        card.free(card.own + card.spilled)
        card.take(0)
        for _ in range(4):  # the first of them still sees the peak of what was freed
            governor.sample()
        assert governor.state.stage == 1
        card.allocate(total - LIMITS.floor(total) + 1)
        governor.sample()
        assert governor.state.stage == 2

    def test_up_into_the_arena_and_back(self) -> None:
        card = Card(held_fraction=0.9, arena_reserved=40 * GIB)  # 50 GiB on the device
        governor = Governor(sensors_over(card), Idle(), LIMITS)
        memory_stages = [governor.sample().state.stage]
        card.allocate(30 * GIB)
        for size in (5, 30, 30, 5, 5, 5, 5):
            perform(card, ("step", size * GIB))
            memory_stages.append(governor.sample().state.stage)
        assert memory_stages == [1, 1, 2, 2, 2, 2, 1, 1]
        assert (governor.counters.transitions, governor.counters.light_reclamations) == (2, 1)

    def test_a_healthy_run_whose_cache_fills_the_card_does_not_flap(self) -> None:
        card = Card(others=GIB)
        card.allocate(95 * GIB)
        card.free(95 * GIB)
        assert card.info()[0] == 4 * GIB  # what the driver calls free is under the floor, step after step
        governor = Governor(sensors_over(card), Idle(), LIMITS)
        for _ in range(20):
            perform(card, ("step", 60 * GIB))
            assert governor.sample().state.stage == 1
        assert governor.counters.transitions == 0


class Idle:
    def synchronize(self) -> None: ...

    def release_device_cache(self) -> None: ...

    def release_host_caches(self) -> None: ...

    def demote_cold(self, *, at_most: int, include_recent: bool) -> None: ...


def governor_total(card: Card) -> int:
    return device_reading(
        free=0, total=card.total, fraction=card.held_fraction, reserved=0, used=0, arena=card.usage()
    ).total


def sensors_over(card: Card) -> Sensors:
    device = DeviceSensor(card, exact_below=LIMITS.calm_level)
    return Sensors(HostSensor(root=MACHINES / "gh200-cdmm"), device, card)


class TestHost:
    @pytest.mark.parametrize("name", NAMES)
    def test_agrees_with_the_probe_on_every_modelled_machine(self, name: str) -> None:
        machine = load_recording(MACHINES / name)
        reading = HostSensor(machine.gpus, MACHINES / name).read()
        assert reading.mem_available == machine.host.cpu_mem_available
        assert reading.mem_available is not None
        assert reading.headroom == machine.host.headroom
        assert reading.notes == ()

    def test_gpu_memory_that_the_kernel_manages_is_not_main_memory(self) -> None:
        root = MACHINES / "gh200-numa"
        with_gpu = HostSensor(load_recording(root).gpus, root).read().mem_available
        without = HostSensor((), root).read().mem_available
        assert with_gpu is not None
        assert without is not None
        assert without - with_gpu > 90 * GIB

    def test_neither_free_nor_as_page_cache(self, tmp_path: Path) -> None:
        writer(tmp_path)("MemTotal:  102400 kB\nMemAvailable:  81920 kB\n")
        node = tmp_path / "sys" / "devices" / "system" / "node" / "node1"
        node.mkdir(parents=True)
        (node / "cpulist").write_text("\n")
        (node / "meminfo").write_text(
            "Node 1 MemTotal:  51200 kB\nNode 1 MemFree:  20480 kB\nNode 1 FilePages:  10240 kB\n"
        )
        gpu = Gpu(index=0, is_numa_node=True, numa_node=1)
        assert HostSensor((gpu,), tmp_path).read().mem_available == 50 * MIB
        assert HostSensor((gpu,), tmp_path).read().mem_available == read_host_memory((gpu,), tmp_path).cpu_mem_available

    def test_follows_the_files_as_they_change(self, tmp_path: Path) -> None:
        write = writer(tmp_path)
        write("MemAvailable:    2048 kB\n")
        sensor = HostSensor(root=tmp_path)
        assert sensor.read().headroom == 2 * MIB
        write("MemAvailable:    1024 kB\n")
        assert sensor.read().headroom == MIB

    def test_unreadable_means_unknown_with_a_note(self, tmp_path: Path) -> None:
        reading = HostSensor(root=tmp_path).read()
        assert reading.headroom is None
        assert reading.notes == ("main memory: /proc/meminfo has no MemAvailable",)

    def test_a_limit_whose_use_cannot_be_read_is_noted(self, tmp_path: Path) -> None:
        writer(tmp_path)("MemAvailable:    2048 kB\n")
        own = tmp_path / "proc" / "self"
        own.mkdir()
        (own / "cgroup").write_text("0::/\n")
        (own / "mountinfo").write_text("29 24 0:26 / /sys/fs/cgroup rw shared:9 - cgroup2 cgroup2 rw\n")
        group = tmp_path / "sys" / "fs" / "cgroup"
        group.mkdir(parents=True)
        (group / "memory.max").write_text(f"{MIB}\n")
        reading = HostSensor(root=tmp_path).read()
        assert reading.headroom == 2 * MIB
        assert reading.notes == ("control group: it has a memory limit, but its usage cannot be read",)
        (group / "memory.current").write_text(f"{MIB // 2}\n")
        assert HostSensor(root=tmp_path).read() == HostReading(2 * MIB, MIB // 2)

    def test_this_machine(self) -> None:
        headroom = HostSensor().read().headroom
        assert headroom is not None
        assert 16 * MIB < headroom < 1 << 50


def writer(root: Path) -> Callable[[str], None]:
    (root / "proc").mkdir(parents=True)

    def write(text: str) -> None:
        (root / "proc" / "meminfo").write_text(text)

    return write


@dataclass
class Meter:
    found: ArenaUsage | None = field(default_factory=lambda: NO_ARENA)

    def usage(self) -> ArenaUsage | None:
        return self.found


class TestTogether:
    def test_a_whole_reading(self) -> None:
        card = Card(arena_reserved=10 * GIB, spilled=2 * GIB, own=20 * GIB, peak=22 * GIB)
        machine = load_recording(MACHINES / "x86-h200")
        device = DeviceSensor(card, exact_below=never)
        sensors = Sensors(HostSensor(machine.gpus, MACHINES / "x86-h200"), device, card)
        assert sensors.read() == MemoryReading(2 * GIB, DeviceReading(80 * GIB, TOTAL), machine.host.headroom)
        assert sensors.vitals().device_available == 80 * GIB
        assert sensors.read().unknown == ()

    def test_without_a_gpu(self, tmp_path: Path) -> None:
        sensors = Sensors(HostSensor(root=tmp_path), None, Meter())
        assert sensors.read().device is None
        assert sensors.vitals().device_available is None
        assert sensors.read().unknown == (
            "main memory: /proc/meminfo has no MemAvailable",
            "device memory: torch has no GPU here",
        )

    def test_an_arena_that_cannot_say_makes_the_device_unknown_too(self) -> None:
        sensors = Sensors(HostSensor(root=MACHINES / "gb10"), DeviceSensor(Card(), exact_below=never), Meter(None))
        reading = sensors.read()
        assert (reading.arena_active, reading.device) == (None, None)
        assert reading.unknown == (
            "device memory: unknown as long as the overflow arena's share of it is",
            "overflow arena: unknown",
        )
        assert sensors.vitals().device_available is None


class TestTorchOnTheCpu:
    def test_there_is_nothing_to_read_and_torch_says_so_itself(self) -> None:
        import torch

        if torch.cuda.is_available():
            pytest.skip("this machine has a GPU; tests/gpu looks at it")
        with pytest.raises((RuntimeError, AssertionError), match=r"CUDA|NVIDIA"):
            TorchCuda(0).info()

    def test_reclaiming_collects_garbage_and_demotes_only_within_its_budget(self) -> None:
        class Thing:
            itself: Thing

        class Buffers:
            requested: list[tuple[int, bool]] = []  # noqa: RUF012

            def demote_cold(self, *, at_most: int, include_recent: bool) -> None:
                self.requested.append((at_most, include_recent))

        reclaimer = TorchReclaimer(0, Buffers())
        gc.disable()
        try:
            thing = Thing()
            thing.itself = thing
            watched = weakref.ref(thing)
            del thing
            reclaimer.release_device_cache()
            assert watched() is None
        finally:
            gc.enable()
        reclaimer.release_host_caches()
        reclaimer.demote_cold(at_most=0, include_recent=True)
        reclaimer.demote_cold(at_most=5, include_recent=True)
        assert Buffers.requested == [(5, True)]


def test_deciding_and_watching_need_no_torch() -> None:
    names = ("arena_size", "governor", "reclaim", "sensors", "unified_memory", "watchdog")
    modules = [*(f"memory.{name}" for name in names), "storage.safetensors_headers", "hostmem.sensors", "hostmem.slab"]
    imports = "".join(f"import gracetune.{module}; " for module in modules)
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; {imports}sys.exit('torch' in sys.modules)"],
        env=os.environ | {"PYTHONPATH": str(Path(gracetune.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr or "one of them imported torch"
