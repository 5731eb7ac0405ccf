from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gracetune.cache.errors import CorruptEntryError, MissingEntryError
from gracetune.cache.keys import EntryOrigin, Key
from gracetune.cache.loading import CacheLoadReport, load_into, pack_index, select, unpack_index
from gracetune.cache.residence import CacheResources, CacheType, Visits, choose_residence
from gracetune.cache.resident import ResidentStore, load_resident
from gracetune.cache.store import DiskStore
from gracetune.cache.writer import Flush
from gracetune.hardware.machine import ProfileName
from gracetune.hostmem.errors import HostMemoryError
from gracetune.hostmem.sharing import LocalRanks
from gracetune.hostmem.slab import MemorySlab
from gracetune.units import MIB
from unit.cache.sample_caches import LATENT, TEXT, latent_visits, numbers, text_visits, this_machine
from unit.data.folders import made_up

COUNT = 24


def origin(number: int) -> EntryOrigin:
    return EntryOrigin("latent", f"{number:032x}", (("bucket", "[64,64]"),))


def entry(number: int) -> dict[str, torch.Tensor]:
    return {"latents": numbers(str(number), 4, 8, 8 + number % 3), "seconds": numbers(f"s{number}", 2).float()}


KEYS = [origin(number).key for number in range(COUNT)]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DiskStore]:
    with DiskStore.open(tmp_path / "cache", writable=True) as store:
        with store.writer(Flush(entries=5)) as writer:
            for number in range(COUNT):
                writer.add(origin(number), entry(number))
        yield store


def load(disk: DiskStore, kind: CacheType = "memory", *, budget: int | None = None, **visits: float) -> ResidentStore:
    """`visits`: with k3=2.0, entry 3 is visited twice and all others once."""
    wanted = {key: Visits(visits.get(f"k{number}", 1.0)) for number, key in enumerate(KEYS)}
    return load_resident(
        [disk],
        wanted,
        name="latents",
        role="latent_cache",
        kind=kind,
        resources=CacheResources(this_machine()),
        budget=budget,
    )


def entry_of(store: ResidentStore, key: Key) -> Mapping[str, torch.Tensor]:
    """Read an entry as batches do: from memory if possible, else from disk."""
    found = store.look_up(key)
    return store.read(key) if found is None else found


def assert_right(store: ResidentStore, number: int) -> None:
    found = entry_of(store, KEYS[number])
    for name, tensor in entry(number).items():
        assert torch.equal(found[name], tensor), f"{name} of entry {number}"
    assert found.keys() == entry(number).keys()


@pytest.mark.parametrize("kind", ["memory", "unified_memory", "disk"])
def test_every_entry_is_as_it_was_written(disk: DiskStore, kind: CacheType) -> None:
    with load(disk, kind) as store:
        for number in range(COUNT):
            assert_right(store, number)
        stats = store.stats
        message = store.report
    resident = kind != "disk"
    assert (stats.hits, stats.disk_reads) == ((COUNT, 0) if resident else (0, COUNT))
    assert (message.entries, message.on_disk) == ((COUNT, 0) if resident else (0, COUNT))
    assert stats.hit_rate == (1.0 if resident else 0.0)
    assert (stats.disk_seconds > 0) == (not resident)


def test_resident_entries_are_views_and_need_no_disk(disk: DiskStore) -> None:
    with load(disk) as store:
        first, again = entry_of(store, KEYS[0]), entry_of(store, KEYS[0])
        assert first["latents"].data_ptr() == again["latents"].data_ptr()
        for shard in disk.shards_folder.iterdir():
            shard.unlink()
        for number in range(COUNT):
            assert_right(store, number)
        held = entry_of(store, KEYS[1])["latents"]
    assert torch.equal(held, entry(1)["latents"]), "a view outlives the store it came from"


def test_the_coldest_stay_on_disk_and_the_report_says_how_much(disk: DiskStore) -> None:
    hot = [3, 11, 17]
    size = sum(disk.locate([KEYS[number]]).layouts[0].size for number in hot)
    whole = sum(disk.locate([key]).layouts[0].size for key in KEYS)
    with load(disk, budget=size, **{f"k{number}": 3.0 for number in hot}) as store:
        assert [number for number, key in enumerate(KEYS) if key in store] == hot
        for number in range(COUNT):
            assert_right(store, number)
        report, stats = store.report, store.stats
    assert (report.entries, report.size) == (3, size)
    assert (report.on_disk, report.on_disk_size) == (COUNT - 3, whole - size)
    assert "stay on disk: the plan allows" in "\n".join(report.lines())
    assert (stats.hits, stats.disk_reads) == (3, COUNT - 3)
    assert CacheLoadReport.from_json(json.loads(json.dumps(report.as_json()))) == report


