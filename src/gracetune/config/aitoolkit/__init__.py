"""The ai-toolkit dialect: what people already have, read into our own config."""

from gracetune.config.aitoolkit.dataset_parts import settle_caches
from gracetune.config.aitoolkit.reader import looks_like, read

__all__ = ["looks_like", "read", "settle_caches"]
