"""Everything that can be wrong with a call of `attention_decode` or `paged_attention`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from fkjit.arguments import one_of
from fkjit.errors import ArgumentTypeError, ParameterError
from fkjit.ops.attention.decode import grid
from fkjit.ops.attention.decode.kernels import kernel, select
from fkjit.ops.attention.decode.problem import LEAST_SPLIT, MAX_TOKENS, ROW_AXES
from fkjit.ops.attention.feature_checks import check_features
from fkjit.ops.attention.features import FEATURE_ARRAYS, SLOTS
from fkjit.ops.attention.page_checks import (
    check_list,
    check_scales,
    check_table,
    codes_of,
    page_size,
    storage_of,
)
from fkjit.ops.attention.shapes import (
    PAGE_AXES,
    Sizes,
    check_columns,
    check_dims,
    check_scale,
)
from fkjit.ops.op.checks import check_dtype, check_flag, check_output, itemsize
from fkjit.ops.op.op import Launch, Output, Request, arch_of
from fkjit.runtime.device import multiprocessors
from fkjit.runtime.interop import CPU, View

# What the kernel reads, and of score features what scores meet.
ARRAYS = ("q", "k", "v", "page_table", "seq_lens", "rows", "k_scale", "v_scale")
_FEATURES = (*FEATURE_ARRAYS, *SLOTS)

_FLOATS = ("bf16", "fp16")
_ONE_TOKEN = (0, 1, None)
CPU_SMS = 2  # where blocks are interpreted
_ROW_BYTES, _OUT_BYTES = 16, 8  # of a copy
_LIMIT = 2**31
_MAX_KEYS = 2**30

Views = Mapping[str, View | None]
Seen = Mapping[str, View]


class Options(NamedTuple):
    """What a call depends on beside its arrays, as the caller gave it; but a score_mod is one line,
    its arrays are named in the order of their slots, and its numbers are (name, kind, value)."""

    layout: Any
    causal: Any = True
    softmax_scale: Any = None
    split_size: Any = None
    return_lse: Any = False
    window: Any = None
    softcap: Any = None
    score_mod: str = ""
    score_names: tuple[str, ...] = ()
    score_scalars: tuple[tuple[str, str, float | int], ...] = ()


def check_contiguous(views: Views, options: Options) -> Request:
    """A call of attention_decode."""
    call, layout, seen = "attention_decode", options.layout, _present(views)
    one_of(call, "layout", layout, ROW_AXES)
    problem, axes = _queries(call, seen["q"], layout), ROW_AXES[layout]
    k, v = (_four(call, name, seen[name], layout) for name in ("k", "v"))
    if k[:3] != v[:3] or k[0] != problem["batch"]:
        raise ParameterError(
            f"{call}: q has shape {seen['q'].shape}, k {k}, v {v}; allowed: q [B, Hq, S, D], "
            f"k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv] (here in layout={layout!r})"
        )
    problem |= {
        "page_axes": axes, "page_size": 0, "num_pages": k[0], "table_rows": k[0],
        "table_width": 0, "longest": k[axes[2]], "heads_kv": k[axes[1]], "head_dim_v": v[3],
    }  # fmt: skip
    if "seq_lens" in seen:
        check_list(call, "seq_lens", seen["seq_lens"], problem["batch"])
    return _request(call, seen, problem, options)


def check_paged(views: Views, options: Options) -> Request:
    """A call of paged_attention."""
    call, layout, seen = "paged_attention", options.layout, _present(views)
    one_of(call, "layout", layout, PAGE_AXES)
    problem, axes = _queries(call, seen["q"], "bshd"), PAGE_AXES[layout]
    k, v = (_four(call, f"{name}_pages", seen[name], layout) for name in ("k", "v"))
    rows, width, step = check_table(call, seen["page_table"])
    size = page_size(call, k, v, axes[2])
    problem |= {
        "page_axes": axes, "page_size": size, "num_pages": k[0], "table_rows": rows,
        "table_width": step, "longest": width * size,
        "heads_kv": k[axes[1]], "head_dim_v": v[3],
    }  # fmt: skip
    check_list(call, "seq_lens", seen["seq_lens"], rows)
    if "rows" in seen:
        check_list(call, "rows", seen["rows"], problem["batch"])
    elif problem["batch"] != rows:
        raise ParameterError(
            f"{call}: q has {problem['batch']} sequences, page_table {rows} rows; "
            "pass rows: which row each sequence has"
        )
    return _request(call, seen, problem, options)


def _request(call: str, seen: Seen, problem: Sizes, options: Options) -> Request:
    """What both have in common."""
    q, out = seen["q"], seen.get("o")
    _heads(call, problem, seen["k"])
    problem["storage"] = storage_of(call, seen["k"], seen["v"], problem["dtype"])
    check_scales(call, seen, problem["storage"], problem["heads_kv"])
    problem["causal"] = check_flag(call, "causal", options.causal)
    problem["softmax_scale"] = check_scale(call, options.softmax_scale, problem["head_dim"])
    problem["split"] = _split(call, options.split_size)
    shape = (*q.shape[:-1], problem["head_dim_v"])
    check_output(call, out, shape, problem["dtype"], "out")
    check_aligned(call, seen)
    features = _features(call, seen, problem, options)
    made = {"o": Output(shape, problem["dtype"], out), "lse": None}
    if check_flag(call, "return_lse", options.return_lse):
        lse = (problem["batch"], problem["heads_q"], problem["seqlen_q"])
        made["lse"] = Output(lse[: len(shape) - 1], "fp32")
    inputs = {name: view for name, view in seen.items() if name != "o"}
    if 0 in shape:
        return Request(inputs, made, ())
    launch = _launch(call, q, problem, features)
    size, counters = grid.workspace(launch.params, launch.problem)
    return Request(inputs, made, (launch,), size, counters)


def _launch(call: str, q: View, problem: Sizes, features: str) -> Launch:
    """On a grid that fills q's GPU."""
    arch = arch_of(q)
    try:
        spec, params = select(problem, arch, features)
    except ParameterError as error:
        own = kernel(features).op
        raise ParameterError(str(error).replace(f"{own}:", f"{call}:", 1)) from None
    sms = CPU_SMS if q.device == CPU else multiprocessors(q.device)
    problem = grid.on_grid(params, problem, sms, arch)
    if grid.units(params, problem) >= _LIMIT or problem["longest"] > _MAX_KEYS:
        raise ParameterError(f"{call}: {problem['longest']} keys a sequence are too many; split q")
    return Launch(spec, params, problem)


