"""Opening the shim and the driver: all ways they can be missing or wrong, and the behavior in a forked process."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gracetune.memory.errors import UnifiedMemoryError, UsedAfterForkError
from gracetune.memory.native import HOST, Advice, SlotPolicy, Unavailable, Uvm, load
from gracetune.memory.native.binding import BUILD_FAILURE
from gracetune.units import GIB, MIB


def test_loading_again_gives_the_same_process_wide_state(bench):
    span = bench.uvm.allocate(MIB, device=0)
    again = load(bench.uvm.path, str(bench.fake.path))
    assert isinstance(again, Uvm)
    assert again.total_stats().live_bytes == MIB
    again.free(span)
    assert bench.uvm.total_stats().live_bytes == 0
    assert len(bench.fake.journal("cuInit")) == 1


def test_many_threads_may_load_at_once(workshop):
    fake, shim, loaded = workshop.fake(), workshop.shim(), []
    threads = [threading.Thread(target=lambda: loaded.append(load(shim, str(fake.path)))) for _ in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert [type(one) for one in loaded] == [Uvm] * 8
    assert len(fake.journal("cuInit")) == 1


def test_a_second_driver_library_is_rejected_by_name(bench, workshop):
    other = workshop.fake()
    with pytest.raises(UnifiedMemoryError, match="already uses") as caught:
        load(bench.uvm.path, str(other.path))
    assert str(bench.fake.path) in str(caught.value)
    assert other.journal() == []


def test_without_the_library_the_reason_is_that_it_was_not_built(tmp_path):
    answer = load(tmp_path / "_uvm.so")
    assert isinstance(answer, Unavailable)
    assert not answer
    assert str(answer).startswith("not available: the native library has not been built; ")
    assert "pip install --force-reinstall --no-deps" in answer.remedy


def test_what_the_build_left_behind_is_the_reason(tmp_path):
    (tmp_path / BUILD_FAILURE).write_text("built without a C compiler (there was no cc, gcc or clang)\n")
    answer = load(tmp_path / "_uvm.so")
    assert isinstance(answer, Unavailable)
    assert str(answer).startswith(
        "not available: built without a C compiler (there was no cc, gcc or clang); install gcc"
    )
    assert "pip install --force-reinstall --no-deps" in answer.remedy


def test_a_library_for_another_machine_is_no_crash(tmp_path):
    library = tmp_path / "_uvm.so"
    library.write_bytes(b"\x7fELF" + b"\0" * 100)
    answer = load(library)
    assert isinstance(answer, Unavailable)
    assert "does not load on this machine" in answer.reason


def test_a_foreign_library_is_recognized(workshop):
    answer = load(workshop.fake().path)
    assert isinstance(answer, Unavailable)
    assert "is not gracetune's native library" in answer.reason


def test_a_library_of_another_version_is_not_used(workshop, tmp_path):
    source = Path(__file__).parents[3] / "src/gracetune/memory/native/uvm.c"
    old = tmp_path / "uvm.c"
    old.write_text(source.read_text().replace("GT_ABI_VERSION = 4 ", "GT_ABI_VERSION = 999 "))
    fake = workshop.fake()
    answer = load(workshop.compile(old), str(fake.path))
    assert isinstance(answer, Unavailable)
    assert "interface 999, this gracetune needs 4" in answer.reason
    assert fake.journal() == [], "nothing of it may run"


def test_without_a_driver_the_loaders_words_are_told(workshop, tmp_path):
    answer = load(workshop.shim(), str(tmp_path / "libcuda.so.1"))
    assert isinstance(answer, Unavailable)
    assert "no CUDA driver" in answer.reason
    assert "cannot open shared object file" in answer.reason


def test_a_driver_that_appears_later_is_taken(workshop, tmp_path):
    shim, fake = workshop.shim(), workshop.fake()
    assert isinstance(load(shim, str(tmp_path / "missing.so")), Unavailable)
    assert isinstance(load(shim, str(fake.path)), Uvm)


def test_a_library_that_is_no_driver_names_the_missing_function(workshop):
    answer = load(workshop.shim(), str(workshop.fake("-DFAKE_NO_MANAGED").path))
    assert isinstance(answer, Unavailable)
    assert "has no cuMemAllocManaged" in answer.reason


def test_a_driver_that_does_not_start_is_told_with_its_own_name_and_can_be_tried_again(workshop):
    shim, fake = workshop.shim(), workshop.fake()
    fake.fail("cuInit", 100)
    answer = load(shim, str(fake.path))
    assert isinstance(answer, Unavailable)
    assert "cuInit failed with CUDA_ERROR_NO_DEVICE (100)" in answer.reason
    assert "gracetune doctor" in answer.remedy
    assert isinstance(load(shim, str(fake.path)), Uvm)


def test_a_driver_that_does_not_start_and_has_no_names(workshop):
    fake = workshop.fake("-DFAKE_NO_OPTIONAL")
    fake.fail("cuInit", 100)
    answer = load(workshop.shim(), str(fake.path))
    assert isinstance(answer, Unavailable)
    assert "unnamed error (100)" in answer.reason


def test_calls_before_the_driver_is_started_are_rejected(workshop):
    shim = ctypes.CDLL(str(workshop.shim()))
    pointer, text = ctypes.c_uint64(), ctypes.c_char_p
    shim.gt_slot0_alloc.restype, shim.gt_last_function.restype, shim.gt_error_name.restype = ctypes.c_void_p, text, text
    assert shim.gt_managed_alloc(0, ctypes.c_size_t(4096), ctypes.byref(pointer)) == -1
    assert shim.gt_slot0_alloc(ctypes.c_size_t(4096), 0, None) is None
    assert shim.gt_has_function(b"cuMemAdvise") == -1
    assert shim.gt_error_name(2) == b""
    assert shim.gt_last_function() == b""


def test_a_device_whose_context_cannot_be_opened_leaves_the_slot_off(bench):
    bench.fake.fail("cuDevicePrimaryCtxRetain", 2)
    with pytest.raises(UnifiedMemoryError, match="cuDevicePrimaryCtxRetain"):
        bench.uvm.configure_slot(0, SlotPolicy(0, GIB))
    assert bench.slot().alloc(MIB) is None
    bench.uvm.configure_slot(0, SlotPolicy(0, GIB))
    assert bench.slot().alloc(MIB) is not None


def in_child(act):
    """Fork. The child returns the result of `act` or the name of its exception, and exits without cleanup."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = str(act())
        except BaseException as error:  # noqa: BLE001 - the parent judges it
            answer = type(error).__name__
        os.write(writer, answer.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        answer = stream.read()
    _, status = os.waitpid(child, 0)
    return answer if status == 0 else f"child ended with status {status}: {answer}"


class TestFork:
    """The fake driver aborts if it is called in a child process, so such a call is detected."""

    @pytest.mark.parametrize(
        "call",
        [
            lambda uvm, span: uvm.allocate(MIB, 0),
            lambda uvm, span: uvm.free(span),
            lambda uvm, span: uvm.advise(span, Advice.SET_PREFERRED_LOCATION, HOST),
            lambda uvm, span: uvm.prefetch(span, 0, 0),
            lambda uvm, span: uvm.range_state(span),
            lambda uvm, span: uvm.is_managed(span.pointer, 0),
            lambda uvm, span: uvm.allocation_of(span.pointer, 0),
            lambda uvm, span: uvm.memory_info(0),
            lambda uvm, span: uvm.driver_version(),
            lambda uvm, span: uvm.total_stats(),
            lambda uvm, span: uvm.slot_stats(0),
            lambda uvm, span: uvm.set_managed_cap(GIB),
            lambda uvm, span: uvm.configure_slot(0, SlotPolicy(0, GIB)),
            lambda uvm, span: load(uvm.path),
        ],
    )
    def test_every_call_in_the_child_is_rejected(self, bench, call):
        span = bench.uvm.allocate(MIB, device=0)
        assert in_child(lambda: call(bench.uvm, span)) == UsedAfterForkError.__name__

    def test_a_slot_gives_the_child_nothing_and_frees_nothing(self, bench):
        bench.uvm.configure_slot(0, SlotPolicy(0, GIB))
        pointer = bench.slot().alloc(MIB)
        assert in_child(lambda: (bench.slot().alloc(MIB), bench.slot().free(pointer, MIB))) == "(None, None)"
        assert bench.uvm.slot_stats(0).live_bytes == MIB

    def test_the_parent_goes_on_undisturbed(self, bench):
        in_child(bench.uvm.total_stats)
        bench.uvm.free(bench.uvm.allocate(MIB, device=0))
        assert bench.uvm.total_stats().live_bytes == 0

    def test_a_grandchild_is_rejected_too(self, bench):
        assert in_child(lambda: in_child(bench.uvm.total_stats)) == UsedAfterForkError.__name__

    def test_a_child_of_a_parent_that_never_reached_the_driver_may_start_it(self, workshop, tmp_path):
        shim, fake = workshop.shim(), workshop.fake()
        assert isinstance(load(shim, str(tmp_path / "missing.so")), Unavailable)
        assert in_child(lambda: type(load(shim, str(fake.path))).__name__) == "Uvm"

    def test_the_message_says_what_to_do_instead(self):
        assert "spawn" in str(UsedAfterForkError())


def test_a_process_that_ends_with_live_managed_memory_ends_cleanly(workshop):
    fake, shim = workshop.fake(), workshop.shim()
    code = (
        "import sys; from pathlib import Path; from gracetune.memory.native import load\n"
        f"uvm = load(Path({str(shim)!r}), {str(fake.path)!r}); uvm.allocate(1 << 20, 0)\n"
        "assert 'torch' not in sys.modules; print('ok')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "ok", "")
