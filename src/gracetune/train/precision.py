"""Base weights in 8 bits: what such a run cannot be combined with, said before anything is loaded."""

from __future__ import annotations

from gracetune.config.run_config import RunConfig
from gracetune.errors import ConfigError, Problem
from gracetune.models.fp8 import check_fp8
from gracetune.train.runtime import Runtime


def refuse_fp8(config: RunConfig, runtime: Runtime) -> None:
    if config.model.base_precision != "fp8":
        return
    check_fp8(runtime.device)
    if runtime.is_sharded:
        found, expected = "fp8, with weights spread over processes (FSDP)", "replicas: fp8 weights are not spread"
        hint = "launch with config/accelerate_config_gh200.yaml, or --set model.base_precision=bf16"
        raise ConfigError([Problem("model.base_precision", found, expected, hint)])
