"""What reading and appending to the pages of a KV cache share: geometry and checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fkjit.errors import ParameterError
from fkjit.ops.op.checks import FLOATS, check_dtype, check_shape, check_writable
from fkjit.runtime.interop import CPU, ITEMSIZE, View, as_numpy
from fkjit.spec import Dim3, Param, Params, Problem, Work, size_class

STORAGES = ("same", "fp8", "int8")  # as the tokens are; e4m3 or int8 with a scale for each head
LAYOUTS = ("nhd", "hnd")  # pages [page_size, heads, head_dim] or [heads, page_size, head_dim]
PAGE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CODES = {"fp8": "uint8", "int8": "int8"}  # what kernels see of them
_VECTOR_BYTES = 16
_WIDEST = 2**22  # elements of a token, see Lanes in kv/place.cuh
SIDES = ("k", "v")

PARAMS = (
    Param("dtype", FLOATS, "element type of k and v"),
    Param("storage", STORAGES, "what the cache keeps: the same, e4m3 or int8"),
    Param("vector", (True, False), "16-byte accesses: every head begins on a multiple of them"),
    Param("threads", (128, 64, 256), "threads of a block", tunable=True),
)
THREADS = 128
_MOST_TOKENS = 1 << 14  # beyond these it makes no difference


def width(params: Params) -> int:
    """Elements of an access."""
    return _VECTOR_BYTES // ITEMSIZE[params["dtype"]] if params["vector"] else 1


def illegal(params: Params, unroll: int) -> str | None:
    """Why threads, or tokens of a thread, are not to be tried, or None; `unroll`: its default."""
    if (params["threads"], params["unroll"]) == (THREADS, unroll):
        return None
    if not params["vector"]:
        return "is for 16-byte accesses"
    same = params["storage"] == "same"
    if params["unroll"] not in ((unroll, 2 * unroll) if same else (2, 4)):
        return "is never the fastest"
    return None if same or params["threads"] == THREADS else "is for tokens kept as they are"


def shape_class(problem: Problem) -> dict[str, Any]:
    """Problems that share their tuned values."""
    return {
        "tokens": size_class(problem["tokens"], _MOST_TOKENS),
        "columns": size_class(problem["heads"] * problem["head_dim"], 1 << 14),
        "layout": problem["layout"],
    }


def derive(params: Params) -> dict[str, Any]:
    """Further values of the templates."""
    kept = {"same": params["dtype"], "fp8": "e4m3", "int8": "i8"}[params["storage"]]
    return {"kept": kept, "scaled": params["storage"] != "same", "size": width(params)}


def lanes(params: Params, problem: Problem) -> tuple[int, int, int]:
    """(threads of a token, blocks of a token, tokens of a block at a time)."""
    columns = problem["heads"] * problem["head_dim"] // width(params)
    pieces = -(-columns // params["threads"])
    threads = -(-columns // pieces)
    return threads, pieces, params["threads"] // threads


def grid(params: Params, problem: Problem) -> Dim3:
    """Pieces of a token, for as many tokens as a block has; keys and values."""
    _, pieces, group = lanes(params, problem)
    return (-(-problem["tokens"] // (group * params["unroll"])), 2 * pieces, 1)


def arguments(params: Params, problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Kernel arguments by name."""
    threads, _, group = lanes(params, problem)
    size = width(params)
    k_token, k_head = problem["k"]
    v_token, v_head = problem["v"]
    k_page, k_page_head, k_page_token = problem["k_pages"]
    v_page, v_page_head, v_page_token = problem["v_pages"]
    return {
        **{"k_scale": None, "v_scale": None, **arrays},
        **{"slot_step": problem["slot_step"], "tokens": problem["tokens"]},
        **{"k_token": k_token, "k_head": k_head, "v_token": v_token, "v_head": v_head},
        **{"k_page_step": k_page, "k_head_step": k_page_head, "k_token_step": k_page_token},
        **{"v_page_step": v_page, "v_head_step": v_page_head, "v_token_step": v_page_token},
        "num_slots": problem["num_pages"] * problem["page_size"],
        "page_log2": problem["page_size"].bit_length() - 1,
        "columns": problem["heads"] * problem["head_dim"] // size,
        "head_columns": problem["head_dim"] // size,
        **{"lanes": threads, "group": group, "lanes_inverse": 1 / threads},
        "head_inverse": size / problem["head_dim"],
    }


