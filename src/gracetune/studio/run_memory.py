"""The memory page of a run: what is used and by whom, what was planned, what moved and why.

Uses come from the run's `MemorySampled` events, the forecast from `Planned`. What only this machine knows now (page
cache, other processes) is added while the run is active here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from gracetune.studio.log_lines import Fields, items, mapping, number, numbers, text, whole
from gracetune.studio.machine_memory import MachineMemory
from gracetune.studio.run_list import RunEntry
from gracetune.units import GIB, format_bytes

_SAMPLES = 1000
_LABELS = {"device": "GPU memory", "host": "main memory", "arena": "overflow arena", "pool": "shared memory"}
_MOVED = ("uvm.prefetched_bytes", "uvm.migrated_to_device_bytes", "uvm.migrated_to_host_bytes")
_WAITED = ("uvm.prefetch_wait_ms", "cache.wait_ms")
_NO_GPU = "this run has no GPU"
_ENDED = "known only while the run is active on this machine"


def memory_page(run: RunEntry, machine: MachineMemory, *, process: int | None) -> dict[str, Any]:
    """The page's data. `process` is the run's process on this machine; None if it has ended."""
    run.log.update()
    log = run.log
    samples = log.events("MemorySampled", _SAMPLES)
    last = log.last("MemorySampled")
    plan, start = log.last("Planned"), log.last("RunStarted")
    one_pool = any(mapping(one).get("name") == "pool" for one in items(plan.get("tiers")))
    used = _used(last, one_pool=one_pool)
    names = list(dict.fromkeys([*used, *_planned_names(plan)]))
    has_gpu = any(name in ("device", "pool") for name in names)
    config = mapping(mapping(start.get("config")).get("memory"))
    return {
        "tiers": [_tier(name, used, last, plan, config, machine, process) for name in names],
        "one_pool": one_pool,
        "step": whole(last.get("step")),
        "time_s": number(last.get("time_s")),
        "stage": number(mapping(last.get("counters")).get("uvm.stage")),
        "stages": _changes(log.events("MemoryStageChanged")),
        "reclamations": _changes(log.events("MemoryReclaimed")),
        "arena": _changes(log.events("OverflowArenaChanged")),
        "look_ahead": _changes(log.events("LookAheadChanged")),
        "history": _history(samples),
        "link": {"gb_per_s": _traffic(samples), "wait_ms": _waits(samples)},
        "next": _next_moves(last, log.last("LookAheadChanged"), used, has_gpu=has_gpu),
        "plan": {"verdict": text(plan.get("verdict"), 40), "summary": text(plan.get("summary")),
                 "mismatch": text(plan.get("mismatch"))} if plan else None,
        "unavailable": _unavailable(last, plan, samples, has_gpu=has_gpu, is_active=process is not None),
    }  # fmt: skip


def _used(last: Fields, *, one_pool: bool) -> dict[str, dict[str, float]]:
    """Tier -> owner -> bytes. With one memory for CPU and GPU, both are parts of the pool."""
    used = {str(tier): numbers(owners) for tier, owners in mapping(last.get("used_bytes")).items()}
    if not one_pool:
        return used
    pool = dict(used.pop("device", {}))
    pool |= {f"{owner} (CPU)" if owner in pool else owner: size for owner, size in used.pop("host", {}).items()}
    return {"pool": pool, **used}


def _planned_names(plan: Fields) -> list[str]:
    tiers = [mapping(one) for one in items(plan.get("tiers"))]
    return [text(one.get("name"), 20) for one in tiers if one.get("name") != "disk"]


def _tier(
    name: str, used: Mapping[str, Mapping[str, float]], last: Fields, plan: Fields, config: Fields,
    machine: MachineMemory, process: int | None,
) -> dict[str, Any]:  # fmt: skip
    planned = next((one for one in map(mapping, items(plan.get("tiers"))) if one.get("name") == name), {})
    lines = [one for one in map(mapping, items(plan.get("lines"))) if one.get("tier") == name]
    sampled = mapping(last.get("capacity_bytes"))
    capacity = whole(sampled.get({"pool": "host"}.get(name, name))) or whole(planned.get("capacity_bytes"))
    in_main_memory, is_here = name in ("host", "pool"), process is not None
    return {
        "name": name,
        "label": text(planned.get("label"), 80) or _LABELS.get(name, name[:40]),
        "capacity_bytes": capacity,
        "budget_bytes": whole(planned.get("budget_bytes")),
        "floor_bytes": _floor(name, capacity, config),
        "used": [{"owner": owner, "bytes": int(size)} for owner, size in used.get(name, {}).items()],
        "planned": _by_role([one for one in lines if "train" in items(one.get("phases"))]),
        "planned_peak_bytes": whole(planned.get("peak_bytes")),
        "reclaimable_bytes": machine.page_cache() if in_main_memory and is_here else None,
        "free_bytes": machine.available() if in_main_memory and is_here else None,
        "others": machine.others(gpu=name == "device", but=process) if process is not None else [],
    }


def _by_role(lines: Sequence[Fields]) -> list[dict[str, Any]]:
    """The forecast by role. Measured memory has owners of the same names, so the two can be compared. Logs of earlier
    releases have no roles."""
    found: dict[str, dict[str, Any]] = {}
    for one in lines:
        name, role, why = (text(one.get(field), 80) for field in ("owner", "role", "why"))
        known = found.setdefault(role or name, {"owner": role or name, "bytes": 0, "why": ""})
        known["bytes"] += whole(one.get("bytes")) or 0
        reason = ": ".join(part for part in (name if name != known["owner"] else "", why) if part)
        known["why"] = "; ".join(part for part in (known["why"], reason) if part)
    return list(found.values())


def _floor(name: str, capacity: int | None, config: Fields) -> int | None:
    """Free memory below which something happens: the run is saved and stops, or the memory stage becomes 2."""
    if capacity is None or name == "arena":
        return None
    if name == "device":
        share, least = number(config.get("uvm_stage1_threshold")), whole(config.get("uvm_stage1_min_bytes"))
        return max(int((0.1 if share is None else share) * capacity), least or 0)
    return max(capacity // 10, min(4 * GIB, capacity // 4)) // 2  # `host_floor` of hardware/allocation.py


def _changes(events: Sequence[Fields]) -> list[Fields]:
    return [{name: value for name, value in one.items() if name not in ("v", "kind")} for one in events]


def _history(samples: Sequence[Fields]) -> dict[str, dict[str, dict[str, list[Any]]]]:
    """Tier -> owner -> curve."""
    found: dict[str, dict[str, dict[str, list[Any]]]] = {}
    for one in samples:
        for tier, owners in mapping(one.get("used_bytes")).items():
            for owner, size in numbers(owners).items():
                curve = found.setdefault(str(tier), {}).setdefault(owner, {"step": [], "value": []})
                curve["step"].append(whole(one.get("step")))
                curve["value"].append(size)
    return found


def _traffic(samples: Sequence[Fields]) -> dict[str, list[float]]:
    """GB/s moved between CPU and GPU memory, from one sample to the next."""
    times, values = [], []
    for before, after in pairwise(samples):
        moved = _increase(before, after, _MOVED)
        seconds = (number(after.get("time_s")) or 0.0) - (number(before.get("time_s")) or 0.0)
        if moved is not None and seconds > 0:
            times.append(number(after.get("time_s")) or 0.0)
            values.append(moved / seconds / 1e9)
    return {"time_s": times, "value": values}


def _waits(samples: Sequence[Fields]) -> dict[str, list[float]]:
    """Milliseconds that a step waited for data, on average from one sample to the next."""
    steps, values = [], []
    for before, after in pairwise(samples):
        for name in _WAITED:
            waited = _increase(before, after, (name,))
            count = (whole(after.get("step")) or 0) - (whole(before.get("step")) or 0)
            if waited is not None and count > 0:
                steps.append(float(whole(after.get("step")) or 0))
                values.append(waited / count)
                break
    return {"step": steps, "value": values}


def _increase(before: Fields, after: Fields, names: Sequence[str]) -> float | None:
    """How much counters grew. None if they are not counted, or began again with a new process."""
    first, second = numbers(before.get("counters")), numbers(after.get("counters"))
    found = [second[name] - first[name] for name in names if name in first and name in second]
    return sum(found) if found and min(found) >= 0 else None


def _next_moves(
    last: Fields, look_ahead: Fields, used: Mapping[str, Mapping[str, float]], *, has_gpu: bool
) -> list[dict[str, str]]:
    """What would be moved or given up next, if memory became tighter. The order is that of memory/governor.py."""
    if not last:
        return []
    counters, capacity = numbers(last.get("counters")), mapping(last.get("capacity_bytes"))
    moves = []
    ahead = whole(look_ahead.get("after"))
    if ahead is not None and ahead > 1:
        why = "the look-ahead shrinks first, because batches can be moved again at any time"
        moves.append({"what": f"one of the {ahead} batches that wait on the GPU", "why": why})
    arena = whole(capacity.get("arena"))
    if arena is not None:
        spilled = int(sum(used.get("arena", {}).values()))
        why = f"the overflow arena holds {format_bytes(spilled)} of {format_bytes(arena)}"
        moves.append({"what": "allocations that exceed GPU memory", "why": why})
    if counters.get("uvm.stage") == 2 and "uvm.hinted_bytes" in counters:
        why = "a hard reclamation demotes managed memory to main memory while the memory stage is 2"
        moves.append(
            {"what": f"caches and parked weights, {format_bytes(int(counters['uvm.hinted_bytes']))}", "why": why}
        )
    why = "below the floor of main memory a run is saved and stops, before the kernel's OOM killer would end it"
    moves.append({"what": "the run itself" if not moves and not has_gpu else "at last, the run itself", "why": why})
    return moves


def _unavailable(
    last: Fields, plan: Fields, samples: Sequence[Fields], *, has_gpu: bool, is_active: bool
) -> dict[str, str]:
    """What the page cannot show -> why."""
    found = {str(name): text(why) for name, why in mapping(last.get("unavailable")).items()}
    if not samples:
        found["use of memory"] = "the first sample is taken at the first log step"
    if not plan:
        found["forecast"] = "the run was started by a release of gracetune that did not log its plan"
    if not has_gpu:
        found["GPU memory"] = found["link traffic"] = _NO_GPU
    elif not _traffic(samples)["value"]:
        found["link traffic"] = "the unified-memory layer is not open in this run, or two samples are needed"
    if not is_active:
        found["page cache"] = found["other processes"] = _ENDED
    return found
