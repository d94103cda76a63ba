"""Links to files that are no documents (kernels, examples, tests) lead to pages that show them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.highlighting import PygmentsBridge

LANGUAGES = {".cu": "cuda", ".cuh": "cuda", ".py": "python", ".toml": "toml", "": "text"}


def resolve(app: Any, doctree: nodes.document, docname: str) -> None:
    """Point links at the page of their file; a page is made for each that is pointed at."""
    if app.builder.format != "html":
        return
    for node in list(doctree.findall(addnodes.download_reference)):
        path = (Path(app.srcdir, docname).parent / node["reftarget"]).resolve()
        if node["reftarget"].startswith("/"):
            path = Path(app.srcdir, node["reftarget"][1:])
        if path.suffix in LANGUAGES and path.is_file():
            page = f"source/{path.relative_to(app.srcdir).as_posix()}"
            app.env.shown_sources[page] = path
            uri = app.builder.get_relative_uri(docname, page)
            node.replace_self(nodes.reference("", "", *node.children, refuri=uri, internal=True))


def pages(app: Any) -> Iterator[tuple[str, dict[str, str], str]]:
    """The pages themselves."""
    light = PygmentsBridge("html", app.config.pygments_style)
    for page, path in sorted(app.env.shown_sources.items()):
        name = page.removeprefix("source/")
        language = LANGUAGES[path.suffix]
        code = light.highlight_block(path.read_text(encoding="utf-8"), language)
        yield page, {"title": name, "body": f"<h1>{name}</h1>\n{code}"}, "page.html"


def start(app: Any) -> None:
    if not hasattr(app.env, "shown_sources"):
        app.env.shown_sources = {}


def setup(app: Any) -> dict[str, Any]:
    app.connect("builder-inited", start)
    app.connect("doctree-resolved", resolve)
    app.connect("html-collect-pages", pages)
    return {"parallel_read_safe": True, "parallel_write_safe": False}