def traffic(problem: Problem) -> float:
    """Bytes of k and v on both sides, and of the slots."""
    elements = 2.0 * problem["tokens"] * problem["heads"] * problem["head_dim"]
    kept = ITEMSIZE[problem["dtype"]] if problem["storage"] == "same" else 1
    slots = 4.0 * problem["slot_step"] * problem["tokens"]
    return elements * (ITEMSIZE[problem["dtype"]] + kept) + slots


def moved(params: Params, problem: Problem) -> float:
    """Elements that the interpreter moves."""
    return 2.0 * problem["tokens"] * problem["heads"] * problem["head_dim"]


WORK = Work(bytes=traffic, interpreter_work=moved)


# ------------------------------------------------------------------ what a caller passes


def page_shape(
    layout: str, num_pages: int, page_size: int, heads: int, dim: int
) -> tuple[int, ...]:
    """Of all keys or all values."""
    inner = (page_size, heads) if layout == "nhd" else (heads, page_size)
    return (num_pages, *inner, dim)


def check_pages(call: str, views: Mapping[str, View], layout: str) -> dict[str, Any]:
    """What k_pages and v_pages say of the problem."""
    shape = tuple(views["k_pages"].shape)
    if len(shape) != 4 or 0 in shape:
        raise ParameterError(
            f"{call}: k_pages has shape {shape}; allowed: [num_pages, page_size, heads, head_dim] "
            '(layout="nhd") or [num_pages, heads, page_size, head_dim] ("hnd"), none of them 0'
        )
    check_shape(call, "v_pages", views["v_pages"], shape, "k_pages'")
    size_at = 1 if layout == "nhd" else 2
    if shape[size_at] not in PAGE_SIZES:
        raise ParameterError(
            f"{call}: k_pages has pages of {shape[size_at]} tokens (layout={layout!r}); allowed: "
            f"{', '.join(map(str, PAGE_SIZES))}"
        )
    problem = {
        "layout": layout,
        "num_pages": shape[0],
        "page_size": shape[size_at],
        "heads": shape[3 - size_at],
        "head_dim": shape[3],
    }
    for side in SIDES:
        view = views[f"{side}_pages"]
        _check_columns(call, f"{side}_pages", view)
        steps = view.strides
        problem[f"{side}_pages"] = (steps[0], steps[3 - size_at], steps[size_at])
    return problem


def check_tokens(
    call: str, name: str, view: View, heads: int, dim: int, tokens: int
) -> tuple[int, int]:
    """Steps from token to token and head to head of [tokens, heads, head_dim]."""
    check_shape(call, name, view, (tokens, heads, dim), "[tokens, heads, head_dim], here")
    _check_columns(call, name, view)
    return view.strides[0], view.strides[1]


def _check_columns(call: str, name: str, view: View) -> None:
    if 0 not in view.shape and view.shape[-1] > 1 and view.strides[-1] != 1:
        raise ParameterError(
            f"{call}: {name} has stride {view.strides[-1]} in its last dimension; a head must be "
            f"contiguous: pass a contiguous copy of {name}"
        )


def check_scales_there(call: str, views: Mapping[str, View | None], storage: str) -> None:
    """ParameterError unless both are there where numbers are scaled, and none elsewhere."""
    names = [f"{side}_scale" for side in SIDES]
    wrong = [name for name in names if (views.get(name) is None) == (storage != "same")]
    if wrong:
        what, verb = " and ".join(wrong), "are" if len(wrong) > 1 else "is"
        raise ParameterError(
            f"{call}: {what} {verb} given, but keys and values are as the tokens; allowed: None"
            if storage == "same"
            else f"{call}: {what} {verb} None, but keys and values are {storage}; allowed: fp32 "
            "[heads], what their codes are multiplied by"
        )


def check_scales(call: str, views: Mapping[str, View | None], storage: str, heads: int) -> None:
    """One fp32 a head where numbers are scaled, None elsewhere."""
    check_scales_there(call, views, storage)
    for side in SIDES:
        name = f"{side}_scale"
        view = views[name]
        if view is not None:
            check_dtype(call, name, view, ("fp32",))
            check_shape(call, name, view, (heads,), "[heads], here")
            if heads > 1 and view.strides[0] != 1:
                raise ParameterError(f"{call}: {name} must be contiguous")


