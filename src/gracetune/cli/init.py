"""`gracetune init FOLDER`: write a config for a folder of images, clips or sounds."""

from __future__ import annotations

import contextlib
import shlex
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.console import Console

from gracetune.cli.config import AsJson
from gracetune.cli.console import Output, Session, mark, out, print_json, session, shown
from gracetune.cli.streams import ignore_lost_stdout
from gracetune.config import load
from gracetune.config.dataset_config import Dataset
from gracetune.config.path_status import inspect_path
from gracetune.data.backends.errors import too_many
from gracetune.errors import ConfigError, Problem
from gracetune.hardware import Machine, probe
from gracetune.proposal.contents import FolderContents, inspect_folder
from gracetune.proposal.models import ChosenModel, model_named
from gracetune.proposal.presets import TrainingPreset, preset_named, presets_for
from gracetune.proposal.proposal import (
    Answers,
    Proposal,
    check_answers,
    default_model,
    default_preset,
    default_trigger,
    propose,
    slug,
)
from gracetune.proposal.text import text_of
from gracetune.storage.atomic import write_file

T = TypeVar("T")
_NAMED = 5
"""Number of unreadable files that are named."""


@dataclass(frozen=True)
class InitRequest:
    """The arguments of the command line."""

    folder: Path
    model: str | None = None
    trigger: str | None = None
    """Empty: no trigger word. None: not given."""
    preset: str | None = None
    steps: int | None = None
    output: Path | None = None
    yes: bool = False


@dataclass(frozen=True)
class Written:
    """A config that was written, and the choices behind it."""

    path: Path
    contents: FolderContents
    answers: Answers
    proposal: Proposal

    @property
    def command(self) -> str:
        """The next command: `estimate` shows what takes the memory of a config that does not fit."""
        verb = "estimate" if self.proposal.is_rejected else "train"
        return f"gracetune {verb} {shlex.quote(str(self.path))}"


def init(
    context: typer.Context,
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder of images, clips or sounds, with captions if any.")
    ],
    model: Annotated[
        str | None,
        typer.Option(metavar="M", help="Model: a family, family/flavour, hub id, model folder, or FAMILY:FILE."),
    ] = None,
    trigger: Annotated[
        str | None, typer.Option(metavar="W", help="Trigger word, added to every caption; '' for none.")
    ] = None,
    preset: Annotated[
        str | None, typer.Option(metavar="P", help="Preset: character, style, concept, edit, motion or sound.")
    ] = None,
    steps: Annotated[int | None, typer.Option(metavar="N", min=1, help="Optimizer steps.")] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Config to write; unset: FOLDER.yaml, beside FOLDER.")
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Use the default for every option that is not given.")
    ] = False,
    json_output: AsJson = False,
) -> None:
    """Write a config for a folder of images, clips or sounds. Ask for options that are not given."""
    ignore_lost_stdout()
    request = InitRequest(folder, model, trigger, preset, steps, output, yes)
    written = run_init(request, session(context), may_ask=not json_output)
    if json_output:
        print_json(_as_json(written))
    else:
        _print(out(), written)


def run_init(request: InitRequest, started: Session, *, may_ask: bool = True) -> Written:
    """Write the config. Raises ConfigError, and writes nothing, if the folder, an answer or the output is unusable."""
    path = _output(request)
    questions = _Questions(request, on_terminal=may_ask and sys.stdin.isatty() and sys.stderr.isatty())
    contents = inspect_folder(request.folder)
    _report(f"{request.folder}: {contents.summary}")
    if contents.ignored:
        _report(f"left out: {contents.ignored} files of other kinds than most")
    _report_unreadable(contents)
    machine = probe()
    answers = questions.answers(slug(path.stem), contents, machine)
    proposal = propose(contents, answers, machine)
    text = text_of(proposal, _header(request, answers, proposal, path))
    _check(text, proposal, started)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        write_file(path, text.encode(), replace=False)
    except FileExistsError:
        raise ConfigError([_taken(path)]) from None
    return Written(path, contents, answers, proposal)


