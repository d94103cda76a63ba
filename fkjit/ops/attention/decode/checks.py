"""Everything that can be wrong with a call of `attention_decode` or `paged_attention`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from fkjit import tuning
from fkjit.arch import Arch
from fkjit.errors import ArgumentTypeError, ParameterError
from fkjit.ops.attention.decode import grid as grid
from fkjit.ops.attention.decode.kernels import SPLIT
from fkjit.ops.kv.problem import CODES, LAYOUTS
from fkjit.ops.op.checks import check_dtype, check_flag, check_output, check_shape, itemsize
from fkjit.ops.op.op import Launch, Output, Request, arch_of
from fkjit.runtime.device import multiprocessors
from fkjit.runtime.interop import CPU, View
from fkjit.spec import KernelSpec, Params

FLOATS = ("bf16", "fp16")
ROW_LAYOUTS = {"bhsd": (0, 1, 2), "bshd": (0, 2, 1)}  # where batch, head, token stand
PAGE_AXES = {"nhd": (0, 2, 1), "hnd": (0, 1, 2)}  # where page, head, token stand
_ONE_TOKEN = (0, 1, None)
_CPU_SMS = 2  # where blocks are interpreted
_CHUNK = 16  # bytes of a copy
_MAX_SCALE = 2e38  # times log2(e) it is still an fp32
_LIMIT = 2**31
_MAX_KEYS = 2**30
_STORAGES = {"uint8": "fp8", "int8": "int8"}

Sizes = dict[str, Any]
# What a call with a form adds to its problem, and says of its kernel: the spec, and parameters.
Form = Callable[[str, Mapping[str, View], Sizes], tuple[KernelSpec, Params]]


def check_contiguous(
    views: Mapping[str, View | None], layout: str, *options: Any, form: Form | None = None
) -> Request:
    """A call of attention_decode."""
    call = "attention_decode"
    _one_of(call, "layout", layout, tuple(ROW_LAYOUTS))
    seen = {name: view for name, view in views.items() if view is not None}
    problem = _queries(call, seen["q"], layout)
    axes = ROW_LAYOUTS[layout]
    k, v = (_four(call, name, seen[name], layout) for name in ("k", "v"))
    heads_at, rows_at = axes[1], axes[2]
    if k[:3] != v[:3] or k[0] != problem["batch"]:
        raise ParameterError(
            f"{call}: q has shape {seen['q'].shape}, k {k}, v {v}; allowed: q [B, Hq, S, D], "
            f"k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv] (here in layout={layout!r})"
        )
    problem |= {
        **{"page_axes": axes, "page_size": 0, "num_pages": k[0], "table_rows": k[0]},
        **{"heads_kv": k[heads_at], "longest": k[rows_at], "table_width": 0},
        **{"head_dim_k": k[3], "head_dim_v": v[3]},
    }
    if "seq_lens" in seen:
        _list(call, "seq_lens", seen["seq_lens"], problem["batch"])
    return _request(call, views, problem, form, *options)


def check_paged(
    views: Mapping[str, View | None], layout: str, *options: Any, form: Form | None = None
) -> Request:
    """A call of paged_attention."""
    call = "paged_attention"
    _one_of(call, "layout", layout, LAYOUTS)
    seen = {name: view for name, view in views.items() if view is not None}
    problem = _queries(call, seen["q"], "bshd")
    k, v = (_four(call, f"{name}_pages", seen[name], layout) for name in ("k", "v"))
    _, heads_at, tokens_at = PAGE_AXES[layout]
    size = k[tokens_at]
    if k[:3] != v[:3] or size < 1 or size & (size - 1) or size > 256:
        raise ParameterError(
            f"{call}: k_pages has shape {k}, v_pages {v}; allowed: alike, [num_pages, page_size, "
            'heads, D] (layout="nhd") or [num_pages, heads, page_size, D] ("hnd"), page_size a '
            "power of two up to 256"
        )
    table = seen["page_table"]
    check_dtype(call, "page_table", table, ("int32",))
    if len(table.shape) != 2 or (table.shape[1] > 1 and table.strides[1] != 1):
        raise ParameterError(
            f"{call}: page_table has shape {tuple(table.shape)}, strides {tuple(table.strides)}; "
            "allowed: [sequences, pages], rows contiguous"
        )
    problem |= {
        **{"page_axes": PAGE_AXES[layout], "page_size": size, "num_pages": k[0]},
        **{"heads_kv": k[heads_at], "longest": table.shape[1] * size, "table_rows": table.shape[0]},
        **{"table_width": table.strides[0] if table.shape[0] > 1 else table.shape[1]},
        **{"head_dim_k": k[3], "head_dim_v": v[3]},
    }
    _list(call, "seq_lens", seen["seq_lens"], problem["table_rows"])
    if "rows" in seen:
        _list(call, "rows", seen["rows"], problem["batch"])
    elif problem["batch"] != problem["table_rows"]:
        raise ParameterError(
            f"{call}: q has {problem['batch']} sequences, page_table {problem['table_rows']} rows; "
            "pass rows: which row each sequence has"
        )
    return _request(call, views, problem, form, *options)


def _request(
    call: str, views: Mapping[str, View | None], problem: Sizes, form: Form | None,
    causal: Any, softmax_scale: Any, split: Any, return_lse: Any,
) -> Request:  # fmt: skip
    """What both have in common."""
    seen = {name: view for name, view in views.items() if view is not None}
    problem |= {
        "storage": _storage(call, seen, problem["dtype"]),
        "causal": check_flag(call, "causal", causal),
        "softmax_scale": _scale(call, softmax_scale, problem["head_dim"]),
        "split": _split(call, split),
    }
    _heads(call, problem)
    _scales(call, views, problem)
    shape = (*seen["q"].shape[:-1], problem["head_dim_v"])
    check_output(call, views["o"], shape, problem["dtype"], "out")
    _aligned(call, seen, problem)
    spec, more = (SPLIT, {}) if form is None else form(call, seen, problem)
    made = {"o": Output(shape, problem["dtype"], views["o"]), "lse": None}
    if check_flag(call, "return_lse", return_lse):
        lse = tuple(problem[n] for n in ("batch", "heads_q", "seqlen_q"))
        made["lse"] = Output(lse[: len(shape) - 1], "fp32")
    inputs = {name: view for name, view in views.items() if name not in made}
    if 0 in shape:
        return Request(inputs, made, ())
    launch = _launch(call, seen["q"], problem, spec, more)
    size, counters = grid.workspace(launch.params, launch.problem)
    return Request(inputs, made, (launch,), size, counters)


def _launch(call: str, q: View, problem: Sizes, spec: KernelSpec, more: Params) -> Launch:
    """On a grid that fills q's GPU."""
    arch = arch_of(q)
    try:
        params = parameters(problem, arch, spec, more)
    except ParameterError as error:
        raise ParameterError(str(error).replace(f"{spec.op}:", f"{call}:", 1)) from None
    sms = _CPU_SMS if q.device == CPU else multiprocessors(q.device)
    problem = grid.on_grid(params, problem, sms, arch)
    if grid.units(params, problem) >= _LIMIT or problem["longest"] > _MAX_KEYS:
        raise ParameterError(f"{call}: {problem['longest']} keys a sequence are too many; split q")
    return Launch(spec, params, problem)


