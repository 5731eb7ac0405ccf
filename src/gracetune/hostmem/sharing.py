"""One copy per machine: local rank 0 stages, the other ranks of the machine map the same pages.

They meet at a Unix socket in the abstract namespace, whose name all ranks derive from the same key. Such a socket is
no file: it needs no folder that can hold sockets, its name may be long, and it vanishes with its process, however that
ends. Rank 0 opens it before it stages, so a rank that finds nobody there for a while, or whose connection breaks off,
knows that rank 0 is gone. Both sides check that the other runs as the same user.

On the wire, from rank 0 only: one JSON object, {"handle": ...} with the segments' descriptors attached to it, or
{"error": text}; then the end of the stream.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

from gracetune.hostmem.errors import StagingError

MOST_SEGMENTS: Final = 200  # the kernel passes at most 253 descriptors at a time
_LARGEST_MESSAGE: Final = 64 << 20
_CREDENTIALS: Final = struct.Struct("3i")  # struct ucred: pid, uid, gid
_RETRY_SECONDS: Final = 0.05
_LINGER_SECONDS: Final = 10.0
"""How long a refusal waits for ranks that have not asked yet. They start together, so they come within seconds."""


@dataclass(frozen=True)
class LocalRanks:
    """This process among those of the same launch on the same machine."""

    rank: int
    count: int
    key: str
    """The same text in all of them and in no other launch: the run's folder and the launcher's id, for example."""
    patience_seconds: float = 300.0
    """How long a rank waits for rank 0 to appear. Staging itself may take as long as it takes."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.count:
            raise ValueError(f"rank {self.rank} of {self.count} local ranks")

    def address(self, dataset: str) -> bytes:
        return b"\0gracetune/" + hashlib.sha256(f"{self.key}\0{dataset}".encode()).hexdigest()[:40].encode()


class Offer:
    """Rank 0's side. Open it before anything that can fail, then `publish` or `refuse`.

    It ends by itself when every other rank has its answer, and with `close` at the latest.
    """

    def __init__(self, ranks: LocalRanks, dataset: str) -> None:
        self._expected = ranks.count - 1
        self._user = os.geteuid()
        self._answered = threading.Event()
        self._message = b""
        self._descriptors: list[int] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            self._socket.bind(ranks.address(dataset))
        except OSError as error:
            self._socket.close()
            raise StagingError(
                f"dataset {dataset} is already being shared under this run's name: {error.strerror}\n"
                "  try  end the other process of the same run, or give this run another output folder"
            ) from error
        self._socket.listen(ranks.count)
        self._thread = threading.Thread(target=self._serve, name="gracetune-share", daemon=True)
        self._thread.start()

    def publish(self, handle: Mapping[str, Any], descriptors: Sequence[int]) -> None:
        """The handle is plain JSON. The descriptors may be closed as soon as this returns."""
        if len(descriptors) > MOST_SEGMENTS:
            raise StagingError(f"{len(descriptors)} segments are too many to hand over\n  try  restart the run")
        self._descriptors = [os.dup(descriptor) for descriptor in descriptors]
        self._answer({"handle": dict(handle)})

    def refuse(self, reason: str, *, linger: float = _LINGER_SECONDS) -> None:
        """Tell every rank, those that come within a while too, and end: the name is free again."""
        self._answer({"error": reason})
        self._thread.join(linger)
        self.close()

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """What goes wrong inside is every other rank's answer too, and raised again."""
        try:
            yield
        except Exception as error:
            self.refuse(str(error) or type(error).__name__)
            raise
        except BaseException:
            self.close()  # interrupted: the others see the connection end
            raise

    def _answer(self, message: dict[str, object]) -> None:
        self._message = json.dumps(message).encode()
        self._answered.set()

    def _serve(self) -> None:
        served = 0
        with self._socket:
            while served < self._expected:
                try:
                    peer, _ = self._socket.accept()
                except OSError:
                    break  # closed by us
                with peer:
                    served += self._hand_over(peer)
        for descriptor in self._descriptors:
            os.close(descriptor)

    def _hand_over(self, peer: socket.socket) -> bool:
        """Whether this was one of ours, and it was still there."""
        if _user_of(peer) != self._user:
            return False
        self._answered.wait()
        try:
            sent = socket.send_fds(peer, [self._message], self._descriptors) if self._message else 0
            peer.sendall(self._message[sent:])
        except OSError:
            return False  # that rank has died; noticing is its launcher's business
        return True

    def close(self) -> None:
        """Stop waiting for ranks. Whoever still waits sees the connection end."""
        self._answered.set()
        with suppress(OSError):  # it may have ended by itself
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()


def fetch(ranks: LocalRanks, dataset: str) -> tuple[dict[str, Any], list[io.FileIO]]:
    """The other ranks' side: wait for rank 0, then its handle and descriptors of our own. Raises what rank 0 said."""
    with _connect(ranks, dataset) as peer:
        if _user_of(peer) != os.geteuid():
            raise StagingError("the process that answers as rank 0 of this run belongs to another user")
        message, files = _receive(peer)
    try:
        return _understood(message, ranks), files
    except StagingError:
        for file in files:
            file.close()
        raise


def _connect(ranks: LocalRanks, dataset: str) -> socket.socket:
    patience = time.monotonic() + ranks.patience_seconds
    while True:
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            peer.connect(ranks.address(dataset))
            return peer
        except ConnectionRefusedError as error:
            peer.close()
            if time.monotonic() > patience:
                raise StagingError(
                    f"local rank {ranks.rank} found no rank 0 that stages {dataset} within "
                    f"{ranks.patience_seconds:g} s\n  try  look at the messages of rank 0"
                ) from error
        time.sleep(_RETRY_SECONDS)


def _receive(peer: socket.socket) -> tuple[bytes, list[io.FileIO]]:
    message, descriptors, _, _ = socket.recv_fds(peer, 1 << 16, MOST_SEGMENTS, socket.MSG_CMSG_CLOEXEC)
    files = [io.FileIO(descriptor) for descriptor in descriptors]
    while (more := peer.recv(1 << 16)) and len(message) < _LARGEST_MESSAGE:
        message += more
    return message, files


def _understood(message: bytes, ranks: LocalRanks) -> dict[str, Any]:
    if not message:
        raise StagingError(f"rank 0 ended before local rank {ranks.rank} had its data\n  try  look at its messages")
    try:
        content = json.loads(message)
    except ValueError as error:
        raise StagingError("rank 0 broke off in the middle of its answer") from error
    if "error" in content:
        raise StagingError(f"rank 0 could not stage the dataset: {content['error']}")
    handle: dict[str, Any] = content["handle"]
    return handle


def _user_of(peer: socket.socket) -> int:
    _, user, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(user)
