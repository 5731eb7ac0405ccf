"""Base weights in 8 bits: what such a run cannot be combined with, said before anything is loaded."""

from __future__ import annotations

from gracetune.config.run_config import RunConfig
from gracetune.errors import ConfigError
from gracetune.models.fp8 import check_fp8
from gracetune.planning.processes import sharded_fp8_problem
from gracetune.train.runtime import Runtime


def refuse_fp8(config: RunConfig, runtime: Runtime) -> None:
    if config.model.base_precision != "fp8":
        return
    check_fp8(runtime.device)
    if runtime.is_sharded:
        raise ConfigError([sharded_fp8_problem()])
