"""Which variants the sweep compiles for which target and which of them the interpreter runs, and
one compile for both the cubin and the PTX.

NVRTC is most of what CI does, so by default a kernel is compiled in a sample of its variants, the
same on each run:

- on its home, Hopper where it is legal there, each value; of attention's kernels, which are near
  the limit of registers (no other has ever spilled), each tile with the widest head dimensions that
  it is legal for as well, which spill first;
- on one neighbour of each family, in turns from kernel to kernel: 8.0, 8.6 and 8.9 have the same
  instructions, and so have 10.0 and 12.0 of what we use. Of attention's kernels the widest variant
  on each; of the others one; and what values the home has not;
- of a kernel whose source another one has, registered before it, only what that one has not, and
  the widest at home.

Machine code is made of attention's kernels and of products: at home of the widest, of attention of
every third tile, and of those that are interpreted, but where these have guards between their
arrays in shared memory, which is another compile. Of any other kernel only of the widest of these
variants, at home and on one neighbour, in turns from kernel to kernel.

The interpreter runs the PTX of these very compiles, a quarter of the home's, of some a sixth.
`pytest --every-variant` leaves nothing out.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any
from unittest import mock

import numpy as np

import fkjit
from fkjit.arch import DEFAULT_ARCHS, arch, target
from fkjit.cache.lookup import Entry
from fkjit.jit import compile as compiler
from fkjit.jit.build import build
from fkjit.jit.compile import run_program
from fkjit.jit.nvrtc import Made, Program
from fkjit.numerics import differences
from fkjit.spec import KernelSpec, Params, Problem, registered

Variants = list[dict[str, Any]]
Cubin = tuple[str, dict[str, Any]]  # target and variant
Combinations = Callable[[Params], set[Any]]

TILE = {"block", "tile", "rows", "form"}  # these parameters

HOPPER = "sm_90a"
# Multiplies rows that no copy has filled and nobody stores: NaN with guards, else not written to.
ALWAYS_GUARDED = (
    "linear.wgmma", "linear_flagged.wgmma", "grouped_linear.wgmma",
    *(f"streamed_{name}.stream" for name in ("linear", "logits", "append")),
)  # fmt: skip
# Whose variants take seconds each to interpret or to compile, and which have tests of their own: of
# these a sixth of the home's is interpreted, one at the least.
DEAR = (
    "attention.flash_sm90", "attention_backward.flash_sm90", "attention_backward.flash_wide_sm90",
    "quantized_attention.flash_sm90", "linear.wgmma", "linear_flagged.wgmma",
    "quantized_linear.wgmma", "grouped_linear.wgmma", "grouped_linear.fp8_wgmma",
    "grouped_linear.fp8_wgmma_blocks",
    "grouped_linear.ragged_wgmma", "streamed_append.stream", "decode_step.whole",
)  # fmt: skip
AMPERE, BLACKWELL = ("sm_80", "sm_86", "sm_89"), ("sm_100a", "sm_120a")
FAMILIES = (("sm_75",), AMPERE, (HOPPER,), BLACKWELL)
# The PTX that is interpreted, and the cubins that are made of the same.
SOURCES = {"compute_75": ("sm_75",), "compute_80": AMPERE, "compute_90a": (HOPPER,)}


def heavy(spec: KernelSpec) -> bool:
    """Attention's kernels: whatever may spill, and has arrays in dynamic shared memory."""
    return spec.op.startswith(("attention", "decode"))


def near_the_limit(spec: KernelSpec) -> bool:
    """Whether it has so many registers in use that any variant may spill: products as well."""
    return heavy(spec) or spec.op in ("linear", "grouped_linear")


@cache
def whole(spec: KernelSpec) -> dict[str, Variants]:
    """By target, every legal variant."""
    return {name: list(spec.variants(arch(name))) for name in DEFAULT_ARCHS}


def everywhere(spec: KernelSpec) -> Variants:
    """Whatever is legal for a target at all."""
    return [p for p in spec.variants() if any(p in variants for variants in whole(spec).values())]


@cache
def plan(spec: KernelSpec) -> dict[str, Variants]:
    """By target, what is compiled for it by default: a variant at the least of each family."""
    legal, home, neighbours = whole(spec), home_of(spec), neighbours_of(spec)
    widest = {name: sorted(legal[name], key=size)[-1] for name in (home, *neighbours)}
    each = combinations(spec)
    elsewhere = set().union(*(values(p) for elder in elders(spec) for p in everywhere(elder)))
    found: dict[str, Variants] = {name: [] for name in DEFAULT_ARCHS}
    left = sample(legal[home], lambda params: each(params) - each(widest[home]) - elsewhere)
    found[home] = [widest[home], *left]
    if heavy(spec):
        found.update({name: [widest[name]] for name in neighbours})
    seen = set().union(*(values(params) for chosen in found.values() for params in chosen))
    seen |= elsewhere
    abroad = [p for p in everywhere(spec) if any(p in legal[name] for name in neighbours)]
    for params in sample(abroad, lambda params: values(params) - seen, found[home]):
        names = [name for name in neighbours if params in legal[name]]
        found[min(names, key=lambda name: len(found[name]))].append(params)
    for name in neighbours:
        found[name] = found[name] or [widest[name]]
    return found


