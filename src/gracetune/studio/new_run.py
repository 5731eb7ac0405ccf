"""A new run: a proposal for a folder, the check of a text while it is written, the memory plan, and saving the file.

A text may be of any dialect. A relative path in it means what it means on the terminal where the studio was started.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gracetune.config import Environment, Resolved, UnresolvedError, load, native
from gracetune.config.base import file_name
from gracetune.config.draft import dotted, parse_path
from gracetune.config.limits import LARGEST_FILE, MOST_VALUES, NotPlainError
from gracetune.config.machine_checks import limits_memory, path_problems, size_warnings
from gracetune.config.plain_data import plain
from gracetune.config.syntax import FORMATS
from gracetune.errors import ConfigError, Problem, short
from gracetune.hardware.probe import read_host_memory
from gracetune.redaction import HIDDEN
from gracetune.storage.atomic import write_file
from gracetune.studio.commands import CommandRunner, SlowWork, reject_errors
from gracetune.studio.replies import StudioError, json_body, json_reply
from gracetune.studio.yaml_edits import sections_of, with_values

if TYPE_CHECKING:
    from gracetune.studio.server import Studio

CONFIGS = "configs"
"""The folder below the studio's folder that new configs are saved in."""
PROPOSE_LIMIT_S, PLAN_LIMIT_S = 180.0, 180.0
_MOST_FILES = 8


class RunMaker:
    """Proposes, checks, plans and saves configs."""

    def __init__(self, root: Path, environment: Environment, commands: CommandRunner) -> None:
        self._root, self._environment, self._commands = root, environment, commands

    def propose(self, folder: str, answers: Mapping[str, Any]) -> dict[str, Any]:
        """The config that `gracetune init` proposes for a folder."""
        options = [text for name, value in answers.items() for text in (f"--{name}", str(value))]
        with tempfile.TemporaryDirectory(prefix="gracetune-studio-") as temporary:
            # The file's name becomes the run's name.
            name = file_name(Path(folder).expanduser().name or "run").lstrip("-")
            output = Path(temporary) / f"{name or 'run'}.yaml"
            arguments = ["init", "--yes", "--json", "--output", str(output), *options, "--", folder]
            answer = self._commands.json(*arguments, timeout_s=PROPOSE_LIMIT_S)
            reject_errors(answer)
            text = output.read_text(encoding="utf-8")
        answer.pop("ok", None)
        return {**{key: value for key, value in answer.items() if key not in ("config", "next")}, "yaml": text}

    def check(self, text: str, name: str, files: Mapping[str, str], changes: Mapping[str, Any]) -> dict[str, Any]:
        """All problems of a text, its values, and the same config in our own dialect."""
        if changes:
            text = _changed(text, changes)
        with _as_file(text, name, files) as path:
            try:
                resolved = load(path, environment=self._environment)
            except UnresolvedError as error:
                answer = _rejected(error, error.dialect, error.notes, text)
            except ConfigError as error:
                answer = _rejected(error, None, (), text)
            else:
                answer = self._accepted(resolved, text)
            shown: dict[str, Any] = _without_folder(answer, path.parent)
            return shown

    def _accepted(self, resolved: Resolved, text: str) -> dict[str, Any]:
        problems = path_problems(resolved)
        host = read_host_memory(()).memory_limit if limits_memory(resolved) else None
        values = resolved.redactor.redact_values(resolved.config.model_dump(mode="json"))
        notes = [*resolved.notes, *size_warnings(resolved, host)]
        if resolved.dialect != "native":
            text, hidden = own_yaml(values, resolved)
            notes += [f"{key}: a secret, left out of the YAML; add it, or set it in the environment" for key in hidden]
        return {
            "ok": not problems,
            "dialect": resolved.dialect,
            "problems": [_problem(one) for one in problems],
            "notes": notes,
            "values": {dotted(path): value for path, value in native.leaves(values)},
            "yaml": text,
        }

    def plan(self, text: str, name: str) -> dict[str, Any]:
        """The memory plan of `gracetune estimate`."""
        with _as_file(text, name, {}) as path:
            answer = self._commands.json("estimate", str(path), "--json", timeout_s=PLAN_LIMIT_S)
            reject_errors(_without_folder(answer, path.parent))
        keys = ("verdict", "summary", "run", "machine", "tiers", "lines", "changes", "assumptions")
        notes = [*answer.get("assumptions", []), *answer.get("notes", [])]
        return {**{key: answer.get(key) for key in keys}, "notes": notes}

    def save(self, text: str, name: str) -> Path:
        """Write a new file. An existing one is never replaced."""
        if _own_name(name) != name:
            hint = f"for example {_own_name(name)}"
            raise StudioError(400, f"file_name {short(name)!r}", "a file name without folders, ending in .yaml", hint)
        folder = self._root / CONFIGS
        folder.mkdir(exist_ok=True)
        if not folder.resolve().is_relative_to(self._root.resolve()):
            raise StudioError(409, f"{folder}, a link out of the studio's folder", "a folder", f"remove {folder}")
        try:
            write_file(folder / name, _encoded(text), replace=False)
        except FileExistsError:
            raise StudioError(409, f"{name}, which exists", "a new name", f"{_next_name(folder, name)}") from None
        return folder / name


