"""Checks of `model.base_precision` against the machine and the sharding."""

from __future__ import annotations

from gracetune.config.run_config import RunConfig
from gracetune.errors import ConfigError
from gracetune.models.eight_bit_linear import check_fp8
from gracetune.planning.processes import sharded_bits_problem
from gracetune.train.runtime import Runtime


def reject_eight_bits(config: RunConfig, runtime: Runtime) -> None:
    """Reject fp8 on a device that cannot compute in it, and 8-bit weights with FSDP."""
    precision = config.model.base_precision
    if precision == "fp8":
        check_fp8(runtime.device)
    if precision in ("fp8", "int8") and runtime.is_sharded:
        raise ConfigError([sharded_bits_problem(precision)])
