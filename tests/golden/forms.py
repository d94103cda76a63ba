"""Cases of instructions that every thread executes for itself, from their inline assembly."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.golden.case import EXACT, PREAMBLE, Case, Tolerance
from tests.golden.values import STORED, Make, Random, pool

_C_TYPES = {"u1": ("u8", "h"), "u2": ("u16", "h"), "u4": ("u32", "r"), "u8": ("u64", "l")}
_ELEMENT = {"f16x2": "f16", "bf16x2": "bf16", "e4m3x2": "e4m3", "e5m2x2": "e5m2"}
_BITS = {**STORED, "e4m3x2": "u2", "e5m2x2": "u2"}
Input = str | tuple[str, Make]


def each(
    name: str,
    assembly: str | Sequence[str],
    out: str,
    *inputs: Input,
    arch: str = "compute_80",
    tolerance: Tolerance = EXACT,
) -> Case:
    """One thread for every element: %0 is the result of kind `out`, %1, %2 … the inputs.

    Several assembly texts are several rows of results. An input is a kind (its edges and random
    bits) or a kind and what makes its elements; all inputs of a case are equally long.
    """
    texts = [assembly] if isinstance(assembly, str) else list(assembly)
    kinds = [i if isinstance(i, str) else i[0] for i in inputs]
    makers = [pool(i) if isinstance(i, str) else i[1] for i in inputs]
    names = "abcdef"[: len(inputs)]

    def arrays(rng: Random) -> dict[str, np.ndarray]:
        made = {n: make(rng) for n, make in zip(names, makers, strict=True)}
        size = len(made["a"])
        return {**made, "result": random_result(rng, (len(texts), size), _BITS[out])}

    size = len(makers[0](np.random.RandomState(0)))
    return Case(
        name, _source(texts, kinds, _BITS[out], size), arrays, {"result": _ELEMENT.get(out, out)},
        arch, grid=-(-size // 64), block=64, tolerance=tolerance,
    )  # fmt: skip


def random_result(rng: Random, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """What stands in a result before the kernel writes it: never what it should become."""
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer(rng.bytes(count), dtype).reshape(shape).copy()


def _source(texts: Sequence[str], kinds: Sequence[str], out: str, size: int) -> str:
    letters = "abcdef"
    ctypes = [_C_TYPES[STORED[kind]] for kind in kinds]
    params = [f"const {c}* {n}" for n, (c, _) in zip(letters, ctypes, strict=False)]
    c_out, constraint = _C_TYPES[out]
    loads = [f"  const {c if c != 'u8' else 'u16'} {n}_i = {n}[i];"
             for n, (c, _) in zip(letters, ctypes, strict=False)]  # fmt: skip
    operands = ", ".join(f'"{r}"({n}_i)' for n, (_, r) in zip(letters, ctypes, strict=False))
    lines = [PREAMBLE, f"K k({', '.join(params)}, {c_out}* result) {{"]
    lines += ["  const int i = blockIdx.x * 64 + threadIdx.x;", f"  if (i >= {size}) return;"]
    lines += loads
    for row, text in enumerate(texts):
        lines.append(f"  {{ {'u16' if c_out == 'u8' else c_out} d;")
        lines.append(f'    asm volatile("{{ {text} }}" : "={constraint}"(d) : {operands});')
        lines.append(f"    result[{row * size} + i] = d; }}")
    return "\n".join([*lines, "}\n"])