def _report_unreadable(contents: FolderContents) -> None:
    files, total = contents.unreadable, len(contents.unreadable) + len(contents.files)
    if not files:
        return
    most = Dataset.model_fields["corrupt_threshold"].default
    then = f"; training stops above {most:.0%}: repair or remove them" if too_many(len(files), total, most) else ""
    _report(f"warning left out, unreadable: {len(files)} of {total} files{then}")
    for one in files[:_NAMED]:
        _report(f"  {one.path}: {one.reason}")
    if len(files) > _NAMED:
        _report(f"  and {len(files) - _NAMED} more")


def _output(request: InitRequest) -> Path:
    """The path of the config. Raises ConfigError if it exists already."""
    path = request.output.expanduser() if request.output is not None else default_output(request.folder)
    if path.suffix.lower() not in (".yaml", ".yml"):
        raise ConfigError([Problem("--output", str(path), "a file ending in .yaml", f"--output {path}.yaml")])
    if inspect_path(path).kind != "nothing":
        raise ConfigError([_taken(path)])
    return path


def default_output(folder: Path) -> Path:
    """The config's default path: beside the folder, with its name."""
    folder = folder.expanduser()
    beside = folder.parent if folder.name not in ("", "..") else folder.resolve().parent
    return beside / f"{slug(folder.resolve().name)}.yaml"


def _taken(path: Path) -> Problem:
    number = next(
        number
        for number in range(2, 1 << 20)
        if inspect_path(path.with_stem(f"{path.stem}-{number}")).kind == "nothing"
    )
    hint = (
        f"train with it: gracetune train {path}; or write another: --output {path.with_stem(f'{path.stem}-{number}')}"
    )
    return Problem("--output", f"{path}, which exists", "a new file", hint)


@dataclass(frozen=True)
class _Questions:
    """Finds each answer: from its option, else from the default with --yes, else by asking on the terminal."""

    request: InitRequest
    on_terminal: bool

    def answers(self, name: str, contents: FolderContents, machine: Machine) -> Answers:
        request = self.request
        self._reject_silence(contents)
        preset = self._preset(contents)
        model = self._model(contents, preset, machine)
        answers = Answers(name, model, preset, None, request.steps)
        check_answers(contents, answers)
        trigger = request.trigger
        if trigger is None:
            default = default_trigger(contents)
            why = (
                "a word to call it by, added to every caption"
                if contents.captions
                else "no captions: a word to call it by"
            )
            trigger = self._ask(f"Trigger word ({why}; - for none)", default or "-")
        steps = request.steps or self._steps(preset.steps.of(len(contents.files)))
        return replace(answers, trigger=None if trigger.strip() in ("", "-") else trigger.strip(), steps=steps)

    def _reject_silence(self, contents: FolderContents) -> None:
        """Without a terminal to ask at, flags have to give every answer."""
        request = self.request
        if request.yes or self.on_terminal:
            return
        given = {"--model": request.model, "--trigger": request.trigger, "--steps": request.steps}
        if len(presets_for(contents.media)) > 1:
            given["--preset"] = request.preset
        missing = [flag for flag, value in given.items() if value is None]
        if missing:
            hint = f"gracetune init {shlex.quote(str(request.folder))} --yes takes the defaults"
            raise ConfigError(
                [Problem(", ".join(missing), "nothing, and no terminal to ask on", "all of them, or --yes", hint)]
            )

    def _preset(self, contents: FolderContents) -> TrainingPreset:
        if self.request.preset is not None:
            return preset_named(self.request.preset)
        choices = presets_for(contents.media)
        if len(choices) == 1:
            return choices[0]
        for one in choices:
            self._print(f"  {one.name:<10} {one.title}")
        return self._answer("What do they show?", default_preset(contents).name, preset_named)

    def _model(self, contents: FolderContents, preset: TrainingPreset, machine: Machine) -> ChosenModel:
        if self.request.model is not None:
            return _model(self.request.model)
        default = default_model(contents, preset, machine).name
        self._print(f"  {', '.join(preset.models)}, a model's folder, a hub id, or FAMILY:FILE")
        return self._answer("Which model?", default, _model)

    def _steps(self, default: int) -> int:
        return self._answer("Optimizer steps", str(default), _whole_number)

    def _print(self, text: str) -> None:
        if not self.request.yes:
            _report(text)

    def _ask(self, question: str, default: str) -> str:
        if self.request.yes:
            return default
        return str(typer.prompt(question, default=default, err=True))

    def _answer(self, question: str, default: str, read: Callable[[str], T]) -> T:
        """Asks again while the answer cannot be used."""
        while True:
            try:
                return read(self._ask(question, default))
            except ConfigError as error:
                if self.request.yes:
                    raise
                for problem in error.problems:
                    _report(f"  {problem.found}: expected {problem.expected}; {problem.hint}")


