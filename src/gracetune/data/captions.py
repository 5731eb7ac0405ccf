"""Captions: found where the dataset says they are, then made into the variants a sample is trained with.

What is done to one caption, in this order: its tags are shuffled, the instance prompt is put in front, the trigger word
is filled in. Nothing here holds state: shuffling is a function of (seed, caption), the choice of a variant and dropout
are functions of (seed, global sample index). With `shuffle_variants: visits` a sample's visits go through its variants.

A text file that is not UTF-8 is an UnreadableMediaError: the sample is counted and left out like a damaged picture,
since a caption guessed from wrong bytes would be learnt as it is. Missing captions are no error; `Found.origin` says so
for the count.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

from gracetune.config.dataset_config import Captions, Dataset
from gracetune.config.limits import LARGEST_FILE, LONGEST_KEY
from gracetune.config.run_config import Training
from gracetune.data.backend import Backend
from gracetune.data.backends.paths import split_suffix
from gracetune.data.caption_tables import Table, load_table, why_no_captions
from gracetune.data.errors import MissingFileError, UnreadableMediaError
from gracetune.data.refs import CaptionRef
from gracetune.errors import ConfigError, Problem
from gracetune.seeded_random import below, shuffled, uniform
from gracetune.units import format_bytes

PLACEHOLDER = "[trigger]"
_A_CAPTION = f"text of at most {format_bytes(LARGEST_FILE)}"
MOST_ORDERS = 100
"""Of the tags of one caption, with `shuffle_variants: visits`: each is an embedding in the cache."""
Origin = Literal["own", "empty", "default", "folder", "missing"]


@dataclass(frozen=True)
class Found:
    """The caption or captions of one file, as written."""

    texts: tuple[str, ...]
    """At least one; empty where there is none."""
    origin: Origin
    """`own` text, an `empty` file, the dataset's `default`, a kohya `folder` name, or `missing`: train on nothing."""


@dataclass(frozen=True)
class KohyaFolder:
    """`10_sks dog`: ten visits an epoch, and a caption for files without one."""

    visits: int
    """0 leaves the folder out, as in kohya's own scripts. Our `repeats` is one less."""
    name: str


class CaptionBook:
    """Finds the captions of one dataset. A table is read once, when the book is opened."""

    def __init__(
        self, options: Captions, backend: Backend, table: Table | None = None, withheld: Mapping[str, str] | None = None
    ) -> None:
        """`withheld`: files that are there and are not read, and why: a link out of the folder, a file far too large.

        A sample is not trained without a caption that it has. Sizes are known from listing the folder: asking for each
        file again would take as long as reading it, on a server twice as long.
        """
        self.options, self._backend, self.table, self._withheld = options, backend, table, withheld or {}
        extension = options.extension
        self._spellings = tuple(dict.fromkeys([extension, extension.lower(), extension.upper()]))

    def find(self, path: str, folder_name: str | None = None) -> Found:
        """`folder_name` stands in for a missing caption, after the dataset's own default."""
        if self.options.strategy == "instanceprompt":
            return Found((self.options.instance_prompt or "",), "own")
        own = self._own(path)
        if own is not None and any(own):
            return Found(own, "own")
        if own is not None and not (self.options.default_for_empty and self.options.default):
            return Found(("",), "empty")
        if self.options.default is not None:
            return Found((self.options.default,), "default")
        return Found(("",), "missing") if folder_name is None else Found((folder_name,), "folder")

    def size_of(self, path: str) -> tuple[int, int] | None:
        """Width and height, where a table says them."""
        entry = self.table.find(path) if self.table is not None else None
        return None if entry is None else entry.size

    def variants(self, found: Found, seed: int, visits: int = 1) -> tuple[str, ...]:
        """Every caption the file can be trained with, each once; the first is the caption as written, if it is one.

        `visits`: how often the run visits the file, for `shuffle_variants: visits`.
        """
        options = self.options
        if not options.shuffle_tags or options.strategy == "instanceprompt":
            return tuple(dict.fromkeys(self._finished(text) for text in found.texts))
        variants = [
            shuffles(text, options, seed, visits=visits, finished=self._finished) for text in found.texts
        ]  # fmt: skip
        if options.shuffle_variants != "visits":
            return tuple(dict.fromkeys(variant for texts in variants for variant in texts))
        # Visits take them in turn: the first of every line, then the second.
        rows = (row for row in zip_longest(*variants))
        return tuple(dict.fromkeys(variant for row in rows for variant in row if variant is not None))

    def _finished(self, text: str) -> str:
        options = self.options
        if options.prepend_instance_prompt and options.instance_prompt and options.strategy != "instanceprompt":
            text = f"{options.instance_prompt} {text}".strip()
        return with_trigger(text, options.trigger_word, add=options.add_trigger)

    def _own(self, path: str) -> tuple[str, ...] | None:
        """None where the file has no caption of its own."""
        if self.options.strategy == "filename":
            return (from_filename(path),)
        if self.options.strategy == "textfile":
            return self._text_file(path)
        entry = self.table.find(path) if self.table is not None else None
        return entry.captions or None if entry is not None else None

    def _text_file(self, path: str) -> tuple[str, ...] | None:
        for spelling in self._spellings:
            name = caption_path(path, spelling)
            if name in self._withheld:
                raise UnreadableMediaError(name, self._withheld[name])
            try:  # rather than asking first whether it is there: nearly every file is there
                data = self._backend.read(name)
            except MissingFileError:
                continue
            if len(data) > LARGEST_FILE:
                raise UnreadableMediaError(name, too_large(len(data)))
            found = lines(decoded(bytes(data), name), self.options.split_lines)
            wrong = why_no_captions(found)
            if wrong is not None:
                raise UnreadableMediaError(name, wrong)
            return found
        return None


