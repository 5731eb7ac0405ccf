"""Downloads that go wrong: broken connections, wrong content, killed processes, damaged archives, full disks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gracetune.data.copies import download as making
from gracetune.data.copies.errors import CopyError
from gracetune.data.copies.folder import CopyFolder
from gracetune.storage import transfer
from gracetune.units import MIB
from servers.hub import HubServer
from unit.data.copies.sample_sources import (
    QUICK,
    captions,
    config,
    copies,
    encoded_image,
    fetched,
    parquet,
    rows,
    shard,
    tar,
)

NAME = "owner/pets"
PETS = f"hf://datasets/{NAME}"


def folder_of(run: Any) -> CopyFolder:
    return next(iter(copies(run).wanted()))[2]


@pytest.fixture
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a small file take several requests."""
    monkeypatch.setattr(transfer, "RANGE", 4096)


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """huggingface_hub waits 1, 2, 4 … seconds between its own attempts."""
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)


@pytest.mark.usefixtures("small_ranges", "no_waiting")
def test_broken_connections_are_resumed(hub: HubServer, tmp_path: Path) -> None:
    members = shard(4) | {"noise.bin": os.urandom(40_000)}
    hub.dataset(NAME, {"0.tar": tar(members)})
    hub.faults.break_after += [100, 2000]
    hub.faults.statuses += [503]
    assert len(fetched(config(tmp_path, {"path": PETS}))["d0"]) == 4
    size = len(tar(members))
    assert hub.sent <= size + 100 + 2000 + 3 * 4096


