"""Captions: reads them from the configured source and produces the variants a sample is trained with.

A caption is processed in this order: shuffle its tags, prepend the instance prompt, insert the trigger word. Nothing
here holds state. Shuffling is a function of (seed, caption). The choice of a variant and the dropout are functions of
(seed, global sample index). With `shuffle_variants: visits` the visits of a sample cycle through its variants.

A text file that is not UTF-8 raises UnreadableMediaError, and the sample is counted and left out like a damaged image:
the model would learn a wrongly decoded caption as it is. A missing caption is not an error; `WrittenCaption.origin`
records it so that missing captions can be counted.
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
from gracetune.data.caption_tables import CaptionEntries, load_table, why_no_captions
from gracetune.data.errors import MissingFileError, UnreadableMediaError
from gracetune.data.refs import CaptionRef
from gracetune.errors import ConfigError, Problem
from gracetune.seeded_random import below, shuffled, uniform
from gracetune.units import format_bytes

PLACEHOLDER = "[trigger]"
_A_CAPTION = f"text of at most {format_bytes(LARGEST_FILE)}"
MOST_ORDERS = 100
"""Limit on the tag orders of one caption with `shuffle_variants: visits`. Each order is an embedding in the cache."""
CaptionOrigin = Literal["own", "empty", "default", "folder", "missing"]


@dataclass(frozen=True)
class WrittenCaption:
    """The captions of one file as written, before shuffling and trigger words."""

    texts: tuple[str, ...]
    """At least one text, which is empty if there is no caption."""
    origin: CaptionOrigin
    """The file's `own` text, an `empty` caption file, the dataset's `default`, a kohya `folder` name, or `missing`."""


@dataclass(frozen=True)
class KohyaFolder:
    """A folder in the layout of kohya's scripts: `10_sks dog` means ten visits per epoch and the caption `sks dog`."""

    visits: int
    """Visits per epoch; 0 excludes the folder, as in kohya's scripts. Our `repeats` setting is one less."""
    name: str


class CaptionBook:
    """Looks up the captions of one dataset. A caption table is read once, when the book is opened."""

    def __init__(
        self,
        options: Captions,
        backend: Backend,
        table: CaptionEntries | None = None,
        withheld: Mapping[str, str] | None = None,
    ) -> None:
        """`withheld` maps files that exist but must not be read to the reason: a link out of the folder, or too large.

        Such a sample is left out rather than trained without its caption. The sizes come from the folder's listing:
        a `stat` of each caption file would take as long as reading it.
        """
        self.options, self._backend, self.table, self._withheld = options, backend, table, withheld or {}
        extension = options.extension
        self._spellings = tuple(dict.fromkeys([extension, extension.lower(), extension.upper()]))

    def find(self, path: str, folder_name: str | None = None) -> WrittenCaption:
        """The captions of a file. A missing one is replaced by the dataset's default, then by `folder_name`."""
        if self.options.strategy == "instanceprompt":
            return WrittenCaption((self.options.instance_prompt or "",), "own")
        own = self._own(path)
        if own is not None and any(own):
            return WrittenCaption(own, "own")
        if own is not None and not (self.options.default_for_empty and self.options.default):
            return WrittenCaption(("",), "empty")
        if self.options.default is not None:
            return WrittenCaption((self.options.default,), "default")
        return WrittenCaption(("",), "missing") if folder_name is None else WrittenCaption((folder_name,), "folder")

    def size_of(self, path: str) -> tuple[int, int] | None:
        """Width and height according to the table, if it has them."""
        entry = self.table.find(path) if self.table is not None else None
        return None if entry is None else entry.size

    def variants(self, found: WrittenCaption, seed: int, visits: int = 1) -> tuple[str, ...]:
        """All distinct captions the file can be trained with. The caption as written comes first if it is one of them.

        `visits` is how often the run visits the file, for `shuffle_variants: visits`.
        """
        options = self.options
        if not options.shuffle_tags or options.strategy == "instanceprompt":
            return tuple(dict.fromkeys(self._finished(text) for text in found.texts))
        variants = [
            shuffles(text, options, seed, visits=visits, finished=self._finished) for text in found.texts
        ]  # fmt: skip
        if options.shuffle_variants != "visits":
            return tuple(dict.fromkeys(variant for texts in variants for variant in texts))
        # Visits cycle through this order: the first variant of every caption line, then the second of each.
        rows = (row for row in zip_longest(*variants))
        return tuple(dict.fromkeys(variant for row in rows for variant in row if variant is not None))

    def _finished(self, text: str) -> str:
        """The caption with the instance prompt and the trigger word."""
        options = self.options
        if options.prepend_instance_prompt and options.instance_prompt and options.strategy != "instanceprompt":
            text = f"{options.instance_prompt} {text}".strip()
        return with_trigger(text, options.trigger_word, add=options.add_trigger)

    def _own(self, path: str) -> tuple[str, ...] | None:
        """The file's own captions; None if it has none."""
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
            try:  # without an `exists` call first: nearly every caption file exists
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
    options: Captions, backend: Backend, location: str, withheld: Mapping[str, str] | None = None
) -> CaptionBook:
    """Check the options and open the captions of a dataset. `location` names the section: `datasets[0].captions`."""
    problems = list(_problems(options, location))
    if problems:
        raise ConfigError(problems)
    if options.strategy in ("parquet", "csv", "jsonl", "json") and options.table is not None:
        return CaptionBook(options, backend, load_table(options.strategy, options.table, backend))
    return CaptionBook(options, backend, withheld=withheld)


