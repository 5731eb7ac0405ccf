"""Lost ranks: real processes with a real store are killed, stopped, or fail."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from gracetune.errors import MachineError
from gracetune.train import rank_monitor as module
from gracetune.train.control import InterruptedBySignal
from gracetune.train.rank_monitor import LostRankError, RankMonitor
from gracetune.train.resume import _settings_for, _without_resume
from unit.cache.processes import Child

RESET = RuntimeError("Connection reset by peer")
Report = Callable[[str], None]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"BEAT_S": 0.05, "SILENT_BEATS": 20, "GRACE_S": 0.3, "SETTLED_S": 1.0}.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(module, "REPORT_EVERY_S", {True: 0.2, False: 0.4})


class Ranks:
    """Processes that share a store served by this process, as by a launcher."""

    def __init__(self, *work: Callable[[RankMonitor, Report], None]) -> None:
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=60))
        self.children = [Child(partial(self._run, rank, len(work), one)) for rank, one in enumerate(work)]
        for child in self.children:
            assert child.wait_for_word()

    def _run(self, rank: int, count: int, work: Callable[[RankMonitor, Report], None], report: Report) -> None:
        store = dist.TCPStore("127.0.0.1", self.store.port, is_master=False, timeout=timedelta(seconds=60))
        peers = RankMonitor(store, rank, count, store_in_rank_0=False)
        peers.advice = lambda: "resume with: the same command"
        store.wait([f"peer/{one}/beat" for one in range(count)])
        peers.start()
        report("ready")
        store.wait(["go"])
        work(peers, report)

    def go(self) -> None:
        self.store.set("go", "1")

    def signal(self, rank: int, number: int) -> None:
        os.kill(self.children[rank].pid, number)

    def lines(self, rank: int) -> list[str]:
        return self.children[rank].join()[1:]


def explaining(error: BaseException) -> Callable[[RankMonitor, Report], None]:
    def work(peers: RankMonitor, report: Report) -> None:
        found = peers.explain(error)
        assert peers.explain(found) is found, "on its way through another level"
        report(type(found).__name__)
        report(str(found))

    return work


def sleeping(peers: RankMonitor, report: Report) -> None:
    time.sleep(60)


def test_a_killed_rank_is_named_by_all_and_one_rank_says_how_to_resume() -> None:
    ranks = Ranks(explaining(RESET), sleeping, explaining(RESET))
    ranks.signal(1, signal.SIGKILL)
    ranks.go()
    first, other = ranks.lines(0), ranks.lines(2)
    assert first[0] == other[0] == "LostRankError"
    assert first[1].startswith(f"rank 1 of 3 is lost: its process (pid {ranks.children[1].pid} on ")
    assert first[1].endswith("\nresume with: the same command")
    assert other[1] == first[1].partition("\n")[0]


def test_a_rank_that_stops_with_an_error_says_why_and_the_others_repeat_it() -> None:
    ranks = Ranks(explaining(RESET), explaining(MachineError("no room; make some")))
    ranks.go()
    assert ranks.lines(1) == ["MachineError", "no room; make some"]
    kind, text = ranks.lines(0)
    assert kind == "LostRankError"
    assert text == "rank 1 of 2 is lost: it stopped: no room; make some\nresume with: the same command"


def late(peers: RankMonitor, report: Report, *, seconds: float = 0.2) -> None:
    time.sleep(seconds)
    explaining(RESET)(peers, report)


def test_a_third_rank_repeats_the_reason_and_not_that_a_rank_ended_without_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "GRACE_S", 30.0)  # the late ranks explain it themselves
    stopping = explaining(MachineError("no room; make some"))
    ranks = Ranks(partial(late, seconds=1.0), partial(late, seconds=0.3), stopping)
    ranks.go()
    reason = "rank 2 of 3 is lost: it stopped: no room; make some"
    assert ranks.lines(1)[1] == reason
    assert ranks.lines(0)[1] == f"{reason}\nresume with: the same command"


@pytest.mark.parametrize(
    ("lost", "expected"), [(2, "rank 2 of 3 is lost: its process"), (0, "rank 1 of 3 is lost: it stopped: found it")]
)
def test_a_rank_that_others_call_lost_but_that_lives_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, lost: int, expected: str
) -> None:
    monkeypatch.setattr(module, "GRACE_S", 30.0)
    finder = explaining(LostRankError("found it", [lost], reports=False))
    ranks = Ranks(partial(late, seconds=0.5), finder, sleeping)
    ranks.go()
    text = ranks.lines(0)[1]
    assert text.startswith(expected)
    assert "ended without a message" not in text
    ranks.children[2].kill()


def test_a_rank_that_was_interrupted_interrupts_the_others() -> None:
    ranks = Ranks(late, explaining(InterruptedBySignal("SIGTERM")))
    ranks.go()
    assert ranks.lines(1) == ["InterruptedBySignal", "SIGTERM"]
    assert ranks.lines(0) == ["InterruptedBySignal", "SIGTERM (rank 1)"]


def test_an_error_while_all_peers_live_is_raised_as_it_is() -> None:
    own = ValueError("a mistake of ours")
    ranks = Ranks(explaining(own), sleeping)
    ranks.go()
    assert ranks.lines(0) == ["ValueError", "a mistake of ours"]
    ranks.children[1].kill()


def test_a_stopped_rank_ends_those_that_wait_for_it(tmp_path: Path) -> None:
    """The main thread is in a collective that does not return. The wait is reported before the process ends."""

    def stuck(peers: RankMonitor, report: Report) -> None:
        os.dup2(os.open(tmp_path / "stderr", os.O_WRONLY | os.O_CREAT), 2)
        sys.stderr = os.fdopen(2, "w")
        peers.on_forced_end = lambda error: report(f"logged: rank {error.lost}")
        with peers.collective():
            time.sleep(60)

    ranks = Ranks(stuck, sleeping)
    ranks.signal(1, signal.SIGSTOP)
    ranks.go()
    waiting = ranks.children[0]
    while waiting.wait_for_word():
        pass
    _, status = os.waitpid(waiting.pid, 0)
    assert os.waitstatus_to_exitcode(status) == 1
    assert waiting.lines == ["ready", "logged: rank (1,)"]
    last_report = (tmp_path / "stderr").read_text()
    assert "rank 0 has waited" in last_report
    assert "for rank 1, which" in last_report
    assert "error rank 1 of 2 is lost: " in last_report
    assert "does not answer" in last_report
    assert last_report.endswith("resume with: the same command\n")
    ranks.children[1].kill()


def test_the_process_that_holds_the_store_is_named_when_it_is_killed() -> None:
    """Without a launcher, rank 0 serves the store."""
    reading, writing = os.pipe()

    def first(report: Report) -> None:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(writing, f"{store.port}\n".encode())
        RankMonitor(store, 0, 2, store_in_rank_0=True)
        time.sleep(60)

    def second(report: Report) -> None:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
        peers = RankMonitor(store, 1, 2, store_in_rank_0=True)
        store.wait(["peer/0/beat"])
        peers.start()
        os.kill(host.pid, signal.SIGKILL)
        found = peers.explain(RESET)
        assert isinstance(found, LostRankError)
        assert (found.lost, found.reports) == ((0,), True)
        report(str(found))

    host = Child(first)
    port = int(os.read(reading, 100))
    (last_report,) = Child(second).join()
    assert last_report.startswith(f"rank 0 of 2 is lost: its process (pid {host.pid} on ")
    os.waitpid(host.pid, 0)


@given(effective=st.integers(1, 5000), batch_size=st.integers(1, 64), world_size=st.integers(1, 64))
def test_settings_that_keep_an_effective_batch(effective: int, batch_size: int, world_size: int) -> None:
    text = _settings_for(effective, batch_size, world_size)
    micro, accumulation = (int(word.partition("=")[2].rstrip(",")) for word in text.split() if "=" in word)
    kept = micro * accumulation * world_size
    assert 1 <= micro <= batch_size
    assert (kept == effective) == ("nearest" not in text)
    assert abs(kept - effective) <= world_size if effective >= world_size else kept == world_size


def test_the_resume_command_names_the_latest_checkpoint() -> None:
    words = ["train", "c.yaml", "--resume", "none", "--json", "--resume=none", "--max-steps", "3"]
    assert _without_resume(words) == ["train", "c.yaml", "--json", "--max-steps", "3"]
