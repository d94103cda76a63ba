"""Runs what a page shows, block by block, in a folder of its own.

A block of CUDA or Python behind a line "`name`…:" is written to that file. Other Python is
executed; of shell every line is a command of fkjit's, run in this process, or an export. A block of
text is what the block before has printed; "…" in it is anything, alone on a line any lines.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from fkjit.cache.lookup import default_cache
from fkjit.settings import settings
from fkjit.user_kernels import load_folder
from tests.cli.kit import run

LANGUAGES = {"cuda", "python", "sh", "text"}


class Block(NamedTuple):
    """A fenced block of a page."""

    language: str
    code: str
    line: int  # of its first line, from 1
    file: str | None  # that it is


def blocks(text: str) -> Iterator[Block]:
    """All of a page."""
    for found in re.finditer(r"(?ms)^```(\S+)\n(.*?)^```$", text):
        before = text[: found.start()].rstrip("\n").rpartition("\n")[2]
        name = re.match(r"`([\w./]+\.(?:cu|py))`.*:$", before)
        line = text.count("\n", 0, found.start(2)) + 1
        yield Block(found[1], found[2], line, name[1] if name else None)


def matches(shown: str, printed: str) -> bool:
    """Whether that was printed, white space at the ends of lines aside."""
    pattern = ""
    for line in shown.splitlines():
        if line.strip() == "…":
            pattern += r"(?:.*\n)*?"
        else:
            pattern += ".*".join(map(re.escape, line.rstrip().split("…"))) + r" *\n"
    lines = "".join(f"{line.rstrip()}\n" for line in printed.rstrip().splitlines())
    return re.fullmatch(pattern, lines) is not None


def execute(text: str, name: str, patch) -> list[str]:
    """Run a page in the current folder; what went otherwise than it says."""
    names: dict = {"__name__": "__main__"}
    wrong, printed = [], ""
    for block in blocks(text):
        assert block.language in LANGUAGES, f"{name}:{block.line}: {block.language}"
        if block.file:
            Path(block.file).write_text(block.code)
        elif block.language == "text":
            if not matches(block.code, printed):
                wrong.append(f"{name}:{block.line} shows\n{block.code}\nprinted was\n{printed}")
        elif block.language == "python":
            code = "\n" * (block.line - 1) + block.code
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(code, name, "exec"), names)
            printed = out.getvalue()
        elif block.language == "sh":
            printed = "".join(command(line, patch) for line in block.code.splitlines())
    return wrong


def command(line: str, patch) -> str:
    """What one line of shell prints: `export NAME=value`, or a command of fkjit's."""
    program, *words = shlex.split(line, comments=True)
    if program == "export":
        for word in words:
            name, _, value = word.partition("=")
            patch.setenv(name, value)
            settings.cache_clear()  # a process reads them once; a reader's next one reads these
            default_cache.cache_clear()
            if name == "FKJIT_KERNEL_PATH":
                load_folder(Path(value))
        return ""
    assert program == "fkjit", f"{line!r} is no command of fkjit's"
    done = run(*words)
    assert done.status == 0, (line, done.out, done.err)
    return done.out
