"""The two permanent hooks: a process with a `gracetune:` block gets a session and runs inside it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Final

from gracetune.extension import ConfigError, Problem

from .hooks import Function, UpstreamChangedError, argument, find_all, wrap, wrapped_by
from .points import INIT, RUN

KEY: Final = "gracetune"
_SESSION: Final = "_gracetune_session"


class NotAProcess:
    """The process class of `type: gracetune`, which is always an error."""

    def __init__(self, process_id: int, job: Any, config: Mapping[str, Any]) -> None:
        hint = f"write `type: diffusion_trainer`, and what you want of us under `{KEY}:`"
        raise ConfigError([Problem(f"config.process[{process_id}].type", KEY, "a trainer of ai-toolkit", hint)])


def report(line: str) -> None:
    sys.stderr.write(f"gracetune: {line}\n")
    sys.stderr.flush()


def open_entry() -> None:
    """Install the two hooks once. A changed ai-toolkit still runs every job without our block."""
    unknown = "because this ai-toolkit is not one we know"
    try:
        (made,) = find_all((INIT,))
    except UpstreamChangedError as error:
        report(f"the overlay is OFF and no `{KEY}:` block is read, {unknown}:\n{error}")
        return
    if wrapped_by(made) is not None:
        return
    wrap(made, _on_init)
    try:
        (ran,) = find_all((RUN,))
    except UpstreamChangedError as error:
        report(f"the overlay is OFF and a job with a `{KEY}:` block is rejected, {unknown}:\n{error}")
        return
    wrap(ran, _on_run)


def _on_init(original: Function, *args: Any, **kwargs: Any) -> Any:
    config = argument(original, "config", args, kwargs)
    if not isinstance(config, Mapping) or config.get(KEY) is None:
        return original(*args, **kwargs)
    process = args[0]
    location = f"config.process[{argument(original, 'process_id', args, kwargs)}]"
    trainer = find_all((RUN,))[0].owner
    if not isinstance(process, trainer):
        found, hint = f"a {type(process).__name__}", f"remove `{KEY}` from this process"
        raise ConfigError([Problem(f"{location}.{KEY}", found, f"a process that trains, with `{KEY}:`", hint)])
    from .options import read_job  # imported here so that jobs without the block start quickly
    from .session import Session

    session = Session(read_job(config, location), report)
    session.check()
    result = original(*args, **kwargs)
    setattr(process, _SESSION, session)
    return result


def _on_run(original: Function, *args: Any, **kwargs: Any) -> Any:
    session = vars(args[0]).get(_SESSION)
    if session is None:
        return original(*args, **kwargs)
    with session.running(args[0]):
        return original(*args, **kwargs)
