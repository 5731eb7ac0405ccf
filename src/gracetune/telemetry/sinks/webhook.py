"""The webhook sink: one POST when the run ends, whatever its outcome."""

from __future__ import annotations

import base64
import http.client
import json
import math
import urllib.error
import urllib.parse
import urllib.request

from gracetune.redaction import redact_webhook
from gracetune.telemetry.errors import TelemetryError
from gracetune.telemetry.events import Record, RunEnded, RunStarted, StepDone
from gracetune.telemetry.schema import to_json

TIMEOUT_S = 5.0


EXPECTED_ADDRESS = "http://HOST/... or https://HOST/..."
ADDRESS_HINT = "--set logging.webhook=https://HOST/PATH, or leave it out"


def check_address(url: str) -> tuple[str, str | None]:
    """The host of an address, and why no request can be sent there (None if it can).

    It is checked before any request: the error of a failed request repeats the address, which may hold a secret.
    """
    try:
        parts = urllib.parse.urlsplit(url)
        host = parts.hostname or ""
        host.encode("idna")
        parts.port  # noqa: B018 - raises ValueError if it is not a number
    except ValueError:  # UnicodeError is a subclass
        return "", "which is no address"
    if parts.scheme not in ("http", "https"):
        return host, "which is no address of the web"
    if not host:
        return host, "which names no host"
    if not url.isascii() or not url.isprintable() or " " in url:
        return host, "which has blanks or other letters that must be written as %XX"
    return host, None


def _without_login(url: str) -> tuple[str, dict[str, str]]:
    """The address without `user:password@`, and the Authorization header that replaces it."""
    parts = urllib.parse.urlsplit(url)
    login, sign, host = parts.netloc.rpartition("@")
    if not sign:
        return url, {}
    encoded = base64.b64encode(urllib.parse.unquote_to_bytes(login)).decode()
    return urllib.parse.urlunsplit(parts._replace(netloc=host)), {"Authorization": f"Basic {encoded}"}


class WebhookSink:
    """Sends the RunEnded event, with the run's name, the last loss and one sentence in `text` and `content`.

    Chat services display one of these two fields. The address may hold a secret, so messages name only the host.
    """

    def __init__(self, url: str, *, timeout_s: float = TIMEOUT_S) -> None:
        host, wrong = check_address(url)
        if wrong is not None:
            found = f"{redact_webhook(url)}, {wrong}"
            raise TelemetryError("logging.webhook", found=found, expected=EXPECTED_ADDRESS, hint=ADDRESS_HINT)
        self.name = f"the webhook at {host}"
        self._url, self._login = _without_login(url)
        self._timeout_s = timeout_s
        self._run = ""
        self._loss: float | None = None

    def write(self, record: Record) -> None:
        match record.event:
            case RunStarted(run=run):
                self._run = run
            case StepDone(loss=loss):
                self._loss = loss
            case RunEnded() as event:
                self._post(event, record)

    def close(self) -> None:
        pass

    def _post(self, event: RunEnded, record: Record) -> None:
        text = f"{self._run or 'gracetune'} {event.outcome} at step {event.step}"
        text += f": {event.reason}" if event.reason else ""
        body = {**to_json(record), "run": self._run, "text": text, "content": text}
        if self._loss is not None:
            body["loss"] = self._loss if math.isfinite(self._loss) else str(self._loss)
        headers = {"Content-Type": "application/json", "User-Agent": "gracetune", **self._login}
        request = urllib.request.Request(self._url, json.dumps(body).encode(), headers, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s):
                return
        except http.client.HTTPException as error:  # the response is not valid HTTP
            raise TelemetryError(
                self.name, found=type(error).__name__, expected="an answer", hint="check logging.webhook"
            ) from None
        except urllib.error.HTTPError as error:  # `from None` below: its text holds the address
            raise TelemetryError(
                self.name,
                found=f"the answer {error.code} {error.reason}",
                expected="an answer 2xx",
                hint="check logging.webhook",
            ) from None
        except OSError as error:
            why = error.reason if isinstance(error, urllib.error.URLError) else error
            raise TelemetryError(
                self.name, found=str(why), expected="an answer", hint="check logging.webhook and the network"
            ) from None
