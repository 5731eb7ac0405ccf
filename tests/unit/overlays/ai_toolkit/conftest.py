from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gracetune.hardware import Machine, probe
from gracetune.hostmem.sensors import HostSensor
from unit.overlays.ai_toolkit.checkouts import Checkout, checked_out, plenty_of_memory


@pytest.fixture(scope="session")
def machine() -> Machine:
    """This one, looked at once: every run would take as long again."""
    return probe()


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: Machine) -> Iterator[Checkout]:
    monkeypatch.setattr(HostSensor, "read", plenty_of_memory)
    with checked_out(tmp_path / "ai-toolkit") as found:
        monkeypatch.setattr(found.ours("caches"), "probe", lambda: machine)
        yield found


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkout]:
    """One for a whole file of tests, none of which changes anything in it."""
    with checked_out(tmp_path_factory.mktemp("shared") / "ai-toolkit") as found:
        yield found
