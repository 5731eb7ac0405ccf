"""Errors of the libraries behind fsspec. Most are not installed, so their classes are rebuilt here."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from gracetune.data.backends.url_access import error_types, explain, is_final


def install(monkeypatch: pytest.MonkeyPatch, module: str, name: str) -> type[Exception]:
    """Make a module importable that has nothing but this exception."""
    error = type(name, (Exception,), {})
    made = ModuleType(module)
    vars(made)[name] = error
    monkeypatch.setitem(sys.modules, module, made)
    return error


@pytest.mark.parametrize("library", ["httpx", "httpx2"])
def test_network_errors_of_each_version_of_the_hub_library_are_caught(
    monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    assert install(monkeypatch, library, "HTTPError") in error_types(["hf"])


class TestGoogleStorage:
    """gcsfs has the status in `code`, and raises a plain OSError for 403."""

    @pytest.mark.parametrize("code", [401, "401"])
    def test_a_rejected_login_is_final(self, monkeypatch: pytest.MonkeyPatch, code: object) -> None:
        error = install(monkeypatch, "gcsfs.retry", "HttpError")("Invalid Credentials, 401")
        vars(error)["code"] = code
        assert isinstance(error, error_types(["gs"]))
        assert is_final(error)
        assert "denied access: 401" in explain("dataset pets", "gs", error).found

    def test_forbidden_is_final(self) -> None:
        error = OSError("Forbidden: bucket/pets\nno permission")
        assert is_final(error)
        assert "denied access: Forbidden" in explain("dataset pets", "gs", error).found

    def test_an_expired_login_is_caught(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert install(monkeypatch, "google.auth.exceptions", "GoogleAuthError") in error_types(["gcs"])
