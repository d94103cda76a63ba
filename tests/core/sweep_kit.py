"""Which variants the sweep compiles for which target, and one compile for the cubin and the PTX.

NVRTC is most of what CI does, so a variant is compiled for targets that show something new: 8.0,
8.6 and 8.9 have the same instructions, and a kernel of fp16 is that of bf16 with other names of
instructions (all spills in data/spill_baseline.json are those of each twin, all but one of 8.x).
test_sweep compiles all for Hopper, beyond this plan; `pytest --every-variant` leaves nothing out.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest import mock

from fkjit.arch import DEFAULT_ARCHS, arch, target
from fkjit.cache.lookup import Entry
from fkjit.jit import compile as compiler
from fkjit.jit.build import build
from fkjit.spec import KernelSpec, Params

Variants = list[dict[str, Any]]

AMPERE, BLACKWELL = ("sm_80", "sm_86", "sm_89"), ("sm_100a", "sm_120a")
TWINS = ("fp16", "bf16")


def heavy(spec: KernelSpec) -> bool:
    """Attention's kernels: whatever may spill, and has arrays in dynamic shared memory."""
    return spec.op.startswith(("attention", "decode"))


@cache
def plan(spec: KernelSpec) -> dict[str, Variants]:
    """By target, what is compiled for it: a variant at the least, where one is legal."""
    found: dict[str, Variants] = {name: [] for name in DEFAULT_ARCHS}
    for names, params in _tiles(spec) if heavy(spec) else _simple(spec):
        found[min(names, key=lambda name: len(found[name]))].append(params)
    for name, variants in found.items():
        if not variants:
            variants += list(spec.variants(arch(name)))[:1]
    return found


def numbered(variants: Variants) -> Iterator[tuple[int, bool, dict[str, Any]]]:
    """(number, whether it has a twin, variant): twins, which differ in fp16 and bf16 alone, have an
    even and an odd number."""
    pairs: dict[Any, Variants] = defaultdict(list)
    for params in variants:
        dtype = params.get("dtype")
        rest = {**params, "dtype": "16 bits" if dtype in TWINS else dtype}
        pairs[tuple(rest.items())].append(params)
    for turn, pair in enumerate(pairs.values()):
        for place, params in enumerate(pair):
            yield 2 * turn + (turn + place) % 2, len(pair) == 2, params


def _tiles(spec: KernelSpec) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """One twin for one of 8.x and one of Blackwell, the other for Hopper; variants without a twin
    for one of 8.x and for Hopper or Blackwell; for 7.5 what is for no other, and half of the rest.

    With each the targets of which one is to have it.
    """
    for number, twin, params in numbered(everywhere(spec)):
        has = targets(spec, params)
        odd = bool(number % 2)
        groups = [
            ("sm_75",) if has == ["sm_75"] or not odd else (),
            AMPERE if odd or not twin else (),
            BLACKWELL if odd else ("sm_90a",),
        ]
        legal = [[name for name in group if name in has] for group in groups]
        if not any(legal):  # for Hopper or Blackwell alone
            legal.append([name for name in ("sm_90a", *BLACKWELL) if name in has])
        yield from ((names, params) for names in legal if names)


def targets(spec: KernelSpec, params: Params) -> list[str]:
    """Where a variant is legal."""
    return [name for name in DEFAULT_ARCHS if spec.why_not(params, arch(name)) is None]


def everywhere(spec: KernelSpec) -> Variants:
    """Whatever is legal for a target at all."""
    return [params for params in spec.variants() if targets(spec, params)]


def _simple(spec: KernelSpec) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """Half of the variants for 9.0, each of the others for one of its neighbours."""
    first, rest = halves(spec)
    yield from ((["sm_90a"], params) for params in first)
    for params in rest:
        yield [name for name in targets(spec, params) if name != "sm_90a"] or ["sm_90a"], params


def halves(spec: KernelSpec) -> tuple[Variants, Variants]:
    """A half in which each value of each parameter is, and the other one."""
    variants = list(spec.variants(arch("sm_90a")))
    seen: set[Any] = set()
    first, rest = [], []
    for params in random.Random(spec.id).sample(variants, len(variants)):
        (rest if seen.issuperset(params.items()) else first).append(params)
        seen.update(params.items())
    most = max(len(first), -(-len(variants) // 2))
    drawn = first + rest
    return drawn[:most], drawn[most:]


SOURCES = {"compute_75": ("sm_75",), "compute_80": AMPERE, "compute_90a": ("sm_90a",)}


@cache
def sources(spec: KernelSpec, name: str) -> dict[str, str]:
    """By label, the variants that the interpreter runs for PTX target `name` as the GPU would: from
    the PTX of the cubin for the target that is told, without bytes between shared arrays.

    Of attention's half, the other twin of each pair: those are compiled again with guards between.
    """
    odd = {spec.label(params) for number, _, params in numbered(everywhere(spec)) if number % 2}
    return {
        spec.label(params): real
        for real in SOURCES[name]
        for params in plan(spec)[real]
        if not heavy(spec) or spec.label(params) in odd
    }


class _Keeping:
    """NVRTC that keeps the PTX which ptxas makes a cubin of."""

    def __init__(self, nvrtc: Any) -> None:
        self._nvrtc, self.ptx = nvrtc, None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._nvrtc, name)

    def getCUBIN(self, program: Any) -> Any:
        self.ptx = self._nvrtc.getPTX(program)
        return self._nvrtc.getCUBIN(program)


def build_both(spec: KernelSpec, params: Params, name: str) -> Entry:
    """The cubin; its PTX goes into the cache as what NVRTC makes for `virtual(name)`."""
    keeping = _Keeping(compiler.nvrtc_module())
    with mock.patch.object(compiler, "nvrtc_module", lambda: keeping):
        entry = build(spec, params, target(name))
    if keeping.ptx is not None and name not in BLACKWELL:
        nothing: Any = lambda *_: ""  # noqa: E731
        replay = SimpleNamespace(
            createProgram=nothing, compileProgram=nothing, destroyProgram=nothing,
            getProgramLog=nothing, getPTX=lambda _: keeping.ptx,
        )  # fmt: skip
        with mock.patch.object(compiler, "nvrtc_module", lambda: replay):
            build(spec, params, target(virtual(name)))
    return entry


def virtual(name: str) -> str:
    """The target of the PTX: sm_90a -> compute_90a."""
    return "compute_" + name.rpartition("_")[2]
