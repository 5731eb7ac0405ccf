"""The real sensors and the real reclaimer on a real GPU. At most 2 GiB of it are used, none of them managed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from gracetune.hardware import probe
from gracetune.hostmem.sensors import HostReading, HostSensor
from gracetune.memory.governor import Action, Governor, PressureLimits
from gracetune.memory.reclaim import TorchReclaimer
from gracetune.memory.sensors import PEAK_ALLOCATED, ArenaUsage, DeviceReading, DeviceSensor, Sensors, TorchCuda
from gracetune.units import GIB, MIB

pytestmark = pytest.mark.gpu

NO_ARENA = ArenaUsage(0, 0)
HOST = HostReading(mem_available=None, cgroup_available=None)
SLACK = 256 * MIB
"""Other processes, the context's own memory, and torch's rounding to segments."""


class NoArena:
    def usage(self) -> ArenaUsage:
        return NO_ARENA


class NoBuffers:
    def demote_cold(self, *, at_most: int, include_recent: bool) -> None: ...


def never(_total: int) -> int:
    return -1


def always(_total: int) -> int:
    return 1 << 62


def read(sensor: DeviceSensor) -> DeviceReading:
    found = sensor.read(NO_ARENA, HOST)
    assert found is not None
    return found


@pytest.fixture(autouse=True)
def clean_gpu() -> Iterator[None]:
    torch.zeros(1, device="cuda:0")  # the context itself takes memory: before any measurement
    if probe().gpus[0].attributes.integrated:
        pytest.skip("one pool: CUDA's free memory is not what these sensors go by")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(0)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0, 0)
    torch.cuda.empty_cache()


class TestDevice:
    def test_total_and_available_are_the_drivers_when_torch_holds_nothing(self) -> None:
        free, total = torch.cuda.mem_get_info(0)
        found = read(DeviceSensor(TorchCuda(0), exact_below=never))
        assert found.total == total
        assert abs(found.available - free) < SLACK

    def test_falls_by_what_is_allocated_and_comes_back_when_it_is_freed_whatever_torch_keeps(self) -> None:
        sensor = DeviceSensor(TorchCuda(0), exact_below=always)
        before = read(sensor).available
        block = torch.empty(GIB, dtype=torch.uint8, device="cuda:0")
        assert abs(before - read(sensor).available - GIB) < SLACK
        del block
        read(sensor)
        assert torch.cuda.memory_reserved(0) >= GIB  # torch keeps it, and the driver calls it used
        assert abs(before - read(sensor).available) < SLACK

    def test_emptying_the_cache_changes_nothing(self) -> None:
        sensor = DeviceSensor(TorchCuda(0), exact_below=always)
        torch.empty(GIB, dtype=torch.uint8, device="cuda:0")
        read(sensor)
        kept = read(sensor).available
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved(0) < GIB
        assert abs(kept - read(sensor).available) < SLACK

    def test_sees_the_peak_inside_a_step(self) -> None:
        sensor = DeviceSensor(TorchCuda(0), exact_below=always)
        before = read(sensor).available
        torch.empty(GIB, dtype=torch.uint8, device="cuda:0")
        assert abs(before - read(sensor).available - GIB) < SLACK
        assert abs(before - read(sensor).available) < SLACK  # and only in the step that had it

    def test_leaves_the_peak_counter_alone_while_there_is_plenty(self) -> None:
        sensor = DeviceSensor(TorchCuda(0), exact_below=never)
        torch.empty(GIB, dtype=torch.uint8, device="cuda:0")
        read(sensor)
        assert torch.cuda.max_memory_allocated(0) >= GIB

    def test_puts_restarted_peaks_back_into_a_copy(self) -> None:
        sensor = DeviceSensor(TorchCuda(0), exact_below=always)
        torch.empty(GIB, dtype=torch.uint8, device="cuda:0")
        read(sensor)
        stats = torch.cuda.memory_stats(0)
        assert stats[PEAK_ALLOCATED] < GIB
        restored = sensor.with_peaks(stats)
        assert restored[PEAK_ALLOCATED] >= GIB
        assert restored.keys() == stats.keys()

    def test_asking_for_this_moment_restarts_nothing(self) -> None:
        sensor = DeviceSensor(TorchCuda(0), exact_below=always)
        torch.empty(GIB, dtype=torch.uint8, device="cuda:0")
        sensor.read_now(NO_ARENA, HOST)
        assert torch.cuda.max_memory_allocated(0) >= GIB

    def test_respects_the_memory_fraction(self) -> None:
        _, total = torch.cuda.mem_get_info(0)
        torch.cuda.set_per_process_memory_fraction(2 * GIB / total, 0)
        sensor = DeviceSensor(TorchCuda(0), exact_below=always)
        found = read(sensor)
        assert abs(found.total - 2 * GIB) <= 1 * MIB
        assert found.available <= found.total
        block = torch.empty(GIB, dtype=torch.uint8, device="cuda:0")
        assert abs(read(sensor).available - GIB) < SLACK
        del block


class TestTogether:
    def test_everything_is_known_on_this_machine(self) -> None:
        gpus = probe().gpus
        sensors = Sensors(HostSensor(gpus), DeviceSensor(TorchCuda(0), exact_below=never), NoArena())
        reading = sensors.read()
        assert reading.unknown == ()
        vitals = sensors.vitals()
        assert vitals.host_headroom is not None
        assert vitals.device_available is not None

    def test_the_governor_goes_up_and_comes_back(self) -> None:
        _, total = torch.cuda.mem_get_info(0)
        torch.cuda.set_per_process_memory_fraction(2 * GIB / total, 0)
        limits = PressureLimits(threshold=0.25, min_bytes=0, host_reserve=0)  # pressure under 512 MiB
        device = DeviceSensor(TorchCuda(0), exact_below=limits.calm_level)
        governor = Governor(Sensors(HostSensor(), device, NoArena()), TorchReclaimer(0, NoBuffers()), limits)
        assert governor.sample().state.stage == 1
        torch.empty(1792 * MIB, dtype=torch.uint8, device="cuda:0")  # one step's peak, freed again
        entered = governor.sample()
        assert entered.state.stage == 2
        assert entered.actions == (Action.LIGHT_RECLAMATION,)
        assert torch.cuda.memory_reserved(0) < GIB  # the light reclamation gave the block back
        memory_stages = []
        for _ in range(3):
            torch.empty(256 * MIB, dtype=torch.uint8, device="cuda:0")
            memory_stages.append(governor.sample().state.stage)
        assert memory_stages == [2, 2, 1]


class TestReclaimer:
    def test_gives_back_what_is_only_kept_for_later(self) -> None:
        torch.empty(GIB, dtype=torch.uint8, device="cuda:0")
        reclaimer = TorchReclaimer(0, NoBuffers())
        assert torch.cuda.memory_reserved(0) >= GIB
        reclaimer.synchronize()
        reclaimer.release_device_cache()
        assert torch.cuda.memory_reserved(0) < GIB

    def test_of_pinned_memory_too(self) -> None:
        if not hasattr(torch.accelerator, "empty_host_cache"):
            pytest.skip("this torch cannot empty its pinned-memory cache")
        torch.empty(256 * MIB, dtype=torch.uint8, pin_memory=True)
        torch.cuda.synchronize(0)
        kept = torch.cuda.host_memory_stats()["allocated_bytes.current"]
        assert kept >= 256 * MIB
        TorchReclaimer(0, NoBuffers()).release_host_caches()
        assert torch.cuda.host_memory_stats()["allocated_bytes.current"] <= kept - 256 * MIB