def check_slots(call: str, view: View, num_slots: int, unique: bool) -> int:
    """32-bit words from one slot to the next. On the CPU the slots are looked at, too."""
    check_dtype(call, "slot_mapping", view, ("int32", "int64"))
    if len(view.shape) != 1:
        raise ParameterError(
            f"{call}: slot_mapping has shape {tuple(view.shape)}; allowed: [tokens]"
        )
    if view.shape[0] > 1 and view.strides[0] < 1:
        raise ParameterError(f"{call}: slot_mapping has stride {view.strides[0]}; allowed: above 0")
    if view.device == CPU:
        slots = as_numpy(view)
        _check_values(call, slots[slots >= 0], num_slots, unique)
    return max(view.strides[0], 1) * (2 if view.dtype == "int64" else 1)


def _check_values(call: str, slots: np.ndarray, num_slots: int, unique: bool) -> None:
    if slots.size and slots.max() >= num_slots:
        raise ParameterError(
            f"{call}: slot_mapping has slot {slots.max()}, but the pages have slots 0 to "
            f"{num_slots - 1} (page * page_size + place in it; below 0: none)"
        )
    if unique and len(np.unique(slots)) < slots.size:
        values, counts = np.unique(slots, return_counts=True)
        raise ParameterError(
            f"{call}: slot_mapping has slot {values[counts > 1][0]} more than once: which token "
            "would stay there is not defined"
        )


def check_append(
    call: str, views: Mapping[str, View | None], dtype: str, storage: str, layout: str
) -> dict[str, Any]:
    """The problem of tokens k and v, of `dtype`, that are written to pages."""
    seen = {name: view for name, view in views.items() if view is not None}
    pages = {"k_pages": seen["k_pages"], "v_pages": seen["v_pages"]}
    problem = check_pages(call, pages, layout)
    for name, view in pages.items():
        check_dtype(call, name, view, (CODES.get(storage, dtype),))
        check_writable(call, name, view)
    heads, dim = problem["heads"], problem["head_dim"]
    check_scales(call, views, storage, heads)
    num_slots = problem["num_pages"] * problem["page_size"]
    step = check_slots(call, seen["slot_mapping"], num_slots, unique=True)
    tokens = seen["slot_mapping"].shape[0]
    for side in SIDES:
        problem[side] = check_tokens(call, side, seen[side], heads, dim, tokens)
    return {**problem, "dtype": dtype, "storage": storage, "tokens": tokens, "slot_step": step}


def is_vector(dtype: str, problem: Problem, views: Mapping[str, View], new: Sequence[str]) -> bool:
    """Whether every head begins on a multiple of an access, in memory too; `new` arrays do."""
    size = _VECTOR_BYTES // ITEMSIZE[dtype]
    rows = (*problem["k"], *problem["v"], *problem["k_pages"], *problem["v_pages"])
    if any([step % size for step in (problem["head_dim"], *rows)]):
        return False
    kept = ITEMSIZE[dtype] if problem["storage"] == "same" else 1
    places = [(views[f"{side}_pages"].pointer, size * kept) for side in SIDES]
    places += [(views[side].pointer, _VECTOR_BYTES) for side in SIDES if side not in new]
    return not any([pointer % alignment for pointer, alignment in places])


def check_size(call: str, params: Params, problem: Problem) -> None:
    """What kernels count in 32 bits or fewer."""
    if problem["num_pages"] * problem["page_size"] >= 2**31:
        raise ParameterError(f"{call}: the cache has 2^31 slots or more; split it")
    if problem["heads"] * problem["head_dim"] >= _WIDEST:
        raise ParameterError(f"{call}: a token has {_WIDEST} elements or more; split its heads")
    steps = (*problem["k"], *problem["v"], *problem["k_pages"], *problem["v_pages"])
    if max(*steps, -min(steps), problem["slot_step"]) >= 2**31:
        raise ParameterError(f"{call}: strides reach 2^31 elements; pass contiguous arrays")
    if problem["tokens"] >= 2**30:
        raise ParameterError(f"{call}: {problem['tokens']} tokens are more than a launch can take")
