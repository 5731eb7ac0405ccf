"""Who may do what: one ASGI layer around all pages of the studio.

    host    must be an IP literal, localhost or a name given with --host-name: a page of another site whose name was
            rebound to this address is rejected (DNS rebinding)
    token   the printed link holds it; its first use sets a cookie, and every other request needs that cookie
    change  POST, PUT and DELETE need --control, an Origin equal to the address in the Host header, and the header
            X-Gracetune-Studio, which a page of another site cannot send without a permission that we never give
    site    a browser that says (Sec-Fetch-Site) that a page of another address asks for data gets none; cookies are
            shared by all ports of a host, so SameSite=Strict alone does not keep such a page out

Every response gets the headers that forbid inline scripts, foreign content and framing.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl, quote, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import HTMLResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gracetune.studio.replies import MOST_BODY, StudioError, error_reply

CHANGE_HEADER = "x-gracetune-studio"
_READS = ("GET", "HEAD")
_CHANGES = ("POST", "PUT", "DELETE")
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; media-src 'self'; "
    "connect-src 'self'; font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}
_NO_TOKEN = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>gracetune studio</title></head>
<body><main><h1>This page needs its link</h1>
<p>The command <code>gracetune studio</code> printed a link that ends in <code>?token=…</code>. Open that link once in
this browser; afterwards this address works too. After a restart of the studio, open the new link.</p></main></body>
</html>
"""
_AGAIN = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>gracetune studio</title>
<meta http-equiv="refresh" content="0;url={target}"></head><body><p><a href="{target}">Continue</a></p></body></html>
"""


@dataclass(frozen=True)
class AccessRules:
    token: str
    control: bool
    port: int
    host_names: tuple[str, ...] = ()
    prefix: str = ""
    """The path below which a reverse proxy shows the studio, such as `/studio`; empty, or without a slash at the
    end."""

    @property
    def cookie_name(self) -> str:
        """It includes the port, because browsers share cookies between the ports of a host."""
        return f"gracetune-studio-{self.port}"

    @property
    def cookie_value(self) -> str:
        """Derived from the token, so that the cookie does not reveal it."""
        return hmac.new(self.token.encode(), b"gracetune studio cookie", hashlib.sha256).hexdigest()


def new_token() -> str:
    return secrets.token_urlsafe(24)


class Access:
    """The ASGI layer. The wrapped application sees only requests that may be answered."""

    def __init__(self, app: ASGIApp, rules: AccessRules) -> None:
        self._app, self._rules = app, rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # no page uses websockets
            await send({"type": "websocket.close", "code": 1008})
            return
        scope = {**scope, "path": _without_prefix(scope["path"], self._rules.prefix), "root_path": ""}
        guarded = _Response(send)
        try:
            reply = self._check(scope)
            if reply is None:
                await self._app(scope, _limited(receive), guarded)
                return
        except StudioError as error:
            if guarded.has_started:
                raise
            reply = error_reply(error)
        await reply(scope, receive, guarded)

    def _check(self, scope: Scope) -> Response | None:
        """The reply to a request that goes no further; None if it may go on. Raises StudioError."""
        headers = Headers(scope=scope)
        host = _checked_host(headers.getlist("host"), self._rules.host_names)
        method = scope["method"]
        if method not in (*_READS, *_CHANGES):
            raise StudioError(405, f"the method {method[:20]}", "GET, HEAD, POST, PUT or DELETE", "use one of them")
        if method in _READS and (reply := self._reply_to_token(scope, headers)) is not None:
            return reply
        if not self._has_cookie(headers):
            if method in _READS and not scope["path"].startswith("/api/"):
                return HTMLResponse(_NO_TOKEN, 401)
            hint = "open the link that `gracetune studio` printed"
            raise StudioError(401, "no valid cookie", "a browser that opened the printed link", hint)
        if scope["path"].startswith("/api/") and headers.get("sec-fetch-site") in ("cross-site", "same-site"):
            hint = "open the studio's own pages"
            raise StudioError(403, "a request of a page of another address", "a request of the studio's pages", hint)
        if method in _CHANGES:
            self._check_change(scope, headers, host)
        length = headers.get("content-length", "0")
        if length.isdigit() and (len(length) > 18 or int(length) > MOST_BODY):
            raise _too_large()
        return None

    def _reply_to_token(self, scope: Scope, headers: Headers) -> Response | None:
        """The reply to a link with `?token=`: set the cookie and go to the same page without the token."""
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True, max_num_fields=None)
        given = [value for name, value in query if name == "token"]
        if not given or scope["path"].startswith("/api/"):
            return None
        if not all(hmac.compare_digest(one.encode("utf-8", "replace"), self._rules.token.encode()) for one in given):
            return HTMLResponse(_NO_TOKEN, 401)
        rest = urlencode([(name, value) for name, value in query if name != "token"])
        path = "/" + scope["path"].lstrip("/")  # not //host, which would be another site
        target = quote(self._rules.prefix + path, safe="/") + (f"?{rest}" if rest else "")
        secure = "; Secure" if "https" in _schemes(scope, headers) else ""
        cookie = f"{self._rules.cookie_name}={self._rules.cookie_value}; Path={self._rules.prefix or '/'}"
        sent = {"set-cookie": f"{cookie}; HttpOnly; SameSite=Strict{secure}", "cache-control": "no-store"}
        if headers.get("sec-fetch-site") == "cross-site":
            # The link was opened from a page of another site. A redirect would still count as that site's request,
            # for which the browser withholds the cookie; a page that moves on by itself does not.
            return HTMLResponse(_AGAIN.format(target=target.replace("&", "&amp;")), headers=sent)
        return Response(status_code=303, headers={"location": target, **sent})

    def _has_cookie(self, headers: Headers) -> bool:
        wanted = self._rules.cookie_value.encode()
        for header in headers.getlist("cookie"):
            try:
                found = SimpleCookie(header).get(self._rules.cookie_name)
            except CookieError:
                continue
            if found is not None and hmac.compare_digest(found.value.encode("utf-8", "replace"), wanted):
                return True
        return False

    def _check_change(self, scope: Scope, headers: Headers, host: str) -> None:
        if headers.get(CHANGE_HEADER) != "1":
            raise StudioError(403, "a change without the header X-Gracetune-Studio", "a request of the studio's pages",
                              "send `X-Gracetune-Studio: 1`")  # fmt: skip
        allowed = {f"{scheme}://{host}" for scheme in _schemes(scope, headers)}
        origins = headers.getlist("origin")
        if len(origins) != 1 or origins[0].lower() not in allowed:
            found = f"a change from {', '.join(origins)[:100] or 'no origin'}"
            raise StudioError(403, found, " or ".join(sorted(allowed)), "use the studio's own pages")
        if not self._rules.control:
            raise StudioError(403, "a studio that only shows", "a studio started with --control",
                              "stop it and start it again with `gracetune studio --control`")  # fmt: skip


def _schemes(scope: Scope, headers: Headers) -> set[str]:
    """That of the connection, and that which a reverse proxy in front of it reports: the first, if there are several
    proxies. A page of another site cannot send this header."""
    return {scope["scheme"], headers.get("x-forwarded-proto", scope["scheme"]).partition(",")[0].strip().lower()}


def _checked_host(hosts: Sequence[str], names: Sequence[str]) -> str:
    """The Host header in lower case. Raises StudioError unless it is an address, localhost or a permitted name."""
    host = hosts[0].lower() if len(hosts) == 1 else ""
    name = re.fullmatch(r"(\[[0-9a-f:.]{2,45}\]|[^\[\]:/@?#\s]{1,253})(:\d{1,5})?", host)
    bare = name[1].strip("[]").rstrip(".") if name else ""
    if bare and (bare == "localhost" or bare in {one.lower() for one in names} or _is_address(bare)):
        return host
    shown = ascii(", ".join(hosts)[:100])
    hint = (
        f"gracetune studio --host-name {bare}" if bare.replace("-", "").replace(".", "").isalnum() else "use 127.0.0.1"
    )
    raise StudioError(403, f"the host {shown}", "an IP address, localhost, or a name that --host-name allows", hint)


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _without_prefix(path: str, prefix: str) -> str:
    """The path as the pages know it. Some proxies remove their prefix, others pass it on."""
    if prefix and (path == prefix or path.startswith(f"{prefix}/")):
        path = path[len(prefix) :]
    return path or "/"


def _too_large() -> StudioError:
    return StudioError(413, f"a body of more than {MOST_BODY >> 20} MiB", "a smaller one", "send less at a time")


def _limited(receive: Receive) -> Receive:
    """`receive` that stops a body without a length, or with a wrong one, at the limit."""
    received = 0

    async def limited() -> Message:
        nonlocal received
        message = await receive()
        received += len(message.get("body", b""))
        if received > MOST_BODY:
            raise _too_large()
        return message

    return limited


class _Response:
    """Adds the headers to a response. A reply's own content security policy is stricter and stays."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.has_started = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.has_started = True
            headers = MutableHeaders(scope=message)
            for name, value in _HEADERS.items():
                headers.setdefault(name, value)
            if "cache-control" not in headers:
                headers["cache-control"] = "no-cache"
        await self._send(message)
