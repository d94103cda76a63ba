"""Marks at lines of the template: errors, findings, bank conflicts."""

from __future__ import annotations

import re
from typing import Any

from fkjit.jit.render import Rendered


def mark(line: int, kind: str, text: str, severity: str = "error") -> dict[str, Any]:
    """One mark; line 0 or past the end goes to the first line."""
    return {"line": max(line, 1), "kind": kind, "text": text, "severity": severity}


def of_include(rendered: Rendered, file: str) -> int:
    """The line of the template that includes a header, by itself or by others; 1 if none does."""
    short = file.partition("/")[2]
    for number, line in enumerate(rendered.template.split("\n"), 1):
        found = re.match(r'\s*#\s*include\s*"([^"]+)"', line)
        if found and (found[1] == short or _includes(rendered, found[1], short, set())):
            return number
    return 1


def _includes(rendered: Rendered, header: str, wanted: str, seen: set[str]) -> bool:
    if header in seen or header not in rendered.headers:
        return False
    seen.add(header)
    inner = re.findall(r'(?m)^\s*#\s*include\s*"([^"]+)"', rendered.headers[header])
    return wanted in inner or any(_includes(rendered, name, wanted, seen) for name in inner)
