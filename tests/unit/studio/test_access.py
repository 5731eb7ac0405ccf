"""Who may do what: the token, DNS rebinding, requests of other sites, read-only studios, and the headers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from gracetune.config.environment import Environment
from gracetune.errors import ConfigError
from gracetune.studio.access import Access, AccessRules
from gracetune.studio.launch import StudioOptions, serve
from gracetune.studio.server import ListenAddress
from unit.studio.clients import HOST, StudioClient, client_of
from unit.studio.logs import small_run

TOKEN = "token-of-this-test"
CHANGE = "/api/queue"


def bare(client: StudioClient, **headers: str) -> TestClient:
    """A browser that has not opened the link."""
    http = TestClient(client.http.app, base_url=f"http://{HOST}", follow_redirects=False)
    http.headers.update(headers)
    return http


@pytest.fixture
def client(tmp_path: Path) -> StudioClient:
    small_run(tmp_path / "cats")
    return client_of(tmp_path)


def test_the_link_sets_a_cookie_and_disappears_from_the_address(client: StudioClient) -> None:
    http = bare(client)
    reply = http.get(f"/?token={TOKEN}&a=1")
    assert reply.status_code == 303
    assert reply.headers["location"] == "/?a=1"
    cookie = reply.headers["set-cookie"]
    assert cookie.startswith("gracetune-studio-8765=")
    assert "HttpOnly; SameSite=Strict" in cookie
    assert "Secure" not in cookie
    assert TOKEN not in cookie
    assert http.get("/api/runs").status_code == 200, "the cookie is enough"


def test_a_link_opened_from_another_site_moves_on_by_itself(client: StudioClient) -> None:
    """After a redirect the browser would withhold the cookie, because another site began the navigation."""
    reply = bare(client, **{"sec-fetch-site": "cross-site"}).get(f"/?token={TOKEN}")
    assert reply.status_code == 200
    assert 'content="0;url=/"' in reply.text


@pytest.mark.parametrize("path", ["/", "/js/ui.js", "/api/runs", "/api/runs/0123456789ab/files/a", "/api/nothing"])
def test_without_the_cookie_nothing_is_shown(client: StudioClient, path: str) -> None:
    for http in (
        bare(client),
        bare(client, cookie="gracetune-studio-8765=wrong"),
        bare(client, cookie="gracetune-studio-8765;=;\x01;"),
    ):
        reply = http.get(path)
        assert reply.status_code == 401
        assert "cats" not in reply.text
        assert "script" not in reply.text


@pytest.mark.parametrize("token", ["", "wrong", TOKEN + "x", "%00", "%ff%fe", "é"])
def test_a_wrong_token_is_rejected(client: StudioClient, token: str) -> None:
    reply = bare(client).get(f"/?token={token}")
    assert reply.status_code == 401
    assert "set-cookie" not in reply.headers


@pytest.mark.parametrize("path", ["//evil.example/", "/\\evil.example/", "/%0d%0aset-cookie:x=1"])
def test_the_redirect_stays_on_this_site(client: StudioClient, path: str) -> None:
    reply = bare(client).get(f"http://{HOST}{path}?token={TOKEN}")
    assert reply.status_code in (303, 404)
    location = reply.headers.get("location", "/")
    assert location.startswith("/")
    assert not location.startswith(("//", "/\\"))
    assert "\n" not in location


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8765", "127.0.0.1.evil.example", "localhost.evil.example", "", "a b", "[::1"]
)
def test_a_rebound_name_is_rejected(client: StudioClient, host: str) -> None:
    reply = client.http.get("/api/runs", headers={"host": host})
    assert reply.status_code == 403
    assert "--host-name" in reply.json()["error"]["expected"]


@pytest.mark.parametrize(
    "host", ["127.0.0.1:1", "localhost", "LOCALHOST:8765", "[::1]:8765", "192.168.0.7", "gpu.lab:8765"]
)
def test_addresses_and_permitted_names_are_served(tmp_path: Path, host: str) -> None:
    client = client_of(tmp_path)
    rules = AccessRules(TOKEN, control=True, port=8765, host_names=("gpu.lab",))
    inner = client.http.app
    assert isinstance(inner, Access)
    http = TestClient(Access(inner._app, rules), base_url=f"http://{HOST}", cookies=dict(client.http.cookies))
    assert http.get("/api/runs", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    ("headers", "found"),
    [
        ({"origin": "http://evil.example"}, "evil.example"),
        ({"origin": "null"}, "null"),
        ({"origin": ""}, "no origin"),
        ({"origin": f"https://{HOST}"}, "https"),
        ({"origin": "http://127.0.0.1:9"}, "127.0.0.1:9"),
        ({"x-gracetune-studio": "0"}, "X-Gracetune-Studio"),
    ],
)
def test_changes_of_other_sites_are_rejected(client: StudioClient, headers: dict[str, str], found: str) -> None:
    reply = client.http.post(CHANGE, json={"config": "a.yaml"}, headers=headers)
    assert reply.status_code == 403
    assert found in reply.json()["error"]["found"]


@pytest.mark.parametrize("reported", ["https", "https, http"])
def test_behind_a_proxy_with_tls_the_origin_is_https(client: StudioClient, reported: str) -> None:
    headers = {"origin": f"https://{HOST}", "x-forwarded-proto": reported}
    assert client.http.post(CHANGE, json={}, headers=headers).status_code == 400
    cookie = bare(client, **{"x-forwarded-proto": reported}).get(f"/?token={TOKEN}").headers["set-cookie"]
    assert cookie.endswith("; Secure")


@pytest.mark.parametrize("site", ["same-site", "cross-site"])
def test_a_page_on_another_port_gets_no_data(client: StudioClient, site: str) -> None:
    """The browser sends it the cookie's value: ports of one host share cookies."""
    reply = client.http.get("/api/runs", headers={"sec-fetch-site": site})
    assert reply.status_code == 403
    assert "cats" not in reply.text
    for own in ("same-origin", "none"):
        assert client.http.get("/api/runs", headers={"sec-fetch-site": own}).status_code == 200


