"""docs/upstream-status.md: where each upstream version has what we hold on to, from the recorded facts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from gracetune.integrations.check import Finding, Status, UpstreamReport, check
from gracetune.integrations.facts import UpstreamFacts, read_facts
from gracetune.integrations.points import Upstream
from gracetune.integrations.upstreams import UPSTREAMS

INTRODUCTION = """\
# What upstream versions have of what we hold on to

Written by `scripts/upstream_status.py`; do not edit. It compares recorded facts (`tests/golden/upstream/`: names,
parameters and lines, no source) with the points our overlays need, as `gracetune overlay check` does with code:

    gracetune overlay check simpletuner                  # what is installed here
    gracetune overlay check ai-toolkit --source DIR      # a checkout, an environment, a wheel

A **needed** point that is missing, takes our calls no more, or moved to where a hook does not find it, means that the
overlay does not fit that version. The others are only worth knowing about: nothing of ours holds on to them. That
everything is there does not say that the overlay was run with a version: docs/upstream.md says with which it was.
"""

SHORT = {Status.PRESENT: "✓", Status.MOVED: "moved", Status.CHANGED: "**changed**", Status.MISSING: "**missing**"}


def page(folder: Path) -> str:
    """The whole file, from every facts file of a folder."""
    recorded = [read_facts(file) for file in sorted(folder.glob("*.json")) if _is_facts(file)]
    parts = [INTRODUCTION]
    for upstream in UPSTREAMS.values():
        facts = sorted((one for one in recorded if one.upstream == upstream.name), key=_age, reverse=True)
        if facts:
            parts.append(_section(upstream, facts))
    return "\n".join(parts)


# -- parts ------------------------------------------------------------------------------------------------------------


def _is_facts(file: Path) -> bool:
    value = json.loads(file.read_text(encoding="utf-8"))
    return isinstance(value, dict) and "facts" in value


def _age(facts: UpstreamFacts) -> tuple[int, ...]:
    """Versions in their order; what has none was read from the newest files there were."""
    if facts.version is None:
        return (1 << 30,)
    return tuple(int(part) for part in facts.version.split(".") if part.isdigit())


def _label(report: UpstreamReport) -> str:
    return report.version or "public files"


def _section(upstream: Upstream, facts: Sequence[UpstreamFacts]) -> str:
    reports = [check(one, upstream.points) for one in facts]
    lines = [f"## {upstream.title}", ""]
    lines += _table(
        ["version", "✓", "moved", "changed", "missing", "all needed there", "recorded from"],
        ([_label(one), *(str(one.count(status)) for status in Status), "yes" if one.ok else "**no**", one.origin]
         for one in reports),
    )  # fmt: skip
    newest = reports[0]
    lines += ["", f"Lines are those of {_label(newest)}.", ""]
    header = ["point", "needed", "for", *(_label(one) for one in reports), "where"]
    lines += _table(header, (_row(findings) for findings in zip(*(one.findings for one in reports), strict=True)))
    notes = [note for report in reports for note in _notes(report)]
    if notes:
        lines += ["", *notes]
    return "\n".join([*lines, ""])


def _row(findings: tuple[Finding, ...]) -> list[str]:
    newest = findings[0]
    location = newest.file or newest.point.module
    line = "" if newest.line is None else f":{newest.line}"
    return [
        f"`{newest.point.name}`",
        "yes" if newest.point.needed else "",
        newest.point.needed_for,
        *(SHORT[one.status] for one in findings),
        f"`{location}{line}`",
    ]


def _notes(report: UpstreamReport) -> Iterable[str]:
    for one in report.findings:
        if one.status is not Status.PRESENT:
            yield f"- {_label(report)}, `{one.point.location}`: {one.status}: {one.detail}"


def _table(header: list[str], rows: Iterable[list[str]]) -> list[str]:
    return [_cells(header), "|" + "---|" * len(header), *(_cells(row) for row in rows)]


def _cells(values: Iterable[str]) -> str:
    return f"| {' | '.join(value.replace('|', chr(92) + '|') for value in values)} |"