def too_large(size: int) -> str:
    return f"a caption file of {format_bytes(size)}; expected {_A_CAPTION}"


def open_captions(
    options: Captions, backend: Backend, where: str, withheld: Mapping[str, str] | None = None
) -> CaptionBook:
    """`where` names the section in messages: `datasets[0].captions`."""
    problems = list(_problems(options, where))
    if problems:
        raise ConfigError(problems)
    if options.strategy in ("parquet", "csv", "jsonl", "json") and options.table is not None:
        return CaptionBook(options, backend, load_table(options.strategy, options.table, backend))
    return CaptionBook(options, backend, withheld=withheld)


def caption_ref(variants: tuple[str, ...], options: Captions, seed: int, index: int, visit: int) -> CaptionRef:
    """What the sample with this global index is trained with, at its `visit`-th visit of the run."""
    if is_dropped(options.dropout, seed, index):
        return CaptionRef(options.dropped_caption, dropped=True)
    return variant_ref(variants, options, seed, index, visit)


def variant_ref(variants: tuple[str, ...], options: Captions, seed: int, index: int, visit: int) -> CaptionRef:
    """One of a sample's captions, never a dropped one."""
    if options.shuffle_tags and options.shuffle_variants == "visits":
        variant = visit % len(variants)
    else:
        variant = below(len(variants), seed, "caption variant", index)
    return CaptionRef(variants[variant], variant)