def caption_ref(variants: tuple[str, ...], options: Captions, seed: int, index: int, visit: int) -> CaptionRef:
    """The caption of the sample with this global index at its `visit`-th visit of the run, possibly dropped."""
    if is_dropped(options.dropout, seed, index):
        return CaptionRef(options.dropped_caption, dropped=True)
    return variant_ref(variants, options, seed, index, visit)


def variant_ref(variants: tuple[str, ...], options: Captions, seed: int, index: int, visit: int) -> CaptionRef:
    """The caption variant of a sample, without dropout."""
    if options.shuffle_tags and options.shuffle_variants == "visits":
        variant = visit % len(variants)
    else:
        variant = below(len(variants), seed, "caption variant", index)
    return CaptionRef(variants[variant], variant)


def most_epochs(training: Training, dataset: Dataset, visits: int) -> int:
    """An upper bound on the epochs of a dataset in a run of one process, if an epoch has this many visits.

    The bound assumes that the run has no other dataset.
    """
    if training.epochs is not None:
        return training.epochs
    batch = (dataset.batch_size or training.batch_size) * training.gradient_accumulation_steps
    return -(-(training.max_steps or 0) * batch // max(1, visits))  # rounded up


def orders_wanted(options: Captions, visits: int) -> int:
    """The number of tag orders to cache for a caption whose sample the run visits this often."""
    if options.shuffle_variants == "visits":
        return max(1, min(MOST_ORDERS, visits))
    return options.shuffle_variants


def is_dropped(rate: float, seed: int, index: int) -> bool:
    return rate > 0 and uniform(seed, "caption dropout", index) < rate


def caption_path(path: str, extension: str) -> str:
    """The path of the caption file next to a media file."""
    return f"{split_suffix(path)[0]}.{extension.lstrip('.')}"


def from_filename(path: str) -> str:
    return split_suffix(path)[0].rpartition("/")[2].replace("_", " ").strip()


def lines(text: str, split: bool) -> tuple[str, ...]:
    """Each non-blank line as a caption, or the whole text as one."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    found = tuple(line.strip() for line in text.split("\n") if line.strip()) if split else (text.strip(),)
    return found or ("",)


def decoded(data: bytes, path: str) -> str:
    """Decode a caption file as UTF-8, with or without a byte order mark. Raises UnreadableMediaError."""
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
    """Distinct orders of a caption's tags, each passed through `finished`. With `shuffle_written` the caption as
    written comes first.

    Returns as many as the options request, or all that exist if there are fewer.
    """
    count = orders_wanted(options, visits)
    tags, separator = _tags(text, options), _separator(options)
    kept, free = tags[: options.keep_tags], tags[options.keep_tags :]
    written = separator.join(tags)
    found: dict[str, None] = {finished(text): None} if options.shuffle_written else {}
    wanted = count + options.shuffle_written
    # With `shuffle_trigger` the trigger word can also stand at each of the tags' positions.
    most = _orders(free, wanted) * (len(tags) if options.shuffle_trigger else 1)
    wanted = min(wanted, max(1, most))
    attempt = 0
    while len(found) < wanted and attempt < _ATTEMPTS * wanted:
        order = shuffled(len(free), seed, "tags", text, attempt)
        variant = separator.join([*kept, *(free[position] for position in order)])
        if variant != written or not options.shuffle_written:
            found[_moved(finished(variant), options, seed, attempt)] = None
        attempt += 1
    return tuple(found) or (finished(text),)


_ATTEMPTS = 200
"""Random orders tried per distinct order wanted. If few orders exist, the last ones come up rarely."""


def _moved(text: str, options: Captions, seed: int, attempt: int) -> str:
    """The caption with its tags shuffled again after the trigger word was added, for `shuffle_trigger`."""
    if not options.shuffle_trigger:
        return text
    tags = _tags(text, options)
    kept, free = tags[: options.keep_tags], tags[options.keep_tags :]
    order = shuffled(len(free), seed, "moved tags", text, attempt)
    return _separator(options).join([*kept, *(free[position] for position in order)])


def _tags(text: str, options: Captions) -> list[str]:
    return [tag.strip() for tag in text.split(options.tag_separator) if tag.strip()]


def _separator(options: Captions) -> str:
    return options.tag_separator if options.tag_separator.isspace() else f"{options.tag_separator} "


def with_trigger(text: str, trigger: str | None, *, add: bool = True) -> str:
    """Replace every `[trigger]` by the trigger word. If the caption does not contain the word then, prepend it.

    Without a trigger word, remove the placeholder together with the comma or space around it.
    """
    trigger = (trigger or "").strip()
    if not trigger:
        return _without_placeholder(text)
    text = text.replace(PLACEHOLDER, trigger)
    # Match whole words only: `asks` does not contain the trigger `sks`.
    if not add or re.search(rf"(?<!\w){re.escape(trigger)}(?!\w)", text):
        return text
    return f"{trigger} {text}".strip()


def kohya_folder(name: str) -> KohyaFolder | None:
    """Parse a folder name of kohya's scripts: a number, an underscore and a name. None for any other name."""
    match = re.fullmatch(r"([0-9]{1,6})_(.*\S.*)", name)
    return KohyaFolder(int(match[1]), match[2].strip()) if match else None


def _without_placeholder(text: str) -> str:
    if PLACEHOLDER not in text:
        return text
    text = text.replace(PLACEHOLDER, "")
    text = re.sub(r"(?<!\s)\s*,(\s*,)+", ",", text)  # the lookbehind avoids quadratic time on long runs of blanks
    return re.sub(r"[ \t]{2,}", " ", text).strip(" \t\n,")


def _orders(tags: list[str], most: int) -> int:
    """The number of distinct orders of the tags, at most `most`. Equal tags are interchangeable.

    This is the multinomial coefficient n! / (c1! c2! ...), built up so that it can stop at `most`.
    """
    orders, total = 1, 0
    for count in Counter(tags).values():
        for number in range(1, count + 1):
            total += 1
            orders = orders * total // number
            if orders >= most:
                return most
    return orders


def _problems(options: Captions, location: str) -> Iterator[Problem]:
    strategy = options.strategy
    if strategy == "instanceprompt" and options.instance_prompt is None:
        yield Problem(f"{location}.instance_prompt", "nothing", "a prompt, because strategy is instanceprompt",
                      'set instance_prompt, for example "a photo of sks dog"')  # fmt: skip
    if options.prepend_instance_prompt and not options.instance_prompt:
        yield Problem(f"{location}.instance_prompt", "nothing", "a prompt, because prepend_instance_prompt is set",
                      "set instance_prompt, or remove prepend_instance_prompt")  # fmt: skip
    if strategy in ("parquet", "csv", "jsonl", "json") and options.table is None:
        yield Problem(f"{location}.table", "nothing", f"the caption file, because strategy is {strategy}",
                      f'add table: {{path: "captions.{strategy}"}}')  # fmt: skip
    if len(options.trigger_word or "") > LONGEST_KEY:
        yield Problem(f"{location}.trigger_word", f"a text of {len(options.trigger_word or ''):,} characters",
                      f"at most {LONGEST_KEY:,}: it is inserted into captions", "shorten it")  # fmt: skip
    if options.shuffle_tags and not options.tag_separator:
        yield Problem(f"{location}.tag_separator", '""', "the text between two tags", 'write ","')
