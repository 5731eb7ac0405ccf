"""Command line of `train.py` and `simpletuner/train.py`, which the GH200 guides use.

It accepts our own flags, and SimpleTuner's options as `--name value`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gracetune.cli.console import Session, start
from gracetune.cli.log_level import LogLevel
from gracetune.cli.train import TrainRequest, run_training, samples_override
from gracetune.config.dialects.simpletuner.keys import ALIASES
from gracetune.config.dialects.simpletuner.training import TRAINING
from gracetune.config.dialects.values import as_number, positive_or_none
from gracetune.config.draft import dotted
from gracetune.config.spelling import misspelt
from gracetune.errors import ConfigError, Problem

_ATTENTION = {"flash_attn": "flash_attn_2", "diffusers": "sdpa", "native": "sdpa", "xformers": "auto"}
_OTHERS: dict[str, str] = {
    "output_dir": "output_dir",
    "seed": "training.seed",
    "mixed_precision": "training.mixed_precision",
    "optimizer": "optimizer.name",
    "lr_scheduler": "schedule.name",
    "grad_clip_method": "training.grad_clip",
}
_ROWS = {key.name: (key.path, key.convert) for key in TRAINING.keys.values() if key.path is not None} | {
    "learning_rate": (("optimizer", "lr"), as_number),
    "lr_warmup_steps": (("schedule", "warmup_steps"), as_number),
    "lr_num_cycles": (("schedule", "cycles"), as_number),
    "lr_power": (("schedule", "power"), as_number),
    "lr_end": (("schedule", "end_lr"), as_number),
    "max_grad_norm": (("training", "max_grad_norm"), positive_or_none),
}
"""SimpleTuner's options that set one value. Those listed here depend on each other in a config file; as flags, each
sets its own value only."""
_ALWAYS = {"enable_manual_validation": "a run takes requests at any time: gracetune validate-now RUN"}
"""SimpleTuner's switches for what every run does here, each with the note that is printed."""
_SWITCHES = (
    "dry-run", "allow-unsupported", "allow-other-data", "allow-other-run", "allow-misfit", "force-oversubscription",
    "no-samples", "json",
)  # fmt: skip
_VALUES = ("config", "set", "resume", "max-steps", "price-per-hour", "log-level")


def main(arguments: Sequence[str], *, help: str | None) -> int:
    """Run the script. Returns its exit code. `help` is the text for --help."""

    def run(session: Session) -> int:
        if not arguments or "-h" in arguments or "--help" in arguments:
            print(help)
            return 0 if arguments else 2
        launch = read_arguments(arguments)
        for note in launch.notes:
            print(note, file=sys.stderr)
        return run_training(launch.request, session)

    return start(run, as_json="--json" in arguments)


@dataclass(frozen=True)
class LaunchLine:
    request: TrainRequest
    notes: tuple[str, ...]


def read_arguments(arguments: Sequence[str]) -> LaunchLine:
    """Parse the flags. Raises ConfigError with all wrong flags at once."""
    problems: list[Problem] = []
    ours: dict[str, str] = {}
    sets: list[str] = []
    notes: list[str] = []
    for flag, value in _pairs(arguments, problems):
        name, plain = flag.replace("-", "_"), flag.replace("_", "-")
        if plain == "set":
            sets.append(value or "")
        elif plain in (*_SWITCHES, *_VALUES):
            ours[plain] = value or ""
        elif name in _ALWAYS:
            notes.append(f"--{flag}: {_ALWAYS[name]}")
        elif (found := _override(name, value)) is not None:
            sets += found
        else:
            supported = [*_SWITCHES, *_VALUES, "max_train_steps", "attention_mechanism", *_OTHERS, *_ROWS, *_ALWAYS]
            hint = misspelt(flag, supported, "--set KEY=VALUE sets any value of the configuration")
            problems.append(Problem(f"--{flag}", value or "a switch", "a flag train.py knows", hint))
    if "config" not in ours:
        problems.append(Problem("--config", "nothing", "a configuration file", "--config config.json"))
    price = _number(ours.get("price-per-hour"), "--price-per-hour", problems)
    level = _log_level(ours.get("log-level", LogLevel.WARNING), problems)
    if "max-steps" in ours:
        sets += [f"training.max_steps={ours['max-steps']}", "training.epochs=null"]
    sets += samples_override(no_samples="no-samples" in ours)
    if problems:
        raise ConfigError(problems)
    config, elsewhere = find_config(Path(ours["config"]))
    notes += [elsewhere] if elsewhere else []
    request = TrainRequest(
        config,
        tuple(sets),
        ours.get("resume"),
        dry_run="dry-run" in ours,
        allow_unsupported="allow-unsupported" in ours,
        allow_other_data="allow-other-data" in ours,
        allow_other_run="allow-other-run" in ours,
        allow_misfit="allow-misfit" in ours,
        force_oversubscription="force-oversubscription" in ours,
        price_per_hour=price,
        log_level=level,
        json="json" in ours,
    )
    return LaunchLine(request, tuple(notes))


def find_config(path: Path) -> tuple[Path, str | None]:
    """The config file, and a note if it was found in `config/`: the guides name it with and without that folder."""
    inside = Path("config") / path
    if path.exists() or path.is_absolute() or not inside.is_file():
        return path, None
    return inside, f"--config {path}: no such file; using {inside}"


def _pairs(arguments: Sequence[str], problems: list[Problem]) -> Iterator[tuple[str, str | None]]:
    """Flags and values: `--name value`, `--name=value` or `--switch`. A word without a flag is the config file."""
    words = [*arguments]
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            yield "config", word
            continue
        name, equals, value = word[2:].partition("=")
        if equals:
            yield name, value
        elif _is_switch(name) or not words or words[0].startswith("--"):
            yield name, None
        else:
            yield name, words.pop(0)


def _is_switch(name: str) -> bool:
    return name.replace("_", "-") in _SWITCHES or name.replace("-", "_") in _ALWAYS


def _override(name: str, value: str | None) -> list[str] | None:
    """`--set` overrides for an option of SimpleTuner; None if there are none."""
    name = ALIASES.get(name, name)
    if name in ("max_train_steps", "num_train_epochs"):
        ours, other = ("max_steps", "epochs") if name == "max_train_steps" else ("epochs", "max_steps")
        return [f"training.{ours}={value}", f"training.{other}=null"]
    if name == "attention_mechanism" and value is not None:
        plain = value.strip().lower().replace("-", "_")
        return [f"training.attention={_ATTENTION.get(plain, plain)}"]
    if name in _OTHERS:
        return [f"{_OTHERS[name]}={value}"]
    if name in _ROWS:
        path, convert = _ROWS[name]
        given: object = True if value is None else value
        return [f"{dotted(path)}={_as_text(convert(given))}"]
    return None


def _as_text(value: object) -> str:
    return (
        {True: "true", False: "false", None: "null"}.get(value, str(value))
        if isinstance(value, bool | None)
        else str(value)
    )


def _log_level(text: str, problems: list[Problem]) -> LogLevel:
    try:
        return LogLevel(text)
    except ValueError:
        supported = ", ".join(LogLevel)
        problems.append(Problem("--log-level", text or "nothing", f"one of {supported}", "--log-level debug"))
        return LogLevel.WARNING


def _number(text: str | None, flag: str, problems: list[Problem]) -> float | None:
    if text is None:
        return None
    try:
        return float(text)
    except ValueError:
        problems.append(Problem(flag, text, "a number", f"{flag} 2.49"))
        return None
