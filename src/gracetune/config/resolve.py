"""Combines file, environment and flags into one `RunConfig`, or reports every problem at once."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path as FilePath
from typing import Any

from pydantic import ValidationError

from gracetune.config import native
from gracetune.config.dialects import DIALECTS
from gracetune.config.dialects.table import Dialect
from gracetune.config.draft import Draft, Origin, Path, UnquotedText, dotted, parse_path, too_many_problems
from gracetune.config.environment import Environment, memory_settings
from gracetune.config.families import FAMILIES, names_of
from gracetune.config.ineffective_options import loaded_by_no_program, without_effect
from gracetune.config.input_paths import find_beside
from gracetune.config.limits import DEEPEST, LONGEST_TEXT, MOST_PROBLEMS, NotPlainError
from gracetune.config.plain_data import plain
from gracetune.config.pydantic_errors import known_path, problems_of, required_names
from gracetune.config.registry import is_lora
from gracetune.config.rules import BrokenRule, broken_rules
from gracetune.config.run_config import Adapter, RunConfig
from gracetune.config.spelling import misspelt
from gracetune.config.syntax import Document, open_document
from gracetune.config.yaml_syntax import parse_scalar
from gracetune.errors import ConfigError, Problem
from gracetune.redaction import Redactor


@dataclass(frozen=True)
class Resolved:
    """A complete config, the origin of each value, and notes for the user."""

    config: RunConfig
    dialect: str
    file: FilePath
    origins: Mapping[Path, Origin]
    notes: tuple[str, ...]
    redactor: Redactor = field(default_factory=Redactor, compare=False)
    """Has the secrets of the config, of its files and of the environment."""


class UnresolvedError(ConfigError):
    """A config that cannot be used. It keeps the dialect and the notes that were collected before the failure."""

    def __init__(self, problems: Sequence[Problem], dialect: str | None, notes: Sequence[str]) -> None:
        super().__init__(problems)
        self.dialect = dialect
        self.notes = tuple(notes)


def load(
    path: FilePath,
    *,
    environment: Environment,
    overrides: Sequence[str] = (),
    allow_unsupported: bool = False,
) -> Resolved:
    """Load a file of any dialect. Flags override the file, the file overrides the environment, and that the defaults.

    Problems and notes contain no secrets; the config itself does.
    """
    redactor = Redactor(environment.variables, dict(text.partition("=")[::2] for text in overrides))
    try:
        resolved = _load(path, environment, overrides, allow_unsupported, redactor)
    except UnresolvedError as error:
        notes = map(redactor.redact, error.notes)
        raise UnresolvedError(_without_secrets(error.problems, redactor), error.dialect, [*notes]) from None
    except ConfigError as error:
        raise ConfigError(_without_secrets(error.problems, redactor)) from None
    redactor.learn(resolved.config.model_dump(mode="json"))
    return replace(resolved, notes=tuple(map(redactor.redact, resolved.notes)), redactor=redactor)


def _without_secrets(problems: Iterable[Problem], redactor: Redactor) -> list[Problem]:
    return [Problem(**redactor.redact_values(vars(problem))) for problem in problems]


def _load(
    path: FilePath, environment: Environment, overrides: Sequence[str], allow_unsupported: bool, redactor: Redactor
) -> Resolved:
    document = _read(path, redactor)
    redactor.learn(document.data)
    dialect, missing = _recognize(document)
    draft = Draft(document.name, problems=[*missing, *document.problems], redactor=redactor)
    _read_environment(draft, environment)
    try:
        dialect.read(document, draft, environment)
        if dialect.finds_beside:
            find_beside(draft)
        _read_overrides(draft, overrides)
    except ConfigError as error:  # the reader could not continue
        raise UnresolvedError(_once([*draft.problems, *error.problems]), dialect.name, draft.notes) from None
    except NotPlainError as error:  # a text that became too long when variables were substituted
        problem = Problem("(file)", error.found, error.expected, error.hint, draft.file)
        raise UnresolvedError(_once([*draft.problems, problem]), dialect.name, draft.notes) from None
    _overrule_hints_variable(draft)
    for settle in dialect.settle:
        settle(draft)
    _choose_format(draft)
    return _build(draft, dialect.name, path, allow_unsupported)


_NATIVE = next(dialect for dialect in DIALECTS if dialect.name == "native")
_VARIABLE = re.compile(r"\$\{\w+\}")


def _read(path: FilePath, redactor: Redactor) -> Document:
    """Parse a file. For a dialect that substitutes `${NAME}` before parsing, it may be malformed until then.

    Such a file is parsed with placeholders for its variables, only to recognize its dialect.
    """
    document = open_document(path)
    redactor.learn(document.text)
    try:
        return document.reparsed()
    except ConfigError:
        if not _VARIABLE.search(document.text):
            raise
        data = _parsed_with_blanks(document)
        if not any(dialect.variables_in_text and dialect.recognizes(data) for dialect in DIALECTS):
            raise
        return replace(document, data=data)


def _parsed_with_blanks(document: Document) -> Any:
    try:
        return document.reparsed(_VARIABLE.sub("0", document.text)).data
    except ConfigError:
        return None


def _recognize(document: Document) -> tuple[Dialect, list[Problem]]:
    """The dialect, and what the file lacks of it: one with our two main sections may lack its first line."""
    for dialect in DIALECTS:
        if dialect.recognizes(document.data):
            return dialect, []
    if isinstance(document.data, Mapping) and {"model", "datasets"} <= document.data.keys():
        version = f"{native.VERSION_KEY}: {native.VERSION}"
        lacking = Problem(native.VERSION_KEY, "nothing", version, f"write `{version}` as the first key", document.name)
        return _NATIVE, [lacking]
    article = "an" if document.format == "env" else "a"
    empty = document.data is None or document.data == {}
    found = "an empty file" if empty else f"{article} {document.format} file of another kind"
    raise ConfigError(
        [
            Problem(
                "(file)",
                found,
                "a SimpleTuner config (model_family, ...), an ai-toolkit job (job, config) or our own (gracetune: 1)",
                _how_to_begin(document.data),
                document.name,
            )
        ]
    )


def _how_to_begin(data: Any) -> str:
    """A hint for a file of no known dialect. A file with our sections only lacks its first line."""
    if isinstance(data, Mapping) and any(key in RunConfig.model_fields for key in data):
        return f"write `{native.VERSION_KEY}: {native.VERSION}` as the first key"
    return "for a folder of images: gracetune init FOLDER; else: gracetune examples list"


def _read_environment(draft: Draft, environment: Environment) -> None:
    draft.problems += environment.sigusr1_problems()
    found = memory_settings(environment)
    draft.problems += found.problems
    for name, setting in found.settings.items():
        draft.put(("memory", name), setting.value, Origin("environment", setting.variable))


def _read_overrides(draft: Draft, overrides: Sequence[str]) -> None:
    for text in overrides:
        key, equals, value = text.partition("=")
        try:
            path = parse_path(key.strip())
        except ValueError:
            path = ()
        if len(text) > LONGEST_TEXT:
            found = UnquotedText(f"a text of {len(text):,} characters")
            draft.problem("--set", found, f"at most {LONGEST_TEXT:,}", "write long values into the file")
        elif not equals or not path:
            draft.problem("--set", text, "KEY=VALUE", "for example --set training.batch_size=2")
        elif len(path) > DEEPEST:
            draft.problem(
                "--set", UnquotedText(f"a key of {len(path)} parts"), f"at most {DEEPEST} parts", "shorten it"
            )
        elif not (targets := _targets(draft, path)):
            ids = [str(one.get("id")) for one in _datasets(draft)]
            hint = misspelt(path[1], ids, "`gracetune config show` lists the ids", write="--set 'datasets[{}]...'")
            draft.problem(f"--set {key}", value, f"the id of a dataset: {', '.join(ids)}", hint)
        elif any(_beyond_lists(draft, target) for target in targets):
            draft.problem(f"--set {key}", value, "an existing list entry or the next one", "count entries from 0")
        else:
            origin = Origin("flag", f"--set {dotted(path)}")
            for target in _only_one_resolution(draft, targets, origin):
                _override(draft, target, value, origin)


def _datasets(draft: Draft) -> list[Mapping[str, Any]]:
    found = draft.get(("datasets",))
    return [one if isinstance(one, Mapping) else {} for one in found] if isinstance(found, list) else []


def _targets(draft: Draft, path: Path) -> list[Path]:
    """Return the paths that a key of `--set` addresses.

    `datasets[0]` is the first entry of the file's own list, with all datasets it was split into. `datasets[NAME]` is
    the dataset with this id.
    """
    if path[0] != "datasets" or len(path) < 2:
        return [path]
    if isinstance(path[1], str):
        return [("datasets", at, *path[2:]) for at, one in enumerate(_datasets(draft)) if one.get("id") == path[1]]
    if draft.entries is None:
        return [path]
    if path[1] == len(draft.entries):
        draft.entries.append((len(_datasets(draft)),))  # a new dataset, which later flags can address too
    made = draft.entries[path[1]] if path[1] < len(draft.entries) else (len(_datasets(draft)) + path[1],)
    return [("datasets", at, *path[2:]) for at in made]


def _only_one_resolution(draft: Draft, targets: list[Path], origin: Origin) -> list[Path]:
    """If a flag sets the resolution of an entry that was split by resolution, disable all of its datasets but one."""
    if len(targets) < 2 or targets[0][2:] != ("resolution",):
        return targets
    datasets = _datasets(draft)
    superfluous = {at for _, at, *_ in targets[1:]}
    names = {datasets[int(at)].get("id") for at in superfluous}
    for at, one in enumerate(datasets):
        if at in superfluous or one.get("source_dataset_id") in names:
            draft.put(("datasets", at, "disabled"), True, origin)
    return targets[:1]


def _override(draft: Draft, path: Path, text: str, origin: Origin) -> None:
    try:
        value, invalid = plain(parse_scalar(text))
    except NotPlainError as error:
        draft.problems.append(Problem(origin.key, error.found, error.expected, error.hint))
        return
    draft.problems += [Problem(origin.key, one.found, one.expected, one.hint) for one in invalid]
    draft.put(*native.written_out(path, value), origin)


def _beyond_lists(draft: Draft, path: Path) -> bool:
    """Whether an index is past the next free place of its list, which would leave a gap."""
    for position, step in enumerate(path):
        if isinstance(step, int):
            around = draft.get(path[:position])
            if step > (len(around) if isinstance(around, list) else 0):
                return True
    return False


def _overrule_hints_variable(draft: Draft) -> None:
    """Caches in unified memory need hints, so a file with such caches overrides a variable that turns hints off."""
    path: Path = ("memory", "enable_uvm_hints")
    found = draft.origins.get(path)
    if found is None or found.kind != "environment" or draft.get(path) is not False:
        return
    for name in ("vae_cache_type", "text_cache_type"):
        cause = draft.origins.get(("cache", name))
        if cause is not None and draft.get(("cache", name)) == "unified_memory":
            draft.put(path, None, cause)
            draft.note(
                f"{found.key}: overruled by {draft.written_key(('cache', name))[0]}: unified_memory; "
                "to switch hints off set memory.enable_uvm_hints to false"
            )
            return


def _choose_format(draft: Draft) -> None:
    """Set the family's default of `checkpoints.format` for a LoRA.

    Not for layers that the user chose, because the format may have no names for them.
    """
    family, kind = draft.get(("model", "family")), draft.get(("adapter", "kind"))
    if family not in FAMILIES or not is_lora(Adapter().kind if kind is None else kind):
        return
    try:
        names = names_of(family)
    except ConfigError:  # a broken package; `_validate` reports it
        return
    if names.lora_format is None:
        return
    within = draft.get(("adapter", "within")) or []
    in_blocks = [*names.aitoolkit.blocks, *names.aitoolkit.conv_blocks]
    in_blocks_only = isinstance(within, list | tuple) and all(name in in_blocks for name in within)
    if in_blocks_only and not (draft.get(("adapter", "targets")) or draft.get(("adapter", "by_module"))):
        draft.default(("checkpoints", "format"), names.lora_format, family)


def _build(draft: Draft, dialect: str, file: FilePath, allow_unsupported: bool) -> Resolved:
    problems = list(draft.problems)
    if allow_unsupported:
        for rejected in draft.unsupported:
            draft.note(f"{rejected.key}: {rejected.found} is not supported and was left out ({rejected.expected})")
    else:
        problems += draft.unsupported
    config, unknown, schema_problems = _validate(draft)
    unknown |= draft.unread | (set() if allow_unsupported else draft.rejected)
    problems += schema_problems
    for broken in broken_rules(config) if config is not None else ():
        if not _rests_on(broken, unknown):
            key, location = draft.written_key(broken.path)
            problems.append(Problem(key, broken.found, broken.expected, broken.hint, location))
    if problems or config is None:
        raise UnresolvedError(_once(problems), dialect, draft.notes)
    for note in (*without_effect(config, draft), *loaded_by_no_program(config)):
        draft.note(note)
    return Resolved(config, dialect, file, dict(draft.origins), tuple(draft.notes))


def _rests_on(broken: BrokenRule, unknown: set[Path]) -> bool:
    """Whether a rule was broken by a placeholder instead of one of the user's values."""
    concerned = (broken.path, *broken.because)
    return any(candidate[: len(path)] == path for path in unknown for candidate in concerned)


