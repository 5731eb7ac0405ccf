"""How the base weights are held: what `auto` means for a run, and what 8 bits cannot be combined with."""

from __future__ import annotations

from gracetune.config.run_config import RunConfig
from gracetune.errors import ConfigError
from gracetune.models.fp8 import check_fp8
from gracetune.planning.processes import sharded_bits_problem
from gracetune.train.runtime import Runtime


def reject_eight_bits(config: RunConfig, runtime: Runtime) -> None:
    held = config.model.base_precision
    if held == "fp8":
        check_fp8(runtime.device)
    if held in ("fp8", "int8") and runtime.is_sharded:
        raise ConfigError([sharded_bits_problem(held)])