@cache
def elders(spec: KernelSpec) -> list[KernelSpec]:
    """Of the same source, registered before."""
    known = registered()
    return [other for other in known[: known.index(spec)] if other.source == spec.source]


def to_assemble(spec: KernelSpec) -> dict[str, Variants]:
    """By target, what becomes machine code by default: the others only PTX, for the interpreter."""
    chosen = plan(spec)
    if not near_the_limit(spec):
        neighbours = neighbours_of(spec)
        turn = registered().index(spec) % max(len(neighbours), 1)
        made = {home_of(spec), *neighbours[turn : turn + 1]}
        return {
            name: sorted(chosen[name], key=size)[-1:] if name in made else [] for name in chosen
        }
    few = [params for params in interpreted(spec) if params not in guarded(spec)]
    made = [p for p in chosen[home_of(spec)] if p in few or p in widest_of_tiles(spec)[::3]]
    return {**chosen, home_of(spec): made}


def widest_first(variants: Variants) -> Variants:
    """Those that take the most registers before the others."""
    return sorted(variants, key=size)[::-1]


def guarded(spec: KernelSpec) -> Variants:
    """The home's variants that have guards between their arrays in shared memory."""
    if spec.shared_layout is None:
        return []
    chosen = plan(spec)[home_of(spec)]
    if spec.id in ALWAYS_GUARDED:
        return chosen
    return spare(spec) or chosen[-1:]


