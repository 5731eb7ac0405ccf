"""`gracetune studio` and `gracetune watch`: runs in a browser."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Annotated

import typer

from gracetune.cli.console import session
from gracetune.cli.streams import RedactedText
from gracetune.errors import ConfigError, Problem

_Port = Annotated[int, typer.Option("--port", metavar="N", min=0, max=65535, help="The port; 0 takes a free one.")]
_DEFAULT_PORT = 8765
_Control = Annotated[
    bool, typer.Option("--control", help="Allow changes: sample, save, stop, resume, new runs, captions.")
]
_Host = Annotated[
    str,
    typer.Option(
        "--host",
        metavar="ADDRESS",
        help="The address to listen on. Others than loopback need --token-file, or --certificate and --key.",
    ),
]
_HostName = Annotated[
    list[str] | None,
    typer.Option("--host-name", metavar="NAME", help="A name under which browsers reach the studio. Repeatable."),
]
_TokenFile = Annotated[
    Path | None, typer.Option("--token-file", metavar="FILE", help="The token to use, in a file of mode 600.")
]
_Certificate = Annotated[
    Path | None, typer.Option("--certificate", metavar="FILE", help="TLS certificate, PEM. Needs --key.")
]
_Key = Annotated[Path | None, typer.Option("--key", metavar="FILE", help="Private key of the certificate, PEM.")]
_Prefix = Annotated[
    str, typer.Option("--prefix", metavar="PATH", help="The path below which a reverse proxy shows the studio.")
]


def studio(
    context: typer.Context,
    folder: Annotated[
        Path, typer.Argument(readable=False, metavar="[FOLDER]", help="The folder whose runs are shown.")
    ] = Path(),
    control: _Control = False,
    port: _Port = _DEFAULT_PORT,
    host: _Host = "127.0.0.1",
    host_name: _HostName = None,
    token_file: _TokenFile = None,
    certificate: _Certificate = None,
    key: _Key = None,
    prefix: _Prefix = "",
) -> None:
    """Show all runs below a folder in a browser: live curves, samples, memory, data; with --control also steer them.

    Prints one link and serves until it is stopped with Ctrl-C. Only browsers that opened the link are served. If the
    default port is taken, a free one is used. Runs do not depend on the studio: it may be stopped and started at any
    time.
    """
    _check_installed()
    from gracetune.studio.launch import StudioOptions, serve
    from gracetune.studio.server import ListenAddress

    options = StudioOptions(
        folder=folder, control=control, address=ListenAddress(host, port, certificate, key), token_file=token_file,
        host_names=tuple(host_name or ()), prefix=prefix, any_port=port == _DEFAULT_PORT,
    )  # fmt: skip
    serve(options, session(context).environment, lambda link: _report(f"gracetune studio: {link}"))


def watch(
    context: typer.Context,
    run_folder: Annotated[Path, typer.Argument(readable=False, metavar="RUN", help="The run's output folder.")],
    control: _Control = False,
    port: _Port = 0,
) -> None:
    """Show one run in a browser. `gracetune studio` shows all runs below a folder, and has more options."""
    _check_installed()
    from gracetune.studio.launch import StudioOptions, check_run, run_link, serve
    from gracetune.studio.server import ListenAddress

    folder = check_run(run_folder)
    options = StudioOptions(folder=folder, control=control, address=ListenAddress(port=port))
    serve(options, session(context).environment, lambda link: _report(f"gracetune watch: {run_link(link)}"))


def _report(line: str) -> None:
    """Print the link, whose token would be hidden like any other secret."""
    text = f"{line}\nCtrl-C stops it; runs go on\n"
    if isinstance(sys.stdout, RedactedText):
        sys.stdout.write_unredacted(text)
    else:  # called from Python, without the streams of the command line
        print(text, end="", flush=True)


def _check_installed() -> None:
    missing = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        found = f"{' and '.join(missing)}: not installed"
        hint = "pip install 'gracetune[studio]'"
        raise ConfigError([Problem("gracetune studio", found, "the packages of the studio", hint)])
