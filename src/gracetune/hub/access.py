"""Access to the Hugging Face hub, and its errors as messages a user can act on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from gracetune.config.environment import Environment
from gracetune.errors import Problem
from gracetune.redaction import redact

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError

SITE: Final = "https://huggingface.co"
RepoKind = Literal["model", "dataset"]
_SERVER_ERRORS = 500


@dataclass(frozen=True)
class HubAccess:
    """The hub settings of the environment. huggingface_hub manages the token, unless the config has one."""

    endpoint: str | None = None
    """A hub other than the public one (HF_ENDPOINT)."""
    offline: str | None = None
    """The variable that forbids network access to the hub, as `NAME=value`; None if it is allowed."""

    @classmethod
    def of(cls, environment: Environment) -> HubAccess:
        endpoint = (environment.get("HF_ENDPOINT") or "").rstrip("/") or None
        return cls(endpoint, environment.hub_offline)


@dataclass(frozen=True)
class Repo:
    """A hub repository as a config names it."""

    name: str
    kind: RepoKind = "model"
    revision: str | None = None

    @property
    def page(self) -> str:
        return f"{SITE}/{'datasets/' if self.kind == 'dataset' else ''}{self.name}"

    @property
    def words(self) -> str:
        """Name and revision, for messages."""
        return f"{self.name} at revision {self.revision}" if self.revision else self.name

    @property
    def command(self) -> str:
        """The shell command that downloads the repository."""
        kind = " --repo-type dataset" if self.kind == "dataset" else ""
        return f"hf download {self.name}{kind}{f' --revision {self.revision}' if self.revision else ''}"

    @property
    def cache_folder(self) -> Path:
        """Where huggingface_hub caches the repository's files."""
        from huggingface_hub import constants

        return Path(constants.HF_HUB_CACHE) / f"{self.kind}s--{self.name.replace('/', '--')}"


def unreachable_errors() -> tuple[type[Exception], ...]:
    """The exceptions of an unreachable hub: OSError, and the base class of huggingface_hub's HTTP library.

    They also catch HfHubHTTPError, which is derived from them: catch that first, or ask `is_server_error`.
    """
    from huggingface_hub.errors import HfHubHTTPError

    return tuple(base for base in HfHubHTTPError.__bases__ if issubclass(base, Exception))


def is_server_error(error: Exception) -> bool:
    """Whether the hub itself failed (status 5xx), which counts as unreachable."""
    return _status(error) >= _SERVER_ERRORS


def why(error: Exception) -> str:
    """The first line of a library's error message, without credentials."""
    text = str(error).strip().split("\n")[0].rstrip(".") or type(error).__name__
    return redact(text)


def rejection(key: str, repo: Repo, error: HfHubHTTPError) -> Problem:
    """Explain an HTTP error of the hub. `key` is the setting that names the repository."""
    from huggingface_hub.errors import DisabledRepoError, GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    status = error.response.status_code
    if isinstance(error, GatedRepoError):
        hint = f"accept its licence on {repo.page}, then: hf auth login"
        found = f"{repo.name}: the hub gives access only after its licence is accepted"
        return Problem(key, found, "access to it", hint)
    if isinstance(error, RepositoryNotFoundError):
        local = f"no folder {Path(repo.name).absolute()}, and " if repo.kind == "model" else ""
        found = f"{repo.name}: {local}the hub has no such {repo.kind}, or it is private"
        hint = f"check the spelling of {repo.page}; for a private {repo.kind}: hf auth login"
        return Problem(key, found, "a folder, or a hub id" if repo.kind == "model" else "a dataset on the hub", hint)
    if isinstance(error, RevisionNotFoundError):
        at = "model.revision" if repo.kind == "model" else key
        found = f"{repo.revision}, which {repo.name} does not have"
        return Problem(at, found, "a branch, tag or commit of it", "remove the setting to use main")
    if isinstance(error, DisabledRepoError):
        return Problem(key, f"{repo.name}: the hub has disabled it", f"a {repo.kind} that can be read", repo.page)
    if status in (401, 403):
        found = f"{repo.name}: the hub answered {status}: {why(error)}"
        hint = "log in again: hf auth login; or set HF_TOKEN to a token with read access"
        return Problem(key, found, "access to it", hint)
    return Problem(key, f"{repo.name}: the hub answered {status}", f"the {repo.kind}'s files", "try again later")


def _status(error: Exception) -> int:
    from huggingface_hub.errors import HfHubHTTPError

    return error.response.status_code if isinstance(error, HfHubHTTPError) else 0


@contextmanager
def without_bars() -> Iterator[None]:
    """Disable huggingface_hub's progress bars inside the `with` block, where the run's own view shows progress."""
    bars: Any = import_module("huggingface_hub.utils")
    shown = not bars.are_progress_bars_disabled()
    bars.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            bars.enable_progress_bars()
