"""Assigning files to splits by the rules of the hub's `datasets` library.

The rules apply in this order: the `configs` of the dataset card (README.md), names such as `train-00000-of-00012`,
folders named after a split, and for tables and archives a word in the file name. If none of them names a split, all
files belong to `train`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import yaml

from gracetune.config.spelling import nearest

KEYWORDS: Final[dict[str, frozenset[str]]] = {
    "train": frozenset(["train", "training"]),
    "validation": frozenset(["validation", "valid", "val", "dev"]),
    "test": frozenset(["test", "testing", "eval", "evaluation"]),
}
ALL: Final = "train"
"""The split of all files if no rule names one."""
_SHARD = re.compile(r"(?:^|.*/)(?P<split>\w+(?:\.\w+)*)-\d{5}-of-\d{5}[^/]*")
_PART = re.compile(r"(?P<name>[^\[\]+]+)(?:\[(?P<start>-?\d+%?)?:(?P<stop>-?\d+%?)?\])?")


class SplitError(ValueError):
    """The requested split does not exist. `found` and `expected` say why; setting `option` to `value` is a remedy."""

    def __init__(self, found: str, expected: str, option: str, value: str) -> None:
        self.found, self.expected, self.option, self.value = found, expected, option, value
        super().__init__(f"{found}; expected {expected}")


@dataclass(frozen=True)
class SplitPart:
    """A split and a range of its samples, such as `train[10%:20%]`."""

    name: str
    start: str | None = None
    stop: str | None = None

    @property
    def is_whole(self) -> bool:
        return self.start is None and self.stop is None

    def bounds(self, count: int) -> range:
        """The range of positions among `count` samples."""
        first = 0 if self.start is None else _position(self.start, count)
        last = count if self.stop is None else _position(self.stop, count)
        return range(first, max(first, last))


def parse_split(text: str) -> tuple[SplitPart, ...]:
    """Parse `train[:10%]+test` into its parts. Raises SplitError."""
    parts = []
    for part in text.split("+"):
        found = _PART.fullmatch(part.strip())
        if found is None:
            raise SplitError(f"`{text}`", "a split such as train, train[:100] or train+test",
                             "local_copy.split", "train")  # fmt: skip
        parts.append(SplitPart(found["name"].strip(), found["start"], found["stop"]))
    return tuple(parts)


def _position(text: str, count: int) -> int:
    """A bound such as `100`, `-5` or `10%` as a position; negative numbers count from the end."""
    number = int(text.removesuffix("%"))
    at = round(number * count / 100) if text.endswith("%") else number
    return min(count, max(0, at + count if at < 0 else at))


def splits_of(files: Iterable[str], card: Mapping[str, Any], subset: str | None) -> dict[str, list[str]]:
    """The files of each split, in order. Raises SplitError if the card does not have the subset."""
    names = sorted(files)
    listed = _by_card(names, card, subset)
    if listed is not None:
        return listed
    for rule in (_by_shard, _by_folder, _by_file_name):
        found = _grouped(names, rule)
        if found:
            return found
    return {ALL: names}


def _grouped(names: Sequence[str], rule: Callable[[str], str | None]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in names:
        split = rule(name)
        if split is not None:
            found.setdefault(split, []).append(name)
    return found


def _by_shard(name: str) -> str | None:
    found = _SHARD.fullmatch(name)
    return None if found is None else found["split"]


def _by_folder(name: str) -> str | None:
    return next((split for part in name.split("/")[:-1] if (split := _split_named(part)) is not None), None)


def _by_file_name(name: str) -> str | None:
    """For tables and archives only: an image named `test_01.jpg` does not belong to a test split."""
    file = name.rpartition("/")[2]
    holds_many = file.lower().endswith((".parquet", ".tar", ".tar.gz", ".tgz", ".zip", ".csv", ".jsonl", ".json"))
    return _split_named(file) if holds_many else None


def _split_named(text: str) -> str | None:
    words = re.split(r"[\W_\d]+", text.lower())
    return next((split for split, keywords in KEYWORDS.items() if not keywords.isdisjoint(words)), None)


# -- the dataset card -------------------------------------------------------------------------------------------------


def read_card(text: str) -> Mapping[str, Any]:
    """The YAML header between the first two `---` of a README; empty if there is none or it is invalid."""
    found = re.match(r"\s*---\s*\n(.*?)\n---\s*(\n|$)", text, re.DOTALL)
    if found is None:
        return {}
    try:
        value = yaml.safe_load(found[1])
    except yaml.YAMLError:  # cards are written by hand, and the hub accepts invalid ones
        return {}
    return value if isinstance(value, dict) else {}


def _by_card(names: Sequence[str], card: Mapping[str, Any], subset: str | None) -> dict[str, list[str]] | None:
    """The files of each split of the subset, or of the default one; None if the card lists no files."""
    configs = [one for one in card.get("configs") or [] if isinstance(one, dict) and one.get("data_files")]
    known = [str(one.get("config_name", "default")) for one in configs]
    if subset is None:
        chosen = next((one for one in configs if one.get("default") is True), None)
        chosen = chosen or next((one for one in configs if one.get("config_name", "default") == "default"), None)
        chosen = chosen or (configs[0] if len(configs) == 1 else None)
        if chosen is None and configs:
            raise SplitError(f"several subsets: {', '.join(known)}", "the name of one of them",
                             "local_copy.subset", known[0])  # fmt: skip
    else:
        chosen = next((one for one in configs if str(one.get("config_name", "default")) == subset), None)
        if chosen is None:
            listed = ", ".join(known) or "none: the dataset card names no subsets"
            near = nearest(subset, known) or next(iter(known), "null")
            raise SplitError(f"subset {subset}", f"one of {listed}", "local_copy.subset", near)
    return None if chosen is None else _data_files(names, chosen)


def _data_files(names: Sequence[str], config: Mapping[str, Any]) -> dict[str, list[str]]:
    given, folder = config["data_files"], str(config.get("data_dir") or "").strip("/")
    entries = given if isinstance(given, list) else [given]
    found: dict[str, list[str]] = {}
    for entry in entries:
        split, patterns = (entry.get("split", ALL), entry.get("path")) if isinstance(entry, dict) else (ALL, entry)
        for pattern in patterns if isinstance(patterns, list) else [patterns]:
            whole = f"{folder}/{pattern}" if folder else str(pattern)
            matching = re.compile(_pattern(whole.removeprefix("./")))
            found.setdefault(str(split), []).extend(name for name in names if matching.fullmatch(name))
    return {split: list(dict.fromkeys(files)) for split, files in found.items()}


def _pattern(glob: str) -> str:
    """A glob as a regular expression. `*` does not match `/`, but `**` does."""
    return "".join(_WILDCARDS.get(chunk, re.escape(chunk)) for chunk in re.split(r"(\*\*/|\*\*|\*|\?)", glob))


_WILDCARDS: Final = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
