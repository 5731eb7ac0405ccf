"""Sharing staged memory between local ranks: rank 0 stages once, and the other ranks of the machine map its pages.

The ranks connect through a Unix socket in the abstract namespace, whose name they derive from a common key. An abstract
socket is not a file: it needs no folder, and the kernel removes it when its process ends, however it ends. Rank 0 opens
it before it stages. A rank that cannot connect for a while, or whose connection breaks, therefore knows that rank 0 has
ended. Both sides check that the other process runs as the same user.

Protocol: rank 0 sends one JSON object and closes the connection. The object is {"handle": ...} with the segments'
descriptors attached (SCM_RIGHTS), or {"error": text}.
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

MOST_SEGMENTS: Final = 200  # the kernel passes at most 253 descriptors per message (SCM_MAX_FD)
_LARGEST_MESSAGE: Final = 64 << 20
_CREDENTIALS: Final = struct.Struct("3i")  # struct ucred: pid, uid, gid
_RETRY_SECONDS: Final = 0.05
_LINGER_SECONDS: Final = 10.0
"""How long a failed rank 0 answers ranks that have not connected yet. All of them start within seconds."""


@dataclass(frozen=True)
class LocalRanks:
    """This process among the ranks of the same launch on the same machine."""

    rank: int
    count: int
    key: str
    """A text that is the same in all ranks and in no other launch, such as the run folder and the launcher's id."""
    patience_seconds: float = 300.0
    """How long a rank waits for rank 0 to open its socket. Staging itself has no time limit."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.count:
            raise ValueError(f"rank {self.rank} of {self.count} local ranks")

    def address(self, dataset: str) -> bytes:
        """The socket's name. The leading zero byte selects the abstract namespace."""
        return b"\0gracetune/" + hashlib.sha256(f"{self.key}\0{dataset}".encode()).hexdigest()[:40].encode()


class Offer:
    """Rank 0's side: a server thread. Open it before anything that can fail, then call `publish` or `reject`.

    The thread ends once every other rank has its answer, or at `close`.
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
        """Send the handle, plain JSON, and the descriptors to every rank. They may be closed after this returns."""
        if len(descriptors) > MOST_SEGMENTS:
            raise StagingError(
                f"{len(descriptors)} segments to share, expected at most {MOST_SEGMENTS}\n  try  restart the run"
            )
        self._descriptors = [os.dup(descriptor) for descriptor in descriptors]
        self._answer({"handle": dict(handle)})

    def reject(self, reason: str, *, linger: float = _LINGER_SECONDS) -> None:
        """Send the reason to every rank, also to those that connect within `linger` seconds, and release the name."""
        self._answer({"error": reason})
        self._thread.join(linger)
        self.close()

    @contextmanager
    def rejecting_on_error(self) -> Iterator[None]:
        """Send an exception raised inside the `with` block to every other rank, and raise it again."""
        try:
            yield
        except Exception as error:
            self.reject(str(error) or type(error).__name__)
            raise
        except BaseException:
            self.close()  # interrupted: the other ranks see the connection close
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
                    break  # `close` has shut the socket down
                with peer:
                    served += self._hand_over(peer)
        for descriptor in self._descriptors:
            os.close(descriptor)

    def _hand_over(self, peer: socket.socket) -> bool:
        """Send the answer. False if the peer belongs to another user or has disconnected."""
        if _user_of(peer) != self._user:
            return False
        self._answered.wait()
        # `send_fds` may send only part of the message; the descriptors travel with its first byte.
        try:
            sent = socket.send_fds(peer, [self._message], self._descriptors) if self._message else 0
            peer.sendall(self._message[sent:])
        except OSError:
            return False  # that rank has ended; its launcher handles that
        return True

    def close(self) -> None:
        """Stop serving. Ranks that still wait see the connection close."""
        self._answered.set()
        with suppress(OSError):  # the thread may have ended and closed the socket already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()


def fetch(ranks: LocalRanks, dataset: str) -> tuple[dict[str, Any], list[io.FileIO]]:
    """The other ranks' side: wait for rank 0 and return its handle and our own copies of its descriptors.

    Raises StagingError with rank 0's reason if it could not stage.
    """
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
    deadline = time.monotonic() + ranks.patience_seconds
    while True:
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            peer.connect(ranks.address(dataset))
            return peer
        except ConnectionRefusedError as error:
            peer.close()
            if time.monotonic() > deadline:
                raise StagingError(
                    f"local rank {ranks.rank} found no rank 0 staging {dataset} within "
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
        raise StagingError(f"rank 0 ended before it answered local rank {ranks.rank}\n  try  look at its messages")
    try:
        content = json.loads(message)
    except ValueError as error:
        raise StagingError("rank 0 ended in the middle of its answer\n  try  look at the messages of rank 0") from error
    if "error" in content:
        raise StagingError(f"rank 0 could not stage the dataset: {content['error']}")
    handle: dict[str, Any] = content["handle"]
    return handle


def _user_of(peer: socket.socket) -> int:
    _, user, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(user)
