"""How `make docs` builds the site (sphinx-build -c docs . docs/_build).

Sources are the Markdown files of the repository as they stand: their links hold on a code host and
here. Links to other files (kernels, examples) lead to pages with that file (site/sources.py).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import fkjit  # noqa: E402

project = "fkjit"
version = release = fkjit.__version__
copyright = "the authors of fkjit; Apache-2.0"
html_title = f"fkjit {release}"

root_doc = "docs/index"
include_patterns = [
    "README.md",
    "CONTRIBUTING.md",
    "docs/**.md",
    "docs/**.ipynb",
    "bench/NOTES.md",
    "bench/notes/*.md",
]
exclude_patterns = ["docs/_build", ".venv", "fkjit", "tests", "templates", "kernels_cu"]
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "docs.site.docstrings",
    "docs.site.sources",
    "docs.site.notebooks",
]

myst_heading_anchors = 4
autodoc_typehints = "none"  # shapes and dtypes stand in the docstrings; arrays are of any framework
autodoc_member_order = "bysource"
toc_object_entries = False
nitpicky = True
smartquotes = False  # "bf16" is Python

html_theme = "furo"
html_static_path = ["site/static"]
html_css_files = ["fkjit.css"]
html_additional_pages = {"index": "start.html"}
templates_path = ["site/templates"]
html_theme_options = {"source_repository": ""}
html_copy_source = False
html_show_sourcelink = False
pygments_style, pygments_dark_style = "a11y-high-contrast-light", "github-dark"


def _without_empty_gallery(app: Any, docname: str, source: list[str]) -> None:
    """A glob that finds nothing is a warning that Sphinx cannot be told to leave out."""
    if docname == root_doc and not list((ROOT / "docs" / "gallery").glob("*.md")):
        source[0] = source[0].replace("\ngallery/*\n", "\n")


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _without_empty_gallery)
