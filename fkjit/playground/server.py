"""The server of `fkjit playground`."""

from __future__ import annotations

import secrets
import socket
import threading
import webbrowser
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import parse_qs, urlencode

from fkjit import ops
from fkjit.arch import target
from fkjit.errors import ParameterError, ToolchainError
from fkjit.messages import write
from fkjit.runtime.gpus import gpus
from fkjit.spec import find

FIRST = "attention.flash"
HOST = "127.0.0.1"  # and nothing else: whoever reaches the page can write files as this user


def beginning(kernel: str | None, arch: str | None) -> str:
    """The part of the address that says with which kernel and target the page begins; "" for its
    own choice. ParameterError for a name or a target that there is not."""
    given = {"kernel": kernel and ops.kernels("playground", kernel)[0].id, "arch": arch}
    if arch is not None:
        given["arch"] = target(arch.replace("compute_", "sm_")).name
        given["kernel"] = given["kernel"] or FIRST
    named = {name: value for name, value in given.items() if value is not None}
    return f"#{urlencode(named)}" if named else ""


def opened(state: str) -> str:
    """The part of the address that has a state: that of a page that was shared, with or without
    what comes before its "#". ParameterError where it names no kernel that there is."""
    found = parse_qs(state.rpartition("#")[2])
    name = found.get("kernel", [""])[0]
    if not name:
        raise ParameterError(
            f"playground: --open {state[:60]!r} is no address that has kernel=… behind its #"
        )
    ops.load()
    find(name)
    return f"#{urlencode({word: values[0] for word, values in found.items()})}"


def run(port: int, browser: bool, folder: Path, state: str = "") -> None:
    """Serve until Ctrl-C; the address, with its token, goes to stdout. `port` 0: any free one.
    `state`: what the page begins with, see `beginning`.

    ParameterError for a port that is taken, ToolchainError without the extra [playground].
    """
    if find_spec("starlette") is None or find_spec("uvicorn") is None:
        raise ToolchainError(
            "playground: starlette and uvicorn are not installed: pip install 'fkjit[playground]'"
        )
    import uvicorn

    from fkjit.playground.app import make
    from fkjit.playground.jobs import Jobs

    listening = _listen(port)
    port = listening.getsockname()[1]
    token = secrets.token_urlsafe(24)
    found, _ = gpus()
    jobs = Jobs(folder.absolute(), gpu=bool(found))
    app = make(token, port, jobs)
    address = f"http://{HOST}:{port}/{token}/{state}"
    print(address, flush=True)
    write("fkjit: the playground is at this address, for this user alone; Ctrl-C ends it")
    if browser:
        threading.Thread(target=_open, args=(address,), daemon=True).start()
    how = uvicorn.Config(app, log_level="warning", access_log=False, server_header=False)
    with suppress(KeyboardInterrupt):
        uvicorn.Server(how).run(sockets=[listening])
    jobs.close()


def _listen(port: int) -> socket.socket:
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((HOST, port))
        made.listen(64)  # who opens the address before the server runs, waits
    except (OSError, OverflowError) as error:
        made.close()
        raise ParameterError(f"playground: --port {port} cannot be used: {error}") from error
    return made


def _open(address: str) -> None:
    with suppress(webbrowser.Error, OSError):
        webbrowser.open(address)
