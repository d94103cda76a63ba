"""Decoding: a new token of each sequence against all of its keys, in pages and in one piece."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import fkjit
from fkjit.arch import Arch
from fkjit.ops.attention.decode.cases import problem_of
from fkjit.ops.attention.decode.grid import on_grid
from fkjit.ops.attention.decode.kernels import SPLIT, select
from fkjit.ops.kv import cases as kv
from fkjit.runtime.device import multiprocessors
from fkjit.spec import KernelSpec, Params, Problem

from ..core.accuracy import LIMITS, Expected
from ..core.kernels import arch_of, launcher
from ..core.op import Arrays, Op, Prepared
from ..kv.cases_kv_append import DTYPES
from .peers_decode import PEERS

# Batch and keys of each sequence; 32 query heads, 8 KV heads, D128.
_SIZES = ((1, 4096), (1, 32_768), (1, 131_072), (16, 4096), (64, 4096), (64, 8192))
_PAGES = ((0, "hnd"), (16, "nhd"), (256, "nhd"))


def problem(
    batch: int, keys: int, page_size: int = 16, layout: str = "nhd", *, tokens: int = 1,
    storage: str = "same", dtype: str = "bf16", heads: tuple[int, int] = (32, 8), dim: int = 128,
) -> dict[str, Any]:  # fmt: skip
    """Sequences of one length, in the words of the kernel's spec."""
    params = {"dtype": dtype, "storage": storage}
    made = problem_of(
        params, [keys] * batch, heads_q=heads[0], heads_kv=heads[1], tokens=tokens, dim=dim,
        page_size=page_size, layout=layout, causal=tokens > 1,
    )  # fmt: skip
    return {**made, "num_pages": batch * max(made["table_width"], 1)}


def label(p: Problem) -> str:
    """ "bf16 B64 S8192 H32/8 D128 p16 nhd", "… x4 fp8" for four new tokens, codes."""
    shape = f"B{p['batch']} S{p['longest']} H{p['heads_q']}/{p['heads_kv']} D{p['head_dim']}"
    pages = f"p{p['page_size']} {p['layout']}" if p["page_size"] else "one piece"
    tokens = f" x{p['seqlen_q']}" if p["seqlen_q"] > 1 else ""
    kept = "" if p["storage"] == "same" else f" {p['storage']}"
    return f"{p['dtype']} {shape} {pages}{tokens}{kept}"


def _table() -> Iterator[dict[str, Any]]:
    for size in _SIZES:
        for pages in _PAGES:
            yield problem(*size, *pages)


SETS: dict[str, list[dict[str, Any]]] = {
    "default": list(_table()),
    "quick": [problem(1, 4096), problem(64, 4096), problem(64, 4096, 0, "hnd")],
    "kept": [problem(*size, storage=kept) for kept in ("fp8", "int8") for size in _SIZES],
    "tokens": [problem(*size, tokens=n) for n in (2, 4, 8, 16) for size in _SIZES[::2]],
    "layouts": [problem(*size, page, la) for la in kv.LAYOUTS for page in (1, 16, 256)
                for size in (_SIZES[1], _SIZES[4])],
}  # fmt: skip


def inputs(problem: Problem, device: Any) -> Arrays:
    """Fresh N(0, 1) q, k and v, or codes; pages in an order drawn anew, as a server leaves them."""
    torch, place = device.torch, getattr(device, "place", "cuda")
    dtype = getattr(torch, DTYPES[problem["dtype"]])
    heads, dim, batch = problem["heads_kv"], problem["head_dim"], problem["batch"]
    size = problem["page_size"] or problem["longest"]
    shape = kv.page_shape(problem["layout"], problem["num_pages"], size, heads, dim)

    def kept() -> Any:
        if problem["storage"] == "same":
            return torch.randn(shape, device=place, dtype=dtype)
        codes = torch.randint(0, 100, shape, device=place, dtype=torch.int8)
        codes -= 128 * torch.randint(0, 2, shape, device=place, dtype=torch.int8)  # never NaN
        return codes.view(getattr(torch, kv.CODES[problem["storage"]]))

    rows = (batch, problem["heads_q"], problem["seqlen_q"], dim)
    made = {"q": torch.randn(rows, device=place, dtype=dtype), "k": kept(), "v": kept()}
    made["seq_lens"] = torch.tensor(problem["lengths"], dtype=torch.int32, device=place)
    if problem["page_size"]:
        order = torch.randperm(problem["num_pages"], device=place).int()
        made["page_table"] = order.view(batch, -1)
    if problem["storage"] != "same":
        scale = torch.full((heads,), 3 / kv.GREATEST[problem["storage"]], device=place)
        made |= {"k_scale": scale, "v_scale": scale.clone()}
    return made