@pytest.mark.usefixtures("small_ranges", "no_waiting")
def test_persistent_failures_are_an_error_and_keep_the_data(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tar({"a.png": encoded_image(1), "noise.bin": os.urandom(60_000)})
    hub.dataset(NAME, {"0.tar": data})
    run = config(tmp_path, {"path": PETS})
    monkeypatch.setattr(making, "REQUESTS", 1)
    hub.faults.break_after += [4096] * 5 + [10] * 100  # the first five are whole ranges
    with pytest.raises(CopyError) as failed:
        copies(run).make(retry_policy=QUICK)
    assert "cannot be reached" in str(failed.value)
    assert "the download continues where it stopped" in str(failed.value)
    folder = folder_of(run)
    assert not folder.is_complete()
    assert [*folder.data.rglob("*")] == []
    hub.faults.break_after.clear()
    before = hub.sent
    assert [*fetched(run)["d0"]] == ["unpacked/0/a.png"]
    assert hub.sent - before <= len(data) - 4 * 4096


def test_wrong_content_is_fetched_again_then_rejected(hub: HubServer, tmp_path: Path) -> None:
    hub.dataset(NAME, {"0.tar": tar(shard(2))})
    hub.faults.corrupt = 1
    assert len(fetched(config(tmp_path, {"path": PETS}))["d0"]) == 2
    assert hub.sent == 2 * len(tar(shard(2)))
    hub.faults.corrupt = 10
    with pytest.raises(CopyError) as failed:
        copies(config(tmp_path / "second", {"path": PETS})).make(retry_policy=QUICK)
    assert "content with sha256:" in str(failed.value)
    assert "as the storage says" in str(failed.value)


@pytest.mark.usefixtures("no_waiting")
def test_a_size_that_is_not_the_one_in_the_listing(hub: HubServer, tmp_path: Path) -> None:
    data = tar(shard(1))
    hub.dataset(NAME, {"0.tar": data})
    hub.faults.claimed_sizes["0.tar"] = len(data) + 50
    with pytest.raises(CopyError, match=f"{len(data):,} bytes from byte 0 on"):
        copies(config(tmp_path, {"path": PETS})).make(retry_policy=QUICK)


def test_a_file_removed_between_listing_and_download(hub: HubServer, tmp_path: Path) -> None:
    repo = hub.dataset(NAME, {"a.png": encoded_image(1), "b.png": encoded_image(2)})
    found = copies(config(tmp_path, {"path": PETS}))
    plans = found.plans()
    hub.faults.statuses += [404]
    with pytest.raises(CopyError, match=r"no data at this address|answered 404"):
        making.make_copy(plans[0], retry_policy=QUICK)
    assert repo.files


def test_credentials_go_to_the_hub_alone(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from servers.hub import TOKEN

    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.dataset(NAME, {"0.tar": tar(shard(1))}, private=True)
    assert fetched(config(tmp_path, {"path": PETS}))
    at_the_network = [request for request in hub.requests if "signature=" in request.path]
    assert at_the_network
    assert all(request.authorization is None for request in at_the_network)
    written = b"".join(path.read_bytes() for path in folder_of(config(tmp_path, {"path": PETS})).root.rglob("*.json*"))
    assert b"signature" not in written
    assert TOKEN.encode() not in written


def test_a_damaged_archive_names_the_member(hub: HubServer, tmp_path: Path) -> None:
    data = bytearray(tar(shard(3)))
    at = data.find(b"000001.png")
    data[at + 100 : at + 140] = b"\xff" * 40
    hub.dataset(NAME, {"0.tar": bytes(data), "1.tar": tar(shard(1, 9))})
    run = config(tmp_path, {"path": PETS})
    with pytest.raises(CopyError) as failed:
        copies(run).make(retry_policy=QUICK)
    stated = str(failed.value)
    assert "0.tar of hf://datasets/owner/pets: a damaged archive, at or after 000000.json" in stated
    assert "to fetch it again, remove" in stated
    assert not (folder_of(run).data / "unpacked/0").exists()
    plan, = copies(run).plans()  # fmt: skip
    assert plan.to_fetch <= len(tar(shard(1, 9)))  # 0.tar was fetched, though not unpacked


def test_members_outside_the_archive_are_left_out(hub: HubServer, tmp_path: Path) -> None:
    hub.dataset(
        NAME,
        {
            "0.tar": tar(
                {"../../evil.png": encoded_image(1), "/abs.png": encoded_image(2), "good.png": encoded_image(3)}
            )
        },
    )
    run = config(tmp_path, {"path": PETS, "corrupt_threshold": 0.9})
    assert [*fetched(run)["d0"]] == ["unpacked/0/good.png"]
    assert not [*tmp_path.rglob("evil.png"), *tmp_path.rglob("abs.png")]


def test_damaged_rows_count(hub: HubServer, tmp_path: Path) -> None:
    table = [*rows(3), {"image": {"bytes": b"no picture", "path": "x.png"}, "text": "?"},
             {"image": None, "text": "nothing"}]  # fmt: skip
    hub.dataset(NAME, {"train.parquet": parquet(table)})
    with pytest.raises(CopyError, match=r"1 of 5 samples cannot be used: 1 x an empty cell"):
        copies(config(tmp_path, {"path": PETS})).make()
    warned: list[str] = []
    found = copies(config(tmp_path, {"path": PETS, "corrupt_threshold": 0.5}))
    found.make(warn=warned.append)
    assert any("1 sample left out of the copy" in text for text in warned)
    # What only looks like an image is left to the scan, as in any folder.
    assert len(captions(found.localized())["d0"]) == 3


@pytest.mark.full
def test_a_disk_that_fills_up(hub: HubServer, tmp_path: Path) -> None:
    """A limit on file sizes is the closest a test can come to a full disk."""
    script = """
import resource, signal, sys
from pathlib import Path
from unit.data.copies.sample_sources import config, copies
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
run = config(Path(sys.argv[1]), {"path": sys.argv[2]})
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
copies(run).make()
"""
    hub.dataset(NAME, {"0.tar": tar(shard(2))})
    done = _process(script, tmp_path, hub)
    assert done.returncode == 1
    assert "File too large" in done.stderr
    assert "then start again: it continues where it stopped" in done.stderr
    assert len(fetched(config(tmp_path, {"path": PETS}))["d0"]) == 2


def test_a_file_in_the_place_of_the_folder(hub: HubServer, tmp_path: Path) -> None:
    hub.dataset(NAME, {"0.tar": tar(shard(2))})
    (tmp_path / "file").write_text("")
    with pytest.raises(CopyError) as rejected:
        fetched(config(tmp_path, {"path": PETS, "local_copy": {"folder": str(tmp_path / "file")}}))
    assert "ENOTDIR" in rejected.value.problem.found
    assert "local_copy.folder=FOLDER" in rejected.value.problem.hint


MAKE = """
import sys
from pathlib import Path
from gracetune.storage import transfer
from unit.data.copies.sample_sources import config, copies
transfer.RANGE = 65536
found = copies(config(Path(sys.argv[1]), {"path": sys.argv[2]}))
found.make(on_fetched=lambda name: lambda done, total: print(done, flush=True))
"""


def _environment(hub: HubServer, tmp_path: Path) -> dict[str, str]:
    tests = Path(__file__).parents[3]
    kept = {name: value for name, value in os.environ.items() if name not in ("HF_HUB_OFFLINE", "HF_TOKEN")}
    return {**kept, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "PYTHONPATH": str(tests)}


def _process(script: str, tmp_path: Path, hub: HubServer) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script, str(tmp_path), PETS]
    return subprocess.run(command, env=_environment(hub, tmp_path), capture_output=True, text=True, timeout=60)


@pytest.mark.full
def test_a_killed_process_leaves_no_partial_file_and_is_resumed(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noise = os.urandom(2 * MIB)
    data = tar({"a.png": encoded_image(1), "noise.bin": noise})
    hub.dataset(NAME, {"0.tar": data, "1.tar": tar(shard(2))})
    hub.faults.delay = 0.05
    command = [sys.executable, "-c", MAKE, str(tmp_path), PETS]
    with subprocess.Popen(command, env=_environment(hub, tmp_path), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.strip().isdigit() and int(line) > MIB // 2:
                break
        os.kill(process.pid, signal.SIGKILL)
    run = config(tmp_path, {"path": PETS})
    folder = folder_of(run)
    assert not folder.is_complete()
    assert not [path for path in folder.data.rglob("*") if "0.tar" in str(path) or "unpacked/0/" in str(path)]
    hub.faults.delay = 0.0
    plan, = copies(run).plans()  # fmt: skip
    assert plan.to_fetch < len(data) + len(tar(shard(2))) - MIB // 4
    before = hub.sent
    monkeypatch.setattr(transfer, "RANGE", 65536)
    reported: list[int] = []
    copies(run).make(on_fetched=lambda name: lambda done, total: reported.append(done))
    assert reported.count(plan.layout.size) == 1  # bytes received earlier count once
    assert len(fetched(run)["d0"]) == 3
    under_way = transfer.AHEAD * 65536  # what the killed process had requested may still have been sent
    assert hub.sent - before <= plan.to_fetch + under_way


@pytest.mark.full
def test_two_processes_make_one_copy(hub: HubServer, tmp_path: Path) -> None:
    data = tar({"a.png": encoded_image(1), "noise.bin": os.urandom(MIB)})
    hub.dataset(NAME, {"0.tar": data})
    hub.faults.delay = 0.02
    command = [sys.executable, "-c", MAKE, str(tmp_path), PETS]
    environment = _environment(hub, tmp_path)
    processes = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    stated = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], stated
    assert hub.sent == len(data)
    assert folder_of(config(tmp_path, {"path": PETS})).is_complete()


def test_a_modified_copy_is_repaired(hub: HubServer, tmp_path: Path) -> None:
    hub.dataset(NAME, {"a.png": encoded_image(1), "b.png": encoded_image(2)})
    run = config(tmp_path, {"path": PETS})
    fetched(run)
    folder = folder_of(run)
    (folder.data / "a.png").unlink()
    (folder.data / "b.png").write_bytes(b"cut")
    (folder.root / "parts.jsonl").open("a").write('{"part": "torn')
    plan, = copies(run).plans()  # fmt: skip
    assert [part.path for part in plan.missing] == ["a.png", "b.png"]
    assert len(fetched(run)["d0"]) == 2
    assert json.loads((folder.root / "copy.json").read_text())["complete"] is True


@pytest.mark.full
def test_a_slow_server_is_waited_for_and_shown(hub: HubServer, tmp_path: Path) -> None:
    hub.dataset(NAME, {"0.tar": tar({"a.png": encoded_image(1), "noise.bin": os.urandom(MIB)})})
    hub.faults.delay = 0.02
    shown: list[tuple[int, int]] = []
    began = time.monotonic()
    copies(config(tmp_path, {"path": PETS})).make(
        on_fetched=lambda name: lambda done, total: shown.append((done, total))
    )
    assert time.monotonic() - began > 0.2
    assert shown[-1][0] == shown[-1][1]
