"""The names of Stable Audio Open in configuration files. ai-toolkit does not support it."""

from __future__ import annotations

from gracetune.config.family_names import FamilyNames, Flavour

NAMES = FamilyNames(
    "stable_audio",
    (Flavour("open-1.0", "stabilityai/stable-audio-open-1.0", "audio"),),
    pipelines=("StableAudioPipeline",),
    objective="cosine",
)
