"""What lies at the names that a run will write to, looked at before its first step: a link that leads nowhere, or a
folder where a file belongs, would otherwise be found when there is a result and no place for it."""

from __future__ import annotations

import errno
import shlex
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from gracetune.config.adapter_kinds import FULL_FINETUNE, AdapterKind
from gracetune.errors import ConfigError, Problem
from gracetune.models.spec import Expert
from gracetune.storage.os_errors import problem_of
from gracetune.telemetry.report.write import LOG_FILE
from gracetune.train.output import CONFIG, RunFolder


def check_output_paths(folder: RunFolder, experts: Sequence[Expert], kind: AdapterKind) -> None:
    """ConfigError for everything that is in the way. A result of an earlier run is not: see `reject_finished`."""
    folders, files = [folder.samples, folder.logs], [folder.path / CONFIG, folder.path / LOG_FILE]
    with folder.refusing():
        steps = folder.steps()
    for step in (None, *steps):
        if kind == FULL_FINETUNE:
            model = folder.model(step)
            folders += [model, *(model / one.component for one in experts)]
        else:
            files += [folder.adapter(one.name, step) for one in experts]
    problems = [*_of_wrong_kind(folders, "a folder"), *_of_wrong_kind(files, "a file")]
    if problems:
        raise ConfigError(problems)


def _of_wrong_kind(paths: Sequence[Path], expected: str) -> Iterator[Problem]:
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
    """None: nothing is there."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        # Below what is no folder there is nothing; what that is, is said of it.
        return f"a link to {path.readlink()}, which does not exist" if path.is_symlink() else None
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return "a link that leads back to itself"
    if stat.S_ISDIR(mode):
        return "a folder"
    return "a file" if stat.S_ISREG(mode) else "neither a file nor a folder"
