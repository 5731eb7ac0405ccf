"""`PeerBlock`: one mapping of a peer's file, and the methods that put its values into a draft.

`settle_samples` adjusts the sample requests of a peer's file as that program would. Published files request samples
that the peer's pipeline rounds or cannot generate. In our own dialect these are errors, but an unchanged file of a peer
has to train.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gracetune.config.dialects.values import Converter, as_flag
from gracetune.config.draft import Draft, Origin, Path
from gracetune.config.families import Flavour, find_flavour, flavours

_OWN: Any = object()


@dataclass(frozen=True)
class PeerFile:
    """One file of a peer, and the draft that it is read into."""

    peer: str
    """The program the file is for, whose defaults apply."""
    draft: Draft
    root: str = ""
    """A prefix of all keys, such as `config.process[0].`, which lists of keys omit."""
    format: str = "JSON"
    """The file's syntax, in which hints show what to add."""
    homes: Mapping[str, Container[str]] = field(default_factory=dict)
    """Section -> its keys, to report where a misplaced key belongs."""
    unused: dict[str, list[str]] = field(default_factory=dict, compare=False)
    """Heading -> keys without an effect. Each heading becomes one note."""

    def note_unused(self) -> None:
        for heading, keys in self.unused.items():
            if keys:
                self.draft.note(f"{heading}: {', '.join(dict.fromkeys(keys))}")


@dataclass(frozen=True)
class PeerBlock:
    """One mapping of a peer's file, with its keys as the user wrote them. A null counts as absent."""

    reading: PeerFile
    values: Mapping[str, Any]
    key_path: str = ""
    """Its path in the file, such as `datasets[0]`; empty for the top level."""
    written: Mapping[str, str] = field(default_factory=dict)
    """Name -> the full key in the file, for values that are written elsewhere or under another name."""
    elsewhere: str = ""
    """The file that has the mapping, if it is not the config itself."""
    around: PeerBlock | None = None
    """The mapping from which keys are inherited that this one does not have."""
    used: set[str] = field(default_factory=set, compare=False)
    """Keys that had an effect. SimpleTuner's readers name the others in a note, so that no key is ignored silently."""

    @property
    def draft(self) -> Draft:
        return self.reading.draft

    @property
    def file(self) -> str:
        return self.elsewhere or self.draft.file

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def get(self, name: str) -> Any:
        """Return a value without marking its key as used."""
        return self.values.get(name)

    def take(self, name: str) -> Any:
        """Return a value and mark its key as used."""
        self.used.add(name)
        return self.values.get(name)

    def key(self, name: str) -> str:
        return self.written.get(name) or (f"{self.key_path}.{name}" if self.key_path else name)

    def origin(self, name: str) -> Origin:
        self.used.add(name)
        return Origin("file", self.key(name), self.file)

    def put(self, name: str, path: Path, convert: Converter | None = None) -> None:
        """Put the value of a key, if it has one, at a path of the `RunConfig`."""
        value = self.values.get(name)
        if value is not None:
            self.assign(path, convert(value) if convert else value, name)

    def assign(self, path: Path, value: Any, name: str) -> None:
        """Put a value that is derived from a key."""
        self.draft.put(path, value, self.origin(name))

    def default(self, path: Path, value: Any, key: str = "") -> None:
        """Put the peer's default, unless the path already has a value."""
        self.draft.default(path, value, self.reading.peer, key)

    def note(self, text: str) -> None:
        self.draft.note(text)

    def list_unused(self, heading: str, *names: str) -> None:
        """Add keys to the note with this heading."""
        keys = [self.key(name).removeprefix(self.reading.root) for name in names]
        if keys:
            self.reading.unused.setdefault(heading, []).extend(keys)

    def reject(self, name: str, why: str, hint: str = "", *, found: Any = _OWN) -> None:
        """Report a value that is not supported; see `Draft.reject`. `found` is shown instead of the key's value."""
        value = self.take(name)
        self.draft.reject(self.key(name), value if found is _OWN else found, why, hint, self.file)

    def problem(self, name: str, expected: str, hint: str, *, found: Any = _OWN) -> None:
        """Report an invalid value. `found` is shown instead of the key's value."""
        value = self.take(name)
        self.draft.problem(self.key(name), value if found is _OWN else found, expected, hint, self.file)

    def has_problem(self, *names: str) -> bool:
        keys = {self.key(name) for name in names}
        return any(problem.key in keys for problem in self.draft.problems)

    def flag(self, name: str, default: bool) -> bool:
        """Return a boolean. Any other value is reported as a problem, and the default is returned."""
        value = self.get(name)
        if isinstance(value, bool):
            return value
        if value is not None and not self.has_problem(name):
            self.problem(name, "true or false", f"write `{name}: {str(default).lower()}`")
        return default

    def is_on(self, name: str) -> bool:
        """Whether a switch is on, in any spelling that a command line accepts."""
        return as_flag(self.values.get(name)) is True

    def switch(self, name: str) -> bool:
        """Like `is_on`, but reports an invalid value. For switches whose value is not put into the config, where the
        schema would check it."""
        value = as_flag(self.values.get(name))
        if value is not None and not isinstance(value, bool):
            self.problem(name, "true or false", "write true or false")
        return value is True

    def inner(self, name: str) -> PeerBlock:
        """Return the mapping under a key, or an empty one."""
        return block_at(self.reading, self.get(name), self.key(name))

    def without_nulls(self, value: Mapping[Any, Any], key_path: str) -> PeerBlock:
        """Wrap another mapping of the same file, without its null keys and without `homes`."""
        values = {str(key): item for key, item in value.items() if item is not None}
        return PeerBlock(replace(self.reading, homes={}), values, key_path, elsewhere=self.elsewhere)


