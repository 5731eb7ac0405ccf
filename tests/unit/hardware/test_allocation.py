from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gracetune.errors import ConfigError
from gracetune.hardware.allocation import (
    CAREFUL_CAP,
    GRANULE,
    AllocationPlan,
    AllocationResult,
    CudaManagedDriver,
    ManagedMemory,
    host_floor,
    host_reserve,
    plan_allocation,
    run_allocation,
)
from gracetune.hardware.driver import DriverCallError
from gracetune.hardware.machine import (
    Cgroup,
    DriverReport,
    Gpu,
    GpuAttributes,
    Host,
    Machine,
    MemoryMode,
    Profile,
    Software,
)
from gracetune.hardware.probe import choose_memory_mode, choose_profile, coherent_link
from gracetune.units import GIB, MIB
from unit.hardware.machines import NAMES, FakeCuda, load

MAYBE = (True, False, None)


def machine_with(gpu: Gpu | None, host: Host) -> Machine:
    gpus = () if gpu is None else (gpu.model_copy(update={"coherent_link": coherent_link(gpu.attributes)}),)
    return Machine(
        profile=choose_profile(host, gpus),
        memory_mode=choose_memory_mode(host, gpus),
        host=host,
        gpus=gpus,
        driver=DriverReport(status="ok", detail="ok"),
        software=Software(),
    )


_sizes = st.none() | st.integers(0, 600 * GIB)
_maybe = st.sampled_from(MAYBE)
_hosts = st.builds(
    Host,
    cpu_mem_total=_sizes,
    cpu_mem_available=_sizes,
    cgroup=st.none() | st.builds(Cgroup, version=st.just(2), limit=_sizes, available=_sizes),
)
_gpus = st.builds(
    Gpu,
    index=st.just(0),
    memory_total=_sizes,
    memory_free=_sizes,
    context_error=st.sampled_from([None, None, None, "cuDevicePrimaryCtxRetain: CUDA_ERROR_DEVICE_UNAVAILABLE (46)"]),
    attributes=st.builds(
        GpuAttributes,
        managed_memory=_maybe,
        concurrent_managed_access=_maybe,
        integrated=_maybe,
        pageable_uses_host_page_tables=_maybe,
        direct_managed_access_from_host=_maybe,
        host_native_atomic=_maybe,
    ),
)
_scales = st.floats(0.001, 1000, allow_nan=False)


@pytest.mark.parametrize(
    ("total", "reserve"),
    [(None, 4), (1, 0.25), (3, 0.75), (16, 4), (24, 4), (40, 4), (64, 6.4), (480, 48)],
)
def test_the_reserve_follows_the_size_of_the_machine(total: float | None, reserve: float) -> None:
    """All values in GiB. On a machine with 3, a reserve of 4 would prevent every run."""
    host = Host(cpu_mem_total=None if total is None else int(total * GIB))
    assert host_reserve(machine_with(None, host)) == int(reserve * GIB)
    assert host_floor(machine_with(None, host)) == int(reserve * GIB) // 2
    if total is not None:
        large = Host(cpu_mem_total=512 * GIB, cgroup=Cgroup(version=2, limit=int(total * GIB)))
        assert host_reserve(machine_with(None, large)) == int(reserve * GIB)


