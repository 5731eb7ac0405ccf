"""`training.deterministic`: two runs of one config on one machine give the same numbers bit for bit, on a GPU too.

On a CPU with one thread this holds without the setting. Deterministic kernels are slower, and an operation without one
ends the run at its first batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from gracetune.config.environment import make_cublas_deterministic
from gracetune.config.run_config import RunConfig
from gracetune.errors import ConfigError, GracetuneError, Problem
from gracetune.train.view import View

_REPEATABLE = (":4096:8", ":16:8")
"""The two workspace settings with which cuBLAS is deterministic."""


@contextmanager
def deterministic(config: RunConfig, view: View) -> Iterator[None]:
    """Use deterministic kernels inside, and restore torch's settings afterwards.

    Enter this before CUDA is initialized: cuBLAS reads its workspace setting then.
    """
    if not config.training.deterministic:
        yield
        return
    started = torch.cuda.is_initialized()
    found, ours = make_cublas_deterministic()
    if found not in _REPEATABLE:
        hint = f"unset CUBLAS_WORKSPACE_CONFIG, or export CUBLAS_WORKSPACE_CONFIG={_REPEATABLE[0]}"
        raise ConfigError([Problem("CUBLAS_WORKSPACE_CONFIG", found, f"one of {', '.join(_REPEATABLE)}", hint)])
    if started and ours:
        view.warn(
            "training.deterministic: CUDA had started in this process before cuBLAS could be configured; start the run "
            f"in its own process, or with CUBLAS_WORKSPACE_CONFIG={_REPEATABLE[0]} in its environment"
        )
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    view.report(
        "deterministic, as training.deterministic says: torch's repeatable kernels only, cuBLAS with the workspace "
        f"{found}; steps take longer"
    )
    try:
        yield
    except RuntimeError as error:
        if "deterministic" not in str(error):  # torch raises a plain RuntimeError for this
            raise
        first = str(error).splitlines()[0]
        hint = "--set training.deterministic=false, or --set training.attention=math where attention is named"
        problem = Problem("training.deterministic", first, "operations with a repeatable kernel", hint)
        raise GracetuneError(str(problem)) from error
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