@cache
def spare(spec: KernelSpec) -> Variants:
    """Up to a third of the home's variants: not the widest, of attention's kernels none of any
    tile, because that spills first."""
    if spec.shared_layout is None:
        return []
    chosen = plan(spec)[home_of(spec)]
    others = [params for params in chosen if params not in widest_of_tiles(spec)]
    return others[: -(-len(chosen) // 3)]


def widest_of_tiles(spec: KernelSpec) -> Variants:
    """Of the home's variants the widest, of attention's kernels that of each tile, widest first."""
    widest: dict[Any, dict[str, Any]] = {}
    for params in sorted(plan(spec)[home_of(spec)], key=size, reverse=True):
        widest.setdefault(tile(params) if heavy(spec) else None, params)
    return list(widest.values())


def neighbours_of(spec: KernelSpec) -> list[str]:
    """A target of each family but the home's and elders', where any is legal: another one of each
    kernel."""
    turn, legal, home = registered().index(spec), whole(spec), home_of(spec)
    new = [family for family in FAMILIES if not any(runs_on(e, family) for e in elders(spec))]
    families = [[name for name in family if legal[name]] for family in new]
    return [names[turn % len(names)] for names in families if names and home not in names]


def runs_on(spec: KernelSpec, family: Sequence[str]) -> bool:
    """Whether any variant is legal for any of these targets."""
    return any(whole(spec)[name] for name in family)


def home_of(spec: KernelSpec) -> str:
    """Hopper, or where most of the kernel's variants are legal."""
    legal = whole(spec)
    return HOPPER if legal[HOPPER] else max(legal, key=lambda name: len(legal[name]))


def combinations(spec: KernelSpec) -> Combinations:
    """What each of is compiled at home."""
    if not heavy(spec):
        return values
    widest: dict[Any, Params] = {}
    for params in sorted(whole(spec)[home_of(spec)], key=size):
        widest[tile(params)] = params

    def each(params: Params) -> set[Any]:
        most = size(params) == size(widest[tile(params)])
        return values(params) | ({("widest", tile(params))} if most else set())

    return each


def sample(variants: Variants, combinations: Combinations, last: Sequence[Params] = ()) -> Variants:
    """A few in which each combination of values stands that stands in any: of some draws the
    shortest, of small tiles; what is in `last` only where nothing else will do."""
    draws = []
    for seed in range(8):
        drawn = random.Random(seed).sample(variants, len(variants))
        drawn.sort(key=lambda params: params in last)
        draws.append(_cover([(params, combinations(params)) for params in drawn]))
    return min(draws, key=lambda draw: (len(draw), sum(map(size, draw))))


def _cover(left: list[tuple[dict[str, Any], set[Any]]]) -> Variants:
    """Next is always the one with the most new combinations."""
    found: Variants = []
    while left := [one for one in left if one[1]]:
        params, new = max(left, key=lambda one: len(one[1]))
        found.append(params)
        left = [(other, rest - new) for other, rest in left]
    return found


def values(params: Params) -> set[Any]:
    """Of a variant, each value."""
    return set(params.items())


def tile(params: Params) -> frozenset[Any]:
    """Of a variant, the values that say which tiles it computes and what it does with them."""
    return frozenset(item for item in params.items() if item[0] in TILE)


def size(params: Params) -> int:
    """A measure of the registers that a variant takes: its tile, head dimensions and the like."""
    values = (value if isinstance(value, tuple) else (value,) for value in params.values())
    numbers = (number for value in values for number in value if type(number) is int)
    return math.prod(max(number, 1) for number in numbers)


def to_interpret(spec: KernelSpec, name: str, every: bool = False) -> list[Cubin]:
    """(target, variant) of each cubin whose PTX is for the interpreter's target `name`."""
    chosen = whole(spec) if every else plan(spec)
    left_out = [] if every else [p for p in chosen[home_of(spec)] if p not in interpreted(spec)]
    return [
        (real, params)
        for real in SOURCES[name]
        for params in chosen[real]
        if real != home_of(spec) or params not in left_out
    ]


@cache
def interpreted(spec: KernelSpec) -> Variants:
    """Of the home's variants a quarter, one at the least (of DEAR kernels a sixth): of those with
    guards, if there are as many, and of those with the most values that are new."""
    chosen, found = plan(spec)[home_of(spec)], []
    share, least = (6, 1) if spec.id in DEAR else (4, 1)
    most = min(max(-(-len(chosen) // share), least), len(chosen))
    for variants in (guarded(spec), chosen):
        while len(found) < most and (left := [p for p in variants if p not in found]):
            known = set().union(*map(values, found))
            found.append(max(left, key=lambda params: len(values(params) - known)))
    return found


def in_turns(
    spec: KernelSpec, cubins: Sequence[Cubin], every: bool = False
) -> Iterator[tuple[Cubin, Problem, bool]]:
    """(cubin, problem, whether races are looked for): what the interpreter runs of these.

    By default each variant computes the first problem, which has ragged edges and several tiles,
    and those of the home are looked through for races; these share out the other problems, which
    are small, and look through them as well.
    """
    home = [cubin for cubin in cubins if cubin[0] == home_of(spec)]
    for cubin in cubins:
        first, *others = spec.verification.problems(cubin[1], "small")
        yield cubin, first, every or cubin in home
        share = others[home.index(cubin) :: len(home)] if cubin in home else []
        for problem in others if every else share:
            yield cubin, problem, True


def has_guards(spec: KernelSpec, name: str, params: Params) -> bool:
    """Whether this variant for the target `name` is interpreted with guards by default."""
    return name == home_of(spec) and params in guarded(spec)


def check_numbers(
    spec: KernelSpec, params: Params, problem: Problem, to_device: Any, to_host: Any
) -> None:
    """One launch against the reference."""
    rng = np.random.default_rng([len(spec.id), problem.get("seqlen_q", 0)])
    inputs = spec.verification.inputs(params, problem, rng)
    arrays = {**inputs, **spec.verification.outputs(params, problem)}
    moved = {name: to_device(array) for name, array in arrays.items()}
    fkjit.launch(spec, params, problem, moved)
    assert spec.verification.reference is not None
    expected = spec.verification.reference(problem, inputs)
    found = {name: to_host(moved[name]) for name in expected}
    for worst in differences(spec, params, expected, found):
        assert worst.ratio <= 1, (params, problem, str(worst))


def cut(variants: list[Any], most: int) -> list[list[Any]]:
    """Runs of at most so many: one test each."""
    return [variants[first : first + most] for first in range(0, len(variants), most)]


def build_both(spec: KernelSpec, params: Params, name: str) -> Entry:
    """The cubin; its PTX goes into the cache as what NVRTC makes for `virtual(name)`."""
    kept: list[Made] = []

    def keep(program: Program, *others: Any) -> Made:
        kept.append(run_program(program._replace(images=("cubin", "ptx")), *others))
        return kept[0]

    with mock.patch.object(compiler, "run_program", keep):
        entry = build(spec, params, target(name))
    if kept and name not in BLACKWELL:
        with mock.patch.object(compiler, "run_program", lambda *_: kept[0]._replace(log="")):
            build(spec, params, target(virtual(name)))
    return entry


def virtual(name: str) -> str:
    """The target of the PTX: sm_90a -> compute_90a."""
    return "compute_" + name.rpartition("_")[2]
