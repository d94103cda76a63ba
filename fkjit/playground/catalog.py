"""The kernels that the page offers, their templates, and saving one as a kernel of one's own."""

from __future__ import annotations

import json
import keyword
import re
from pathlib import Path
from typing import Any

from fkjit import ops, scaffold
from fkjit.arch import DEFAULT_ARCHS, target
from fkjit.errors import ParameterError
from fkjit.jit.render import load
from fkjit.playground.request import check_text
from fkjit.spec import KernelSpec, find, registered

NEW = "new_kernel"  # what the page calls the scaffold before it is saved

_DERIVED = '''\
"""{doc}

Begun in fkjit's playground from {id}, whose description this takes over.
"""

from dataclasses import replace
from pathlib import Path

from fkjit import ops, register
from fkjit.spec import find

ops.load()
{upper} = register(
    replace(
        find("{id}"),
        op="{name}",
        name="plain",
        source="{name}.cu",
        root=Path(__file__).parent,
    )
)
'''


def write_scaffold(folder: Path) -> Path:
    """The files of the new kernel, in a folder of kernels within `folder`; its path."""
    made = folder / "kernels"
    made.mkdir()
    for file, text in scaffold.files(NEW).items():
        (made / file).write_text(text, encoding="utf-8")
    return made


def kernels() -> list[dict[str, Any]]:
    """Each kernel: its parameters, and for each target its first legal variant (None: none)."""
    ops.load()
    return [_entry(spec) for spec in registered()]


def _entry(spec: KernelSpec) -> dict[str, Any]:
    return {
        "kernel": spec.id,
        "op": spec.op,
        "doc": spec.doc,
        "yours": spec.root is not None,
        "parameters": [
            {"name": p.name, "values": p.values, "tunable": p.tunable, "doc": p.doc}
            for p in spec.params
        ],
        "first": {name: _first(spec, name) for name in DEFAULT_ARCHS},
    }


def _first(spec: KernelSpec, arch: str) -> dict[str, Any] | None:
    return next(spec.variants(target(arch).arch), None)


def legal(spec: KernelSpec, params: dict[str, Any], arch: str) -> dict[str, list[bool]]:
    """Of each parameter, which of its values are legal beside the others as they are."""
    to = target(arch).arch
    return {
        p.name: [spec.why_not({**params, p.name: value}, to) is None for value in p.values]
        for p in spec.params
    }


def nearest(spec: KernelSpec, wanted: Any, arch: str) -> dict[str, Any] | None:
    """The first legal variant on a target with as many of the wanted values, one after the other,
    as go together; None where there is no variant. Values that are not declared are left out."""
    to = target(arch).arch
    given = wanted if isinstance(wanted, dict) else {}
    found, fixed = next(spec.variants(to), None), {}
    for param in spec.params:
        text = json.dumps(given.get(param.name))
        value = next((v for v in param.values if json.dumps(v) == text), None)
        if found is None or value is None:
            continue
        fitting = next(spec.variants(to, {**fixed, param.name: value}), None)
        if fitting is not None:
            found, fixed = fitting, {**fixed, param.name: value}
    return found


def template(name: str) -> dict[str, str]:
    """A kernel's template as its file has it. ParameterError for a name that there is not."""
    spec = find(name)
    params = next(spec.variants(), None)
    if params is None:
        raise ParameterError(f"playground: {spec.id} has no legal variant")
    rendered = load(spec, params)
    return {"name": rendered.name, "text": rendered.template}


def save(kernel: str, name: str, text: str, folder: Path) -> list[str]:
    """Write NAME.cu and NAME.py, begun from a kernel, and return their paths.

    ParameterError for a name that cannot be one, that is taken, or whose files are there.
    """
    check_text(text)
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,60}", name) or keyword.iskeyword(name):
        raise ParameterError(f"save: {name!r} is not a name of a-z, 0-9 and _, such as my_scale")
    if name in ops.known_names():
        raise ParameterError(f"save: {name!r} is a call or an op already; choose another name")
    spec = find(kernel)
    texts = _texts(spec, name, text)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file in texts:
            if (folder / file).exists():
                raise ParameterError(f"save: {folder / file} is there already; choose another name")
        for file, content in texts.items():
            (folder / file).write_text(content, encoding="utf-8")
    except OSError as error:
        raise ParameterError(f"save: {folder} cannot be written: {error}") from error
    return [str(folder / file) for file in texts]


def _texts(spec: KernelSpec, name: str, text: str) -> dict[str, str]:
    if spec.op == NEW:
        made = scaffold.files(name)
        return {**made, f"{name}.cu": re.sub(rf"\b{NEW}\b", name, text)}
    doc = (spec.doc or spec.id).replace("\\", " ").replace('"', "'")
    describe = _DERIVED.format(doc=doc, id=spec.id, name=name, upper=name.upper())
    return {f"{name}.cu": text, f"{name}.py": describe}
