"""A user's kernel folder, made of the two files that CONTRIBUTING.md shows."""

from __future__ import annotations

import re
from contextlib import contextmanager
from pathlib import Path

from fkjit import ops, spec

ROOT = Path(__file__).resolve().parents[2]
VARIANTS = 2 * 2 * 2  # of scale.plain: dtype, threads, negated


def code_blocks(document: str) -> dict[str, str]:
    """{"scale.cu": code, …} of a document's fenced blocks that a line "`name`…:" announces."""
    text = (ROOT / document).read_text()
    found = re.findall(r"(?ms)^`(\w+\.(?:cu|py))`[^\n]*:\n\n```\w+\n(.*?)^```$", text)
    return dict(found)


def write_kernel(folder: Path) -> Path:
    """Put scale.cu and scale.py into `folder`."""
    blocks = code_blocks("CONTRIBUTING.md")
    assert sorted(blocks) == ["scale.cu", "scale.py"]
    folder.mkdir(parents=True, exist_ok=True)
    for name, code in blocks.items():
        (folder / name).write_text(code)
    return folder


@contextmanager
def registered_kernel(folder: Path):
    """The kernel in `folder` in the registry, for as long as the `with` lasts."""
    ops.load()
    before = dict(spec._REGISTRY)
    ops.load_folder(folder)
    try:
        yield spec.find("scale.plain")
    finally:
        spec._REGISTRY.clear()
        spec._REGISTRY.update(before)
