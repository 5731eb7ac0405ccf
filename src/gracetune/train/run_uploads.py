"""Uploads of a run to the hub: the final weights and, if `every_checkpoint` is set, the weights of each checkpoint.

Uploads run in the background. A failed one is reported as a warning, and no function here raises because of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml

from gracetune.config.environment import Environment
from gracetune.config.families import find_flavour, flavours
from gracetune.config.run_config import RunConfig
from gracetune.hub.access import HubAccess
from gracetune.hub.upload import HubUploads
from gracetune.train.output import RunFolder
from gracetune.train.view import View


class RunUploads:
    """What a run uploads, and when. Does nothing unless `checkpoints.push_to_hub` is set; rank 0 alone uploads."""

    def __init__(
        self, config: RunConfig, folder: RunFolder, environment: Environment, view: View, *, is_main: bool
    ) -> None:
        requested = config.checkpoints.push_to_hub
        self._every = requested is not None and requested.every_checkpoint
        self._uploads: HubUploads | None = None
        if requested is not None and is_main:
            self._uploads = HubUploads(
                requested.repo_id, folder.path, HubAccess.of(environment), private=requested.private,
                card=model_card(config),
                report=view.report, warn=view.warn,
            )  # fmt: skip

    def begin(self) -> None:
        """Create the repository, so that a problem with the token is reported before the first step."""
        if self._uploads is not None:
            self._uploads.begin()

    def upload_checkpoint(self, step: int, files: Sequence[Path]) -> None:
        if self._uploads is not None and self._every:
            self._uploads.add(files, below=f"checkpoint-{step}", message=f"Checkpoint at step {step}")

    def upload_result(self, step: int, files: Sequence[Path]) -> None:
        """Upload the final files. A run that saved none passes an empty sequence."""
        if self._uploads is not None and files:
            self._uploads.add(files, message=f"Trained for {step} steps")

    def wait(self) -> None:
        """Wait until every upload has succeeded or failed."""
        if self._uploads is not None:
            self._uploads.drain()


def model_card(config: RunConfig) -> str:
    """The README of a new repository. It names the base model, but no folder of this machine."""
    base = config.model.path
    if base is None:
        known = flavours(config.model.family)
        flavour = find_flavour(config.model.family, config.model.flavour) if config.model.flavour else known[0]
        base = None if flavour is None else flavour.weights
    header: dict[str, object] = {
        "library_name": "diffusers",
        "tags": [config.adapter.kind, config.model.family, "gracetune"],
    }
    if base is not None and base.count("/") == 1 and not base.startswith((".", "/", "~")):
        header["base_model"] = base
    triggers = [one.captions.trigger_word or one.captions.instance_prompt for one in config.datasets]
    if trigger := next((word for word in triggers if word), None):
        header["instance_prompt"] = trigger
    text = yaml.safe_dump(header, sort_keys=True, allow_unicode=True)
    return f"---\n{text}---\n\n# {config.name}\n\nTrained with gracetune.\n"
