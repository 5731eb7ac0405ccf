"""Real processes for the tests of this folder. They are forked, so each starts in a millisecond with torch loaded."""

from __future__ import annotations

import ctypes
import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000
_MS_RDONLY, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18


class NotPermitted(Exception):  # noqa: N818 - a reason to skip, not an error
    """The machine does not allow tests to mount anything."""


class Child:
    """A child process that runs `work(report)`. The words it passes to `report` arrive in `stated`."""

    def __init__(self, work: Callable[[Callable[[str], None]], None]) -> None:
        self._reading, writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._reading)
            _run(work, writing)
        os.close(writing)
        self._text = b""
        self.status: int | None = None

    def wait_for_word(self) -> bool:
        """Wait for the next word. Returns False if the process has ended."""
        got = os.read(self._reading, 1 << 16)
        self._text += got
        return bool(got)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self._end()

    def join(self) -> list[str]:
        """Wait for its end and return all words. An error of the process is raised here."""
        stated = self._end()
        if stated and stated[-1].startswith("skip "):
            pytest.skip(stated[-1].removeprefix("skip "))
        assert self.status == 0, "\n".join(stated)
        return stated

    def _end(self) -> list[str]:
        while self.wait_for_word():
            pass
        os.close(self._reading)
        _, status = os.waitpid(self.pid, 0)
        self.status = os.waitstatus_to_exitcode(status)
        return self.lines

    @property
    def lines(self) -> list[str]:
        """The complete words; a killed process may have written a part of one."""
        return [word.decode().replace("\0", "\n") for word in self._text.split(b"\n")[:-1]]


def _run(work: Callable[[Callable[[str], None]], None], descriptor: int) -> None:
    def report(word: str) -> None:
        os.write(descriptor, word.replace("\n", "\0").encode() + b"\n")

    # torch renews its pool of threads at the first use after a fork; two threads that do so at once break it.
    torch.set_num_threads(1)
    code = 1
    try:
        work(report)
        code = 0
    except NotPermitted as reason:
        report(f"skip {reason}")
    except BaseException:  # noqa: BLE001 - told to the test, which fails with it
        report(traceback.format_exc())
    finally:
        os._exit(code)  # without pytest's own exit handlers


def own_mounts() -> None:
    """Make further mounts private to this process; they end with it."""
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    flags = _CLONE_NEWNS if user == 0 else _CLONE_NEWNS | _CLONE_NEWUSER
    if libc.unshare(flags) != 0:
        raise NotPermitted(f"no mount namespace here: {os.strerror(ctypes.get_errno())}")
    if user != 0:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    _mount("none", Path("/"), None, _MS_REC | _MS_PRIVATE)


def mount_tmpfs(folder: Path, size: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    _mount("tmpfs", folder, "tmpfs", 0, f"size={size}")


def resize_tmpfs(folder: Path, size: int) -> None:
    _mount("tmpfs", folder, "tmpfs", _MS_REMOUNT, f"size={size}")


def make_read_only(folder: Path) -> None:
    _mount(str(folder), folder, None, _MS_BIND)
    _mount(str(folder), folder, None, _MS_BIND | _MS_REMOUNT | _MS_RDONLY)


def show_instead(seen: Path, real: Path) -> None:
    """Make `real` visible to this process under the path `seen`."""
    _mount(str(real), seen, None, _MS_BIND)


def _mount(source: str, target: Path, kind: str | None, flags: int, options: str = "") -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    kind_bytes = None if kind is None else kind.encode()
    if libc.mount(source.encode(), str(target).encode(), kind_bytes, flags, options.encode()) != 0:
        raise NotPermitted(f"cannot mount {target}: {os.strerror(ctypes.get_errno())}")
