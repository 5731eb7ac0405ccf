"""Adjusts the sample requests of a peer's file as that program would.

Published files request samples that the peer's pipeline rounds or cannot generate. In our own dialect these are errors,
but an unchanged file of a peer has to train.
"""

from __future__ import annotations

from typing import Any

from gracetune.config.draft import Draft, Path
from gracetune.config.families import Flavour, find_flavour, flavours

_PROMPTS: Path = ("validation", "prompts")


def settle_samples(draft: Draft) -> None:
    """Adjust the sample requests that come from a file. Values from a flag are not changed."""
    family, prompts = draft.get(("model", "family")), draft.get(_PROMPTS)
    count = len(prompts) if isinstance(prompts, list) else 0
    if isinstance(family, str) and any(flavour.makes == "video" for flavour in flavours(family)):
        for root in (("validation",), *((*_PROMPTS, index) for index in range(count))):
            _round_frames(draft, (*root, "num_frames"))
    flavour = _flavour(draft, family)
    if count and flavour is not None and (flavour.edits or flavour.from_image):
        _drop_prompts_without_image(draft, prompts, flavour)


def _flavour(draft: Draft, family: Any) -> Flavour | None:
    name = draft.get(("model", "flavour"))
    return find_flavour(family, name) if isinstance(family, str) and isinstance(name, str) else None


def _round_frames(draft: Draft, path: Path) -> None:
    frames, origin = draft.get(path), draft.origins.get(path)
    if type(frames) is not int or frames < 1 or frames % 4 == 1 or origin is None or origin.kind != "file":
        return
    generated_frames = frames // 4 * 4 + 1
    draft.put(path, generated_frames, origin)
    draft.note(f"{origin.key}: {frames} frames become {generated_frames}, as in diffusers: clips have 4 k + 1 frames")


def _drop_prompts_without_image(draft: Draft, prompts: list[Any], flavour: Flavour) -> None:
    kept = [index for index, item in enumerate(prompts) if not isinstance(item, dict) or item.get("references")]
    dropped = [draft.written_key((*_PROMPTS, index, "prompt"))[0] for index in range(len(prompts)) if index not in kept]
    if not dropped:
        return
    # Origins are stored by index, so those of the remaining prompts move to their new indices.
    origins = {
        (*_PROMPTS, kept.index(index), *path[3:]): origin
        for path, origin in draft.origins.items()
        if path[:2] == _PROMPTS and len(path) > 2 and isinstance(index := path[2], int) and index in kept
    }
    first = next(origin for path, origin in draft.origins.items() if path[:2] == _PROMPTS)
    draft.put(_PROMPTS, [prompts[index] for index in kept], first)
    draft.origins.update(origins)
    draft.note(f"{', '.join(dropped)}: not generated, because {flavour.name} needs an input image and this has none "
               "(`ctrl_img` in ai-toolkit, `validation_input` in SimpleTuner)")  # fmt: skip
