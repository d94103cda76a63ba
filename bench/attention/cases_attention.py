"""Attention forward: the cases, and how ours is called and checked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

import fkjit
from fkjit.arch import Arch
from fkjit.ops.attention import select
from fkjit.ops.attention.checks import check
from fkjit.ops.attention.decode.kernels import SPLIT
from fkjit.ops.attention.kernels_sm90 import COUNTERS
from fkjit.ops.attention.options import AttentionOptions
from fkjit.runtime import interop
from fkjit.runtime.device import multiprocessors
from fkjit.spec import KernelSpec, Params, Problem

from ..core.accuracy import LIMITS, Expected
from ..core.drawn import Drawn
from ..core.op import Arrays, Op, Prepared
from . import peers_fa4, peers_flashinfer, peers_torch, short_queries

TOKENS, WIDTH = 16_384, 2048  # of a batch; heads * head_dim
_ROWS = 64  # checked at the end of a head, and as many spread over the rest


def problem(
    batch: int, heads: int, seqlen: int, head_dim: int, causal: bool, dtype: str = "bf16",
    *, heads_kv: int | None = None, seqlen_q: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """One problem, in the words of the kernels' specs."""
    return {
        "dtype": dtype,
        "batch": batch,
        "heads_q": heads,
        "heads_kv": heads_kv or heads,
        "seqlen_q": seqlen_q or seqlen,
        "seqlen_k": seqlen,
        "head_dim": head_dim,
        "head_dim_v": head_dim,
        "softmax_scale": head_dim**-0.5,
        "causal": causal,
    }


def label(p: Problem) -> str:
    """ "bf16 D128 S4096 B4 H16 causal"; S1/4096 and H32/8 where queries and keys differ."""
    length = _pair(p["seqlen_q"], p["seqlen_k"])
    heads = _pair(p["heads_q"], p["heads_kv"])
    mask = "causal" if p["causal"] else "full"
    return f"{p['dtype']} D{p['head_dim']} S{length} B{p['batch']} H{heads} {mask}"


def _pair(first: int, second: int) -> str:
    return str(first) if first == second else f"{first}/{second}"


