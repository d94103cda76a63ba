"""Warp-wide instructions: shuffles, votes, matches and reductions, of all lanes and of some."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tests.golden.case import PREAMBLE, Case
from tests.golden.forms import random_result
from tests.golden.values import Random, random_bits

MASKS = (0xFFFFFFFF, 0x0000FFFF, 0x80000001, 0x5A5A5A5A, 0x00000010)


def _case(name: str, body: str, rows: int = 1, arch: str = "compute_75", few: bool = False) -> Case:
    """A warp with a word `a` and an index `b` (0 to 39) a lane; `d` is a row of results.

    `few` draws `a` from four values, so that lanes agree.
    """

    def arrays(rng: Random) -> dict[str, np.ndarray]:
        words = random_bits(rng, "u32", 64)
        if few:
            words = words[rng.randint(0, 4, 64)]
        words[7] = words[8] = 0
        index = rng.randint(0, 40, 64).astype(np.uint32)
        return {"x": words, "y": index, "result": random_result(rng, (rows, 64), "u4")}

    source = f"""{PREAMBLE}
K k(const u32* x, const u32* y, u32* result) {{
  const u32 lane = threadIdx.x % 32, a = x[threadIdx.x], b = y[threadIdx.x];
  u32* d = result + threadIdx.x;
{body}
}}
"""
    return Case(name, source, arrays, {"result": "u32"}, arch, block=64)


def _members(mask: int, text: str, row: int) -> str:
    """The statement for the members of a mask alone; the others keep what they had."""
    return f"  if ({mask:#x}u >> lane & 1) {{ {text} d[{64 * row}] = r; }}"


def _for_masks(text: str) -> list[str]:
    """The statement for each mask, which stands in it as MASK, and each a row of results."""
    return [_members(m, text.replace("MASK", f"{m}u"), row) for row, m in enumerate(MASKS)]


def _shuffles() -> Iterator[Case]:
    for mode in ("idx", "up", "down", "bfly"):
        for clamp in (0x1F, 0x00, 0x181F, 0x1C1F, 0x1807, 0x1E1F):
            text = (
                'u32 r, s; asm volatile("{ .reg .pred p; '
                f'shfl.sync.{mode}.b32 %0|p, %2, %3, {clamp}, 0xffffffff; selp.u32 %1, 1, 0, p; }}"'
                ' : "=r"(r), "=r"(s) : "r"(a), "r"(b));'
                " r = s ? r : r ^ a ^ 0x55u;"  # a source out of range gives the lane's own value
            )
            yield _case(f"shfl.{mode}.{clamp:04x}", _members(MASKS[0], text, 0))
    inner = [("idx", "lane & 15", 0x0000FFFF), ("bfly", "1", 0x0000FFFF), ("up", "2", 0x00FFFFFF),
             ("down", "1", 0xFFFF0000), ("idx", "0", 0x80000001)]  # fmt: skip
    for mode, index, mask in inner:  # the source is always a member: else it is undefined
        text = (
            f'u32 r; asm volatile("shfl.sync.{mode}.b32 %0, %1, %2, {0 if mode == "up" else 31}, '
            f'%3;" : "=r"(r) : "r"(a), "r"({index}), "r"({mask}u));'
        )
        yield _case(f"shfl.{mode}.of.{mask:08x}", _members(mask, text, 0))


def _votes() -> Iterator[Case]:
    for mode in ("all", "any", "uni"):
        text = (
            'u32 r; asm volatile("{ .reg .pred p; setp.lt.u32 p, %1, 30; '
            f'vote.sync.{mode}.pred p, p, %2; selp.u32 %0, 1, 0, p; }}" '
            ': "=r"(r) : "r"(b), "r"(MASK));'
        )
        rows = _for_masks(text)
        yield _case(f"vote.{mode}", "\n".join(rows), len(rows))
    text = (
        'u32 r; asm volatile("{ .reg .pred p; setp.lt.u32 p, %1, 20; '
        'vote.sync.ballot.b32 %0, p, %2; }" : "=r"(r) : "r"(b), "r"(MASK));'
    )
    rows = _for_masks(text)
    yield _case("vote.ballot", "\n".join(rows), len(rows))
    yield _case("activemask.uniform", "  d[0] = __activemask();")


def _matches() -> Iterator[Case]:
    for bits in (32, 64):
        wide = f"u{bits} v = {'a' if bits == 32 else '(u64)a << 20 | b % 2'};"
        letter = "r" if bits == 32 else "l"
        some = (
            f'{wide} u32 r; asm volatile("match.any.sync.b{bits} %0, %1, %2;" '
            f': "=r"(r) : "{letter}"(v), "r"(MASK));'
        )
        rows = _for_masks(some)
        yield _case(f"match.any.b{bits}", "\n".join(rows), len(rows), few=True)
        every = (
            f'{wide} u32 r, s; v = lane & 16 ? v : 5; asm volatile("{{ .reg .pred p; '
            f'match.all.sync.b{bits} %0|p, %2, %3; selp.u32 %1, 256, 0, p; }}" '
            f': "=r"(r), "=r"(s) : "{letter}"(v), "r"(MASK)); r += s;'
        )
        rows = _for_masks(every)
        yield _case(f"match.all.b{bits}", "\n".join(rows), len(rows), few=True)


def _reductions() -> Iterator[Case]:
    forms = [f"{op}.{sign}32" for op in ("add", "min", "max") for sign in "su"]
    for form in forms + ["and.b32", "or.b32", "xor.b32"]:
        text = (
            f'u32 r; asm volatile("redux.sync.{form} %0, %1, %2;" : "=r"(r) : "r"(a), "r"(MASK));'
        )
        rows = _for_masks(text)
        yield _case(f"redux.{form}", "\n".join(rows), len(rows), "compute_80")


def _blocks() -> Iterator[Case]:
    for form in ("and.pred", "or.pred", "popc.u32"):
        if form == "popc.u32":
            what = "bar.red.popc.u32 %0, 0, p;"
        else:
            what = f".reg .pred q; bar.red.{form} q, 0, p; selp.u32 %0, 1, 0, q;"
        lines = [
            f'  {{ u32 r; asm volatile("{{ .reg .pred p; setp.lt.u32 p, %1, {limit}; {what} }}" '
            f': "=r"(r) : "r"(b)); d[{64 * row}] = r; }}'
            for row, limit in enumerate((0, 1, 20, 39, 40))
        ]
        yield _case(f"bar.red.{form}", "\n".join(lines), len(lines))
    for row, mask in enumerate(MASKS):
        text = (
            'u32 r, s; asm volatile("{ .reg .pred p; elect.sync %0|p, %2; '
            f'selp.u32 %1, 256, 0, p; }}" : "=r"(r), "=r"(s) : "r"({mask}u)); r += s;'
        )
        yield _case(f"elect.{row}", _members(mask, text, 0), arch="compute_90a")


CASES = [*_shuffles(), *_votes(), *_matches(), *_reductions(), *_blocks()]
