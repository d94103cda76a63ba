"""Programs in C around what `fkjit compile --output` wrote."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

from tests.cli.kit import run

PROGRAM = Path(__file__).with_name("launch.c")
ADD = (
    "compile", "vector_add", "--dtype", "fp32", "--vector", "true", "--dimensions", "0",
    "--threads", "256",
)  # fmt: skip


def written(folder: Path, *words: str) -> tuple[dict, Path]:
    """The manifest and the header of one image."""
    done = run(*words, "--output", str(folder))
    assert done.status == 0, done.err
    (path,) = folder.glob("*.json")
    return json.loads(path.read_text()), path.with_suffix(".h")


def c_name(header: Path) -> str:
    """What the names in a header begin with."""
    return re.sub(r"\W+", "_", header.stem)


def compiled(source: Path, header: Path, folder: Path, compiler: str = "cc") -> Path:
    """A program of a C source that includes the header."""
    program = folder / "program"
    done = subprocess.run(
        [compiler, "-Wall", "-Wextra", *(["-std=gnu11"] if compiler == "cc" else []),
         f"-I{header.parent}", f'-DHEADER="{header.name}"', f"-DNAME={c_name(header)}", str(source),
         "-o", str(program), "-ldl"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return program
