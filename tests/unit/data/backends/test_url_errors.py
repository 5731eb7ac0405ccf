"""Errors of the libraries behind fsspec. Most are not installed, so their classes are rebuilt here."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from gracetune.data.backends.url import PACKAGES
from gracetune.data.backends.url_access import LIBRARY_ERRORS, error_types, explain, is_final


def install(monkeypatch: pytest.MonkeyPatch, module: str, *names: str) -> type[Exception]:
    """Make a module importable that has nothing but these exceptions. Returns the first one."""
    made = ModuleType(module)
    errors = [type(name, (Exception,), {}) for name in names]
    vars(made).update(zip(names, errors, strict=True))
    monkeypatch.setitem(sys.modules, module, made)
    return errors[0]


@pytest.mark.parametrize("library", ["httpx", "httpx2"])
def test_network_errors_of_each_version_of_the_hub_library_are_caught(
    monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    assert install(monkeypatch, library, "HTTPError") in error_types(["hf"])


EXAMPLES = {
    "az": ("azure.core.exceptions", "AzureError"), "oss": ("oss2.exceptions", "OssError"),
    "oci": ("oci.exceptions", "ServiceError", "ClientError"), "sftp": ("paramiko", "SSHException"),
    "smb": ("smbprotocol.exceptions", "SMBException"),
}  # fmt: skip


@pytest.mark.parametrize("protocol", EXAMPLES)
def test_errors_of_every_library_are_caught(monkeypatch: pytest.MonkeyPatch, protocol: str) -> None:
    error = install(monkeypatch, *EXAMPLES[protocol])
    same_library = [other for other, package in PACKAGES.items() if package == PACKAGES[protocol]]
    assert all(error in error_types([other]) for other in same_library)


def test_every_offered_protocol_has_the_errors_of_its_library() -> None:
    assert set(PACKAGES) <= set(LIBRARY_ERRORS)


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
