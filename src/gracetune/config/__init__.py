"""Reads configuration files of every supported dialect into one typed, frozen `RunConfig`."""

from gracetune.config.draft import Origin
from gracetune.config.environment import Environment
from gracetune.config.resolve import Resolved, UnresolvedError, load
from gracetune.config.run_config import RunConfig

__all__ = ["Environment", "Origin", "Resolved", "RunConfig", "UnresolvedError", "load"]
