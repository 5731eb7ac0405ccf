"""The watchdog with real threads. To simulate a shortage, a real meminfo file changes while it runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gracetune.hostmem.sensors import HostSensor
from gracetune.memory.errors import UnifiedMemoryError
from gracetune.memory.sensors import ArenaUsage, Sensors, Vitals
from gracetune.memory.watchdog import Floors, StopRequest, Watchdog, WatchdogEvent
from gracetune.units import GIB, MIB

TICK = 0.005
PLENTY = Vitals(host_headroom=100 * GIB, device_available=50 * GIB)


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.001)


def let_it_look(watchdog: Watchdog, times: int = 2) -> None:
    """Wait until at least one complete sample was taken."""
    seen = watchdog.samples
    wait_until(lambda: watchdog.samples >= seen + times)


class Machine:
    """A meminfo file that a test can change, and the real sensors that read it."""

    def __init__(self, root: Path) -> None:
        self._file = root / "proc" / "meminfo"
        self._file.parent.mkdir()
        self.available(100 * GIB)
        self.sensors = Sensors(HostSensor(root=root), None, self)

    def usage(self) -> ArenaUsage:
        return ArenaUsage(0, 0)

    def available(self, size: int) -> None:
        fresh = self._file.with_suffix(".new")
        fresh.write_text(f"MemTotal:  209715200 kB\nMemAvailable:  {size // 1024} kB\n")
        fresh.replace(self._file)  # no reader ever sees half of it

    def vanish(self) -> None:
        self._file.unlink()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


class TestASqueeze:
    def test_brings_a_request_with_the_reading_that_caused_it(self, machine: Machine) -> None:
        events: list[WatchdogEvent] = []
        with Watchdog(machine.sensors.vitals, Floors(host=8 * GIB), report=events.append, period=TICK) as watchdog:
            let_it_look(watchdog)
            assert watchdog.requested() is None
            machine.available(8 * GIB)  # the floor itself is still ground
            let_it_look(watchdog)
            assert watchdog.requested() is None
            machine.available(8 * GIB - MIB)
            wait_until(lambda: watchdog.requested() is not None)
        request = watchdog.requested()
        assert request is not None
        assert request.reason == "8.00 GiB of main memory left, the floor is 8.00 GiB"
        assert request.reading.host_headroom == 8 * GIB - MIB
        assert [event.kind for event in events] == ["stop requested"]

    def test_the_request_stays_when_memory_recovers_and_is_reported_once(self, machine: Machine) -> None:
        events: list[WatchdogEvent] = []
        with Watchdog(machine.sensors.vitals, Floors(host=8 * GIB), report=events.append, period=TICK) as watchdog:
            machine.available(3 * GIB)
            wait_until(lambda: watchdog.requested() is not None)
            first = watchdog.requested()
            machine.available(100 * GIB)
            let_it_look(watchdog)
            machine.available(1 * GIB)
            let_it_look(watchdog)
            assert watchdog.requested() is first
        assert len(events) == 1

    def test_a_run_that_starts_under_the_floor_is_told_at_once(self, machine: Machine) -> None:
        machine.available(GIB)
        with Watchdog(machine.sensors.vitals, Floors(host=8 * GIB), report=ignore, period=3600) as watchdog:
            wait_until(lambda: watchdog.requested() is not None)

    def test_of_the_device(self) -> None:
        low = Vitals(host_headroom=100 * GIB, device_available=GIB)
        with Watchdog(lambda: low, Floors(host=GIB, device=2 * GIB), report=ignore, clock=lambda: 7.5) as watchdog:
            wait_until(lambda: watchdog.requested() is not None)
        reason = "1.00 GiB of device memory left, the floor is 2.00 GiB"
        assert watchdog.requested() == StopRequest(reason, low, 7.5)

    def test_of_both_names_both(self) -> None:
        reason = Floors(host=2 * GIB, device=4 * GIB).breach(Vitals(GIB, 3 * GIB))
        assert reason == (
            "1.00 GiB of main memory left, the floor is 2.00 GiB; 3.00 GiB of device memory left, the floor is 4.00 GiB"
        )

    def test_what_has_no_floor_is_not_watched(self) -> None:
        assert Floors(host=None).breach(Vitals(0, 0)) is None
        assert Floors(host=None).trouble(Vitals(None, None)) is None


class TestSensorTrouble:
    def test_unknown_is_reported_once_and_asks_nobody_to_stop(self, machine: Machine) -> None:
        events: list[WatchdogEvent] = []
        with Watchdog(machine.sensors.vitals, Floors(host=8 * GIB), report=events.append, period=TICK) as watchdog:
            machine.vanish()
            wait_until(lambda: len(events) == 1)
            let_it_look(watchdog, times=5)
            assert watchdog.requested() is None
            machine.available(100 * GIB)
            wait_until(lambda: len(events) == 2)
            machine.available(GIB)  # it has not gone blind over it
            wait_until(lambda: watchdog.requested() is not None)
        assert [event.kind for event in events] == ["sensor failed", "sensor works again", "stop requested"]
        assert events[0].text == "main memory is unknown; main memory: /proc/meminfo has no MemAvailable"

    def test_a_sensor_that_raises_is_reported_and_asked_again(self) -> None:
        events: list[WatchdogEvent] = []
        answers = iter([RuntimeError("CUDA error: unspecified launch failure")] * 3 + [PLENTY] * 3)
        low = Vitals(GIB, None)

        def read() -> Vitals:
            answer = next(answers, low)
            if isinstance(answer, RuntimeError):
                raise answer
            return answer

        with Watchdog(read, Floors(host=8 * GIB), report=events.append, period=TICK) as watchdog:
            wait_until(lambda: watchdog.requested() is not None)
        assert [event.kind for event in events] == ["sensor failed", "sensor works again", "stop requested"]
        assert events[0].text == "RuntimeError: CUDA error: unspecified launch failure"

    @pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
    def test_a_watchdog_that_dies_does_not_die_in_silence(self) -> None:
        def read() -> Vitals:
            raise KeyError("a bug in a sensor")

        with Watchdog(read, Floors(host=8 * GIB), report=ignore, period=TICK) as watchdog:
            wait_until(lambda: not watchdog.alive)
            with pytest.raises(UnifiedMemoryError, match="has stopped watching") as caught:
                watchdog.requested()
        assert isinstance(caught.value.__cause__, KeyError)


class TestComingAndGoing:
    def test_the_thread_lives_exactly_as_long_as_the_block(self) -> None:
        watchdog = Watchdog(lambda: PLENTY, Floors(host=GIB), report=ignore, period=TICK)
        assert not watchdog.alive
        with watchdog:
            assert watchdog.alive
            let_it_look(watchdog)
        assert not watchdog.alive
        seen = watchdog.samples
        time.sleep(10 * TICK)
        assert watchdog.samples == seen

    def test_leaving_does_not_wait_for_the_period(self) -> None:
        started = time.monotonic()
        with Watchdog(lambda: PLENTY, Floors(host=GIB), report=ignore, period=3600) as watchdog:
            wait_until(lambda: watchdog.samples == 1)
        assert time.monotonic() - started < 5
        assert not watchdog.alive

    def test_an_error_in_the_loop_ends_it_too(self) -> None:
        watchdog = Watchdog(lambda: PLENTY, Floors(host=GIB), report=ignore, period=TICK)

        def train() -> None:
            with watchdog:
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            train()
        assert not watchdog.alive

    def test_it_sleeps_between_looks(self) -> None:
        with Watchdog(lambda: PLENTY, Floors(host=GIB), report=ignore, period=0.2) as watchdog:
            started = time.process_time()
            time.sleep(0.5)
            assert watchdog.samples <= 3
        assert time.process_time() - started < 0.25

    def test_it_cannot_keep_the_process_alive(self) -> None:
        with Watchdog(lambda: PLENTY, Floors(host=GIB), report=ignore):
            ours = [thread for thread in threading.enumerate() if thread.name == "gracetune-memory-watchdog"]
            assert [thread.daemon for thread in ours] == [True]

    def test_two_know_nothing_of_each_other(self, machine: Machine) -> None:
        sensors = machine.sensors
        machine.available(5 * GIB)
        with (
            Watchdog(sensors.vitals, Floors(host=8 * GIB), report=ignore, period=TICK) as strict,
            Watchdog(sensors.vitals, Floors(host=2 * GIB), report=ignore, period=TICK) as lenient,
        ):
            wait_until(lambda: strict.requested() is not None)
            let_it_look(lenient)
            assert lenient.requested() is None

    def test_is_used_once(self) -> None:
        watchdog = Watchdog(lambda: PLENTY, Floors(host=GIB), report=ignore, period=TICK)
        with watchdog:
            pass
        with pytest.raises(RuntimeError, match="once"), watchdog:
            pass

    @pytest.mark.parametrize("period", [0.0, -1.0, float("nan")])
    def test_a_period_of_nothing_would_be_a_busy_loop(self, period: float) -> None:
        with pytest.raises(ValueError, match="period"):
            Watchdog(lambda: PLENTY, Floors(host=GIB), report=ignore, period=period)


def ignore(_event: WatchdogEvent) -> None:
    """A callback for tests that do not check reports."""