def _once(problems: Sequence[Problem]) -> list[Problem]:
    """Drop repeated problems. A value that was removed as invalid is also reported missing later; the first is kept."""
    reported: set[tuple[str, str | None]] = set()
    kept: list[Problem] = []
    for problem in dict.fromkeys(problems):
        identity = (problem.key, problem.file)
        if problem.found in _FOUND_NOTHING and identity in reported:
            continue
        reported.add(identity)
        kept.append(problem)
        if len(kept) == MOST_PROBLEMS:
            return [*kept, too_many_problems(problem.file)]
    return kept


_FOUND_NOTHING = ("nothing", "nothing (null)", "neither steps nor epochs")

# Placeholders for required values that are missing, so that the rules on the other values can still be checked.
_DATASET = {"id": "unknown", "path": "unknown"}
_STAND_INS: dict[str, Any] = {"family": FAMILIES[0], "name": "unknown", "output_dir": "unknown", **_DATASET,
                              "prompt": "unknown", "model": {"family": FAMILIES[0]},
                              "datasets": [_DATASET]}  # fmt: skip


def _validate(draft: Draft) -> tuple[RunConfig | None, set[Path], list[Problem]]:
    """Return the config, the paths at which it has a placeholder for an invalid value, and the problems.

    Only the problems of the first round are reported. Later rounds validate with the invalid values removed, so that
    the rules on the remaining values can be checked and all problems are reported together.
    """
    tree = copy.deepcopy(draft.tree)
    unknown: set[Path] = set()
    problems: list[Problem] | None = None
    for _round in range(4):
        try:
            return RunConfig.model_validate(tree), unknown, problems or []
        except ConfigError as error:  # the family's package is broken, so no config can be built
            return None, unknown, [*(problems or []), *error.problems]
        except ValidationError as error:
            errors = error.errors(include_url=False)
            problems = problems_of(errors, draft) if problems is None else problems
            unknown |= {_set_aside(tree, known_path(detail["loc"], detail["type"])) for detail in errors}
    return None, unknown, problems or []


def _set_aside(tree: dict[str, Any], path: Path) -> Path:
    """Remove an invalid value: its whole field, or the whole dataset of a list. Returns the path that was removed."""
    inside = 2 if path[:1] == ("datasets",) else 0
    index = next((i for i, step in enumerate(path) if i >= inside and isinstance(step, int)), len(path))
    path = path[:index]
    node: Any = tree
    for step in path[:-1]:
        if isinstance(node, dict):
            node = node.get(step)
        else:
            node = node[step] if isinstance(node, list) and isinstance(step, int) and step < len(node) else None
    if isinstance(node, dict) and path:
        node.pop(path[-1], None)
        if path[-1] in required_names(path[:-1]):
            node[str(path[-1])] = copy.deepcopy(_STAND_INS.get(str(path[-1])))
    elif isinstance(node, list) and isinstance(path[-1], int) and path[-1] < len(node):
        node[path[-1]] = {**_DATASET, "id": f"unknown {path[-1]}"}
    return path
