from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gracetune.hardware import cgroup, files, host, software
from gracetune.hardware.files import HostFiles
from gracetune.hardware.host import ProcessFacts, read_host

PARSERS: list[Callable[[str], object]] = [
    files.parse_integer,
    files.parse_fields,
    files.parse_colon_lines,
    host.parse_meminfo,
    host.parse_cpu_model,
    host.parse_allowed_cpus,
    host.count_cpus,
    host.parse_memlock,
    host.parse_bracketed,
    host.parse_nvidia_version,
    host.parse_quoted,
    host.parse_word,
    host.parse_hexadecimal,
    host.parse_link_speed,
    host.parse_link_width,
    cgroup.parse_membership,
    cgroup.parse_mounts,
    software.parse_torch_version,
    software.release_numbers,
    lambda text: software.parse_minimums([text]),
]

# Pieces of the real formats, so that random text gets past the first character of a parser.
_PARTS = st.sampled_from(
    [
        *("MemTotal:", " 12 kB", "Node 0 ", "0-3,", "CPU part\t: ", "0xd4f", "Max locked memory ", "[always]", "\n"),
        *("0::/", "a:memory:/b", " - ", "cgroup2 ", '"driver"', "NVRM version: x  5", "32.0 GT/s", "9" * 5000),
        *("cuda = ", "'13.0'", ">="),
    ]
)
_TEXT = st.one_of(st.text(), st.lists(st.one_of(_PARTS, st.text(max_size=4)), max_size=12).map("".join))


@pytest.mark.parametrize("parser", PARSERS)
@given(text=_TEXT)
def test_no_text_makes_a_parser_raise(parser: Callable[[str], object], text: str) -> None:
    parser(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0-71", 72), ("0", 1), ("0-3,8,10-11\n", 7), ("", None), ("0-", None), ("a", None), ("5-2", 0), ("٣", None)],
)
def test_cpu_lists(text: str, expected: int | None) -> None:
    assert host.count_cpus(text) == expected


def test_a_huge_cpu_list_is_counted_and_not_built() -> None:
    assert host.count_cpus("0-999999999") == 10**9


def test_meminfo_is_in_bytes_and_understands_node_files() -> None:
    text = "MemTotal:       24684100 kB\nHugePages_Total:       3\nActive(anon):     8 kB\nbroken\nX: -1 kB\n"
    assert host.parse_meminfo(text) == {"MemTotal": 24684100 * 1024, "HugePages_Total": 3, "Active(anon)": 8192}
    assert host.parse_meminfo("Node 12 MemFree:      7 kB\n") == {"MemFree": 7168}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model name\t: AMD EPYC\nmodel name\t: AMD EPYC\n", "AMD EPYC"),
        ("CPU implementer\t: 0x41\nCPU part\t: 0xd4f\n" * 72, "Neoverse-V2"),
        (
            "CPU implementer\t: 0x41\nCPU part\t: 0xd85\nCPU implementer\t: 0x41\nCPU part\t: 0xd87\n",
            "Cortex-X925 + Cortex-A725",
        ),
        ("CPU implementer\t: 0x46\nCPU part\t: 0x001\n", "Arm core 0x46:0x001"),
        ("model name\t:\nother: 1\n", None),
        ("", None),
    ],
)
def test_cpu_models(text: str, expected: str | None) -> None:
    assert host.parse_cpu_model(text) == expected


@pytest.mark.parametrize(
    ("soft", "expected"), [("8388608", 8388608), ("unlimited", "unlimited"), ("many", None), ("-1", None)]
)
def test_memlock(soft: str, expected: object) -> None:
    assert host.parse_memlock(f"Max locked memory         {soft:<20} unlimited            bytes\n") == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  580.65.06  Release Build  (x@y)\n", "580.65.06"),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54  Tue Jun\n", "535.54"),
        ("NVRM version: none\n", None),
        ("GCC version: 13.3.0\n", None),
    ],
)
def test_nvidia_version(text: str, expected: str | None) -> None:
    assert host.parse_nvidia_version(text) == expected


def test_small_formats() -> None:
    assert host.parse_bracketed("always [madvise] never\n") == "madvise"
    assert host.parse_bracketed("always madvise never\n") is None
    assert host.parse_quoted('"driver"') == "driver"
    assert host.parse_quoted('""') == ""
    assert host.parse_quoted(None) is None
    assert host.parse_hexadecimal("0x10de\n") == 0x10DE
    assert host.parse_link_speed("32.0 GT/s PCIe\n") == 32.0
    assert host.parse_link_speed("Unknown\n") is None
    assert host.parse_link_width("16\n") == 16
    assert host.parse_link_width("255\n") is None
    assert host.parse_link_width("0\n") is None
    assert files.parse_integer(" 12\n") == 12
    assert files.parse_integer("max") is None
    assert files.parse_integer("1" * 20) is None


def _tree(root: Path, texts: dict[str, str]) -> HostFiles:
    for path, text in texts.items():
        place = root / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, encoding="utf-8")
    return HostFiles(root)


def test_an_empty_machine_is_unknown_throughout(tmp_path: Path) -> None:
    found = read_host(HostFiles(tmp_path), ProcessFacts())
    assert {value for _, value in found if value != ()} == {None}
    assert found.headroom is None


def test_a_file_that_is_a_folder_or_binary_is_unknown(tmp_path: Path) -> None:
    (tmp_path / "proc/meminfo").mkdir(parents=True)
    (tmp_path / "proc/cpuinfo").write_bytes(b"\xff\xfe\x00model name\t: \xff\n")
    found = read_host(HostFiles(tmp_path), ProcessFacts())
    assert found.mem_total is None


def test_reading_never_leaves_the_root(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("found")
    inside = _tree(tmp_path / "tree", {"/proc/self/cgroup": "0::/\n"})
    assert inside.read("/../secret") is None
    assert inside.read("/proc/\0") is None


def test_nvidia_devices_are_counted_by_vendor_and_class(tmp_path: Path) -> None:
    devices = {"a": ("0x10de", "0x030200"), "b": ("0x10de", "0x040300"), "c": ("0x8086", "0x030000")}
    texts = {
        f"{host.PCI_DEVICES}/{name}/{file}": value
        for name, pair in devices.items()
        for file, value in zip(("vendor", "class"), pair, strict=True)
    }
    assert host.count_nvidia_devices(_tree(tmp_path, texts)) == 1
    assert host.count_nvidia_devices(HostFiles(tmp_path / "nowhere")) is None


def test_numa_nodes_are_in_numerical_order_and_other_entries_ignored(tmp_path: Path) -> None:
    texts = {f"{host.NODES}/node{n}/cpulist": "0-1\n" if n == 0 else "\n" for n in (10, 2, 0)}
    tree = _tree(tmp_path, {**texts, f"{host.NODES}/nodex/cpulist": "", f"{host.NODES}/online": "0,2,10"})
    assert [(node.id, node.cpu_count) for node in host.read_numa_nodes(tree)] == [(0, 2), (2, 0), (10, 0)]


@pytest.mark.parametrize(("marker", "kind"), [("/.dockerenv", "docker"), ("/run/.containerenv", "podman")])
def test_container_markers(tmp_path: Path, marker: str, kind: str) -> None:
    assert read_host(_tree(tmp_path, {marker: ""}), ProcessFacts()).container == kind


def test_the_page_size_is_the_systems() -> None:
    import mmap

    assert ProcessFacts.of_this_process().page_size == mmap.PAGESIZE