@pytest.mark.parametrize("budget", [0, 1, 700, 5000, 10**9])
def test_a_budget_is_never_passed(disk: DiskStore, budget: int) -> None:
    visits = {key: Visits(float(number)) for number, key in enumerate(KEYS)}
    found = select([disk], visits, budget)
    assert found.size <= budget
    chosen = {key for _, plan in found.chosen for key in plan.keys}
    assert chosen.isdisjoint(found.left)
    assert chosen.union(found.left) == set(KEYS)
    coldest_taken = min((visits[key] for key in chosen), default=Visits(99.0))
    assert all(visits[key] <= coldest_taken for key in found.left)


def test_main_memory_keeps_its_reserve_whatever_the_plan_gives(disk: DiskStore) -> None:
    """A modelled machine whose reserve, a tenth of its memory, exceeds the memory of this machine."""
    current = this_machine()
    host = current.host.model_copy(update={"cpu_mem_total": 1 << 60, "cgroup": None})
    large = current.model_copy(update={"host": host})
    visits = {key: Visits(1.0) for key in KEYS}
    with load_resident(
        [disk],
        visits,
        name="latents",
        role="latent_cache",
        kind="memory",
        resources=CacheResources(large),
        budget=1 << 40,
    ) as store:
        assert (store.report.entries, store.report.on_disk) == (0, COUNT)
        assert "stay on disk: 0 B of main memory" in "\n".join(store.report.lines())
        assert_right(store, 0)


def test_memory_that_could_be_cut_off_under_a_reader_is_rejected() -> None:
    with io.FileIO(os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "r+") as file:
        file.truncate(4096)
        with pytest.raises(HostMemoryError, match="could be truncated while it is read"):
            MemorySlab.join(file, None)


def test_of_equally_hot_ones_the_less_probable_stay_on_disk(disk: DiskStore) -> None:
    visits = {key: Visits(1.0, probability=1.0 + number % 2) for number, key in enumerate(KEYS)}
    probable = [key for key in KEYS if visits[key].probability == 2.0]
    found = select([disk], visits, sum(disk.locate([key]).layouts[0].size for key in probable))
    assert {key for _, plan in found.chosen for key in plan.keys} == {*probable}


def test_damage_found_while_loading_is_named_and_never_a_wrong_tensor(disk: DiskStore) -> None:
    shard = max(disk.shards_folder.iterdir(), key=lambda path: path.stat().st_size)
    raw = bytearray(shard.read_bytes())
    raw[-100] ^= 1  # in the data of the shard's last entry
    shard.write_bytes(raw)
    with load(disk) as store:
        (bad,) = store.report.damaged
        assert bad not in store
        assert any(bad in line and "damaged" in line for line in store.report.lines())
        with pytest.raises((CorruptEntryError, MissingEntryError), match=bad):
            entry_of(store, bad)
        assert disk.find([bad]).missing == (bad,), "it can be encoded again at once"
        for number in set(range(COUNT)) - {KEYS.index(bad)}:
            assert_right(store, number)
        with disk.writer() as writer:
            writer.add(origin(KEYS.index(bad)), entry(KEYS.index(bad)))
        assert_right(store, KEYS.index(bad))


def test_a_shard_cut_off_after_it_was_opened(disk: DiskStore) -> None:
    shard = max(disk.shards_folder.iterdir(), key=lambda path: path.stat().st_size)
    os.truncate(shard, shard.stat().st_size - 600)
    with load(disk) as store:
        assert store.report.damaged
        for number in {KEYS.index(key) for key in KEYS if key in store}:
            assert_right(store, number)
        assert store.report.entries + len(store.report.damaged) == COUNT


def test_missing_entries_are_counted_and_raise_when_asked_for(disk: DiskStore) -> None:
    absent = Key("0" * 32)
    wanted = {absent: Visits(1.0), KEYS[0]: Visits(1.0)}
    resources = CacheResources(this_machine())
    with load_resident([disk], wanted, name="n", role="latent_cache", kind="memory", resources=resources) as store:
        assert store.report.missing == 1
        assert "1 entries are missing" in "\n".join(store.report.lines())
        with pytest.raises(MissingEntryError, match=absent):
            entry_of(store, absent)


