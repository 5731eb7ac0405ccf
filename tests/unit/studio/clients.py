"""A client of the studio's application, with the cookie and the headers that a browser sends."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

from gracetune.config.environment import Environment
from gracetune.studio.access import AccessRules
from gracetune.studio.run_list import RunList
from gracetune.studio.server import Studio, application

HOST = "127.0.0.1:8765"


@dataclass(frozen=True)
class StudioClient:
    studio: Studio
    http: TestClient

    def get(self, path: str) -> Any:
        """The JSON of a successful request."""
        return self._json(self.http.get(f"/api/{path}"))

    def post(self, path: str, body: Any = None) -> Any:
        return self._json(self.http.post(f"/api/{path}", json=body if body is not None else {}))

    def put(self, path: str, body: Any) -> Any:
        return self._json(self.http.put(f"/api/{path}", json=body))

    def rejected(self, method: str, path: str, body: Any = None) -> tuple[int, dict[str, str]]:
        """The status and the error of a request that must be rejected."""
        reply = self.http.request(method, f"/api/{path}", json=body)
        assert 400 <= reply.status_code < 500, reply.text
        return reply.status_code, reply.json()["error"]

    @staticmethod
    def _json(reply: Any) -> Any:
        assert reply.status_code == 200, reply.text
        return reply.json()


def client_of(
    root: Path, *, control: bool = True, folder: Path | None = None, environment: Environment | None = None
) -> StudioClient:
    """A studio of `root`. Its queue has no runner unless a test starts it."""
    variables = Environment.capture() if environment is None else environment
    studio = Studio(
        root=root.resolve(), control=control, environment=variables, runs=RunList(root.resolve()),
        working_folder=(folder or root).resolve(),
    )  # fmt: skip
    rules = AccessRules("token-of-this-test", control, 8765)
    http = TestClient(application(studio, rules), base_url=f"http://{HOST}", raise_server_exceptions=True)
    http.headers.update({"origin": f"http://{HOST}", "x-gracetune-studio": "1"})
    http.cookies.set(rules.cookie_name, rules.cookie_value)
    return StudioClient(studio, http)
