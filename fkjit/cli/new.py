"""`fkjit new`: the two files that a kernel is, which compile, run and are checked as they stand."""

from __future__ import annotations

import keyword
import re
from pathlib import Path

from fkjit import ops, scaffold
from fkjit.cli import console as report
from fkjit.errors import ParameterError


def run(name: str, folder: Path) -> None:
    """Write NAME.cu and NAME.py, y = factor * x. ParameterError for a name that cannot be one, that
    a call or an op has, or whose files are there."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise ParameterError(f"new: {name!r} is not a name of a-z, 0-9 and _, such as my_scale")
    if name in ops.known_names():
        raise ParameterError(f"new: {name!r} is a call or an op already; choose another name")
    texts = scaffold.files(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file in texts:
            if (folder / file).exists():
                raise ParameterError(f"new: {folder / file} is there already; choose another name")
        for file, text in texts.items():
            (folder / file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ParameterError(f"new: {folder} cannot be written: {error}") from error
    lines = [f"{folder / file}" for file in texts]
    lines += [f"check it: FKJIT_KERNEL_PATH={folder} fkjit check {name}"]
    report.console().print("\n".join(lines), soft_wrap=True)
