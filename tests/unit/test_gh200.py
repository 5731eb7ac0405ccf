"""The guides' names on a machine without a GPU: every answer is honest and says why."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from gracetune import gh200
from gracetune.memory.errors import UnifiedMemoryError

HINTS = "SIMPLETUNER_GH200_ENABLE_UVM_HINTS"


@pytest.fixture(autouse=True)
def own_switch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(HINTS, raising=False)
    yield
    gh200.set_uvm_hint_override(None)


def test_importing_it_imports_no_torch() -> None:
    code = "import sys; from gracetune import gh200; print('torch' in sys.modules, bool(gh200.gh200_uvm_enabled()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_off_unless_asked_for() -> None:
    answer = gh200.gh200_uvm_enabled()
    assert not answer
    assert HINTS in answer.reason


def test_the_override_beats_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HINTS, "1")
    gh200.set_uvm_hint_override(False)
    assert "set_uvm_hint_override(False)" in gh200.gh200_uvm_enabled().reason
    gh200.set_uvm_hint_override(None)
    assert f"{HINTS}=1" in gh200.gh200_uvm_enabled().reason
    with pytest.raises(TypeError):
        gh200.set_uvm_hint_override("yes")  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the answers of a machine without a GPU")
def test_wanted_but_not_to_be_had_says_why() -> None:
    gh200.set_uvm_hint_override(True)
    tensor = torch.zeros(4)
    for answer in (
        gh200.gh200_uvm_enabled(),
        gh200.prefer_cpu_residency(tensor),
        gh200.prefer_gpu_residency(tensor),
        gh200.prefetch_to_device(tensor),
        gh200.optimize_batch_for_gh200({"latents": tensor}),
    ):
        assert not answer
        assert (answer.applied, answer.bytes) == (False, 0)
        assert "not available" in answer.reason
    with pytest.raises(UnifiedMemoryError, match="not available"):
        gh200.managed_empty((4,), torch.float32)


def test_statistics_have_the_promised_names() -> None:
    stats = gh200.memory_stats()
    assert {name for name in stats if name.startswith("uvm.")} == {
        "uvm.stage", "uvm.transitions", "uvm.light_reclamations", "uvm.hard_reclamations", "uvm.arena_reserved_bytes",
        "uvm.arena_active_bytes", "uvm.arena_peak_bytes", "uvm.refused", "uvm.prefetched_bytes", "uvm.prefetch_wait_ms",
        "uvm.hinted_bytes", "uvm.hints_refused",
    }  # fmt: skip
    assert stats["uvm.stage"] == 1
