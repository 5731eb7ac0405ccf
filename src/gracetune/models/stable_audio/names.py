"""What configuration files call Stable Audio Open. ai-toolkit does not train it."""

from __future__ import annotations

from gracetune.config.family_names import FamilyNames, Flavour

NAMES = FamilyNames(
    "stable_audio",
    (Flavour("open-1.0", "stabilityai/stable-audio-open-1.0", "audio"),),
    pipelines=("StableAudioPipeline",),
    objective="cosine",
)
