"""Attention on codes, made before: int8 and fp8 beside attention in bf16, ours and peers'."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import fkjit
from fkjit.arch import Arch
from fkjit.ops.attention.kernels_sm90 import COUNTERS
from fkjit.ops.attention.problem import window
from fkjit.ops.attention.quantized import select
from fkjit.ops.attention.quantized.kernels import weights_of
from fkjit.ops.attention.quantized.quantize import ATTENTION_SCHEMES, AttentionCodes
from fkjit.runtime.interop import CPU, View, contiguous
from fkjit.spec import KernelSpec, Params, Problem

from ..core.accuracy import Expected
from ..core.op import Arrays, Candidate, Op, Prepared
from . import cases_attention, peers_torch

# Of ||out - exact|| / ||exact||, exact of the numbers before they were codes.
_LIMITS = {"int8": 2.5e-2, "int8_fp8": 6e-2, "fp8": 8e-2, "fp8_e5m2": 1e-1}
_NAMES = ("q", "k", "v", "q_scales", "k_scales", "v_scales", "shift")


def problem(
    scheme: str, seqlen: int, head_dim: int = 128, causal: bool = False,
    heads: tuple[int, int] = (64, 8), batch: int = 1,
) -> dict[str, Any]:  # fmt: skip
    """bf16 before they are codes: keys smooth, scales of blocks."""
    how = ATTENTION_SCHEMES[scheme]
    made = cases_attention.problem(batch, heads[0], seqlen, head_dim, causal, heads_kv=heads[1])
    return {**made, "axes": (0, 1, 2, 3), "window": window(made), "scheme": scheme,
            "code": how.code, "v_codes": how.v_codes, "values": how.values}  # fmt: skip


def label(p: Problem) -> str:
    """ "fp8 bf16 D128 S4096 B1 H64/8 causal"."""
    return f"{p['scheme']} {cases_attention.label(p)}"


_LENGTHS = (2048, 4096, 8192, 16_384)


def _grid(schemes: Sequence[str], dims: Sequence[int]) -> Iterator[dict[str, Any]]:
    for scheme in schemes:
        for dim in dims:
            for causal in (False, True):
                for seqlen in _LENGTHS:
                    yield problem(scheme, seqlen, dim, causal, (8192 // dim, 1024 // dim))


SETS: dict[str, Sequence[Problem]] = {
    "default": [*_grid(("fp8",), (128,)), *_grid(("int8",), (128,))],
    "quick": [problem("fp8", 4096), problem("int8", 4096)],
    "grid": list(_grid(tuple(ATTENTION_SCHEMES), (64, 128, 256))),
}


def inputs(problem: Problem, device: Any) -> Arrays:
    """Fresh N(0, 1); what the reference and 16-bit attention see, and the codes."""
    torch, made = device.torch, dict(cases_attention.inputs(problem, device))
    codes = fkjit.quantize_attention(made["q"], made["k"], made["v"], problem["scheme"])
    plain = {f"plain_{name}": made[name] for name in "qkv"}
    named = {name: _as_bytes(torch, getattr(codes, name)) for name in _NAMES}
    return {**plain, **named, "counters": made["counters"]}


def _as_bytes(torch: Any, codes: Any) -> Any:
    fp8 = codes is not None and codes.dtype == torch.float8_e4m3fn
    return codes.view(torch.uint8) if fp8 else codes


def _plain(arrays: Arrays) -> Arrays:
    return {name: arrays[f"plain_{name}"] for name in "qkv"}


def expected(problem: Problem, arrays: Arrays) -> Expected:
    """Attention of the numbers before they were codes."""
    made = cases_attention.expected(problem, _plain(arrays))
    return Expected(made.parts, _LIMITS[problem["scheme"]])


def ours(problem: Problem, arrays: Arrays) -> Prepared:
    """The public call on codes."""
    codes = AttentionCodes(*(arrays[name] for name in _NAMES), problem["scheme"], "bhsd", "bf16")
    causal, variant = problem["causal"], None
    if arrays["q"].is_cuda:
        from fkjit.runtime.device import device_target

        variant = chosen(problem, device_target(arrays["q"].get_device()).arch)
    return Prepared(lambda: fkjit.quantized_attention(codes, causal=causal), variant=variant)


def _v(problem: Problem) -> View:
    """A v as `inputs` makes it, for those who look at strides."""
    shape = tuple(problem[n] for n in ("batch", "heads_kv", "seqlen_k", "head_dim_v"))
    return View("abstract", None, 0, shape, contiguous(shape), problem["dtype"], CPU)


def chosen(problem: Problem, arch: Arch) -> tuple[KernelSpec, Params]:
    """What the public call launches."""
    return select.variant(dict(problem), _v(problem), None, None, arch)


def choose(spec: KernelSpec, problem: Problem, arch: Arch) -> Params:
    """What the public call takes of a kernel."""
    if spec is select.FLASH_CODES_SM90:
        return select.choose_sm90(problem, None, None, arch)
    wanted = {**problem, "weights": weights_of(problem["v_codes"], arch)}
    return select.kernels.choose(wanted, None, None, arch)


def launch(
    spec: KernelSpec, params: Params, problem: Problem, arrays: Arrays, device: Any
) -> Prepared:
    """A variant, into an output of its own."""
    o = device.torch.empty_like(arrays["plain_q"])
    counters = device.torch.zeros(COUNTERS, dtype=device.torch.int32, device=o.device)
    named = {**{name: arrays[name] for name in _NAMES}, "o": o, "counters": counters}

    def call() -> Any:
        fkjit.launch(spec, params, problem, named)
        return o

    return Prepared(call, variant=(spec, params))


def _bf16(candidate: Candidate) -> Candidate:
    """A peer of attention, on the numbers before they were codes."""

    def prepare(problem: Problem, arrays: Arrays) -> Prepared:
        return candidate.prepare(problem, _plain(arrays))

    return replace(candidate, variant=None, prepare=prepare)


OURS_BF16 = Candidate(
    name="fkjit-bf16", kind="peer", package=None,
    prepare=lambda problem, arrays: cases_attention.ours(problem, _plain(arrays)),
)  # fmt: skip

OP = Op(
    name="quantized_attention",
    sets=SETS,
    label=label,
    inputs=inputs,
    expected=expected,
    ours=ours,
    choose=choose,
    chosen=chosen,
    launch=launch,
    peers=(OURS_BF16, *map(_bf16, peers_torch.PEERS)),
)
