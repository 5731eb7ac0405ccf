"""Tiny models of every family, for tests: `cached("sdxl", "base-1.0", tmp_path)` returns a model folder."""

from __future__ import annotations

from gracetune.models.tiny import build, cached

__all__ = ["build", "cached"]