def test_several_folders_make_one_store(disk: DiskStore, tmp_path: Path) -> None:
    other = EntryOrigin("latent", "another", ())
    with DiskStore.open(tmp_path / "other", writable=True) as second:
        with second.writer() as writer:
            writer.add(other, {"latents": torch.ones(3)})
        wanted = {other.key: Visits(1.0), **{key: Visits(1.0) for key in KEYS}}
        for budget in (None, 0):
            with load_resident(
                [disk, second], wanted, name="n", role="latent_cache", kind="memory",
                resources=CacheResources(this_machine()), budget=budget,
            ) as store:  # fmt: skip
                assert torch.equal(entry_of(store, other.key)["latents"], torch.ones(3))
                for number in range(COUNT):
                    assert_right(store, number)
                assert store.report.entries == (0 if budget == 0 else COUNT + 1)


@pytest.mark.parametrize(
    ("kind", "profile", "ranks", "no_managed", "memory_kind", "note"),
    [
        ("unified_memory", "superchip", 1, None, "managed_host", ""),
        ("unified_memory", "superchip", 1, "no driver", "pinned_host", "is not available: no driver"),
        ("unified_memory", "superchip", 2, None, "shared_host", "is not used on this machine: one copy for 2 ranks"),
        ("unified_memory", "discrete", 1, None, "pinned_host", "is not used on this machine"),
        ("unified_memory", "integrated", 1, None, "shared_host", "one pool"),
        ("unified_memory", "cpu", 1, None, "host", "no GPU"),
        ("memory", "superchip", 1, None, "pinned_host", ""),
        ("memory", "discrete", 1, None, "pinned_host", ""),
        ("memory", "cpu", 4, None, "shared_host", ""),
        ("disk", "superchip", 1, None, "disk", ""),
    ],
)
def test_where_a_cache_lives_and_why(
    kind: CacheType, profile: ProfileName, ranks: int, no_managed: str | None, memory_kind: str, note: str
) -> None:
    found = choose_residence(
        kind, "latent_cache", profile, size=10**9, device_bytes=10**11, local_ranks=ranks, no_managed=no_managed
    )
    assert found.kind == memory_kind
    assert found.reason
    assert note in "".join(found.notes)
    assert bool(found.notes) == bool(note), "nothing requested is silently not done"


def test_a_small_text_cache_lives_on_the_device_of_a_superchip() -> None:
    small = choose_residence("unified_memory", "text_cache", "superchip", size=MIB, device_bytes=10**11)
    large = choose_residence("unified_memory", "text_cache", "superchip", size=10**10, device_bytes=10**11)
    assert (small.kind, large.kind) == ("managed_device", "managed_host")


def test_visits_follow_repeats_flips_and_dropout() -> None:
    index = made_up(
        {"counts": [2], "repeats": 3, "cache_latents": "disk", "augmentation": {"flip_x": True}},
        {"counts": [1], "captions": {"dropout": 0.25}, "cache_latents": "disk", "probability": 2.0},
        {"counts": [1], "cache_latents": "none"},
    )
    latents = latent_visits(index, LATENT)
    assert sorted(latents.values()) == [Visits(1.0, 2.0)] + 4 * [Visits(2.0)]
    texts = text_visits(index, TEXT)
    assert sorted(one.per_epoch for one in texts.values()) == [0.25, 0.75, 1.0, 4.0, 4.0]


def test_what_only_validation_reads_is_the_coldest() -> None:
    both = made_up({"counts": [2], "cache_latents": "disk"}, {"counts": [3], "cache_latents": "disk"})
    index = replace(both, datasets=both.datasets[:1], held_out=both.datasets[1:])
    for visits in (latent_visits(index, LATENT), text_visits(index, TEXT)):
        assert sorted(one.per_epoch for one in visits.values()) == [0.0, 0.0, 0.0, 1.0, 1.0]


