"""Check the paths a run will write to, before its first step.

A dangling link, or a folder where a file belongs, would otherwise be found only when the result is to be written.
"""

from __future__ import annotations

import errno
import shlex
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from gracetune.config.registry import FULL_FINETUNE, AdapterKind
from gracetune.errors import ConfigError, Problem
from gracetune.models.spec import Expert
from gracetune.storage.os_errors import problem_of
from gracetune.telemetry.report.write import LOG_FILE
from gracetune.train.output import CONFIG, RunFolder


def check_output_paths(folder: RunFolder, experts: Sequence[Expert], kind: AdapterKind) -> None:
    """Raise ConfigError if something of the wrong type has one of the run's names.

    Results of an earlier run are checked by `RunFolder.reject_finished`.
    """
    folders, files = [folder.samples, folder.logs], [folder.path / CONFIG, folder.path / LOG_FILE]
    with folder.refusing():
        steps = folder.steps()
    for step in (None, *steps):
        if kind == FULL_FINETUNE:
            model = folder.model(step)
            folders += [model, *(model / one.component for one in experts)]
        else:
            files += [folder.adapter(one.name, step) for one in experts]
    problems = [*_wrong_types(folders, "a folder"), *_wrong_types(files, "a file")]
    if problems:
        raise ConfigError(problems)


def _wrong_types(paths: Sequence[Path], expected: str) -> Iterator[Problem]:
    for path in paths:
        try:
            found = _kind(path)
        except OSError as error:
            yield problem_of(error, "output_dir", path, elsewhere="--set output_dir=FOLDER", then="")
            continue
        if found not in (None, expected):
            hint = f"look at `ls -ld {shlex.quote(str(path))}` and move it away; or --set output_dir=FOLDER"
            yield Problem(
                "output_dir", f"{path.name}, {found}", f"nothing of this name, or {expected}", hint, str(path)
            )


def _kind(path: Path) -> str | None:
    """What is at this path; None if nothing is."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        # Below a file there is nothing. The file itself is reported under its own path.
        return f"a link to {path.readlink()}, which does not exist" if path.is_symlink() else None
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return "a link that leads back to itself"
    if stat.S_ISDIR(mode):
        return "a folder"
    return "a file" if stat.S_ISREG(mode) else "neither a file nor a folder"
