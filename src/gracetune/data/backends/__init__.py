"""Where a dataset's bytes come from: a folder, a URL, or either of them staged in memory."""

from gracetune.data.backends.handle import BackendHandle, from_json, to_json
from gracetune.data.backends.in_memory import InMemoryBackend
from gracetune.data.backends.local import LocalBackend
from gracetune.data.backends.open import GH200InMemoryBackend, OpenedBackend, attach_backend, open_backend
from gracetune.data.backends.pool import BackendPool
from gracetune.data.backends.share import LocalRanks
from gracetune.data.backends.url import UrlBackend

__all__ = [
    "BackendHandle",
    "BackendPool",
    "GH200InMemoryBackend",
    "InMemoryBackend",
    "LocalBackend",
    "LocalRanks",
    "OpenedBackend",
    "UrlBackend",
    "attach_backend",
    "from_json",
    "open_backend",
    "to_json",
]