def own_yaml(values: Mapping[str, Any], resolved: Resolved) -> tuple[str, list[str]]:
    """A config of another dialect in our own: what its file sets, and the defaults of its program.

    Also returns the keys of secrets, which are left out.
    """
    hidden: list[str] = []
    tree: dict[str, Any] = {}
    for path, value in native.leaves(values):
        origin = native.origin_of(path, resolved.origins)
        if origin.kind == "environment" or (origin.kind == "default" and not origin.location):
            continue
        if isinstance(value, str) and HIDDEN in value:
            hidden.append(dotted(path))
            continue
        node: Any = tree
        for step, following in pairwise(path):
            node = _enter(node, step, [] if isinstance(following, int) else {})
        node[path[-1]] = value
    if not resolved.config.validation.prompts:  # without the key, a run of our own dialect makes prompts of captions
        _enter(tree, "validation", {})["prompts"] = []
    return native.write_values(tree), hidden


def _enter(node: Any, step: str | int, empty: Any) -> Any:
    if isinstance(step, int):
        if step == len(node):
            node.append(empty)
        return node[step]
    return node.setdefault(step, empty)


def _rejected(error: ConfigError, dialect: str | None, notes: tuple[str, ...], text: str) -> dict[str, Any]:
    sections = sections_of(text)
    found = {key: value for key, value in (sections or {}).items() if key != native.VERSION_KEY}
    return {
        "ok": False,
        "dialect": dialect,
        "problems": [_problem(one) for one in error.problems],
        "notes": [*notes],
        "values": {dotted(path): value for path, value in native.leaves(found) if path},
        "yaml": text if sections is not None else None,
    }


def _problem(problem: Problem) -> dict[str, Any]:
    return {"key": problem.key, "found": problem.found, "expected": problem.expected, "try": problem.hint,
            "file": problem.file}  # fmt: skip


@contextmanager
def _as_file(text: str, name: str, files: Mapping[str, str]) -> Iterator[Path]:
    """The text as a file with its name in a temporary folder, for the readers, which take files."""
    with tempfile.TemporaryDirectory(prefix="gracetune-studio-") as folder:
        for other, content in files.items():
            (Path(folder) / _own_name(other)).write_bytes(_encoded(content))
        path = Path(folder) / _own_name(name)
        path.write_bytes(_encoded(text))
        yield path