def _grid(
    batches: Sequence[int], seqlens: Sequence[int], dims: Sequence[int],
    dtypes: Sequence[str] = ("bf16",), masks: Sequence[bool] = (False, True),
) -> Iterator[dict[str, Any]]:  # fmt: skip
    for dtype in dtypes:
        for dim in dims:
            for causal in masks:
                for batch in batches:
                    for seqlen in seqlens:
                        yield problem(batch, WIDTH // dim, seqlen, dim, causal, dtype)


def _tokens(seqlens: Sequence[int], dim: int, dtype: str = "bf16") -> Iterator[dict[str, Any]]:
    """16k tokens in a batch."""
    for causal in (False, True):
        for seqlen in seqlens:
            yield problem(TOKENS // seqlen, WIDTH // dim, seqlen, dim, causal, dtype)


def _decode() -> Iterator[dict[str, Any]]:
    """One query a sequence against its keys, and the prefill of the same heads."""
    for batch, seqlen in ((1, 4096), (1, 32_768), (1, 131_072), (16, 4096), (64, 4096), (64, 8192)):
        yield problem(batch, 32, seqlen, 128, False, heads_kv=8, seqlen_q=1)
    for batch, seqlen in ((1, 4096), (16, 4096), (1, 32_768)):
        yield problem(batch, 32, seqlen, 128, True, heads_kv=8)


def _short_q() -> Iterator[dict[str, Any]]:
    """1 to 64 queries of a sequence, and many keys."""
    for batch, seqlen in ((1, 4096), (1, 32_768), (16, 4096)):
        for queries in (1, 4, 16, 64):
            yield problem(batch, 32, seqlen, 128, True, heads_kv=8, seqlen_q=queries)


_SPEC = (512, 1024, 2048, 4096)
SETS: dict[str, Sequence[Problem]] = {
    "default": list(_grid((4,), _SPEC, (64, 128))),
    "quick": [
        *_grid((4,), (1024, 4096), (64, 128), masks=(False,)),
        *_grid((4,), (4096,), (128,), masks=(True,)),
    ],
    "peers": [
        *_tokens((1024, 4096, 16_384), 64),
        *_tokens((512, 1024, 2048, 4096, 8192, 16_384), 128),
        *_tokens((4096, 16_384), 256),
    ],
    "peers-fp16": [
        *_tokens((1024, 4096, 16_384), 64, "fp16"),
        *_tokens((512, 1024, 4096, 16_384), 128, "fp16"),
        *_tokens((4096, 16_384), 256, "fp16"),
    ],
    "readme": [
        *_tokens((2048, 4096, 8192, 16_384), 64),
        *_tokens((2048, 4096, 8192, 16_384), 128),
    ],
    "small_batch": list(_grid((1, 2, 4), _SPEC, (128,))),
    "short_q": list(_short_q()),
    "drawn": Drawn(short_queries.drawn),
    "scaling": list(_grid((1, 2, 4), _SPEC, (128,), masks=(False,))),
    "grid": list(_grid((1, 4, 8), _SPEC, (64, 128, 256), ("bf16", "fp16", "fp32"))),
    "long": list(_grid((1,), (8192, 16_384), (64, 128, 256))),
    "decode": list(_decode()),
    "host": [problem(1, 8, 64, 64, False, "fp16")],  # so small that the GPU is never waited for
}


def inputs(problem: Problem, device: Any) -> Arrays:
    """Fresh N(0, 1) q [B, Hq, Sq, D], k and v [B, Hkv, Sk, D] on the GPU; the counters, at 0, that
    blocks of a kernel draw their work from when it is launched by name."""
    torch = device.torch
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[problem["dtype"]]
    place = getattr(device, "place", "cuda")

    def normal(heads: str, rows: str, dim: str) -> Any:
        shape = (problem["batch"], problem[heads], problem[rows], problem[dim])
        return torch.randn(shape, dtype=dtype, device=place)

    return {
        "q": normal("heads_q", "seqlen_q", "head_dim"),
        "k": normal("heads_kv", "seqlen_k", "head_dim"),
        "v": normal("heads_kv", "seqlen_k", "head_dim_v"),
        "counters": torch.zeros(COUNTERS, dtype=torch.int32, device=place),
    }


def expected(problem: Problem, arrays: Arrays) -> Expected:
    """Rows of the first and of the last head: those at the end, and some of all the others."""
    ends = [(0, 0), (problem["batch"] - 1, problem["heads_q"] - 1)]
    sq = problem["seqlen_q"]
    step = max(1, sq // _ROWS)
    rows = sorted({*range(0, sq, step), *range(max(0, sq - _ROWS), sq)})
    parts = [((b, h, rows), _rows(problem, arrays, b, h, rows)) for b, h in dict.fromkeys(ends)]
    return Expected(parts, LIMITS[problem["dtype"]])


def _rows(problem: Problem, arrays: Arrays, batch: int, head: int, rows: list[int]) -> Any:
    """Some rows of one head in float64, the textbook way."""
    torch = import_module("torch")
    kv = head // (problem["heads_q"] // problem["heads_kv"])
    q, k, v = arrays["q"][batch, head, rows], arrays["k"][batch, kv], arrays["v"][batch, kv]
    scores = q.double() @ k.double().T * problem["softmax_scale"]
    if problem["causal"]:
        last = torch.tensor(rows, device=q.device) + problem["seqlen_k"] - problem["seqlen_q"]
        keys = torch.arange(problem["seqlen_k"], device=q.device)
        scores = scores.masked_fill(keys > last[:, None], float("-inf"))
    return scores.softmax(-1) @ v.double()


def ours(problem: Problem, arrays: Arrays) -> Prepared:
    """`fkjit.attention` as anybody calls it."""
    q, k, v, causal = arrays["q"], arrays["k"], arrays["v"], problem["causal"]
    variant = None
    if q.is_cuda:
        from fkjit.runtime.device import device_target

        arch = device_target(q.get_device()).arch
        views = {n: interop.view(arrays[n], "attention", n) for n in ("q", "k", "v")}
        request = check(views, AttentionOptions(causal=causal))
        if request.delegate is None:
            launch = request.launches[0]  # behind it may come one that adds up parts
            variant = (launch.spec, launch.params)
        else:
            here = {**problem, "multiprocessors": multiprocessors(q.get_device())}
            variant = (SPLIT, select.decode_parameters(here, arch))
    return Prepared(lambda: fkjit.attention(q, k, v, causal=causal), variant=variant)


def choose(spec: KernelSpec, problem: Problem, arch: Arch) -> Params:
    """What `attention` would take of this kernel."""
    return select.parameters(spec, problem, None, True, arch)


OP = Op(
    name="attention",
    sets=SETS,
    label=label,
    inputs=inputs,
    expected=expected,
    ours=ours,
    choose=choose,
    peers=(*peers_torch.PEERS, *peers_fa4.PEERS, *peers_flashinfer.PEERS),
)