RANK = """
import json, sys
from pathlib import Path
from gracetune.cache.keys import Key
from gracetune.cache.resident import load_resident
from gracetune.cache.residence import CacheResources
from gracetune.cache.store import DiskStore
from gracetune.cache.residence import Visits
from gracetune.hostmem.sharing import LocalRanks
from gracetune.hardware import probe

folder, rank, key = sys.argv[1], int(sys.argv[2]), sys.argv[3]
with DiskStore.open(Path(folder), writable=False) as disk:
    visits = {key: Visits(1.0) for key in disk.keys()}
    resources = CacheResources(probe(), ranks=LocalRanks(rank, 2, key, patience_seconds=60))
    options = {"name": "latents", "role": "latent_cache", "kind": "memory"}
    with load_resident([disk], visits, resources=resources, **options) as store:
        total = sum(float(store.look_up(name)["latents"].double().sum()) for name in visits)
        print(json.dumps({"sum": total, "place": store.report.residence.kind, "entries": store.report.entries,
                          "hits": store.stats.hits}), flush=True)
        sys.stdin.readline()
        pss, rss, inside = 0, 0, False
        for line in open("/proc/self/smaps"):
            head = line.split()
            if "-" in head[0] and not head[0].endswith(":"):
                inside = "memfd:gracetune-cache" in line
            elif inside and head[0] == "Pss:":
                pss += 1024 * int(head[1])
            elif inside and head[0] == "Rss:":
                rss += 1024 * int(head[1])
        print(json.dumps({"pss": pss, "rss": rss}), flush=True)
        sys.stdin.readline()
"""


def test_two_ranks_share_one_copy(tmp_path: Path) -> None:
    size, count = 256 * 1024, 64
    folder = tmp_path / "cache"
    with DiskStore.open(folder, writable=True) as disk, disk.writer() as writer:
        for number in range(count):
            writer.add(origin(number), {"latents": torch.full((size // 4,), float(number))})
    key = f"test {os.getpid()} {tmp_path}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(folder), str(rank), key],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in (1, 0)  # the one that waits first
    ]  # fmt: skip
    try:
        read = [json.loads(_line(process)) for process in processes]
        for process in processes:
            _go_on(process)
        memory = [json.loads(_line(process)) for process in processes]
        for process in processes:
            _go_on(process)
            assert process.wait(60) == 0
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    expected = {"sum": float(sum(range(count)) * (size // 4)), "place": "shared_host", "entries": count, "hits": count}
    assert read == [expected, expected]
    whole = size * count
    assert all(one["rss"] >= whole for one in memory), "both have all of it mapped"
    assert sum(one["pss"] for one in memory) < 1.1 * whole, "and together they hold it once"


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    assert process.stderr is not None
    return process.stdout.readline() or pytest.fail(process.stderr.read())


def _go_on(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def test_a_rank_hears_why_rank_0_could_not_load(disk: DiskStore, tmp_path: Path) -> None:
    """Rank 0 runs in this process and really fails, because its store was closed."""
    from concurrent.futures import ThreadPoolExecutor

    from gracetune.cache.errors import CacheError

    key = f"refusal {os.getpid()} {tmp_path}"

    def rank(number: int) -> ResidentStore:
        resources = CacheResources(this_machine(), ranks=LocalRanks(number, 2, key, patience_seconds=30))
        visits = {"not a key at all": Visits(1.0)} if number == 0 else {}
        return load_resident([disk], visits, name="n", role="latent_cache", kind="memory", resources=resources)  # type: ignore[arg-type]

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.submit(rank, 0), pool.submit(rank, 1)
        with pytest.raises(ValueError, match="hex"):
            first.result(60)
        with pytest.raises(CacheError, match=r"rank 0(.|\n)*hex"):
            second.result(60)


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_a_cache_nobody_wants_anything_of(disk: DiskStore, kind: CacheType) -> None:
    with load_resident(
        [disk, disk], {}, name="n", role="text_cache", kind=kind, resources=CacheResources(this_machine())
    ) as store:
        assert (store.report.entries, store.report.size, store.report.on_disk, store.report.missing) == (0, 0, 0, 0)
        assert_right(store, 3)


@pytest.mark.parametrize("count", [0, 1, 7])
def test_what_rank_0_hands_over_is_what_it_has(disk: DiskStore, count: int) -> None:
    visits = {key: Visits(1.0) for key in KEYS[:count]}
    selection = select([disk], visits, None)
    slab = torch.empty(selection.size, dtype=torch.uint8)
    contents, damaged = load_into(slab, selection, None)
    report = CacheLoadReport("latents", choose_residence("memory", "latent_cache", "cpu", size=1), damaged=damaged)
    for padding in ("", "x", "yyy"):  # the length of the report decides where the columns begin
        message, stated = unpack_index(pack_index(contents, replace(report, why_on_disk=padding)))
        assert stated == replace(report, why_on_disk=padding)
        assert [message.find(key) for key in KEYS] == [contents.find(key) for key in KEYS]
        assert sum(message.find(key) is not None for key in KEYS) == count
