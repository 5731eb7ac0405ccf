"""Errors of the libraries behind fsspec. Most are not installed, so their classes are rebuilt here."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from gracetune.data.backends.url_access import error_types


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
