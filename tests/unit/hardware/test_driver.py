from __future__ import annotations

import ctypes
import ctypes.util

import pytest

from gracetune.hardware.allocation import CudaManagedDriver
from gracetune.hardware.driver import Attribute, CudaDriver, CudaLibrary, DriverCallError
from gracetune.units import GIB
from unit.hardware.machines import FakeCuda


def test_a_driver_is_asked_without_opening_the_gpu(fake_cuda: FakeCuda) -> None:
    facts = CudaDriver(fake_cuda.path).facts(free_memory=False)
    assert (facts.status, facts.cuda_version, len(facts.devices)) == ("ok", 13000, 1)
    device = facts.devices[0]
    assert (device.name, device.memory_total, device.memory_free) == ("Fake GPU", 8 * GIB, None)
    assert device.attribute(Attribute.CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY) == 1
    assert fake_cuda.contexts_opened == 0


def test_attributes_the_driver_does_not_know_stay_unknown(fake_cuda: FakeCuda) -> None:
    device = CudaDriver(fake_cuda.path).facts(free_memory=False).devices[0]
    assert device.attribute(Attribute.CU_DEVICE_ATTRIBUTE_NUMA_CONFIG) is None
    assert device.attribute(Attribute.CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS) == 0


def test_free_memory_opens_the_gpu_and_closes_it_again(fake_cuda: FakeCuda) -> None:
    facts = CudaDriver(fake_cuda.path).facts(free_memory=True)
    assert facts.devices[0].memory_free == 6 * GIB
    assert fake_cuda.contexts_opened == 1


def test_a_one_pool_gpu_is_not_opened_for_a_number_that_means_nothing(fake_cuda: FakeCuda) -> None:
    fake_cuda.one_pool()
    assert CudaDriver(fake_cuda.path).facts(free_memory=True).devices[0].memory_free is None
    assert fake_cuda.contexts_opened == 0


def test_a_gpu_that_cannot_be_opened_says_why(fake_cuda: FakeCuda) -> None:
    fake_cuda.fail("context", 46)
    device = CudaDriver(fake_cuda.path).facts(free_memory=True).devices[0]
    assert device.memory_free is None
    assert device.context_error == "cuDevicePrimaryCtxRetain: CUDA_ERROR_DEVICE_UNAVAILABLE (46)"
    assert device.memory_total == 8 * GIB


@pytest.mark.parametrize(
    ("code", "name"),
    [(100, "CUDA_ERROR_NO_DEVICE"), (803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"), (777, "an error without a name")],
)
def test_a_driver_that_does_not_start_is_not_a_missing_gpu(fake_cuda: FakeCuda, code: int, name: str) -> None:
    fake_cuda.fail("init", code)
    facts = CudaDriver(fake_cuda.path).facts(free_memory=True)
    assert (facts.status, facts.error_code, facts.detail) == ("failed", code, f"cuInit: {name} ({code})")
    assert facts.cuda_version == 13000
    assert facts.devices == ()


def test_a_missing_library_is_absent_in_the_loaders_words() -> None:
    facts = CudaDriver("libnothere.so.9").facts(free_memory=True)
    assert facts.status == "absent"
    assert "libnothere.so.9" in facts.detail


def test_a_library_that_is_no_libcuda_fails_and_does_not_crash() -> None:
    facts = CudaDriver(ctypes.util.find_library("m") or "libm.so.6").facts(free_memory=True)
    assert facts.status == "failed"
    assert "not in this version of libcuda" in facts.detail
    assert facts.cuda_version is None


def test_calls_are_checked(fake_cuda: FakeCuda) -> None:
    library = CudaLibrary(fake_cuda.path)
    address = ctypes.c_uint64()
    with pytest.raises(DriverCallError, match=r"cuMemAllocManaged: .* \(201\)"):
        library.call("cuMemAllocManaged", ctypes.byref(address), ctypes.c_size_t(4096), ctypes.c_uint(1))


def test_managed_memory_is_written_by_one_side_and_read_by_the_other(fake_cuda: FakeCuda) -> None:
    with CudaManagedDriver(fake_cuda.path).open(0) as memory:
        address = memory.allocate(1 << 20)
        memory.fill(address, 0x42, 1 << 20)
        assert memory.peek(address + (1 << 20) - 1) == 0x42
        memory.free(address)
    assert fake_cuda.live_blocks == 0


def test_the_context_closes_when_the_work_inside_fails(fake_cuda: FakeCuda) -> None:
    with pytest.raises(ZeroDivisionError), CudaManagedDriver(fake_cuda.path).open(0):
        raise ZeroDivisionError


def test_attribute_numbers_are_those_of_cuda() -> None:
    bindings = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings comes with CUDA builds of torch")
    for attribute in Attribute:
        assert int(getattr(bindings.CUdevice_attribute, attribute.name)) == attribute.value
