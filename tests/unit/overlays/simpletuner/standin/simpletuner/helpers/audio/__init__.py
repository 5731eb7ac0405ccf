"""As upstream's: its loader's packages are asked for when somebody loads a sound."""

import importlib


def __getattr__(name):
    if name not in ("load_audio", "load_audio_from_video"):
        raise AttributeError(name)
    return getattr(importlib.import_module("simpletuner.helpers.audio.load"), name)
