"""The published weights. The first is the one taken when a config names none."""

from __future__ import annotations

from gracetune.extension import Flavour

FLAVOURS = (Flavour("v0.3", "fal/AuraFlow-v0.3", "image"),)
