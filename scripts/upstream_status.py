#!/usr/bin/env python3
"""Record what upstream versions have, and write docs/upstream-status.md from all that was recorded.

    scripts/upstream_status.py                                        write the page
    scripts/upstream_status.py record simpletuner WHEEL_OR_DIR...     record versions, then write the page

A recorded file holds names, parameters and lines of the points in gracetune.integrations, and no source. After a new
point was added, every version has to be recorded again (`pip download simpletuner==X --no-deps`).
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from dataclasses import replace
from pathlib import Path

from gracetune.errors import GracetuneError
from gracetune.integrations.check import check
from gracetune.integrations.facts import UpstreamFacts, read_facts, write_facts
from gracetune.integrations.points import Upstream
from gracetune.integrations.status_page import page
from gracetune.integrations.survey import narrow_facts, survey
from gracetune.integrations.trees import open_tree
from gracetune.integrations.upstreams import UPSTREAMS

ROOT = Path(__file__).resolve().parents[1]
FACTS = ROOT / "tests" / "golden" / "upstream"
PAGE = ROOT / "docs" / "upstream-status.md"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command")
    record_parser = commands.add_parser("record", help="record versions, then write the page")
    record_parser.add_argument("upstream", choices=sorted(UPSTREAMS))
    record_parser.add_argument("source", nargs="+", type=Path)
    arguments = parser.parse_args()
    try:
        if arguments.command == "record":
            for source in arguments.source:
                print(f"recorded {record(UPSTREAMS[arguments.upstream], source).relative_to(ROOT)}")
        PAGE.write_text(page(FACTS), encoding="utf-8")
    except GracetuneError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"wrote {PAGE.relative_to(ROOT)}")
    return 0


def record(upstream: Upstream, source: Path) -> Path:
    """One version's facts; what a check says of them is what it says of the code."""
    with open_tree(upstream, source) as (tree, _):
        whole = survey(tree, upstream, origin(source))
    if whole.version is None:
        raise GracetuneError(f"{source}: nothing says which version this is")
    kept = narrow_facts(whole, upstream.points)
    file = FACTS / f"{upstream.name}-{whole.version}.json"
    FACTS.mkdir(parents=True, exist_ok=True)
    write_facts(kept, file)
    if check_results(read_facts(file), upstream) != check_results(whole, upstream):
        raise GracetuneError(f"{file}: does not say what the code says; this is a mistake in gracetune")
    return file


def check_results(facts: UpstreamFacts, upstream: Upstream) -> object:
    return check(replace(facts, unreadable={}), upstream.points).findings


def origin(source: Path) -> str:
    """What was recorded, without where it lay on the recorder's disk."""
    if not source.is_file():
        return f"folder {source.resolve().name}"
    return f"{source.name}, sha256 {hashlib.sha256(source.read_bytes()).hexdigest()}"


if __name__ == "__main__":
    sys.exit(main())
