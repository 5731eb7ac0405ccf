"""The ai-toolkit dialect: what people already have, read into our own config."""

from gracetune.config.dialects.aitoolkit.dataset_parts import settle_caches
from gracetune.config.dialects.aitoolkit.reader import looks_like, read

__all__ = ["looks_like", "read", "settle_caches"]