@given(gpu=st.none() | _gpus, host=_hosts, scale=_scales, force=st.booleans())
def test_no_plan_is_dangerous(gpu: Gpu | None, host: Host, scale: float, force: bool) -> None:
    machine = machine_with(gpu, host)
    plan = plan_allocation(machine, scale, force=force)
    assert plan == plan_allocation(machine, scale, force=force)
    assert plan.reason
    assert 0 <= plan.size <= plan.requested
    assert plan.size % GRANULE == 0
    if plan.size == 0:
        return
    assert gpu is not None
    assert gpu.attributes.managed_memory is True
    assert gpu.context_error is None
    headroom = machine.host.headroom
    assert headroom is not None
    spare = headroom - host_reserve(machine)
    assert spare > 0
    # Whatever is requested: what is really there, and main memory keeps its reserve.
    own = 0 if gpu.attributes.integrated else gpu.memory_free or 0
    assert plan.size <= own + spare
    coherent = machine.gpus[0].coherent_link is True and not gpu.attributes.integrated
    if not force and not coherent:
        assert plan.size <= CAREFUL_CAP
        assert plan.size <= (gpu.memory_free or 0) // 2 or gpu.attributes.integrated
    if not gpu.attributes.concurrent_managed_access and not gpu.attributes.integrated:
        assert plan.size <= min(CAREFUL_CAP, (gpu.memory_free or 0) // 2)
    # Beyond the GPU's own memory: only with a coherent link, or when forced.
    if plan.size > (gpu.memory_total or 0) and not gpu.attributes.integrated and gpu.memory_free == gpu.memory_total:
        assert coherent or force


@pytest.mark.parametrize(("tables", "direct", "atomics", "force"), list(product(MAYBE, MAYBE, MAYBE, (True, False))))
def test_only_coherence_or_force_goes_beyond_hbm(
    tables: bool | None, direct: bool | None, atomics: bool | None, force: bool
) -> None:
    gpu = Gpu(
        index=0,
        memory_total=96 * GIB,
        memory_free=95 * GIB,
        attributes=GpuAttributes(
            integrated=False,
            managed_memory=True,
            concurrent_managed_access=True,
            pageable_uses_host_page_tables=tables,
            direct_managed_access_from_host=direct,
            host_native_atomic=atomics,
        ),
    )
    machine = machine_with(gpu, Host(cpu_mem_total=480 * GIB, cpu_mem_available=470 * GIB))
    plan = plan_allocation(machine, 1.5, force=force)
    if True in (tables, direct, atomics) or force:
        assert (plan.size, plan.size < plan.requested) == (144 * GIB, False)
    else:
        assert (plan.size, plan.size < plan.requested) == (4 * GIB, True)
        assert "reboot" in plan.reason


@pytest.mark.parametrize(
    ("name", "force", "size"),
    [
        ("gh200-numa", False, int(95 * GIB * 1.5)),
        ("gh200-cdmm", False, int(95 * GIB * 1.5)),
        ("gb200", False, int(184 * GIB * 1.5)),
        ("x86-h200", False, 4 * GIB),
        ("x86-h200-cgroup", False, 4 * GIB),
        ("gb10", False, 4 * GIB),
        ("cpu-only", False, 0),
        ("cpu-only", True, 0),
    ],
)
def test_plans_for_the_modelled_machines(name: str, force: bool, size: int) -> None:
    assert plan_allocation(load(name), 1.5, force=force).size == size


def test_force_is_still_bounded_by_the_container() -> None:
    machine = load("x86-h200-cgroup")
    plan = plan_allocation(machine, 5, force=True)
    free = machine.gpus[0].memory_free or 0
    assert plan.size == (free + 122 * GIB - host_reserve(machine)) // GRANULE * GRANULE
    assert plan.size < plan.requested


def test_a_full_card_leaves_half_of_what_is_free() -> None:
    machine = load("x86-h200")
    gpu = machine.gpus[0].model_copy(update={"memory_free": 3 * GIB})
    assert plan_allocation(machine.model_copy(update={"gpus": (gpu,)}), 1.5, force=False).size == 3 * GIB // 2


def test_a_full_host_runs_nothing() -> None:
    machine = load("gh200-numa")
    host = machine.host.model_copy(update={"cpu_mem_available": 5 * GIB})
    plan = plan_allocation(machine.model_copy(update={"host": host}), 1.5, force=True)
    assert plan.size == 0
    assert "reserve" in plan.reason


@pytest.mark.parametrize("scale", [0, -1, float("nan"), float("inf"), 1e9])
def test_a_scale_that_means_nothing_is_rejected(scale: float) -> None:
    with pytest.raises(ConfigError, match="--oversubscription-scale"):
        plan_allocation(load("gh200-numa"), scale, force=False)


class ArrayMemory:
    """A substitute for managed memory with a call log. It can be set to fail or to lose a byte."""

    def __init__(self, *, fail: str = "", corrupt: int | None = None) -> None:
        self.fail, self.corrupt = fail, corrupt
        self.blocks: dict[int, ctypes.Array[ctypes.c_char]] = {}
        self.filled: list[int] = []

    @contextmanager
    def open(self, device: int) -> Iterator[ManagedMemory]:
        self._maybe_fail("open")
        assert device == 0
        yield self

    def _maybe_fail(self, call: str) -> None:
        if self.fail == call:
            raise DriverCallError(call, 2, "CUDA_ERROR_OUT_OF_MEMORY")

    def allocate(self, size: int) -> int:
        self._maybe_fail("allocate")
        block = ctypes.create_string_buffer(size)
        self.blocks[ctypes.addressof(block)] = block
        return ctypes.addressof(block)

    def fill(self, address: int, value: int, size: int) -> None:
        self._maybe_fail("fill")
        ctypes.memset(address, value, size)
        self.filled.append(size)

    def peek(self, address: int) -> int:
        offset = address - next(iter(self.blocks))
        return 0 if offset == self.corrupt else ctypes.c_ubyte.from_address(address).value

    def free(self, address: int) -> None:
        del self.blocks[address]
        self._maybe_fail("free")


PLAN = AllocationPlan(scale=1.5, requested=8 * MIB, size=8 * MIB, reason="as requested")


def _run(
    driver: ArrayMemory, plan: AllocationPlan = PLAN, headroom: list[int | None] | None = None
) -> AllocationResult:
    left = iter(headroom or [])
    return run_allocation(
        plan, driver, headroom=lambda: next(left) if headroom else 100 * GIB, reserve=10 * GIB, chunk=3 * MIB
    )


def test_a_run_fills_everything_in_pieces_and_gives_it_back() -> None:
    driver = ArrayMemory()
    result = _run(driver)
    assert (result.status, result.allocated, result.error) == ("success", 8 * MIB, None)
    assert driver.filled == [3 * MIB, 3 * MIB, 2 * MIB]
    assert driver.blocks == {}
    report = result.to_json()
    assert list(report) == [
        "requested_scale",
        "status",
        "reason",
        "error",
        "allocated_gb",
        "allocation_time_s",
        "fill_bandwidth_gbps",
    ]
    assert report["allocated_gb"] == round(8 / 1024, 2)
    assert isinstance(report["fill_bandwidth_gbps"], float)


def test_a_reduced_plan_says_that_and_why() -> None:
    plan = AllocationPlan(scale=1.5, requested=64 * MIB, size=4 * MIB, reason="the link is not coherent")
    result = _run(ArrayMemory(), plan)
    assert (result.status, result.allocated, result.reason) == ("reduced", 4 * MIB, "the link is not coherent")


@pytest.mark.parametrize("call", ["open", "allocate", "fill", "free"])
def test_every_failing_call_is_reported_and_nothing_is_kept(call: str) -> None:
    driver = ArrayMemory(fail=call)
    result = _run(driver)
    assert (result.status, result.error) == ("failed", f"{call}: CUDA_ERROR_OUT_OF_MEMORY (2)")
    assert result.to_json()["allocated_gb"] is None
    assert driver.blocks == {}


@pytest.mark.parametrize("offset", [0, 4 * MIB, 8 * MIB - 1])
def test_a_byte_the_cpu_does_not_see_is_a_failure(offset: int) -> None:
    driver = ArrayMemory(corrupt=offset)
    result = _run(driver)
    assert result.status == "failed"
    assert f"byte {offset} reads 0x00" in (result.error or "")
    assert driver.blocks == {}


def test_filling_stops_when_main_memory_runs_low() -> None:
    driver = ArrayMemory()
    result = _run(driver, headroom=[50 * GIB, 9 * GIB])
    assert (result.status, result.allocated) == ("reduced", 3 * MIB)
    assert "9.00 GiB of main memory left; 10.0 GiB have to stay free" in result.reason
    assert driver.blocks == {}


@pytest.mark.parametrize(("left", "cause"), [(9 * GIB, "9.00 GiB"), (None, "unknown")])
def test_filling_does_not_begin_when_main_memory_is_low_or_unknown(left: int | None, cause: str) -> None:
    driver = ArrayMemory()
    result = _run(driver, headroom=[left])
    assert result.status == "skipped"
    assert cause in result.reason
    assert driver.filled == []
    assert driver.blocks == {}


def test_an_interrupt_gives_the_memory_back() -> None:
    class Interrupted(ArrayMemory):
        def fill(self, address: int, value: int, size: int) -> None:
            raise KeyboardInterrupt

    driver = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        _run(driver)
    assert driver.blocks == {}


def test_nothing_is_opened_for_an_empty_plan() -> None:
    result = _run(ArrayMemory(fail="open"), AllocationPlan(1.5, 0, 0, "no GPU"))
    assert (result.status, result.reason, result.error) == ("skipped", "no GPU", None)


@pytest.mark.parametrize("location", ["nothing", "context", "alloc", "memset", "sync", "free"])
def test_through_the_driver_library_nothing_leaks(fake_cuda: FakeCuda, location: str) -> None:
    fake_cuda.fail(location, 2)
    result = run_allocation(PLAN, CudaManagedDriver(fake_cuda.path), headroom=lambda: GIB, reserve=0, chunk=MIB)
    assert result.status == ("success" if location == "nothing" else "failed")
    assert (result.error is None) == (location == "nothing")
    assert fake_cuda.live_blocks == 0
    assert fake_cuda.largest in (0, 8 * MIB)


def test_a_library_that_vanished_is_a_failure_and_no_crash() -> None:
    result = run_allocation(PLAN, CudaManagedDriver("libnothere.so.9"), headroom=lambda: GIB, reserve=0)
    assert result.status == "failed"
    assert "libnothere" in (result.error or "")


def test_every_modelled_machine_has_a_plan_with_a_reason() -> None:
    for name in NAMES:
        machine = load(name)
        assert isinstance(machine.profile, Profile)
        assert isinstance(machine.memory_mode, MemoryMode)
        for force in (True, False):
            assert plan_allocation(machine, 1.5, force=force).reason
