"""Render every variant of the fkjit on sys.path, and write the sources to stdout, pickled.

`machine_code.py` starts this file as a program of its own for each tree that it compares, so it
imports nothing of a tree but what both of them have, wherever it stands there:

    PYTHONPATH=tree python tests/core/render_tree.py [op or kernel id ...]
"""

from __future__ import annotations

import pickle
import sys
from importlib import import_module
from types import ModuleType


def find_module(*names: str) -> ModuleType:
    """The first of these modules of fkjit that there is: a tree may be older than a move."""
    for name in names:
        try:
            return import_module(f"fkjit.{name}")
        except ModuleNotFoundError as error:
            if error.name is None or not f"fkjit.{name}".startswith(error.name):
                raise
    raise ModuleNotFoundError(f"fkjit has none of {', '.join(names)}")


def main(wanted: list[str]) -> None:
    """(kernel id, label, targets, name, text, headers) of each variant, and options by target."""
    arch, spec = find_module("arch"), find_module("spec")
    keys, render = find_module("jit.keys", "keys"), find_module("jit.render", "render")
    version = find_module("jit.toolchain", "toolchain").nvrtc_info().version
    find_module("ops").load()
    targets = [arch.target(name) for name in arch.DEFAULT_ARCHS]
    found = []
    for one in spec.registered():
        if wanted and not {one.id, one.op} & set(wanted):
            continue
        for params in one.variants():
            legal = [t.name for t in targets if one.why_not(params, t.arch) is None]
            source = render.render(one, params)
            rest = (source.name, source.text, dict(source.headers))
            found.append((one.id, one.label(params), legal, *rest))
    pickle.dump((found, {t.name: keys.options(t, version) for t in targets}), sys.stdout.buffer)


if __name__ == "__main__":
    main(sys.argv[1:])
