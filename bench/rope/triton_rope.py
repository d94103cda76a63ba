"""Rotary position embedding in Triton, the twin of kernels_cu/rope/fused.cu and table.cu.

A program turns TOKENS tokens of HEADS heads; q and k are two launches. Sines and cosines are out of
a table, or those of a fp64 product of position and frequency, reduced to a turn. Pairs are halves
of whole heads, of a power of two columns.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fkjit.ops.rope.frequencies import frequencies
from fkjit.ops.rope.kernels import dimensions
from fkjit.spec import Problem

from ..core.op import Arrays, Prepared, Refused


def _config(tokens: int, heads: int, warps: int) -> triton.Config:
    return triton.Config({"TOKENS": tokens, "HEADS": heads}, num_warps=warps)


_ALL = [_config(*sizes) for sizes in ((1, 8, 4), (2, 8, 4), (4, 8, 4), (4, 8, 8), (8, 4, 4))]
_INTERPRETED = [_config(2, 4, 4)]  # Triton's interpreter times nothing


@triton.jit
def angles(at, turning, head_dim: tl.constexpr, tabled: tl.constexpr):
    """(cosine, sine) [TOKENS, pairs] at these positions; `turning` as `_rope` takes it."""
    pair = tl.arange(0, head_dim // 2)
    if tabled:
        entry = turning + at.to(tl.int64)[:, None] * head_dim + pair[None, :]
        cosine = tl.load(entry)
        sine = tl.load(entry + head_dim // 2)
    else:
        turns = at.to(tl.float64)[:, None] * tl.load(turning + pair)[None, :]
        angle = ((turns - tl.floor(turns)) * 6.283185307179586).to(tl.float32)
        cosine, sine = tl.cos(angle), tl.sin(angle)
    return cosine, sine


@triton.autotune(
    configs=_INTERPRETED if triton.knobs.runtime.interpret else _ALL,
    key=["tokens", "heads", "head_dim"],
)
@triton.jit
def _rope(
    x,  # [batch, length, heads, head_dim], strides of all but the last dimension
    out,
    positions,  # [batch, length]
    turning,  # [pairs] fp64 turns a token, or [positions, head_dim] fp32 cosines and sines
    tokens,
    length,
    heads,
    x_batch,
    x_row,
    x_head,
    out_batch,
    out_row,
    out_head,
    position_batch,
    position_row,
    head_dim: tl.constexpr,
    tabled: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
):
    token = tl.cast(tl.program_id(0), tl.int64) * TOKENS + tl.arange(0, TOKENS)
    inside = token < tokens
    batch, row = token // length, token % length
    pair = tl.arange(0, head_dim // 2)
    at = tl.load(positions + batch * position_batch + row * position_row, mask=inside, other=0)
    cosine, sine = angles(at, turning, head_dim, tabled)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    mask = inside[:, None, None] & (head < heads)[None, :, None]
    cosine, sine = cosine[:, None, :], sine[:, None, :]
    source = (batch * x_batch + row * x_row)[:, None, None] + (head * x_head)[None, :, None]
    target = (batch * out_batch + row * out_row)[:, None, None] + (head * out_head)[None, :, None]
    half = head_dim // 2
    left = tl.load(x + source + pair[None, None, :], mask=mask).to(tl.float32)
    right = tl.load(x + source + half + pair[None, None, :], mask=mask).to(tl.float32)
    kind = out.dtype.element_ty
    turned = (left * cosine - right * sine).to(kind)
    tl.store(out + target + pair[None, None, :], turned, mask=mask)
    turned = (right * cosine + left * sine).to(kind)
    tl.store(out + target + half + pair[None, None, :], turned, mask=mask)


_AXES = {"bhsd": (0, 2, 1), "bshd": (0, 1, 2)}  # batch, row, head


def rope(
    x: torch.Tensor, out: torch.Tensor, positions: torch.Tensor, turning: torch.Tensor, layout: str
) -> torch.Tensor:
    """x turned into `out`, at positions [B, S].

    `turning`: fp64 turns a token of each pair, or a fp32 table as of `fkjit.rope_table`. Layouts
    "bhsd", "bshd", and "thd" with positions [1, T].
    """
    batch, heads, length = dimensions(layout, x.shape)
    seen = [y[None] if layout == "thd" else y for y in (x, out)]
    steps = [y.stride(axis) for y in seen for axis in _AXES["bshd" if layout == "thd" else layout]]
    tokens = batch * length

    def grid(tiles: dict[str, Any]) -> tuple[int, int]:
        return triton.cdiv(tokens, tiles["TOKENS"]), triton.cdiv(heads, tiles["HEADS"])

    if tokens and heads:
        _rope[grid](
            x, out, positions, turning, tokens, length, heads, *steps, *positions.stride(),
            head_dim=x.shape[-1], tabled=turning.dim() == 2,
        )  # fmt: skip
    return out


def _positions(problem: Problem, arrays: Arrays) -> torch.Tensor:
    """[B, S], or [1, T] of flat q."""
    if problem["positions"] == "starts":
        raise Refused("takes positions of rows")
    if problem["positions"] == "none":
        rows = torch.arange(problem["length"], device=arrays["q"].device) + problem["start"]
        return rows.expand(problem["batch"], -1)
    ids = arrays["positions"]
    return ids[None] if ids.dim() == 1 else ids.expand(problem["batch"], -1)


def turns(problem: Problem, device: torch.device) -> torch.Tensor:
    """[pairs] fp64 turns a token."""
    found = frequencies(problem["head_dim"], problem["theta"], problem["scaling"])
    return torch.from_numpy((found / 6.283185307179586).astype("f8")).to(device)


def prepare(problem: Problem, arrays: Arrays) -> Prepared:
    """The twin on a problem of the benchmark."""
    dim = problem["head_dim"]
    if (
        problem["inverse"]
        or problem["interleaved"]
        or problem["rotary_dim"] != dim
        or dim & (dim - 1)
    ):
        raise Refused("turns whole heads of a power of two, in halves, forwards")
    turning = arrays.get("table")
    turning = turns(problem, arrays["q"].device) if turning is None else turning
    positions, layout = _positions(problem, arrays), problem["layout"]
    given = [x for x in (arrays["q"], arrays.get("k")) if x is not None]
    if problem["inplace"]:
        raise Refused("turns into new arrays: tiles are tried on the same ones")
    pairs = [(x, torch.empty_like(x)) for x in given]

    def call() -> Any:
        return tuple(rope(x, out, positions, turning, layout) for x, out in pairs)

    return Prepared(call, lambda made: made[0])
