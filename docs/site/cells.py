"""Runs notebooks and keeps what their cells print: `python -m docs.site.cells docs/notebooks/*`.

Cells are plain Python and outputs plain text, so that this needs no Jupyter. Of a cell's last line
the value is shown, as there.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

from fkjit.jit.build import quiet


def executed(text: str, name: str = "notebook") -> str:
    """A notebook's file with the outputs of a run from the first cell to the last."""
    notebook = json.loads(text)
    names: dict[str, Any] = {"__name__": "__main__"}
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(code, 1):
        with quiet():
            printed, value = run("".join(cell["source"]), f"{name}[{number}]", names)
        cell["execution_count"] = number
        cell["outputs"] = outputs(printed, value, number)
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def run(source: str, name: str, names: dict[str, Any]) -> tuple[str, Any]:
    """What a cell prints, and the value of its last line if that is an expression."""
    body = ast.parse(source, name)
    last = body.body[-1] if body.body else None
    shown = ast.Expression(last.value) if isinstance(last, ast.Expr) else None
    body.body = body.body[:-1] if shown else body.body
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(body, name, "exec"), names)
        value = eval(compile(shown, name, "eval"), names) if shown else None
    return out.getvalue(), value


def outputs(printed: str, value: Any, number: int) -> list[dict[str, Any]]:
    """As a notebook's file has them."""
    found: list[dict[str, Any]] = []
    if printed:
        text = printed.splitlines(keepends=True)
        found.append({"name": "stdout", "output_type": "stream", "text": text})
    if value is not None:
        data = {"text/plain": repr(value).splitlines(keepends=True)}
        found.append({"data": data, "execution_count": number, "metadata": {},
                      "output_type": "execute_result"})  # fmt: skip
    return found


def main(paths: list[str]) -> None:
    for path in map(Path, paths):
        path.write_text(executed(path.read_text(encoding="utf-8"), path.name), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
