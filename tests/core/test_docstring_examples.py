"""Examples in the docstrings of public names: doctests run; other code names what there is."""

from __future__ import annotations

import ast
import doctest
import inspect
import io
import re
from importlib import import_module
from pathlib import Path

import pytest

import fkjit
from docs.site import docstrings
from fkjit.jit.build import quiet

ROOT = Path(__file__).resolve().parents[2]
PUBLIC = [f"{module}.{n}" for module in docstrings.MODULES for n in import_module(module).__all__]
TUTORIALS = "\n".join(path.read_text() for path in (ROOT / "docs" / "tutorials").glob("*.md"))
SHOWN_ELSEWHERE = {"warm"}  # the command is in a tutorial; the call compiles for minutes


def looked_up(name: str):
    module, _, last = name.rpartition(".")
    return getattr(import_module(module), last)


def documented(name: str) -> dict[str, str]:
    """Docstrings by full name: of what is public, and of a class's own methods."""
    found = looked_up(name)
    members = vars(found).items() if inspect.isclass(found) else ()
    methods = {f"{name}.{key}": value.__doc__ for key, value in members if key[0] != "_"}
    return {key: doc for key, doc in {name: found.__doc__, **methods}.items() if doc}


@pytest.mark.parametrize("name", PUBLIC)
def test_an_example_prints_what_it_says(name):
    import numpy
    import torch

    names = {"np": numpy, "torch": torch, "fkjit": fkjit}
    parser, told = doctest.DocTestParser(), io.StringIO()
    for where, doc in documented(name).items():
        test = parser.get_doctest(inspect.cleandoc(doc), dict(names), where, where, 0)
        with quiet():
            doctest.DocTestRunner(verbose=False).run(test, out=told.write)
    assert not told.getvalue(), told.getvalue()


@pytest.mark.parametrize("name", [n for n in fkjit.__all__ if n not in SHOWN_ELSEWHERE])
def test_every_call_has_an_example_that_runs(name):
    """In its docstring or in a tutorial."""
    if not inspect.isclass(getattr(fkjit, name)):
        doc = getattr(fkjit, name).__doc__
        assert ">>> " in doc or re.search(rf"\b{name}\(", TUTORIALS + examples_of_classes())


def examples_of_classes() -> str:
    return "\n".join(doc for doc in documented("fkjit.PagedKVCache").values() if ">>> " in doc)


def test_code_that_no_example_runs_is_python_and_names_what_there_is():
    found = 0
    for name in PUBLIC:
        for where, doc in documented(name).items():
            for block in docstrings.blocks(inspect.cleandoc(doc).splitlines()):
                if docstrings.depth(block[0]):
                    found += 1
                    check_names(inspect.cleandoc("\n" + "\n".join(block)), where)
    assert found > 3


def check_names(code: str, where: str) -> None:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute):
            full = ast.unparse(node)
            if full.startswith("fkjit."):
                assert full in {*PUBLIC, *docstrings.MODULES}, (where, full)


def test_signatures_on_pages_have_short_defaults():
    given = "(a=<function K.<lambda>>, b=<function no>, w=Work(f=<function W.<lambda>>, n=1), c=0)"
    assert docstrings.signature(given) == "(a=..., b=..., w=Work(), c=0)"


def test_fields_of_a_class_are_shown_with_their_comments():
    source = (
        '@frozen\nclass A:\n    """Text."""\n\n    x: int  # one\n    # two\n    y: str\n\n'
        "    def z(self): ...\n"
    )
    assert docstrings.fields(source)[4:-1] == ["    x: int  # one", "    # two", "    y: str"]
    assert docstrings.fields("class A:\n    pass\n") == []


def test_arguments_that_share_a_line_become_entries_of_their_own():
    text = "Args:\n    q: [B]; k, v: [C]. Far; default: 1.\n    w (left, right): a. other: b."
    lines = docstrings.converted(text, "fkjit", ("q", "k", "v", "w"))
    assert lines[2:] == [
        "``q``", "    [B]", "", "``k``, ``v``", "    [C]. Far; default: 1.",
        "", "``w`` (left, right)", "    a. other: b.", "",
    ]  # fmt: skip
