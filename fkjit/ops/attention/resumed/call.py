"""Attention in several calls: each goes on, with other keys, where the ones before it stopped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from fkjit import tuning
from fkjit.arch import Arch
from fkjit.errors import ParameterError
from fkjit.ops.attention import select_sm90
from fkjit.ops.attention.kernels import FLASH
from fkjit.ops.attention.kernels_sm90 import COUNTERS, counters
from fkjit.ops.attention.kernels_sm90 import padded_dims as padded_sm90
from fkjit.ops.attention.problem import split_block
from fkjit.ops.attention.resumed.kernels import (
    HEAD_DIMS,
    RESUMED,
    RESUMED_SM90,
    TILES,
    TILES_SM90,
)
from fkjit.ops.attention.shapes import are_rows_aligned, check_scale, dense_sizes
from fkjit.ops.op.checks import check_dtype, check_same_dtype, check_shape
from fkjit.ops.op.op import Launch, Op, Request, arch_of
from fkjit.runtime.device import multiprocessors
from fkjit.runtime.interop import CPU, View, view
from fkjit.spec import KernelSpec, Problem

_CALL = "resume_attention"
_DTYPES = ("fp16", "bf16")
_CHUNK = 8  # columns of 16 bytes


class ResumeOptions(NamedTuple):
    """What a call says besides its arrays."""

    first: int
    end: int
    causal: bool = False
    softmax_scale: float | None = None


def resume_attention(
    q: Any, k: Any, v: Any, sums: Any, lse: Any, o: Any, *, done: tuple[int, int],
    causal: bool = False, softmax_scale: float | None = None,
) -> None:  # fmt: skip
    """Attention over keys that come in several calls, with o in fp32 from one to the next.

    Args:
        q: [B, Hq, Sq, D], k: [B, Hkv, Sk, D], v: [B, Hkv, Sk, Dv] of fp16 or bf16, as
            `fkjit.attention` takes them; rows on 16-byte boundaries.
        sums: fp32 [B, Hq, Sq, Dv], o so far; lse: fp32 [B, Hq, Sq], log-sum-exps so far. Both are
            written in place, and may be rows of longer arrays. An lse of -inf says that a row has
            seen no key: its sums are not looked at.
        o: [B, Hq, Sq, Dv] in q's dtype. Rows done[0] to done[1] - 1 see no more keys after this
            call: theirs are rounded and written to o in place of sums.
        causal, softmax_scale: as in `fkjit.attention`, of these queries and keys.

    Raises:
        ParameterError: shapes, rows, strides. ArgumentTypeError: dtypes. No gradient.
    """
    first, end = done
    _OP((q, k, v, sums, lse, o), (), (first, end, causal, softmax_scale))


def resumes(q: Any, k: Any, v: Any) -> bool:
    """Whether there is a kernel for tensors like these: some, of 16 bits, whose rows are whole
    chunks of 16 bytes."""
    if q.element_size() != 2 or not all(x.numel() for x in (q, k, v)):
        return False
    views, width = [view(x, _CALL, "q") for x in (q, k, v)], v.shape[-1]
    aligned = are_rows_aligned(views, q.shape[-1], width) and width % _CHUNK == 0
    fits = max(q.shape[-1], width) <= HEAD_DIMS[-1]
    return aligned and fits and arch_of(views[0]).features >= FLASH.features({})


def _check(views: Mapping[str, View | None], options: ResumeOptions) -> Request:
    seen = {name: view for name, view in views.items() if view is not None}
    rows = {name: seen[name] for name in "qkv"}
    dtype = check_same_dtype(_CALL, {**rows, "o": seen["o"]}, _DTYPES)
    problem = dense_sizes(_CALL, rows, "bhsd")
    shape = tuple(problem[n] for n in ("batch", "heads_q", "seqlen_q", "head_dim_v"))
    for name, wanted in (("sums", shape), ("o", shape), ("lse", shape[:3])):
        check_shape(_CALL, name, seen[name], wanted, "q's rows")
    for name in ("sums", "lse"):
        check_dtype(_CALL, name, seen[name], ("fp32",))
    problem |= {
        "dtype": dtype, "causal": bool(options.causal), "done": (options.first, options.end),
        "softmax_scale": check_scale(_CALL, options.softmax_scale, problem["head_dim"]),
    }  # fmt: skip
    _check_rows(seen, problem)
    if seen["q"].device != CPU:
        problem["multiprocessors"] = multiprocessors(seen["q"].device)
    if 0 in shape or not problem["seqlen_k"]:
        raise ParameterError(f"{_CALL}: {shape} with {problem['seqlen_k']} keys; allowed: some")
    spec, params = choose(seen, problem, arch_of(seen["q"]))
    drawn = counters(params, problem) if spec is RESUMED_SM90 else 0
    return Request(seen, {}, (Launch(spec, params, problem),), counters=min(drawn, COUNTERS))


def _check_rows(seen: Mapping[str, View], problem: Problem) -> None:
    """ParameterError for rows that no kernel reads: of 16 bytes, lse of heads evenly apart."""
    first, end = problem["done"]
    if not 0 <= first <= end <= problem["seqlen_q"]:
        raise ParameterError(
            f"{_CALL}: done=({first}, {end}); allowed: rows of the {problem['seqlen_q']} queries"
        )
    lse = seen["lse"]
    batch, head, row = lse.strides
    even = row == 1 and (lse.shape[0] == 1 or batch == head * lse.shape[1])
    aligned = are_rows_aligned([seen[n] for n in ("q", "k", "v", "o", "sums")])
    if not even or not aligned or any(seen[n].strides[-1] != 1 for n in ("o", "sums")):
        raise ParameterError(
            f"{_CALL}: allowed: rows of q, k, v, o and sums on 16-byte boundaries and contiguous, "
            "lse contiguous, or rows of an array that is"
        )


def choose(
    seen: Mapping[str, View], problem: Problem, arch: Arch
) -> tuple[KernelSpec, dict[str, Any]]:
    """The kernel of a problem and its parameters. ParameterError where this GPU has none."""
    few = problem["seqlen_q"] < select_sm90.LEAST_QUERIES
    if select_sm90.suits(arch) and not few and select_sm90.readable(problem, seen, None):
        return RESUMED_SM90, _sm90(problem, arch)
    if not arch.features >= FLASH.features({}):
        raise ParameterError(f"{_CALL}: {arch.name} has no kernel; allowed: sm_80 and newer")
    width = max(problem["head_dim"], problem["head_dim_v"])
    padded = next(d for d in HEAD_DIMS if d >= width)
    params = {"dtype": problem["dtype"], "head_dim": padded, "head_dim_v": padded, "aligned": True}
    legal = [b for b in TILES[padded] if RESUMED.why_not({**params, "block": b}, arch) is None]
    rows = [b for b in legal if split_block(b)[0] <= max(problem["seqlen_q"], 32)]
    params["block"] = (rows or legal)[0]
    return RESUMED, dict(RESUMED.canonical(tuning.tuned(RESUMED, params, problem, arch)))


def _sm90(problem: Problem, arch: Arch) -> dict[str, Any]:
    """The tile that attention takes, where it is compiled."""
    dims = padded_sm90(problem["head_dim"], problem["head_dim_v"])
    found = select_sm90.plain_tile(problem, *dims)
    params = {"dtype": problem["dtype"], "head_dim": dims[0], "head_dim_v": dims[1], **found}
    if found["block"] not in TILES_SM90[dims[0]]:
        block = TILES_SM90[dims[0]][-1]
        params |= select_sm90.plain_tile(problem, dims[0], dims[1], block)
    params = tuning.tuned(RESUMED_SM90, params, problem, arch)
    return dict(RESUMED_SM90.canonical(params))


_OP = Op(
    _CALL,
    inputs=("q", "k", "v", "sums", "lse", "o"),
    check=_check,
    options=ResumeOptions,
    written=("sums", "lse", "o"),
)
