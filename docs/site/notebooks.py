"""Notebooks as pages: their Markdown, their code, and the outputs that are stored in them."""

from __future__ import annotations

import json
from typing import Any

from docutils import nodes
from docutils.parsers import Parser


def markdown(text: str) -> str:
    """A notebook's file as one text in Markdown."""
    return "\n\n".join(filter(None, map(_cell, json.loads(text)["cells"])))


def _cell(cell: dict[str, Any]) -> str:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return source
    shown = [f"```python\n{source}\n```"]
    for output in cell["outputs"]:
        text = output.get("text") or output.get("data", {}).get("text/plain", [])
        if text:
            shown.append(f"```text\n{''.join(text).rstrip()}\n```")
    return "\n\n".join(shown)


class NotebookParser(Parser):
    """Sphinx's parser of *.ipynb files."""

    supported = ("notebook",)

    def parse(self, inputstring: str, document: nodes.document) -> None:
        """Called by docutils with the file's text."""
        from myst_parser.parsers.sphinx_ import MystParser

        MystParser().parse(markdown(inputstring), document)


def setup(app: Any) -> dict[str, Any]:
    app.add_source_suffix(".ipynb", "notebook")
    app.add_source_parser(NotebookParser)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
