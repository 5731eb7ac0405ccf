from __future__ import annotations

from pathlib import Path

import pytest

from gracetune.hardware.cgroup import locate, parse_membership, parse_mounts, read_cgroup
from gracetune.hardware.files import HostFiles
from gracetune.hardware.machine import Cgroup
from gracetune.units import GIB

V2 = "29 24 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "35 31 0:32 {root} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"


def tree(root: Path, membership: str, mounts: str, limits: dict[str, str]) -> HostFiles:
    texts = {"proc/self/cgroup": membership, "proc/self/mountinfo": mounts}
    for path, text in (texts | {f"sys/fs/cgroup/{name}": value for name, value in limits.items()}).items():
        mount = root / path
        mount.parent.mkdir(parents=True, exist_ok=True)
        mount.write_text(text, encoding="utf-8")
    return HostFiles(root)


def test_version_2_takes_the_tightest_limit_on_the_path(tmp_path: Path) -> None:
    files = tree(
        tmp_path,
        "0::/a/b/c\n",
        V2,
        {
            "a/b/c/memory.max": "max\n",
            "a/b/c/memory.current": f"{1 * GIB}\n",
            "a/b/memory.max": f"{8 * GIB}\n",
            "a/b/memory.current": f"{5 * GIB}\n",
            "a/b/memory.stat": f"anon 1\ninactive_file {2 * GIB}\n",
            "a/b/memory.high": f"{6 * GIB}\n",
            "a/memory.max": f"{32 * GIB}\n",
            "a/memory.current": f"{31 * GIB}\n",
        },
    )
    # The limit is b's; what is left is a's, which is closer to full, and has no page cache to give back.
    expected = Cgroup(version=2, limit=8 * GIB, throttle=6 * GIB, current=5 * GIB, available=1 * GIB)
    assert read_cgroup(files) == expected


def test_reclaimable_page_cache_counts_as_free(tmp_path: Path) -> None:
    limits = {
        "memory.max": f"{8 * GIB}",
        "memory.current": f"{7 * GIB}",
        "memory.stat": f"inactive_file {9 * GIB}\n",
    }
    found = read_cgroup(tree(tmp_path, "0::/\n", V2, limits))
    assert found is not None
    assert found.available == 8 * GIB


def test_without_any_limit(tmp_path: Path) -> None:
    found = read_cgroup(tree(tmp_path, "0::/\n", V2, {}))
    assert found == Cgroup(version=2)


def test_version_1_says_unlimited_with_a_huge_number(tmp_path: Path) -> None:
    limits = {"memory/x/memory.limit_in_bytes": "9223372036854771712\n", "memory/x/memory.usage_in_bytes": "77\n"}
    files = tree(tmp_path, "4:memory:/x\n0::/\n", V1.format(root="/") + V2, limits)
    assert read_cgroup(files) == Cgroup(version=1, current=77)


def test_a_container_that_mounts_a_branch_finds_its_files(tmp_path: Path) -> None:
    limits = {
        "memory/memory.limit_in_bytes": f"{4 * GIB}\n",
        "memory/memory.usage_in_bytes": f"{1 * GIB}\n",
        "memory/memory.stat": f"inactive_file 5\ntotal_inactive_file {GIB // 2}\n",
    }
    files = tree(tmp_path, "12:memory,hugetlb:/docker/abc\n", V1.format(root="/docker/abc"), limits)
    found = read_cgroup(files)
    assert found is not None
    assert (found.limit, found.available) == (4 * GIB, 4 * GIB - GIB // 2)


def test_a_group_outside_our_namespace_falls_back_to_the_mounted_root(tmp_path: Path) -> None:
    files = tree(tmp_path, "0::/../../elsewhere\n", V2, {"memory.max": f"{GIB}\n", "memory.current": "0\n"})
    found = read_cgroup(files)
    assert found is not None
    assert found.limit == GIB


@pytest.mark.parametrize(
    ("membership", "mounts"), [("", V2), ("0::/\n", ""), ("nonsense", "nonsense"), ("3:cpu:/\n", V2)]
)
def test_what_cannot_be_found_is_unknown(tmp_path: Path, membership: str, mounts: str) -> None:
    assert read_cgroup(tree(tmp_path, membership, mounts, {})) is None


def test_broken_numbers_are_no_limit_and_no_error(tmp_path: Path) -> None:
    found = read_cgroup(tree(tmp_path, "0::/\n", V2, {"memory.max": "lots", "memory.current": "-"}))
    assert found == Cgroup(version=2)


def test_mount_points_with_blanks(tmp_path: Path) -> None:
    assert parse_mounts("1 0 0:1 / /my\\040groups rw - cgroup2 none rw\n") == {2: ("/my groups", "/")}
    assert parse_membership("0::/a:b\n") == {2: "/a:b"}


def test_this_machine_is_read_the_way_the_kernel_tells_it() -> None:
    location = locate(HostFiles(Path("/")))
    if location is None:
        pytest.skip("no cgroup file system is mounted here")
    assert any(Path(folder).is_dir() for folder in location.folders())