def most_epochs(training: Training, dataset: Dataset, visits: int) -> int:
    """How often a run of one process goes through a dataset at most, if an epoch of it has this many visits.

    That is what it would be if there were no other dataset.
    """
    if training.epochs is not None:
        return training.epochs
    batch = (dataset.batch_size or training.batch_size) * training.gradient_accumulation_steps
    return -(-(training.max_steps or 0) * batch // max(1, visits))


def orders_wanted(options: Captions, visits: int) -> int:
    """Orders of one caption's tags that are cached, where the run visits its sample this often."""
    if options.shuffle_variants == "visits":
        return max(1, min(MOST_ORDERS, visits))
    return options.shuffle_variants


def is_dropped(rate: float, seed: int, index: int) -> bool:
    return rate > 0 and uniform(seed, "caption dropout", index) < rate


def caption_path(path: str, extension: str) -> str:
    """The text file next to a picture."""
    return f"{split_suffix(path)[0]}.{extension.lstrip('.')}"


def from_filename(path: str) -> str:
    return split_suffix(path)[0].rpartition("/")[2].replace("_", " ").strip()


def lines(text: str, split: bool) -> tuple[str, ...]:
    """Each line with something in it, or all of it as one caption."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    found = tuple(line.strip() for line in text.split("\n") if line.strip()) if split else (text.strip(),)
    return found or ("",)


def decoded(data: bytes, path: str) -> str:
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise UnreadableMediaError(path, "a caption in UTF-16; save it as UTF-8")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        wrong = f"byte {data[error.start]:#04x} at position {error.start}"
        raise UnreadableMediaError(path, f"a caption that is not UTF-8 ({wrong}); save it as UTF-8") from error


def shuffles(
    text: str, options: Captions, seed: int, *, visits: int = 1, finished: Callable[[str], str] = str
) -> tuple[str, ...]:
    """The caption as written and other orders of its tags, or orders of its tags alone, each `finished`.

    There are as many as the options ask for, or as the tags have.
    """
    count = orders_wanted(options, visits)
    tags, glue = _tags(text, options), _glue(options)
    kept, free = tags[: options.keep_tags], tags[options.keep_tags :]
    written = glue.join(tags)
    found: dict[str, None] = {finished(text): None} if options.shuffle_written else {}
    wanted = count + options.shuffle_written
    most = _orders(free, wanted) * (len(tags) if options.shuffle_trigger else 1)
    wanted = min(wanted, max(1, most))
    attempt = 0
    while len(found) < wanted and attempt < _ATTEMPTS * wanted:
        order = shuffled(len(free), seed, "tags", text, attempt)
        variant = glue.join([*kept, *(free[position] for position in order)])
        if variant != written or not options.shuffle_written:
            found[_moved(finished(variant), options, seed, attempt)] = None
        attempt += 1
    return tuple(found) or (finished(text),)


_ATTEMPTS = 200
"""For each order that is wanted: orders are distinct, and the last of few are rarely met."""


def _moved(text: str, options: Captions, seed: int, attempt: int) -> str:
    """The caption with its tags shuffled again, now that the trigger word is part of one of them."""
    if not options.shuffle_trigger:
        return text
    tags = _tags(text, options)
    kept, free = tags[: options.keep_tags], tags[options.keep_tags :]
    order = shuffled(len(free), seed, "moved tags", text, attempt)
    return _glue(options).join([*kept, *(free[position] for position in order)])


def _tags(text: str, options: Captions) -> list[str]:
    return [tag.strip() for tag in text.split(options.tag_separator) if tag.strip()]


def _glue(options: Captions) -> str:
    return options.tag_separator if options.tag_separator.isspace() else f"{options.tag_separator} "


def with_trigger(text: str, trigger: str | None, *, add: bool = True) -> str:
    """Every `[trigger]` becomes the word; it is put in front where it would otherwise not be there at all.

    Without a trigger word the placeholder goes, and the comma or space it leaves behind.
    """
    trigger = (trigger or "").strip()
    if not trigger:
        return _without_placeholder(text)
    text = text.replace(PLACEHOLDER, trigger)
    # As a word of its own: `sks` is not in `asks`.
    if not add or re.search(rf"(?<!\w){re.escape(trigger)}(?!\w)", text):
        return text
    return f"{trigger} {text}".strip()


def kohya_folder(name: str) -> KohyaFolder | None:
    """What a folder's name says if it is one of kohya's: a number, an underscore, a name."""
    match = re.fullmatch(r"([0-9]{1,6})_(.*\S.*)", name)
    return KohyaFolder(int(match[1]), match[2].strip()) if match else None


def _without_placeholder(text: str) -> str:
    if PLACEHOLDER not in text:
        return text
    text = text.replace(PLACEHOLDER, "")
    text = re.sub(r"(?<!\s)\s*,(\s*,)+", ",", text)  # a run of blanks is looked at once
    return re.sub(r"[ \t]{2,}", " ", text).strip(" \t\n,")


def _orders(tags: list[str], most: int) -> int:
    """In how many ways the tags can be written down, or `most` where there are more; equal ones make no difference."""
    orders, placed = 1, 0
    for count in Counter(tags).values():
        for number in range(1, count + 1):  # one more of this tag among those placed before: a binomial coefficient
            placed += 1
            orders = orders * placed // number
            if orders >= most:
                return most
    return orders


def _problems(options: Captions, where: str) -> Iterator[Problem]:
    strategy = options.strategy
    if strategy == "instanceprompt" and options.instance_prompt is None:
        yield Problem(f"{where}.instance_prompt", "nothing", "the prompt of every sample: strategy is instanceprompt",
                      'set instance_prompt, for example "a photo of sks dog"')  # fmt: skip
    if options.prepend_instance_prompt and not options.instance_prompt:
        yield Problem(f"{where}.instance_prompt", "nothing", "a prompt: prepend_instance_prompt puts it in front",
                      "set instance_prompt, or remove prepend_instance_prompt")  # fmt: skip
    if strategy in ("parquet", "csv", "jsonl", "json") and options.table is None:
        yield Problem(f"{where}.table", "nothing", f"where the captions are: strategy is {strategy}",
                      f'add table: {{path: "captions.{strategy}"}}')  # fmt: skip
    if len(options.trigger_word or "") > LONGEST_KEY:
        yield Problem(f"{where}.trigger_word", f"a text of {len(options.trigger_word or ''):,} characters",
                      f"at most {LONGEST_KEY:,}: it is put into captions", "shorten it")  # fmt: skip
    if options.shuffle_tags and not options.tag_separator:
        yield Problem(f"{where}.tag_separator", '""', "what stands between two tags", 'write ","')
