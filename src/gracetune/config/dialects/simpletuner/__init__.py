"""The SimpleTuner dialect: what people already have, read into our own config."""

from gracetune.config.dialects.simpletuner.reader import looks_like, read

__all__ = ["looks_like", "read"]