def _model(text: str) -> ChosenModel:
    from gracetune.cli.library_output import libraries_quiet

    if inspect_path(text.rpartition(":")[2]).kind != "folder":
        return model_named(text)
    _report(f"looking at {text}")
    with contextlib.redirect_stdout(sys.stderr), libraries_quiet():
        return model_named(text)


def _whole_number(text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise ConfigError([Problem("--steps", text, "a whole number above 0", "for example 2000")])
    return int(text)


def _report(text: str) -> None:
    Output(stderr=True).print(shown(text))


def _header(request: InitRequest, answers: Answers, proposal: Proposal, path: Path) -> list[str]:
    return [
        f"Written by `gracetune init {request.folder}`: preset {answers.preset.name}, for {answers.model.name}. "
        "Its values are from",
        *(f"  {source}" for source in answers.preset.sources_for(answers.model.family, answers.model.flavour.name)),
        f"gracetune config show {shlex.quote(path.name)} lists every option.",
        f"Plan for this machine: {proposal.mismatch or f'{proposal.plan.verdict}: {proposal.plan.summary}'}",
    ]


def _check(text: str, proposal: Proposal, started: Session) -> None:
    """Read the text back and check all rules of a config. It must give the config that was planned."""
    with tempfile.TemporaryDirectory(prefix="gracetune-init-") as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(text, encoding="utf-8")
        read = load(file, environment=started.environment.without_memory_options()).config
    if read != proposal.config:
        raise AssertionError("the config that was written is not the one that was planned")


def _print(console: Console, written: Written) -> None:
    proposal, path = written.proposal, written.path
    console.print(f"{mark(console, ok=True)} [bold]{shown(str(path))}[/]")
    console.print(f"    {shown(written.answers.model.name)}, {proposal.config.training.max_steps} steps, into "
                  f"{shown(proposal.config.output_dir)}")  # fmt: skip
    if written.answers.trigger and not written.contents.captions:
        console.print(f"    trigger word, as there are no captions: {shown(written.answers.trigger)}")
    weights = written.answers.model.missing_weights
    if weights is not None:
        console.print(f"    training downloads the weights: {shown(weights)}")
    if proposal.mismatch is None:
        fits = not proposal.is_rejected
        console.print(f"{mark(console, ok=fits)} {proposal.plan.verdict}: {shown(proposal.plan.summary)}")
    else:
        console.print(f"    {shown(proposal.mismatch)}")
    console.print(f"next: [bold]{shown(written.command)}[/]")


def _as_json(written: Written) -> dict[str, object]:
    contents, answers, proposal = written.contents, written.answers, written.proposal
    return {
        "ok": True,
        "config": str(written.path),
        "media": contents.media,
        "files": len(contents.files),
        "captioned": len(contents.captions),
        "preset": answers.preset.name,
        "model": answers.model.name,
        "trigger": answers.trigger,
        "steps": proposal.config.training.max_steps,
        "unreadable": [one.path for one in contents.unreadable],
        "plan": {
            "verdict": proposal.plan.verdict,
            "summary": proposal.plan.summary,
            "applies": proposal.mismatch is None,
            "note": proposal.mismatch,
        },
        "next": written.command,
    }
