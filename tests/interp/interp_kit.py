"""What the interpreter's tests share: kernels around single PTX instructions, and NVRTC."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path

import numpy as np

from fkjit.interp import Arg, run
from fkjit.paths import templates_dir

_HEAD = ".version 8.0\n.target {target}\n.address_size 64\n"


def apply(
    instructions: str,
    *inputs: np.ndarray,
    out: object = np.uint32,
    target: str = "sm_80",
    block: int = 64,
    declare: str = "",
) -> np.ndarray:
    """Run PTX instructions once for every element of the inputs, one thread each.

    The inputs' elements are in %a, %b, %c, %e (registers of their width, .pred for bool); what
    stands in %d (of the width of `out`) afterwards is the result.
    """
    size = inputs[0].size
    result = np.zeros(size, out)
    arrays = [*inputs, result]
    names = ["a", "b", "c", "e"][: len(inputs)] + ["d"]
    types = [8 * array.itemsize for array in arrays]
    params = ", ".join(f".param .u64 p{i}" for i in range(len(arrays)))
    lines = [_HEAD.format(target=target), f".visible .entry k({params}, .param .u32 n)\n{{"]
    lines += [f".reg .b{bits} %{name};" for name, bits in zip(names, types, strict=True)
              if bits > 8]  # fmt: skip
    lines += [f".reg .b16 %{name};" for name, bits in zip(names, types, strict=True) if bits == 8]
    lines += [".reg .pred %p, %q, %end; .reg .b32 %i, %t, %t2, %u, %v, %w, %x; .reg .b64 %g, %o;"]
    lines += [".reg .b16 %h, %l;", declare]
    lines += ["mov.u32 %i, %ctaid.x; mov.u32 %t, %ntid.x; mov.u32 %u, %tid.x;"]
    lines += ["mad.lo.s32 %i, %i, %t, %u; ld.param.u32 %t, [n];"]
    lines += ["setp.ge.s32 %end, %i, %t; @%end bra END;"]
    for number, name in enumerate(names[:-1]):
        width = arrays[number].itemsize
        lines.append(f"ld.param.u64 %g, [p{number}]; mul.wide.s32 %o, %i, {width};")
        lines.append(f"add.s64 %g, %g, %o; ld.global.u{8 * width} %{name}, [%g];")
    lines.append(instructions)
    width = result.itemsize
    lines.append(f"ld.param.u64 %g, [p{len(inputs)}]; mul.wide.s32 %o, %i, {width};")
    lines.append(f"add.s64 %g, %g, %o; st.global.u{8 * width} [%g], %d;\nEND: ret;\n}}")
    arguments = [Arg(name, array, name == "d") for name, array in zip(names, arrays, strict=True)]
    arguments.append(Arg("n", np.int32(size)))
    run("\n".join(lines), "k", -(-size // block), block, arguments)
    return result


def bits(*values: int, width: int = 4) -> np.ndarray:
    """Unsigned integers of `width` bytes."""
    return np.array(values, f"u{width}")


def pairs(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Every value with every value."""
    a, b = np.meshgrid(values, values)
    return np.ascontiguousarray(a.ravel()), np.ascontiguousarray(b.ravel())


def header_dirs() -> list[str]:
    """The include folders of the CUDA runtime wheel."""
    spec = importlib.util.find_spec("nvidia")
    assert spec is not None
    roots = [Path(p) for p in spec.submodule_search_locations or ()]
    found = [h.parent for root in roots for h in root.glob("*/include/cuda_fp16.h")]
    return [str(path) for path in found]


@cache
def compile_ptx(source: str, arch: str = "compute_80", name: str = "kernels_cu/test/t.cu") -> str:
    """CUDA -> PTX with line numbers, as fkjit compiles (no GPU is needed); it may include
    fkjit's headers.
    """
    from cupy.cuda import nvrtc

    text = f'#line 1 "{name}"\n{source}'
    program = nvrtc.createProgram(text, name, [], [])
    options = [f"--gpu-architecture={arch}", "--std=c++17", "-default-device", "-lineinfo",
               "--device-int128"]  # fmt: skip
    include = [*header_dirs(), templates_dir()]
    try:
        nvrtc.compileProgram(program, options + [f"-I{path}" for path in include])
    except Exception as error:
        raise RuntimeError(nvrtc.getProgramLog(program)) from error
    out = nvrtc.getPTX(program)
    return (out.decode() if isinstance(out, bytes) else out).rstrip("\0")


def line_of(source: str, marker: str) -> int:
    """The line (from 1) of the only line of `source` that contains `marker`."""
    (number,) = [i for i, line in enumerate(source.split("\n"), 1) if marker in line]
    return number


# Floats worth testing: zeros, subnormals, limits, infinities, NaN, ties.
EDGES = np.array(
    [0.0, -0.0, 1.0, -1.0, 0.5, 1.5, 2.5, -2.5, 3.0, 65504.0, 65519.0, 65520.0, 1e38, -1e38, 3.4e38,
     1e-38, 1e-40, -1e-45, 6e-8, 5.9e-8, 2.98e-8, np.inf, -np.inf, np.nan, 1 + 2**-11,
     1 + 3 * 2**-11, 1 + 2**-8, 1 + 3 * 2**-8, 2147483647.0, 4294967296.0, -2147483648.0, 1e19],
    np.float32,
)  # fmt: skip
INTEGERS = np.array(
    [0, 1, 2, 3, 7, 31, 32, 33, 255, 256, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 0x12345678, 0x7FFFFFFF,
     0x80000000, 0x80000001, 0xDEADBEEF, 0xFFFFFFFE, 0xFFFFFFFF],
    np.uint32,
)  # fmt: skip


def same_floats(got: np.ndarray, expected: np.ndarray) -> None:
    """Equal bit for bit, except that every NaN equals every NaN."""
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(got), nan)
    unsigned = f"u{got.itemsize}"
    np.testing.assert_array_equal(got[~nan].view(unsigned), expected[~nan].view(unsigned))
