"""cp.async: sizes, zero fill, groups and arrival on a barrier."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tests.golden.case import PREAMBLE, Case
from tests.golden.forms import random_result
from tests.golden.values import Random, random_bits

THREADS = 64


def _case(name: str, body: str, result: int = 4 * THREADS, arch: str = "compute_80") -> Case:
    """A block with x in global memory and `tile` (filled with 0xA5 bytes) in shared memory."""
    source = f"""{PREAMBLE}
K k(const u32* x, const u32* y, u32* result) {{
  __shared__ __align__(16) u32 tile[{result}];
  const int i = threadIdx.x;
  for (int j = i; j < {result}; j += {THREADS}) tile[j] = 0xA5A5A5A5u;
  __syncthreads();
{body}
  for (int j = i; j < {result}; j += {THREADS}) result[j] = tile[j];
}}
"""

    def arrays(rng: Random) -> dict[str, np.ndarray]:
        x = random_bits(rng, "u32", 16 * THREADS)
        sizes = rng.randint(0, 17, THREADS).astype(np.uint32)
        return {"x": x, "y": sizes, "result": random_result(rng, (result,), "u4")}

    return Case(name, source, arrays, {"result": "u32"}, arch, block=THREADS)


_END = '  asm volatile("cp.async.wait_all;" ::: "memory");\n  __syncthreads();'


def _copy(form: str, to: str, of: str, more: str = "") -> str:
    extra = f', "r"({more})' if more else ""
    operand = ", %2" if more else ""
    return (f'  asm volatile("cp.async.{form}{operand};" :: "r"(shared_address({to})), "l"({of})'
            f'{extra} : "memory");')  # fmt: skip


def _sizes() -> Iterator[Case]:
    for size in (4, 8, 16):
        words = size // 4
        to, of = f"&tile[i * {words}]", f"&x[({THREADS - 1} - i) * {words}]"
        for level in (".ca", ".cg") if size == 16 else (".ca",):
            form = f"{level[1:]}.shared.global [%0], [%1], {size}"
            yield _case(f"cp.async{level}.{size}", "\n".join([_copy(form, to, of), _END]))
            yield _case(f"cp.async{level}.{size}.fill",
                        "\n".join([_copy(form, to, of, f"y[i] % {size + 1}"), _END]))  # fmt: skip
            ignore = ('  asm volatile("{ .reg .pred p; setp.lt.u32 p, %2, 8; '
                      f'cp.async.{form}, p; }}" :: "r"(shared_address({to})), "l"({of}), '
                      '"r"(y[i]) : "memory");')  # fmt: skip
            yield _case(f"cp.async{level}.{size}.ignore", "\n".join([ignore, _END]))
    hint = "cg.shared.global.L2::128B [%0], [%1], 16"
    yield _case("cp.async.cg.L2", "\n".join([_copy(hint, "&tile[4 * i]", "&x[4 * i]"), _END]))


def _groups() -> Iterator[Case]:
    """Four groups; after each wait, what must have come is added to the sums."""
    copy = _copy("cg.shared.global [%0], [%1], 16", "&tile[(4 * g + 0) * 64 + 4 * i]",
                 "&x[(g * 64 + i) * 4]")  # fmt: skip
    lines = [
        "  u32 seen[3];",
        "  for (int g = 0; g < 3; ++g) {",
        copy.replace("4 * g + 0", "4 * g"),
    ]
    lines += ['    asm volatile("cp.async.commit_group;" ::: "memory");', "  }"]
    for g in range(3):
        lines.append(f'  asm volatile("cp.async.wait_group {2 - g};" ::: "memory");')
        lines.append(f"  seen[{g}] = tile[{g} * 256 + 4 * i] ^ tile[{g} * 256 + 4 * i + 3];")
    lines += [
        "  __syncthreads();",
        "  for (int g = 0; g < 3; ++g) tile[768 + g * 64 + i] = seen[g];",
    ]
    yield _case("cp.async.groups", "\n".join([*lines, "  __syncthreads();"]), 4 * 256)


def _barriers() -> Iterator[Case]:
    for noinc in ("", ".noinc"):
        count = THREADS if noinc else 1
        body = f"""  __shared__ u64 full;
  const u32 bar = shared_address(&full);
  if (i == 0) asm volatile("mbarrier.init.shared.b64 [%0], {count};" :: "r"(bar) : "memory");
  __syncthreads();
{_copy("ca.shared.global [%0], [%1], 8", "&tile[2 * i]", "&x[2 * i]")}
  asm volatile("cp.async.mbarrier.arrive{noinc}.shared.b64 [%0];" :: "r"(bar) : "memory");
  __syncthreads();
  if ({"false" if noinc else "i == 0"})
    asm volatile("{{ .reg .b64 t; mbarrier.arrive.shared.b64 t, [%0]; }}" :: "r"(bar) : "memory");
  u32 done = 0;
  while (!done)
    asm volatile("{{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], 0;"
                 " selp.u32 %0, 1, 0, p; }}" : "=r"(done) : "r"(bar) : "memory");
  __syncthreads();"""
        yield _case(f"cp.async.mbarrier.arrive{noinc}", body)


CASES = [*_sizes(), *_groups(), *_barriers()]
