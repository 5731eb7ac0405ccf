"""How the hub is reached, and what its refusals mean in words a user can act on."""

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
    """What the environment says about the hub. The token stays with huggingface_hub, unless a config has one."""

    endpoint: str | None = None
    """Another hub than the public one (HF_ENDPOINT)."""
    offline: str | None = None
    """The variable that forbids asking it, as it is set; None where nothing does."""

    @classmethod
    def of(cls, environment: Environment) -> HubAccess:
        endpoint = (environment.get("HF_ENDPOINT") or "").rstrip("/") or None
        return cls(endpoint, environment.hub_offline)


@dataclass(frozen=True)
class Repo:
    """A repository of the hub, as a config names it."""

    name: str
    kind: RepoKind = "model"
    revision: str | None = None

    @property
    def page(self) -> str:
        return f"{SITE}/{'datasets/' if self.kind == 'dataset' else ''}{self.name}"

    @property
    def words(self) -> str:
        return f"{self.name} at revision {self.revision}" if self.revision else self.name

    @property
    def command(self) -> str:
        """What downloads it on a machine with network."""
        kind = " --repo-type dataset" if self.kind == "dataset" else ""
        return f"hf download {self.name}{kind}{f' --revision {self.revision}' if self.revision else ''}"

    @property
    def cache_folder(self) -> Path:
        """Where huggingface_hub keeps what it downloaded of it."""
        from huggingface_hub import constants

        return Path(constants.HF_HUB_CACHE) / f"{self.kind}s--{self.name.replace('/', '--')}"


def unreachable_errors() -> tuple[type[Exception], ...]:
    """What a hub out of reach raises: OSError, and the base of whichever HTTP library huggingface_hub is built on."""
    from huggingface_hub.errors import HfHubHTTPError

    return tuple(base for base in HfHubHTTPError.__bases__ if issubclass(base, Exception))


def is_server_error(error: Exception) -> bool:
    """Whether the hub itself failed, so that it counts as out of reach."""
    return _status(error) >= _SERVER_ERRORS


def why(error: Exception) -> str:
    """The first line of what a library says, without credentials."""
    text = str(error).strip().split("\n")[0].rstrip(".") or type(error).__name__
    return redact(text)


def refusal(key: str, repo: Repo, error: HfHubHTTPError) -> Problem:
    """`key` is the setting that names the repository."""
    from huggingface_hub.errors import DisabledRepoError, GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    status = error.response.status_code
    if isinstance(error, GatedRepoError):
        hint = f"accept its licence on {repo.page}, then: hf auth login"
        found = f"{repo.name}: the hub shows it only to those who accepted its licence"
        return Problem(key, found, "access to it", hint)
    if isinstance(error, RepositoryNotFoundError):
        local = f"no folder {Path(repo.name).absolute()}, and " if repo.kind == "model" else ""
        found = f"{repo.name}: {local}the hub knows no such {repo.kind} or hides it"
        hint = f"check the spelling of {repo.page}; for a private {repo.kind}: hf auth login"
        return Problem(key, found, "a folder, or a hub id" if repo.kind == "model" else "a dataset of the hub", hint)
    if isinstance(error, RevisionNotFoundError):
        at = "model.revision" if repo.kind == "model" else key
        return Problem(at, f"{repo.revision} of {repo.name}", "a branch, tag or commit of it", "remove it for main")
    if isinstance(error, DisabledRepoError):
        return Problem(key, f"{repo.name}: the hub has disabled it", f"a {repo.kind} that can be read", repo.page)
    if status in (401, 403):
        found = f"{repo.name}: the hub answered {status}: {why(error)}"
        hint = "log in again: hf auth login; or set HF_TOKEN to a token that may read it"
        return Problem(key, found, "access to it", hint)
    return Problem(key, f"{repo.name}: the hub answered {status}", f"the {repo.kind}'s files", "try again later")


def _status(error: Exception) -> int:
    from huggingface_hub.errors import HfHubHTTPError

    return error.response.status_code if isinstance(error, HfHubHTTPError) else 0


@contextmanager
def without_bars() -> Iterator[None]:
    """What is downloaded is shown by a run's own view."""
    bars: Any = import_module("huggingface_hub.utils")
    shown = not bars.are_progress_bars_disabled()
    bars.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            bars.enable_progress_bars()