def block_at(reading: PeerFile, value: Any, key_path: str) -> PeerBlock:
    """Wrap the mapping at a path of the file. Any other value is reported and becomes an empty mapping."""
    if value is not None and not isinstance(value, Mapping):
        reading.draft.problem(key_path, value, "a mapping", "indent its keys below it")
    values = {str(key): item for key, item in value.items()} if isinstance(value, Mapping) else {}
    return PeerBlock(reading, values, key_path)


PLAN_DECIDES = (
    "decided by the memory plan when the run starts: base weights are held in 16 bits where these fit, else in int8"
)


def let_plan_choose_precision(block: PeerBlock, name: str, requested: str, rest: str = "") -> None:
    """Set `model.base_precision` to `auto` for a type of at most 8 bits, and add a note.

    `requested` is the type that the file names. The plan takes 16 bits where they fit, else int8. Both are at least as
    precise as requested, so nothing has to compensate for lost precision.
    """
    block.assign(("model", "base_precision"), "auto", name)
    block.note(f"{block.key(name)}: {requested} is requested; {PLAN_DECIDES}, at least as exact as requested{rest}")


# -- sample requests ---------------------------------------------------------------------------------------------------


_PROMPTS: Path = ("validation", "prompts")


def settle_samples(draft: Draft) -> None:
    """Adjust the sample requests that come from a file. Values from a flag are not changed."""
    family, prompts = draft.get(("model", "family")), draft.get(_PROMPTS)
    count = len(prompts) if isinstance(prompts, list) else 0
    if isinstance(family, str) and any(flavour.makes == "video" for flavour in flavours(family)):
        for root in (("validation",), *((*_PROMPTS, index) for index in range(count))):
            _round_frames(draft, (*root, "num_frames"))
    flavour = _flavour(draft, family)
    needs_image = flavour is not None and (flavour.from_image or (flavour.edits and not flavour.images_alone))
    if count and flavour is not None and needs_image:
        _drop_prompts_without_image(draft, prompts, flavour)


def _flavour(draft: Draft, family: Any) -> Flavour | None:
    name = draft.get(("model", "flavour"))
    return find_flavour(family, name) if isinstance(family, str) and isinstance(name, str) else None


def _round_frames(draft: Draft, path: Path) -> None:
    frames, origin = draft.get(path), draft.origins.get(path)
    if type(frames) is not int or frames < 1 or frames % 4 == 1 or origin is None or origin.kind != "file":
        return
    generated_frames = frames // 4 * 4 + 1
    draft.put(path, generated_frames, origin)
    draft.note(f"{origin.key}: {frames} frames become {generated_frames}, as in diffusers: clips have 4 k + 1 frames")


def _drop_prompts_without_image(draft: Draft, prompts: list[Any], flavour: Flavour) -> None:
    kept = [index for index, item in enumerate(prompts) if not isinstance(item, dict) or item.get("references")]
    dropped = [draft.written_key((*_PROMPTS, index, "prompt"))[0] for index in range(len(prompts)) if index not in kept]
    if not dropped:
        return
    # Origins are stored by index, so those of the remaining prompts move to their new indices.
    origins = {
        (*_PROMPTS, kept.index(index), *path[3:]): origin
        for path, origin in draft.origins.items()
        if path[:2] == _PROMPTS and len(path) > 2 and isinstance(index := path[2], int) and index in kept
    }
    first = next(origin for path, origin in draft.origins.items() if path[:2] == _PROMPTS)
    draft.put(_PROMPTS, [prompts[index] for index in kept], first)
    draft.origins.update(origins)
    draft.note(f"{', '.join(dropped)}: not generated, because {flavour.name} needs an input image and this has none "
               "(`ctrl_img` in ai-toolkit, `validation_input` in SimpleTuner)")  # fmt: skip