def parameters(
    problem: Sizes, arch: Arch, spec: KernelSpec = SPLIT, more: Params | None = None
) -> Params:
    """The variant for a problem, with what is fixed besides. ParameterError where there is none on
    `arch`."""
    rows = problem["heads_q"] // problem["heads_kv"] * problem["seqlen_q"]
    dim = max(problem["head_dim"], problem["head_dim_v"])
    fixed = {
        **{"dtype": problem["dtype"], "storage": problem["storage"]},
        "head_dim": next(padded for padded in grid.HEAD_DIMS if dim <= padded),
    }
    fixed["rows"] = 16 if rows <= 16 or fixed["head_dim"] == 256 else 64
    fixed |= more or {}
    tiles = grid.tiles(fixed)
    fitting = [t for t in tiles if spec.why_not({**fixed, "tile": t}, arch) is None]
    params = {**fixed, "tile": (fitting or tiles)[0]}
    if not problem.get("split"):  # else results would depend on the batch: its size is in the class
        params = tuning.tuned(spec, params, problem, arch)
    spec.check(params, arch)
    return params


# ------------------------------------------------------------------ one by one


def _one_of(call: str, name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise ParameterError(f"{call}: {name}={value!r} is not one of {', '.join(allowed)}")


def _queries(call: str, q: View, layout: str) -> Sizes:
    """What q says of the problem; without the tokens' dimension it is one token."""
    check_dtype(call, "q", q, FLOATS)
    if len(q.shape) not in (3, 4):
        tokens = ", ".join("BHSD"[i] for i in (*ROW_LAYOUTS[layout], 3))
        raise ParameterError(
            f"{call}: q has shape {tuple(q.shape)}; allowed: [B, H, D], one token a sequence, or "
            f"[{tokens}]"
        )
    axes = ROW_LAYOUTS[layout] if len(q.shape) == 4 else _ONE_TOKEN
    batch, heads, tokens = (1 if at is None else q.shape[at] for at in axes)
    if tokens > grid.MAX_TOKENS:
        raise ParameterError(
            f"{call}: q has {tokens} tokens a sequence; allowed: up to {grid.MAX_TOKENS} "
            "(fkjit.attention takes more)"
        )
    _columns(call, "q", q)
    return {
        **{"dtype": q.dtype, "axes": axes, "batch": batch, "heads_q": heads},
        **{"seqlen_q": tokens, "head_dim": q.shape[-1]},
    }


def _four(call: str, name: str, view: View, layout: str) -> tuple[int, ...]:
    if len(view.shape) != 4:
        raise ParameterError(
            f"{call}: {name} has shape {tuple(view.shape)}; allowed: 4 dimensions "
            f"(layout={layout!r})"
        )
    _columns(call, name, view)
    return tuple(view.shape)


def _columns(call: str, name: str, view: View) -> None:
    if 0 not in view.shape and view.shape[-1] > 1 and view.strides[-1] != 1:
        raise ParameterError(
            f"{call}: {name} has stride {view.strides[-1]} in its last dimension; it must be "
            f"contiguous: pass a contiguous copy of {name}"
        )


def _list(call: str, name: str, view: View, size: int) -> None:
    check_dtype(call, name, view, ("int32",))
    check_shape(call, name, view, (size,), "one for each sequence, here")
    if size > 1 and view.strides[0] != 1:
        raise ParameterError(f"{call}: {name} must be contiguous")


def _storage(call: str, seen: Mapping[str, View], dtype: str) -> str:
    """What k and v are kept as."""
    kept = seen["k"].dtype
    check_dtype(call, "k", seen["k"], (dtype, *CODES.values()))
    check_dtype(call, "v", seen["v"], (kept,))
    return _STORAGES.get(kept, "same")


def _heads(call: str, problem: Sizes) -> None:
    queries, keys = problem["heads_q"], problem["heads_kv"]
    if queries and (not keys or queries % keys):
        raise ParameterError(f"{call}: q has {queries} heads, not a multiple of k's {keys}")
    if problem["head_dim_k"] != problem["head_dim"]:
        raise ParameterError(
            f"{call}: q has head_dim {problem['head_dim']}, k {problem['head_dim_k']}"
        )
    most = grid.HEAD_DIMS[-1]
    for name in ("head_dim", "head_dim_v"):
        if not 1 <= problem[name] <= most:
            raise ParameterError(f"{call}: {name}={problem[name]} is not in 1 .. {most}")


def _scales(call: str, views: Mapping[str, View | None], problem: Sizes) -> None:
    for name in ("k_scale", "v_scale"):
        view = views[name]
        if (view is not None) != (problem["storage"] != "same"):
            raise ParameterError(
                f"{call}: {name} goes with keys and values of fp8 and int8, and with no others"
            )
        if view is not None:
            check_dtype(call, name, view, ("fp32",))
            check_shape(call, name, view, (problem["heads_kv"],), "[heads], here")
            if problem["heads_kv"] > 1 and view.strides[0] != 1:
                raise ParameterError(f"{call}: {name} must be contiguous")


def _scale(call: str, scale: Any, head_dim: int) -> float:
    if scale is None:
        return 1.0 / math.sqrt(max(head_dim, 1))
    try:
        if isinstance(scale, str | bytes) or getattr(scale, "requires_grad", False):
            raise TypeError
        value = float(scale)
    except (TypeError, ValueError, OverflowError):
        raise ArgumentTypeError(
            f"{call}: softmax_scale={scale!r} is not a plain number; None means 1/sqrt(head_dim)"
        ) from None
    if not abs(value) <= _MAX_SCALE:
        raise ParameterError(
            f"{call}: softmax_scale={value} is not a finite number up to {_MAX_SCALE:g}"
        )
    return value


def _split(call: str, split: Any) -> int:
    """Keys of a part; 0: as they come."""
    least = grid.LEAST_SPLIT
    if split is None:
        return 0
    if isinstance(split, bool) or not isinstance(split, int):
        raise ArgumentTypeError(f"{call}: split_size={split!r} is not a whole number or None")
    if split < least or split & (split - 1) or split >= _LIMIT:
        raise ParameterError(
            f"{call}: split_size={split}; allowed: {least}, {2 * least} …, or None"
        )
    return split


def _aligned(call: str, seen: Mapping[str, View], problem: Sizes) -> None:
    """Rows begin on 16-byte boundaries, those of the output on 8-byte ones; steps fit."""
    for name in ("q", "k", "v", "o"):
        view = seen.get(name)
        if view is None or 0 in view.shape:
            continue
        size, need = itemsize(view), _CHUNK if name != "o" else _CHUNK // 2
        steps = [s for s, n in zip(view.strides[:-1], view.shape[:-1], strict=True) if n > 1]
        numbers = [view.pointer, view.shape[-1] * size, *(step * size for step in steps)]
        if any(number % need for number in numbers):
            raise ParameterError(
                f"{call}: {name} (shape {tuple(view.shape)}, strides {tuple(view.strides)}) has "
                f"rows that do not fill whole {need} bytes from such a boundary on; pad head_dim, "
                "or pass a contiguous copy (fkjit.attention takes any)"
            )
        if name in ("k", "v") and max(map(abs, steps), default=0) >= _LIMIT:
            raise ParameterError(f"{call}: {name} has strides of 2^31 elements or more")


INPUTS = ("q", "k", "v", "page_table", "seq_lens", "rows", "k_scale", "v_scale")