@pytest.mark.parametrize("method", ["OPTIONS", "TRACE", "PATCH", "CONNECT", "FOO"])
def test_other_methods_are_rejected(client: StudioClient, method: str) -> None:
    reply = client.http.request(method, "/api/runs")
    assert reply.status_code == 405
    assert "access-control-allow-origin" not in reply.headers


def test_without_control_nothing_can_be_changed(tmp_path: Path) -> None:
    small_run(tmp_path / "cats")
    client = client_of(tmp_path, control=False)
    run = client.get("runs")["runs"][0]["id"]
    for method, path in (("POST", f"runs/{run}/actions/stop"), ("POST", "queue"), ("PUT", "x"), ("DELETE", "y")):
        status, error = client.rejected(method, path, {})
        assert status == 403
        assert "gracetune studio --control" in error["hint"]
    actions = client.get(f"runs/{run}")["actions"]
    assert {one["allowed"] for one in actions.values()} == {False}
    assert not (tmp_path / ".studio").exists()


def test_every_reply_has_the_headers(client: StudioClient) -> None:
    run = client.get("runs")["runs"][0]["id"]
    for path in ("/", "/api/runs", "/nothing", f"/api/runs/{run}/files/logs/events.jsonl", "/api/runs/no"):
        headers = client.http.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe-inline'" not in policy.split("script-src")[-1].split(";")[0]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"


def test_a_body_that_is_too_large_is_rejected_with_and_without_a_length(client: StudioClient) -> None:
    body = b"x" * (9 << 20)
    assert client.http.post(CHANGE, content=body).status_code == 413
    assert client.http.post(CHANGE, content=iter([body])).status_code == 413


@pytest.mark.parametrize("path", ["/api/studio", "/studio/api/studio"])
def test_a_proxy_may_remove_its_prefix_or_keep_it(tmp_path: Path, path: str) -> None:
    client = client_of(tmp_path)
    inner = client.http.app
    assert isinstance(inner, Access)
    rules = AccessRules(TOKEN, control=False, port=8765, prefix="/studio")
    http = TestClient(Access(inner._app, rules), base_url=f"http://{HOST}", follow_redirects=False)
    assert http.get(f"/studio/?token={TOKEN}").headers["location"] == "/studio/"
    cookie = f"{rules.cookie_name}={rules.cookie_value}"
    assert http.get(path, headers={"cookie": cookie}).status_code == 200


# -- what `gracetune studio` rejects --------------------------------------------------------------------------------


def rejected(folder: Path, **more: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        serve(StudioOptions(folder=folder, **more), Environment({}), lambda line: None)
    return str(caught.value)


def test_other_machines_are_served_only_with_a_token_file_or_tls(tmp_path: Path) -> None:
    for host in ("0.0.0.0", "::", "192.168.1.5"):
        text = rejected(tmp_path, address=ListenAddress(host))
        assert "--token-file FILE" in text
        assert "ssh -L" in text
    assert "an IP address" in rejected(tmp_path, address=ListenAddress("gpu.lab"))


def test_a_token_file_must_be_private_and_long(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("a" * 40)
    file.chmod(0o644)
    assert "others may read" in rejected(tmp_path, token_file=file)
    file.write_text("short")
    file.chmod(0o600)
    assert "5 characters" in rejected(tmp_path, token_file=file)
    assert "no such file" in rejected(tmp_path, token_file=tmp_path / "none").lower()


def test_other_options_are_checked(tmp_path: Path) -> None:
    assert "no such folder" in rejected(tmp_path / "none")
    assert "--prefix /studio" in rejected(tmp_path, prefix="https://x")
    assert "both of them" in rejected(tmp_path, address=ListenAddress(certificate=tmp_path / "a.pem"))
    assert "no such file" in rejected(tmp_path, address=ListenAddress(certificate=tmp_path / "a", key=tmp_path / "b"))
    (tmp_path / "a.pem").write_text("no certificate")
    both = ListenAddress(certificate=tmp_path / "a.pem", key=tmp_path / "a.pem")
    assert "PEM files: a certificate and its key" in rejected(tmp_path, address=both)
