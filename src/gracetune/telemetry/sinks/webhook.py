"""One POST when the run ends, well or badly."""

from __future__ import annotations

import json
import math
import urllib.error
import urllib.parse
import urllib.request

from gracetune.telemetry.errors import TelemetryError
from gracetune.telemetry.events import Record, RunEnded, RunStarted, StepDone
from gracetune.telemetry.schema import to_json

TIMEOUT_S = 5.0


class WebhookSink:
    """Sends the RunEnded event, with the run's name, the last loss and one sentence in `text` and `content`.

    Chat services show one of the two. The address may hold a secret: messages name the host only.
    """

    def __init__(self, url: str, *, timeout_s: float = TIMEOUT_S) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise TelemetryError(
                "logging.webhook",
                found=f"an address that begins with {url[:8]!r}",
                expected="http://HOST/... or https://HOST/...",
                hint="--set logging.webhook=https://HOST/PATH, or leave it out",
            )
        self.name = f"the webhook at {parts.hostname}"
        self._url, self._timeout_s = url, timeout_s
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
        request = urllib.request.Request(
            self._url,
            json.dumps(body).encode(),
            {"Content-Type": "application/json", "User-Agent": "gracetune"},
            method="POST",
        )
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s):
                return
        except urllib.error.HTTPError as error:  # its text holds the address
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
