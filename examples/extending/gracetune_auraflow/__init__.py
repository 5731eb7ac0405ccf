"""AuraFlow: an image transformer with one text encoder."""

FAMILY = "auraflow"
"""The name of the entry point in pyproject.toml; configs say it as `model.family`."""
