"""What `fkjit compile --output` writes beside an image: a JSON manifest and a C header, so that a
program without Python can launch it with `cuLaunchKernel`.

The header has the block, the shared memory and a struct with one member for each argument, whose
addresses are the `kernelParams`. The grid follows from a problem: both files show one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from fkjit.cache.lookup import Entry
from fkjit.jit.signature import TENSOR_MAP_BYTES
from fkjit.spec import KernelSpec, Params

_C = {
    "i": "int32_t", "I": "uint32_t", "q": "int64_t", "Q": "uint64_t", "f": "float", "d": "double",
    "?": "uint8_t", "P": "CUdeviceptr",
}  # fmt: skip
_SYSTEM = """\
#include <stdint.h>
#ifndef __cuda_cuda_h__ /* without the toolkit's cuda.h */
#ifndef FKJIT_DEVICE_POINTER
#define FKJIT_DEVICE_POINTER
typedef unsigned long long CUdeviceptr;
#endif
#endif
#ifndef FKJIT_ALIGNED
#ifdef __cplusplus
#define FKJIT_ALIGNED(bytes) alignas(bytes)
#else
#define FKJIT_ALIGNED(bytes) _Alignas(bytes)
#endif
#endif
"""


def write(spec: KernelSpec, params: Params, entry: Entry, folder: Path) -> Path:
    """The image, NAME.json and NAME.h in `folder`; the image's path. Raises OSError."""
    meta = entry.meta
    name = file_name(entry)
    image = folder / f"{name}.{'ptx' if meta['kind'] == 'ptx' else 'cubin'}"
    image.write_bytes(entry.image)
    found = manifest(spec, params, entry, image.name)
    (folder / f"{name}.json").write_text(json.dumps(found, indent=2) + "\n")
    (folder / f"{name}.h").write_text(header(found))
    return image


def file_name(entry: Entry) -> str:
    """Of a variant and its target, without a suffix."""
    meta = entry.meta
    return re.sub(r"[^\w.=-]+", "_", f"{meta['kernel']} {meta['label']} {meta['target']}")


def manifest(spec: KernelSpec, params: Params, entry: Entry, image: str) -> dict[str, Any]:
    """What a launch needs to know, as JSON can write it; sizes are bytes."""
    meta, block = entry.meta, spec.block(params)
    used = meta["resources"] or {}
    return {
        "image": image,
        "kernel": spec.id,
        "params": {n: _plain(v) for n, v in params.items()},
        "target": meta["target"],
        "kind": meta["kind"],
        "nvrtc": meta["nvrtc"],
        "entry": meta["entry"],
        "block": list(block),
        "threads": prod(block),
        "shared_dynamic": spec.shared_bytes(params),
        "shared_static": used.get("shared"),
        "registers": used.get("registers"),
        "cooperative": spec.cooperative,
        "pdl": spec.pdl,
        "arguments": [_argument(*one) for one in meta["arguments"]],
        "example": _example(spec, params),
    }


def _argument(name: str, code: str, const: bool) -> dict[str, Any]:
    kind = "pointer" if code == "P" else "value" if code in _C else "struct"
    if code == f"{TENSOR_MAP_BYTES}s":
        return {"name": name, "kind": "tensor_map", "bytes": TENSOR_MAP_BYTES, "alignment": 64}
    fields = [{"type": _C[c], "count": len([*run])} for c, run in groupby(code)]
    pointer = {"const": const} if kind == "pointer" else {}
    return {"name": name, "kind": kind, **pointer, "fields": fields}


def _example(spec: KernelSpec, params: Params) -> dict[str, Any] | None:
    """A small problem with its grid and arguments; None where the kernel names no problem."""
    cases = spec.verification
    problem = next(iter(cases.problems(params, "small")), None)
    if problem is None:
        return None
    arrays = {
        **cases.inputs(params, problem, np.random.default_rng(0)),
        **cases.outputs(params, problem),
    }
    given = spec.arguments(params, problem, arrays)
    return {
        "problem": {name: _plain(value) for name, value in problem.items()},
        "grid": list(map(int, spec.grid(params, problem))),
        "arguments": {name: _plain(value) for name, value in given.items()},
    }


def _plain(value: Any) -> Any:
    """As JSON has it: of an array "bf16[2, 8]"; of what JSON does not know, its text."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{list(value.shape)}"
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value if isinstance(value, int | float | str | bool | None) else str(value)


def header(found: dict[str, Any]) -> str:
    """The manifest as C, which C++ reads as well."""
    name = re.sub(r"\W+", "_", found["image"].rpartition(".")[0])
    arguments = found["arguments"]
    members = "\n".join("  " + _member(one) for one in arguments)
    addresses = "\n".join(
        f"  params[{at}] = &arguments->{one['name']};" for at, one in enumerate(arguments)
    )
    x, y, z = found["block"]
    defined = {
        "IMAGE": f'"{found["image"]}"',
        "ENTRY": f'"{found["entry"]}"',
        "BLOCK_X": x,
        "BLOCK_Y": y,
        "BLOCK_Z": z,
        "SHARED": found["shared_dynamic"],
        "ARGUMENTS": len(arguments),
    }
    lines = "\n".join(f"#define {name}_{word} {value}" for word, value in defined.items())
    return f"""\
/* {found["image"]}: made by fkjit. {_how(found)} */
#pragma once
{_SYSTEM}
{lines}

typedef struct {name}_arguments {{
{members}
}} {name}_arguments;

/* The kernelParams of cuLaunchKernel. */
static inline void {name}_params({name}_arguments* arguments, void** params) {{
{addresses}
}}
"""


def _how(found: dict[str, Any]) -> str:
    """How it is launched, for the comment on top."""
    parts = []
    if found["shared_dynamic"] > 48 << 10:
        parts.append(
            "Before the first launch: cuFuncSetAttribute(function,\n"
            "   CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, ..._SHARED)."
        )
    if found["cooperative"]:
        parts.append("Launch it with cuLaunchCooperativeKernel.")
    example = found["example"]
    if example is not None:
        problem = " ".join(f"{n}={v}" for n, v in example["problem"].items())
        grid = ", ".join(map(str, example["grid"]))
        parts.append(f"Grid ({grid}) is that of\n   {problem.replace('*/', '* /')}.")
    return "\n   ".join(parts)


def _member(one: dict[str, Any]) -> str:
    if one["kind"] == "tensor_map":
        return f"FKJIT_ALIGNED(64) uint8_t {one['name']}[{one['bytes']}]; /* CUtensorMap */"
    if one["kind"] == "struct":
        return f"struct {{ {_fields(one['fields'])} }} {one['name']};"
    note = " /* only read */" if one.get("const") else ""
    return f"{one['fields'][0]['type']} {one['name']};{note}"


def _fields(runs: list[dict[str, Any]]) -> str:
    """ "qqqii": `int64_t f0[3]; int32_t f1[2];`."""
    return " ".join(f"{run['type']} f{at}[{run['count']}];" for at, run in enumerate(runs))
