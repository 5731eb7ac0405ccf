"""The names of every family's layers in one place."""

from __future__ import annotations

from gracetune.models.flux.keys import KEYS as FLUX
from gracetune.models.installed import WithInstalled
from gracetune.models.keys import KeyMap
from gracetune.models.qwen_image.keys import KEYS as QWEN_IMAGE
from gracetune.models.sdxl.keys import KEYS as SDXL
from gracetune.models.stable_audio.keys import KEYS as STABLE_AUDIO
from gracetune.models.wan.keys import KEYS as WAN

KEY_MAPS: WithInstalled[KeyMap] = WithInstalled(
    {keys.family: keys for keys in (WAN, QWEN_IMAGE, FLUX, SDXL, STABLE_AUDIO)}, module="keys", name="KEYS"
)
"""By family, in the order of `config.families`."""
