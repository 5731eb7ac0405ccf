"""Generate docs/upstream-status.md from recorded facts: which upstream version has which point."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from gracetune.integrations.check import Finding, Status, UpstreamReport, check
from gracetune.integrations.facts import UpstreamFacts, read_facts
from gracetune.integrations.points import Upstream
from gracetune.integrations.upstreams import UPSTREAMS

INTRODUCTION = """\
# Upstream versions and the points our overlays need

Written by `scripts/upstream_status.py`; do not edit. It compares recorded facts (`tests/golden/upstream/`: names,
parameters and lines, no source) with the points our overlays need, as `gracetune overlay check` does with code:

<!-- run: tests/unit/cli/test_overlay_command.py -->

    gracetune overlay check simpletuner                  # what is installed here
    gracetune overlay check ai-toolkit --source DIR      # a checkout, an environment, a wheel

If a **needed** point is missing, no longer takes our calls, or moved to where no hook finds it, the overlay does not
work with that version. The other points are informative only. A complete row does not mean that the overlay was run
with that version: docs/upstream.md lists the versions it was run with.
"""

SHORT = {Status.PRESENT: "✓", Status.MOVED: "moved", Status.CHANGED: "**changed**", Status.MISSING: "**missing**"}


def page(folder: Path) -> str:
    """The whole page, from every facts file in `folder`."""
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
    """Sort key by version. Facts without a version were recorded from the newest files, so they count as newest."""
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