def _encoded(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:  # JSON can hold half a character
        raise StudioError(400, "text with half a character", "text that UTF-8 can hold", "remove it") from None


def _own_name(name: str) -> str:
    """The name as a plain file name with the extension of a config."""
    printable = "".join(letter for letter in name if letter.isprintable())
    safe = file_name(printable.encode(errors="ignore").decode().lstrip(". ")[:120]) or "run"
    return safe if Path(safe).suffix.lower() in FORMATS else f"{safe}.yaml"


def _next_name(folder: Path, name: str) -> str:
    path = Path(name)
    numbered = (f"{path.stem}-{number}{path.suffix}" for number in range(2, 1 << 20))
    return next(one for one in numbered if not (folder / one).exists())


def _without_folder(value: Any, folder: Path) -> Any:
    """The answer without the temporary folder in its texts."""
    if isinstance(value, str):
        return value.replace(f"{folder}/", "").replace(str(folder), "the folder of this file")
    if isinstance(value, Mapping):
        return {_without_folder(key, folder): _without_folder(inner, folder) for key, inner in value.items()}
    return [_without_folder(inner, folder) for inner in value] if isinstance(value, list | tuple) else value


def _changed(text: str, changes: Mapping[str, Any]) -> str:
    """The text with the values of the form in it."""
    paths = {}
    for key, value in changes.items():
        try:
            copied, invalid = plain(value)
            paths[parse_path(key)] = copied
        except (ValueError, NotPlainError) as error:
            raise StudioError(
                400, f"set {short(key)!r}: {short(str(error))}", "a key and a value", "check it"
            ) from None
        if invalid:
            raise StudioError(400, f"set {short(key)!r}: {invalid[0].found}", invalid[0].expected, invalid[0].hint)
    changed = with_values(text, paths)
    if changed is None:
        raise StudioError(
            409, "a text that is not of gracetune's own dialect, or not YAML", "YAML that begins with `gracetune: 1`",
            "use the `yaml` of a check of this text",
        )  # fmt: skip
    return changed


# -- requests ---------------------------------------------------------------------------------------------------------


def text_in(body: Mapping[str, Any], key: str, default: str | None = None, most: int = LARGEST_FILE) -> str:
    """A text of a request's body. Without a default it is required."""
    value = body.get(key, default)
    if value is None and default is not None:
        return default
    if not isinstance(value, str) or len(value) > most:
        found = f"{len(value):,} characters" if isinstance(value, str) else f"{key} of type {type(value).__name__}"
        raise StudioError(400, f"{key}: {found}", f"text of at most {most:,} characters", f'{{"{key}": "..."}}')
    return value


def _mapping_in(body: Mapping[str, Any], key: str, most: int) -> dict[str, Any]:
    value = body.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict) or len(value) > most:
        raise StudioError(
            400, f"{key} of another kind or too long", f"an object of at most {most}", f'{{"{key}": {{}}}}'
        )
    return value


def _answers(body: Mapping[str, Any]) -> dict[str, Any]:
    """The answers of a request as options of `gracetune init`. Empty ones are left to their defaults."""
    found: dict[str, Any] = {name: text_in(body, name, "", 1000) for name in ("model", "preset") if body.get(name)}
    if body.get("trigger") is not None:
        found["trigger"] = text_in(body, "trigger", "", 1000)
    steps = body.get("steps")
    if steps is not None and steps != "":
        if isinstance(steps, bool) or not str(steps).isascii() or not str(steps).isdecimal() or len(str(steps)) > 10:
            raise StudioError(400, f"steps: {short(str(steps))}", "a whole number above 0", '{"steps": 2000}')
        found["steps"] = int(steps)
    if any("\0" in str(value) for value in found.values()):
        raise StudioError(400, "an answer with a NUL character", "text", "remove it")
    return found


def routes(studio: Studio) -> list[Route]:
    maker, slow = RunMaker(studio.root, studio.environment, studio.commands), SlowWork()

    async def propose(request: Request) -> Response:
        body = await json_body(request)
        folder = text_in(body, "folder", most=4096)
        if not folder.strip() or "\0" in folder:
            raise StudioError(400, "no folder", "the folder of the images, clips or sounds", '{"folder": "photos"}')
        return json_reply(await slow.run(maker.propose, folder, _answers(body)))

    async def check(request: Request) -> Response:
        body = await json_body(request)
        files = _mapping_in(body, "files", _MOST_FILES)
        others = {name: text_in(files, name) for name in files}
        changes = _mapping_in(body, "set", MOST_VALUES)
        text, name = text_in(body, "text"), text_in(body, "name", "run.yaml", 1000)
        return json_reply(await slow.run(maker.check, text, name, others, changes))

    async def plan(request: Request) -> Response:
        body = await json_body(request)
        text, name = text_in(body, "text"), text_in(body, "name", "run.yaml", 1000)
        return json_reply(await slow.run(maker.plan, text, name))

    async def save(request: Request) -> Response:
        body = await json_body(request)
        start = body.get("start", False)
        if not isinstance(start, bool):
            raise StudioError(400, f"start of type {type(start).__name__}", "true or false", '{"start": true}')
        path = await slow.run(maker.save, text_in(body, "text"), text_in(body, "file_name", most=1000))
        job = await slow.run(studio.queue.add, path) if start else None
        return json_reply({"path": str(path), "job": job})

    return [
        Route("/api/new/propose", propose, methods=["POST"]),
        Route("/api/new/check", check, methods=["POST"]),
        Route("/api/new/plan", plan, methods=["POST"]),
        Route("/api/new/save", save, methods=["POST"]),
    ]
