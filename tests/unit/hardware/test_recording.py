from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from gracetune.errors import MachineError
from gracetune.hardware.driver import DriverFacts
from gracetune.hardware.host import ProcessFacts
from gracetune.hardware.machine import Machine, Software
from gracetune.hardware.probe import probe
from gracetune.hardware.recording import load_recording, record
from unit.hardware.machines import MACHINES, NAMES, ReplayDriver, load


def _record_again(name: str, folder: Path) -> Machine:
    """Record a modelled machine as if it were this machine."""
    tree = MACHINES / name
    header = json.loads((tree / "recording.json").read_text())
    return record(
        folder,
        root=tree,
        driver=ReplayDriver(DriverFacts.model_validate_json((tree / "driver.json").read_text())),
        process=ProcessFacts(architecture=header["architecture"], page_size=header["page_size"]),
        software=Software.model_validate_json((tree / "software.json").read_text()),
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_recording_says_what_the_machine_said(tmp_path: Path, name: str) -> None:
    original = load(name)
    assert _record_again(name, tmp_path / "copy") == original
    assert load_recording(tmp_path / "copy") == original


def test_recording_this_machine(tmp_path: Path) -> None:
    recorded = record(tmp_path / "here")
    now = probe(free_memory=True)
    moving = {"mem_available", "cpu_mem_available", "numa_nodes", "cgroup"}
    assert recorded.host.model_dump(exclude=moving) == now.host.model_dump(exclude=moving)
    assert (recorded.profile, recorded.memory_mode, recorded.software) == (now.profile, now.memory_mode, now.software)
    assert [node.id for node in recorded.host.numa_nodes] == [node.id for node in now.host.numa_nodes]
    if now.host.cgroup is not None:
        assert recorded.host.cgroup is not None
        assert recorded.host.cgroup.limit == now.host.cgroup.limit
    assert recorded.driver.status == now.driver.status
    assert (tmp_path / "here").stat().st_mode & 0o777 == 0o755


SECRETS = ("alice", "node17", "SERIAL", "6f1c2", "uid-1001", "54:0b", "/home", "0x8086")


def _machine_with_secrets(root: Path) -> None:
    group = "/kubepods/pod6f1c2/uid-1001"
    for name, text in {
        "proc/meminfo": "MemTotal: 300 kB\nMemAvailable: 250 kB\nSecret: 1 kB alice\n",
        "proc/cpuinfo": "model name\t: AMD EPYC\nSerial\t\t: SERIAL\n" * 2,
        "proc/sys/kernel/osrelease": "6.8.0\n",
        "proc/self/status": "Name:\talice-train\nCpus_allowed_list:\t0-1\n",
        "proc/self/limits": "Max locked memory         8388608              8388608              bytes\n",
        "proc/self/cgroup": f"0::{group}\n",
        "proc/self/mountinfo": (
            "1 0 8:1 /home/alice /home/alice rw - ext4 /dev/disk/by-id/SERIAL rw\n"
            "2 0 0:26 / /mnt/alice/cgroup rw - cgroup2 cgroup2 rw\n"
        ),
        f"mnt/alice/cgroup{group}/memory.max": "200000\n",
        f"mnt/alice/cgroup{group}/memory.current": "100000\n",
        f"mnt/alice/cgroup{group}/memory.stat": "anon 5\ninactive_file 40000\n",
        "mnt/alice/cgroup/kubepods/memory.max": "max\n",
        "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Kernel Module  580.95.05  Release (alice@node17)\n",
        "proc/driver/nvidia/params": 'CoherentGPUMemoryMode: "driver"\nTemporaryFilePath: "/home/alice"\n',
        "run/.containerenv": 'name="alice"\n',
        "sys/bus/pci/devices/0000:54:0b.0/vendor": "0x8086\n",
        "sys/bus/pci/devices/0000:54:0b.0/class": "0x020000\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_a_recording_carries_no_names_paths_or_serial_numbers(tmp_path: Path) -> None:
    root, copy = tmp_path / "root", tmp_path / "copy"
    _machine_with_secrets(root)
    detail = "/home/alice/lib/libcuda.so.1: file too short"
    driver = ReplayDriver(DriverFacts(status="absent", detail=detail))
    facts = ProcessFacts(architecture="x86_64", page_size=4096)
    original = probe(root, driver, process=facts, software=Software(python="3.12.1"))
    recorded = record(copy, root=root, driver=driver, process=facts, software=Software(python="3.12.1"))

    everything = "\n".join(
        f"{path.relative_to(copy)}\n{path.read_text(encoding='utf-8')}" for path in copy.rglob("*") if path.is_file()
    )
    assert [secret for secret in SECRETS if secret in everything] == []
    # Nothing the Machine knows was lost, but for the loader's words about a path.
    assert recorded.driver.detail == ".../libcuda.so.1: file too short"
    assert recorded.model_copy(update={"driver": original.driver}) == original
    assert recorded.host.cgroup is not None
    assert (recorded.host.cgroup.limit, recorded.host.cgroup.available) == (200000, 140000)
    assert recorded.host.container == "podman"
    assert recorded.host.nvidia_pci_devices == 0


def test_an_occupied_folder_is_rejected_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "keep").write_text("mine")
    with pytest.raises(MachineError, match="not an empty folder"):
        record(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["keep"]
    with pytest.raises(MachineError, match="not an empty folder"):
        record(tmp_path / "keep")


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    _record_again("cpu-only", tmp_path / "new")
    assert load_recording(tmp_path / "new").profile.value == "cpu"


def test_a_place_that_cannot_be_written_is_an_error_of_ours(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match="cannot be written"):
        _record_again("cpu-only", tmp_path / "file" / "deeper")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def _broken(tmp_path: Path) -> Path:
    return Path(shutil.copytree(MACHINES / "gh200-numa", tmp_path / "broken"))


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("recording.json", None, "recording.json: No such file"),
        ("driver.json", None, "driver.json: No such file"),
        ("software.json", None, "software.json: No such file"),
        ("driver.json", "{", "driver.json: the file: Invalid JSON"),
        ("driver.json", "[]", "driver.json: the file: Input should be"),
        ("driver.json", '{"status": "fine", "detail": ""}', "driver.json: status: Input should be 'ok'"),
        (
            "driver.json",
            '{"status": "ok", "detail": "", "devices": [{"memory_total": "big"}]}',
            "devices.0.memory_total",
        ),
        ("recording.json", '{"format": 2, "kind": "recorded"}', "recording.json: format: Input should be 1"),
        ("software.json", '{"pythn": "3.12"}', "software.json: pythn: Extra inputs are not permitted"),
        ("software.json", b"\xff\xfe", "software.json: not UTF-8 text"),
    ],
)
def test_broken_recordings_say_what_is_wrong(tmp_path: Path, file: str, text: str | bytes | None, message: str) -> None:
    folder = _broken(tmp_path)
    if text is None:
        (folder / file).unlink()
    elif isinstance(text, bytes):
        (folder / file).write_bytes(text)
    else:
        (folder / file).write_text(text)
    with pytest.raises(MachineError) as raised:
        load_recording(folder)
    assert message in str(raised.value)
    assert str(raised.value).endswith("gracetune doctor --record DIR")


def test_what_is_no_recording_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="found nothing"):
        load_recording(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match="found a file"):
        load_recording(tmp_path / "file")
    folder = _broken(tmp_path)
    shutil.rmtree(folder / "proc")
    with pytest.raises(MachineError, match="folder proc is missing"):
        load_recording(folder)


def test_damaged_proc_files_become_unknown_and_no_error(tmp_path: Path) -> None:
    folder = _broken(tmp_path)
    for path in [*folder.glob("proc/**/*"), *folder.glob("sys/**/*")]:
        if path.is_file():
            path.write_bytes(b"\xff\x00 garbage \n")
    machine = load_recording(folder)
    assert machine.host.mem_total is None
    assert machine.profile.value == "superchip"


@pytest.mark.parametrize("name", ["x" * 300, "~nosuchuser/x", "nul\0byte"])
def test_paths_that_cannot_be_looked_at_are_errors_of_ours(name: str) -> None:
    with pytest.raises(MachineError, match="expected a recording"):
        load_recording(Path(name))
    with pytest.raises(MachineError, match="--record NEW_DIR"):
        record(Path(name))
