"""The site of the documents: every public name is described, links and anchors lead somewhere, and
pages fetch nothing from elsewhere."""

from __future__ import annotations

import io
import re
from collections import Counter
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path

import pytest

import fkjit
from docs.site import docstrings, runs, support
from fkjit import errors, ops
from fkjit.spec import registered

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs" / "reference"
DIRECTIVE = re.compile(r"(?m)^\.\. auto(?:function|class|exception):: (\S+)$")


def described() -> Counter[str]:
    text = "\n".join(path.read_text() for path in REFERENCE.glob("*.md"))
    return Counter(DIRECTIVE.findall(text))


def public() -> set[str]:
    names = {f"fkjit.{name}" for name in fkjit.__all__}
    for module in docstrings.MODULES[1:]:
        names |= {f"{module}.{name}" for name in import_module(module).__all__}
    for name, value in vars(errors).items():
        if isinstance(value, type) and issubclass(value, errors.FkjitError):
            names.add(f"fkjit.errors.{name}")
    return names - {"fkjit.errors.SanitizerError"}  # is fkjit.SanitizerError


def test_the_reference_has_every_public_name_once():
    found = described()
    assert not public() - set(found), "public, and on no page of docs/reference"
    assert set(found) == public() and set(found.values()) == {1}


def test_every_public_module_is_one_of_the_reference():
    modules = {name for name in dir(fkjit) if isinstance(getattr(fkjit, name), type(fkjit))}
    text = "\n".join(path.read_text() for path in REFERENCE.glob("*.md"))
    named = set(re.findall(r"(?m)^\.\. automodule:: fkjit\.(\w+)$", text))
    assert {"compat", "distributed", "errors", "models"} <= modules and named <= modules
    assert named == {*(m.removeprefix("fkjit.") for m in docstrings.MODULES[1:]), "errors"}


def test_public_names_have_docstrings():
    for name in public():
        module, _, last = name.rpartition(".")
        assert (getattr(import_module(module), last).__doc__ or "").strip(), name


def test_a_docstring_becomes_what_autodoc_reads():
    text = (
        "a * b, and `rope` of `q`; docs/MOE.md.\n\n    x = fkjit.rope(q)\n\nArgs:\n"
        "    q, k: [B, S]; `linear`\n        too.\n    The others: as in `rope`.\n\n"
        "Raises:\n    ParameterError: a trailing_ word."
    )
    lines = docstrings.converted(text, "fkjit")
    assert lines[0] == (
        r"a \* b, and :py:obj:`rope <fkjit.rope>` of ``q``; :doc:`docs/MOE.md </docs/MOE>`."
    )
    assert lines[2:5] == [".. code-block:: python", "", "    x = fkjit.rope(q)"]
    at = lines.index("``q``, ``k``")
    assert lines[at + 1 : at + 3] == ["    [B, S]; :py:obj:`linear <fkjit.linear>`", "    too."]
    assert "The others" in lines and "    as in :py:obj:`rope <fkjit.rope>`." in lines
    assert r"    a trailing\_ word." in lines


def test_the_table_of_gpus_is_what_calls_select():
    assert support.PAGE.read_text() == support.page(), "python -m docs.site.support writes it"


def test_the_table_of_runs_is_what_is_stored():
    assert runs.PAGE.read_text() == runs.page(), "python -m docs.site.runs writes it"


def test_what_no_gpu_has_run_is_no_more_than_there_is():
    ops.load()
    assert {spec.id for spec in registered()} >= support.NOT_RUN


class Fetched(HTMLParser):
    """What a browser asks for when it shows a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.urls: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        wanted = ("src", "srcset", "data") if tag != "link" else ("href",)
        self.urls += [value for name in wanted if (value := given.get(name))]


def test_what_a_page_fetches_is_found():
    page = '<link href="https://a/b.css"><a href="https://c"></a><img src="d.png">'
    assert Fetched(page).urls == ["https://a/b.css", "d.png"]


def built(tmp_path: Path, builder: str, **settings: object) -> str:
    """Builds the site in tmp_path/site; the warnings."""
    application = pytest.importorskip("sphinx.application", reason="needs fkjit[docs]")
    pytest.importorskip("myst_parser", reason="needs fkjit[docs]")
    pytest.importorskip("furo", reason="needs fkjit[docs]")
    warnings = io.StringIO()
    from sphinx.util.docutils import docutils_namespace

    with docutils_namespace():  # else the next site of the process finds this one's nodes
        application.Sphinx(
            ROOT, ROOT / "docs", tmp_path / "site", tmp_path / "trees", builder, settings, None,
            warnings,
        ).build()  # fmt: skip
    return warnings.getvalue()


def remote(site: Path) -> list[str]:
    """What its pages and style sheets fetch from elsewhere."""
    found = [u for p in site.rglob("*.html") for u in Fetched(p.read_text()).urls if "//" in u]
    loads = r"(?:url\(|@import)\s*['\"]?(?:https?:)?//[^)'\"]*"
    return found + [u for p in site.rglob("*.css") for u in re.findall(loads, p.read_text())]


@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")
def test_pages_are_read_without_a_warning_and_their_links_lead_somewhere(tmp_path):
    assert not built(tmp_path, "dummy")


@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")
def test_pages_fetch_nothing(tmp_path, every_variant):
    """One page by default, all that `make docs` writes with --every-variant."""
    if every_variant:
        assert not built(tmp_path, "html")
    else:
        built(tmp_path, "html", include_patterns=["docs/SECURITY.md"], root_doc="docs/SECURITY")
    assert not remote(tmp_path / "site") and list((tmp_path / "site").rglob("*.css"))
