"""The ai-toolkit dialect: reads ai-toolkit's job files into a `RunConfig`."""

from gracetune.config.dialects.aitoolkit.dataset_parts import settle_caches
from gracetune.config.dialects.aitoolkit.reader import TABLES, looks_like, read
from gracetune.config.dialects.peer_file import settle_samples
from gracetune.config.dialects.table import Dialect

AI_TOOLKIT = Dialect(
    "ai-toolkit",
    recognizes=looks_like,
    read=read,
    tables=TABLES,
    settle=(settle_samples, settle_caches),
    finds_beside=True,
    variables_in_text=True,
)
