"""Start the studio: check its options, open its socket, print its link, serve until it is stopped."""

from __future__ import annotations

import errno
import ipaddress
import signal
import socket
import ssl
import stat
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import anyio

from gracetune.config.environment import Environment
from gracetune.errors import ConfigError, Problem
from gracetune.hardware import Machine, probe
from gracetune.storage.os_errors import problem_of
from gracetune.storage.regular_files import read_small_file
from gracetune.studio.access import AccessRules, new_token
from gracetune.studio.run_list import RunList, identifier_of, is_run
from gracetune.studio.server import ListenAddress, Studio, StudioServer, listen

_SHORTEST_TOKEN = 16


@dataclass(frozen=True, kw_only=True)
class StudioOptions:
    """The options of `gracetune studio`."""

    folder: Path
    control: bool = False
    address: ListenAddress = field(default_factory=ListenAddress)
    token_file: Path | None = None
    host_names: tuple[str, ...] = ()
    prefix: str = ""
    any_port: bool = False
    """Whether a free port may be taken if this one is in use."""


def serve(options: StudioOptions, environment: Environment, report: Callable[[str], None]) -> None:
    """Serve until a signal. `report` takes lines for the user; the first is the link."""
    root = _checked_root(options.folder)
    _check_address(options)
    token = new_token() if options.token_file is None else _read_token(options.token_file)
    prefix = _checked_prefix(options.prefix)
    with _listen(options) as listening:
        port = listening.getsockname()[1]
        rules = AccessRules(token, options.control, port, options.host_names, prefix)
        studio = Studio(
            root=root, control=options.control, environment=environment, runs=RunList(root), prefix=prefix,
            machine=_in_one_line(probe()),
        )  # fmt: skip
        server = StudioServer(studio, rules, options.address)
        threading.Thread(target=studio.runs.rows, name="first look at the runs", daemon=True).start()
        report(replace(options.address, port=port).link(prefix, token))
        before = signal.getsignal(signal.SIGHUP)
        signal.signal(signal.SIGHUP, lambda number, frame: server.handle_exit(number, None))
        if studio.control:
            studio.queue.start_runner()
        try:
            anyio.run(server.serve, [listening])
        except KeyboardInterrupt:  # uvicorn raises the signal again after its own clean end
            pass
        finally:
            signal.signal(signal.SIGHUP, before)
            studio.queue.stop_runner()


def _listen(options: StudioOptions) -> socket.socket:
    try:
        return listen(options.address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE and options.any_port:
            return listen(replace(options.address, port=0))
        hint = "--port 0 takes a free port; `ss -ltnp` lists the used ones"
        found = f"{options.address.host} port {options.address.port}: {error.strerror or error}"
        raise ConfigError([Problem("--port", found, "an address that is free", hint)]) from None


def run_link(link: str) -> str:
    """The link that opens the only run of a studio whose folder is that run."""
    return f"{link}#/run/{identifier_of('.')}"


def _checked_root(folder: Path) -> Path:
    path = folder.expanduser().absolute()
    if not path.is_dir():
        found = "no such folder" if not path.exists() else "not a folder"
        hint = "check the path; without FOLDER it is the current one"
        raise ConfigError([Problem("FOLDER", found, "a folder with runs in it", hint, str(path))])
    return path.resolve()


def check_run(folder: Path) -> Path:
    """The folder of a run. Raises ConfigError if it is none."""
    path = folder.expanduser().absolute()
    if not is_run(path):
        found = "no such folder" if not path.is_dir() else "a folder without a run's log or lock"
        raise ConfigError([Problem("RUN", found, "the output folder of a run", "check the path", str(path))])
    return path.resolve()


def _check_address(options: StudioOptions) -> None:
    host, address = options.address.host, options.address
    problems = []
    if (address.certificate is None) != (address.key is None):
        hint = "--certificate server.crt --key server.key"
        problems.append(Problem("--certificate", "one of --certificate and --key", "both of them", hint))
    for name, file in (("--certificate", address.certificate), ("--key", address.key)):
        if file is not None and not file.is_file():
            problems.append(Problem(name, "no such file", "a PEM file", "check the path", str(file)))
    if not problems and address.certificate is not None and address.key is not None:
        problems += _tls_problems(address.certificate, address.key)
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        problems.append(Problem("--host", host, "an IP address of this machine", "--host 127.0.0.1"))
        is_loopback = True
    if not is_loopback and options.token_file is None and address.certificate is None:
        problems.append(
            Problem(
                "--host",
                f"{host}, which other machines can reach",
                "--token-file FILE, or --certificate FILE and --key FILE",
                "keep 127.0.0.1 and use an SSH tunnel: ssh -L 8765:127.0.0.1:8765 THIS_MACHINE",
            )
        )
    if problems:
        raise ConfigError(problems)


def _tls_problems(certificate: Path, key: Path) -> list[Problem]:
    try:
        # A password of its own: without one, OpenSSL asks on the terminal for that of an encrypted key.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=lambda: "none")
    except OSError as error:  # an ssl.SSLError is one
        cause = str(error).partition(" (_ssl")[0]
        found = f"{certificate.name} and {key.name}, which cannot be loaded: {cause}"
        expected = "PEM files: a certificate and its key, without a password"
        return [Problem("--certificate", found, expected, "--certificate server.crt --key server.key")]
    return []


def _read_token(file: Path) -> str:
    path = file.expanduser().absolute()
    try:
        token = read_small_file(path, 4096).decode("utf-8", "replace").strip()
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError as error:
        raise ConfigError([problem_of(error, "--token-file", path)]) from None
    found = ""
    if mode & 0o077:
        found = f"a file that others may read (mode {mode:03o})"
    elif len(token) < _SHORTEST_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        found = f"{len(token)} characters"
    if found:
        expected = f"a file of mode 600 with {_SHORTEST_TOKEN} or more letters and digits in one line"
        hint = f"(umask 077; openssl rand -hex 24 > {path})"
        raise ConfigError([Problem("--token-file", found, expected, hint, str(path))])
    return token


def _checked_prefix(prefix: str) -> str:
    stripped = prefix.rstrip("/")
    plain = stripped.replace("/", "").replace("-", "").replace("_", "").replace(".", "")
    if stripped and (not stripped.startswith("/") or "//" in stripped or not plain.isalnum() or not plain.isascii()):
        raise ConfigError([Problem("--prefix", prefix, "a path of letters, digits, - and _", "--prefix /studio")])
    return stripped


def _in_one_line(machine: Machine) -> str:
    gpus = ", ".join(gpu.name or "an unnamed GPU" for gpu in machine.gpus) or "no GPU"
    return f"{gpus}; {machine.host.cpu_count or 'an unknown number of'} CPUs; {machine.profile.value}"
