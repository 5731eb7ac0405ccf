"""What the five seed documents name in code, and which sections they have."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from unit.docs.targets import ROOT

FOLDER = ROOT.parent / "shared" / "seeds"
"""Beside a clone, where there is one; the documents themselves are not ours to publish."""

_FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```[ ]*$", re.M | re.S)
_SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_WHOLE = ("git ", "less ", "code ", "nvidia-smi ")
"""Commands of other programs: named as they stand."""
_LOCAL = {"BACKUP_BRANCH", "MERGE_LOG", "--abbrev-ref", "--hard", "dataset", "train"}
"""Variables and flags inside a script that is itself named, and YAML's section names."""


@cache
def texts() -> dict[str, str]:
    """Number -> text."""
    return {path.name[:3]: path.read_text(errors="replace") for path in sorted(FOLDER.glob("*.txt"))}


def names() -> set[str]:
    """Every name in code, as a row of the map has it."""
    found: set[str] = set()
    for text in texts().values():
        for language, body in _FENCE.findall(text):
            found |= _in_block(language, body)
        for span in _SPAN.findall(_FENCE.sub("", text)):
            found |= _in_span(span)
    return {name for name in found if name not in _LOCAL and not re.fullmatch(r"[\d.\s]*", name)}


def _in_span(span: str) -> set[str]:
    span = re.split(r"[^\x20-\x7e]", span)[0].strip()  # what was a sign once, and is no character any more
    if span.startswith(_WHOLE):
        return {span}
    if keys := re.findall(r'"(\w+)": ', span):
        return {*keys, *re.findall(r': "(\w+)"', span)}
    if given := re.fullmatch(r'[\w*]+: "(\w+)"', span):
        return {given[1]}
    if given := re.fullmatch(r"(\w+) ?= ?\w+", span):
        return {given[1]}
    if span.startswith(("python ", "source ", "scripts/", "accelerate ")):
        return {word for word in span.split() if word.endswith((".py", ".sh", ".yaml", ".json")) or word[:2] == "--"}
    if called := re.fullmatch(r"([\w.]+)\(\w*\)", span):
        return {called[1]}
    return {span.strip('"')}


def _in_block(language: str, body: str) -> set[str]:
    found = {
        *re.findall(r'"(\w+)"\s*:', body),
        *re.findall(r"(?<![\w-])--[a-z][\w-]*", body),
        *re.findall(r"\b[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+\b", body),
        *re.findall(r"[\w./-]+\.(?:py|sh|json|yaml|txt|wav)\b", body),
        *(name for pair in re.findall(r"^from ([\w.]+) import (\w+)", body, re.M) for name in pair),
        *re.findall(r"\b(u(?:se_uvm|vm_\w+)):", body),
    }
    if language == "yaml":
        found |= {*re.findall(r"^\s*(\w+):", body, re.M)}
    if language == "python":
        found |= {*re.findall(r"def (\w+)", body), *re.findall(r"stats\['([\w.]+)'\]", body)}
        found |= {*re.findall(r'"((?:audio_\w+)|waveform)"', body), *re.findall(r"self\.(\w+) =", body)}
    return found


def sections() -> set[str]:
    """`002 §6.1`: every numbered heading, without those that only hold others."""
    found: set[str] = set()
    for number, text in texts().items():
        numbered = re.findall(r"^#{2,3} (\d+(?:\.\d+)?)\b", _FENCE.sub("", text), re.M)
        found |= {f"{number} §{one}" for one in numbered if not any(other.startswith(f"{one}.") for other in numbered)}
    return found


def contents() -> list[str]:
    """The titles in the third document's table of contents, which is most of what there is of it."""
    return re.findall(r"^ *(?:\d+\.|-) \[([^\]]+)\]", texts()["003"], re.M)


def blocks(number: str, language: str) -> list[str]:
    """The fenced blocks of one document in one language."""
    return [body for kind, body in _FENCE.findall(texts()[number]) if kind == language]


def present() -> bool:
    return Path(FOLDER).is_dir() and len(texts()) == 5