def expected(problem: Problem, arrays: Arrays) -> Expected:
    """The first and the last head of the first and of the last sequence, in float64."""
    ends = [(0, 0), (problem["batch"] - 1, problem["heads_q"] - 1)]
    parts = [((b, h), _rows(problem, arrays, b, h)) for b, h in dict.fromkeys(ends)]
    return Expected(parts, LIMITS[problem["dtype"]])


def _rows(problem: Problem, arrays: Arrays, b: int, head: int) -> Any:
    """[tokens, D] of one head, the textbook way."""
    torch, keys, tokens = import_module("torch"), problem["lengths"][b], problem["seqlen_q"]
    k, v = (keys_of(problem, arrays, side, b, head) for side in "kv")
    scores = arrays["q"][b, head].double() @ k.T * problem["softmax_scale"]
    if problem["causal"]:
        last = torch.arange(keys - tokens, keys, device=scores.device)
        scores.masked_fill_(torch.arange(keys, device=scores.device) > last[:, None], float("-inf"))
    return scores.softmax(-1) @ v


def keys_of(problem: Problem, arrays: Arrays, side: str, b: int, head: int) -> Any:
    """[keys, D] that one query head of one sequence sees of k or v, in float64."""
    torch = import_module("torch")
    kv_head = head // (problem["heads_q"] // problem["heads_kv"])
    pages = arrays["page_table"][b].long() if problem["page_size"] else slice(b, b + 1)
    at = (
        (slice(None), kv_head)
        if problem["layout"] == "hnd"
        else (slice(None), slice(None), kv_head)
    )
    x = arrays[side][pages][at].flatten(0, 1)[: problem["lengths"][b]]
    if problem["storage"] == "fp8":
        x = x.view(torch.float8_e4m3fn).float()
    scale = arrays[f"{side}_scale"][kv_head].double() if problem["storage"] != "same" else 1.0
    return x.double() * scale


def choose(spec: KernelSpec, problem: Problem, arch: Arch) -> Params:
    """What the public calls take."""
    return select(problem, arch)[1]


def launch(
    spec: KernelSpec, params: Params, problem: Problem, arrays: Arrays, device: Any
) -> Prepared:
    """On a grid that fills this GPU."""
    q = arrays["q"]
    if q.is_cuda:
        sms = multiprocessors(q.get_device())
        problem = on_grid(params, problem, sms, arch_of(q))
    return launcher(spec, params, problem, arrays, device)


def ours(problem: Problem, arrays: Arrays) -> Prepared:
    """The public calls, with lengths on the device."""
    q, k, v, lengths = (arrays[n] for n in ("q", "k", "v", "seq_lens"))
    options = {n: arrays[n] for n in ("k_scale", "v_scale") if n in arrays}
    options |= {"causal": problem["causal"], "softmax_scale": problem["softmax_scale"]}
    variant = (SPLIT, choose(SPLIT, problem, arch_of(q))) if q.is_cuda else None
    if problem["page_size"]:
        q, options["layout"] = q.transpose(1, 2).contiguous(), problem["layout"]
        table = arrays["page_table"]
        return Prepared(
            lambda: fkjit.paged_attention(q, (k, v), table, lengths, **options),
            lambda o: o.transpose(1, 2),
            variant=variant,
        )
    return Prepared(lambda: fkjit.attention_decode(q, k, v, lengths, **options), variant=variant)


OP = Op(
    name="attention_decode",
    sets=SETS,
    label=label,
    inputs=inputs,
    expected=expected,
    ours=ours,
    choose=choose,
    launch=launch,
    peers=PEERS,
)