def _features(call: str, seen: Seen, problem: Sizes, options: Options) -> str:
    """What scores meet besides, as text, "" for nothing; what the problem has of it is added."""
    without = options.window is options.softcap is None and not options.score_mod
    if without and seen.keys().isdisjoint(_FEATURES):
        return ""
    problem |= {"seqlen_k": problem["longest"], "causal": False}  # the window has it
    return check_features(call, seen, problem, options).text


# ------------------------------------------------------------------ one by one


def _present(views: Views) -> dict[str, View]:
    """The arrays that there are; fp8 as bytes, which every framework has."""
    seen = {name: view for name, view in views.items() if view is not None}
    for name in ("k", "v"):
        seen[name] = codes_of(seen[name])
    return seen


def _queries(call: str, q: View, layout: str) -> Sizes:
    """What q says of the problem; without the tokens' dimension it is one token."""
    check_dtype(call, "q", q, _FLOATS)
    if len(q.shape) not in (3, 4):
        tokens = ", ".join("BHSD"[i] for i in (*ROW_AXES[layout], 3))
        raise ParameterError(
            f"{call}: q has shape {tuple(q.shape)}; allowed: [B, H, D], one token a sequence, or "
            f"[{tokens}]"
        )
    axes = ROW_AXES[layout] if len(q.shape) == 4 else _ONE_TOKEN
    batch, heads = q.shape[axes[0]], q.shape[axes[1]]
    tokens = 1 if axes[2] is None else q.shape[axes[2]]
    if tokens > MAX_TOKENS:
        raise ParameterError(
            f"{call}: q has {tokens} tokens a sequence; allowed: up to {MAX_TOKENS} "
            "(fkjit.attention takes more)"
        )
    _columns(call, "q", q)
    return {
        "dtype": q.dtype, "axes": axes, "batch": batch, "heads_q": heads, "seqlen_q": tokens,
        "head_dim": q.shape[-1],
    }  # fmt: skip


def _four(call: str, name: str, view: View, layout: str) -> tuple[int, ...]:
    """Shape of keys or values."""
    if len(view.shape) != 4:
        raise ParameterError(
            f"{call}: {name} has shape {tuple(view.shape)}; allowed: 4 dimensions "
            f"(layout={layout!r})"
        )
    _columns(call, name, view)
    return tuple(view.shape)


def _columns(call: str, name: str, view: View) -> None:
    if view.strides[-1] != 1:
        check_columns(call, name, view, f"pass a contiguous copy of {name}")


def _heads(call: str, problem: Sizes, k: View) -> None:
    queries, keys = problem["heads_q"], problem["heads_kv"]
    if queries and (not keys or queries % keys):
        raise ParameterError(f"{call}: q has {queries} heads, not a multiple of k's {keys}")
    if k.shape[3] != problem["head_dim"]:
        raise ParameterError(f"{call}: q has head_dim {problem['head_dim']}, k {k.shape[3]}")
    check_dims(call, problem["head_dim"], problem["head_dim_v"])


def _split(call: str, split: Any) -> int:
    """Keys of a split; 0: as they come."""
    if split is None:
        return 0
    if isinstance(split, bool) or not isinstance(split, int):
        raise ArgumentTypeError(f"{call}: split_size={split!r} is not a whole number or None")
    if split < LEAST_SPLIT or split & (split - 1) or split >= _LIMIT:
        raise ParameterError(
            f"{call}: split_size={split}; allowed: {LEAST_SPLIT}, {2 * LEAST_SPLIT} …, or None"
        )
    return split


def check_aligned(call: str, seen: Seen) -> None:
    """Rows begin on 16-byte boundaries, those of the output on 8-byte ones; strides fit."""
    for name in ("q", "k", "v", "o"):
        view = seen.get(name)
        if view is None or 0 in view.shape:
            continue
        need, together, far = _ROW_BYTES if name != "o" else _OUT_BYTES, view.shape[-1], 0
        *steps, _ = view.strides
        for step, n in zip(steps, view.shape, strict=False):
            if n > 1:
                together |= step
                far |= abs(step)  # as large as a power of two if one of them is
        if (view.pointer | together * itemsize(view)) % need:
            raise ParameterError(
                f"{call}: {name} (shape {tuple(view.shape)}, strides {tuple(view.strides)}) has "
                f"rows that do not fill whole {need} bytes from such a boundary on; pad head_dim, "
                "or pass a contiguous copy (fkjit.attention takes any)"
            )
        if far >= _LIMIT and name in ("k", "v"):
            raise ParameterError(f"{call}: {name} has strides of 2^31 elements or more")
