"""The backward's kernels with a form: those without, with it rendered in, and those for gradients
that only forms have, of a bias, of sinks and of ALiBi slopes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from fkjit.ops.attention.backward import feature_problem as problem
from fkjit.ops.attention.backward import kernels as plain
from fkjit.ops.attention.backward import kernels_fp32 as fp32
from fkjit.ops.attention.features import (
    BIAS_DTYPES,
    EXAMPLE_ARGS,
    EXAMPLE_MOD,
    ScoreFeatures,
    parse,
)
from fkjit.runtime.interop import numpy_dtype
from fkjit.spec import Arrays, KernelSpec, Param, Params, Problem, SharedLayout, register

OP = "attention_backward_form"
# A warp has 16 rows: rules and band take the registers of another 16.
TILES: dict[str, dict[int, tuple[Any, ...]]] = {
    "keys": {
        64: ((64, 64, 4, 1, 2),),
        **dict.fromkeys((128, 192), ((64, 32, 4, 2, 2), (32, 32, 2, 2, 2))),
        256: ((32, 32, 2, 2, 2), (32, 32, 2, 2, 1)),
    },
    "sums": {
        64: ((64, 64, 4, 1, 2),),
        128: ((64, 64, 4, 2, 2), (32, 64, 2, 2, 1)),
    },
    "queries": {
        64: ((64, 64, 4, 2),),
        **dict.fromkeys((128, 192), ((64, 32, 4, 2),)),
        256: ((32, 32, 2, 2),),
    },
    # rows and keys of a block, warps, stages
    "bias": {
        64: ((64, 64, 4, 2),),
        128: ((64, 64, 4, 2), (64, 64, 4, 1)),
        192: ((64, 64, 4, 1),),
        256: ((64, 32, 4, 1),),
    },
    # of a heavy form a thread has half as many rows
    **{
        name: {
            dim: (*tiles, *((own, other, 2 * warps) for own, other, warps in tiles))
            for dim, tiles in fp32.TILES.items()
        }
        for name in ("keys_fp32", "queries_fp32")
    },
    "bias_fp32": fp32.TILES,
}
# What is compiled ahead; every other form is compiled when it is first called.
SHOWN = ScoreFeatures(
    True, True, "fp32", False, True, False, True, True, EXAMPLE_MOD, EXAMPLE_ARGS,
    score_mod_grad="1 + 0 * score", dalibi=True,
).text  # fmt: skip
# The same where sums of products start from a bias and a mask, whose gradient is made on the way.
SEEDED = ScoreFeatures(bias="bf16", mask=True, dbias=True, seeded=True).text
# What these kernels make besides, by the field of a form that asks for it.
_MORE = {
    "keys": {"dbias": "dbias_parts"},
    "queries": {"dbias": "dbias", "dalibi": "dalibi_rows"},
}
_FORM = "what it does beside causal attention"


# With a band of keys alone a kernel is hardly more than without a form.
_PLAIN_TILES = {
    "keys": plain.KEY_TILES, "queries": plain.QUERY_TILES, "sums": plain.SUM_TILES,
    "bias": {**TILES["bias"], 64: ((128, 64, 4, 2),), 128: ((128, 64, 4, 1),)},
}  # fmt: skip


# Of those, the ones whose warps have two blocks of rows and no registers to spare.
_TALL = ((128, 128, 4, 1, 2), (128, 64, 4, 1, 2), (128, 32, 4, 2))


def tiles(name: str, head_dim: int, text: str) -> tuple[Any, ...]:
    """Of a kernel with a form, the first is the fastest."""
    form = parse(text)
    band = not (form.softcap or form.score_mod or form.alibi or form.bias or form.mask)
    # Sums that start from one array are hardly more, either, but for those of dq.
    one = _starts_from_one(form) and head_dim <= (64 if name == "sums" else 128)
    of = _PLAIN_TILES[name] if (band or one) and name in _PLAIN_TILES else TILES[name]
    return of.get(head_dim, ())


def _starts_from_one(form: ScoreFeatures) -> bool:
    return form.seeded and not form.varlen and bool(form.bias) + form.mask == 1


def _is_tight(name: str, params: Params) -> bool:
    """Whether registers hold no more than 16 columns of scores at a time."""
    form, dim = parse(params["form"]), params["head_dim"]
    if not form.seeded:
        return params["tile"] in _TALL
    if not _starts_from_one(form) or form.bias == "fp32" or dim > 128:
        return True
    if name == "queries":
        return dim == 64 or not form.bias
    return name != "bias" and (dim == 64 or form.dbias or name == "sums")


def _is_heavy(params: Params) -> bool:
    """Whether its rules and their numbers take many registers."""
    form = parse(params["form"])
    rules = (form.softcap, form.score_mod, form.alibi, form.bias, form.mask, form.varlen)
    return form.dalibi or sum(map(bool, rules)) > 2


def _derive(base: KernelSpec) -> Callable[[Params], dict[str, Any]]:
    def derive(params: Params) -> dict[str, Any]:
        usual = {**base.derive(params), **parse(params["form"]).values()}
        if params["tile"] not in plain.QUERY_TILES[params["head_dim"]]:
            usual["in_registers"] = False
        if "step_k" in usual and params["head_dim"] > 128 and _is_heavy(params):
            usual["step_k"] = 16
        if _is_tight(base.name, params):
            usual |= {"step_k": 16, "step_q": 16}
        return usual

    return derive


def _query_shared(params: Params) -> SharedLayout:
    """Where sums start from a bias: what rows bring along, too."""
    usual = plain.QUERIES.shared_layout
    assert usual is not None
    layout = list(usual(params))
    if parse(params["form"]).seeded:
        layout += [(name, 4 * params["tile"][0]) for name in ("lse", "delta")]
    return layout


def _illegal(name: str, of: KernelSpec) -> Callable[[Params], str | None]:
    pairs = fp32.PAIRS if name.endswith("_fp32") else plain.PAIRS

    def illegal(params: Params) -> str | None:
        dims = (params["head_dim"], params["head_dim_v"])
        if dims not in pairs:
            return f"head_dim_v={dims[1]} is not compiled for head_dim={dims[0]}"
        if params["tile"] not in tiles(name, dims[0], params["form"]):
            return f"is not a tile for head_dim={dims[0]}"
        if name.endswith("_fp32") and params["aligned"] and params["dtype"] != "fp32":
            return "is not compiled for 16 bits: aligned or not, they are fetched one by one"
        few_rows = params["tile"] not in fp32.TILES.get(dims[0], ())
        if name in ("keys_fp32", "queries_fp32") and _is_heavy(params) != few_rows:
            return "has more rows a thread, or fewer, than this form has registers for"
        return None

    return illegal


def _only(*names: str) -> Callable[[Problem, Mapping[str, Any]], Any]:
    """The reference of some results."""

    def reference(one: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
        found = problem.reference(one, arrays)
        return {name: found[name] for name in (*names, *one.get("more", ()))}

    return reference


def _with_form(base: KernelSpec, name: str, wanted: tuple[str, ...], **more: Any) -> KernelSpec:
    """A kernel of any form; `params` of those that are compiled ahead."""
    every = [*TILES[name].values(), *_PLAIN_TILES.get(name, {}).values()]
    values = tuple(dict.fromkeys(tile for some in every for tile in some))
    params = [replace(p, values=values) if p.name == "tile" else p for p in base.params]

    def more_of(params: Params) -> tuple[str, ...]:
        form = parse(params["form"])
        made = _MORE.get(name.removesuffix("_fp32"), {})
        return tuple(output for field, output in made.items() if getattr(form, field))

    own: dict[str, Any] = {
        "op": OP,
        "name": name,
        "params": (*params, Param("form", (SHOWN,), _FORM)),
        "derive": _derive(base),
        "illegal": _illegal(name, base),
        "arguments": problem.arguments,
        "shape_class": problem.shape_class,
        "problems": lambda params, scale: [
            {**one, "more": more_of(params)} for one in problem.problems(params, scale)
        ],
        "inputs": problem.inputs,
        "outputs": lambda params, one: {
            n: x
            for n, x in problem.outputs(params, one).items()
            if n in (*wanted, *more_of(params))
        },
        "reference": _only(*wanted),
        "tolerance": problem.tolerance,
    }  # fmt: skip
    return replace(base, **own | more)


# ------------------------------------------------------------------ the gradient of a bias


def _bias_derive(params: Params) -> dict[str, Any]:
    form = parse(params["form"])
    others = form.softcap or form.score_mod or form.alibi or form.mask
    names = ("block_q", "block_k", "num_warps", "stages")
    return {
        **dict(zip(names, params["tile"], strict=True)),
        **form.values(),
        "ahead": form.bias_paired and not others and params["head_dim"] == 64,
        "step_k": 16 if form.seeded and _is_tight("bias", params) else 32,
    }


def _bias_shared(params: Params) -> SharedLayout:
    (block_q, block_k, _, count), d, dv = params["tile"], params["head_dim"], params["head_dim_v"]
    sizes = (("Q", block_q * d), ("dO", block_q * dv), ("K", block_k * d), ("V", block_k * dv))
    return [(f"{name} stage {i}", 2 * size) for i in range(count) for name, size in sizes]


def _bias_shared_fp32(params: Params) -> SharedLayout:
    (own, other, _), d, dv = params["tile"], params["head_dim"], params["head_dim_v"]
    sizes = (("Q", own, d), ("dO", own, dv), ("K", other, d), ("V", other, dv))
    return [(name, 4 * rows * (dim + 4)) for name, rows, dim in sizes]


def _bias_grid(params: Params, one: Problem) -> tuple[int, int, int]:
    block_q, block_k, *_ = params["tile"]
    batch, heads, rows = one["bias_shape"]
    tiles = -(-rows // block_q) * -(-one["seqlen_k"] // block_k)
    return tiles * batch * heads * one["bias_parts"], 1, 1


def _bias_kernel(base: KernelSpec, name: str, layout: Any, derive: Any) -> KernelSpec:
    return _with_form(
        base, name, ("dbias",), source=f"attention/backward_{name}.cu",
        entry=f"attention_backward_{name}", grid=_bias_grid, derive=derive, shared_layout=layout,
        shared_bytes=lambda params: sum(size for _, size in layout(params)),
        doc="gradient of a bias: a block owns a tile of it and walks over what shares it",
    )  # fmt: skip


_FP32_DERIVE = _derive(fp32.QUERIES_FP32)
_SPECS = {
    "keys": _with_form(plain.KEYS, "keys", ("dk", "dv")),
    "sums": _with_form(plain.SUMS, "sums", ("dk", "dv")),
    "queries": _with_form(
        plain.QUERIES,
        "queries",
        ("dq",),
        shared_layout=_query_shared,
        shared_bytes=lambda params: sum(size for _, size in _query_shared(params)),
    ),
    "keys_fp32": _with_form(fp32.KEYS_FP32, "keys_fp32", ("dk", "dv")),
    "queries_fp32": _with_form(fp32.QUERIES_FP32, "queries_fp32", ("dq",)),
    "bias": _bias_kernel(plain.QUERIES, "bias", _bias_shared, _bias_derive),
    "bias_fp32": _bias_kernel(fp32.QUERIES_FP32, "bias_fp32", _bias_shared_fp32, _FP32_DERIVE),
}
# Compiled ahead and swept is a variant of each kernel that multiplies on tensor cores, where all
# features are; those of fp32 are made of the same rules, and of products that the sweep has seen.
_AHEAD = {"dtype": "bf16", "head_dim": 64, "head_dim_v": 64, "aligned": True}


def _only_shown(spec: KernelSpec) -> KernelSpec:
    """The same, with one of its variants, or two."""
    forms = (SHOWN, SEEDED) if spec.name in _MORE else (SHOWN,)
    shown = {name: (value,) for name, value in _AHEAD.items()}
    shown |= {"tile": (TILES[spec.name][64][0],), "form": forms}
    return replace(spec, params=tuple(replace(p, values=shown[p.name]) for p in spec.params))


for _name in ("keys", "queries", "bias"):
    register(_only_shown(_SPECS[_name]))


@lru_cache(maxsize=1024)
def kernel(name: str, form: str) -> KernelSpec:
    """A kernel by its name without form, for any variant."""
    spec = _SPECS[name]
    return replace(spec, params=(*spec.params[:-1], Param("form", (form,), _FORM)))


# ------------------------------------------------------------------ rows, heads, sums of a bias

_THREADS = 256
_HEAD_THREADS = 512
_DENSE = replace(parse(SHOWN), varlen=False).text

_PACKED = {"varlen": True, "seqlen_q": "max_seqlen_q"}
PACKED_ROWS = replace(
    plain.ROWS,
    op=OP,
    derive=lambda params: {**plain.ROWS.derive(params), **_PACKED},
    arguments=lambda params, one, arrays: {
        **problem.arguments(params, one, arrays), "lanes": plain.row_lanes(one),
    },
    grid=lambda params, one: (plain.row_blocks(one, problem.longest_padded(one)), 1, 1),
)  # fmt: skip

PACKED_DQ = replace(
    plain.DQ,
    op=OP,
    derive=lambda params: {**plain.DQ.derive(params), **_PACKED},
    arguments=problem.arguments,
    grid=lambda params, one: (
        one["batch"] * one["heads_q"]
        * -(-(-(-one["seqlen_q"] // 16) * one["sum_columns"] // 2) // plain.ROW_THREADS), 1, 1,
    ),
)  # fmt: skip


def _as_form(params: Params) -> dict[str, Any]:
    """Parameters of a kernel whose inputs and outputs are those of `heads`."""
    form = SHOWN if params["varlen"] else _DENSE
    return {**_AHEAD, "dtype": "fp32", "form": form}


def _head_inputs(params: Params, one: Problem, rng: np.random.Generator) -> Arrays:
    made = problem.inputs(_as_form(params), one, rng)
    rows = problem.reference(one, made)["dalibi_rows"]
    return made | {"dalibi_rows": rows.astype(np.float32)}


def _head_outputs(params: Params, one: Problem) -> Arrays:
    made = problem.outputs(_as_form(params), one)
    return {name: made[name] for name in ("dsinks", "dalibi_slopes")}


HEADS = register(
    KernelSpec(
        op=OP,
        name="heads",
        source="attention/backward_heads.cu",
        entry="attention_backward_heads",
        doc="gradients of sinks and ALiBi slopes: a block adds up the rows of a head",
        params=(Param("varlen", (True, False), "packed sequences"),),
        derive=lambda params: {"threads": _HEAD_THREADS},
        block=lambda params: (_HEAD_THREADS, 1, 1),
        grid=lambda params, one: (one["heads_q"], 1, 1),
        problems=lambda params, scale: problem.problems(_as_form(params), scale),
        inputs=_head_inputs,
        outputs=_head_outputs,
        arguments=problem.arguments,
        reference=_only("dsinks", "dalibi_slopes"),
        tolerance=lambda params: 4e-6,
    )
)


def _sum_size(one: Problem) -> int:
    return one["bias_batch"] * one["heads"] * one["columns"]


def _sum_inputs(params: Params, one: Problem, rng: np.random.Generator) -> Arrays:
    shape = (*(one[n] for n in ("bias_batch", "batches", "heads", "shared")), one["columns"])
    return {"dbias_parts": rng.standard_normal(shape, np.float32)}


def _sum_arguments(params: Params, one: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **{name: arrays[name] for name in ("dbias_parts", "dbias")},
        **{name: one[name] for name in ("columns", "heads", "batches")},
        "size": _sum_size(one),
        "heads_summed": one["heads"] * one["shared"],
    }


BIAS_SUM = register(
    KernelSpec(
        op=OP,
        name="bias_sum",
        source="attention/backward_bias_sum.cu",
        entry="attention_backward_bias_sum",
        doc="gradient of a bias out of the sums of its parts",
        params=(Param("bias_dtype", BIAS_DTYPES, "element type of the bias"),),
        derive=lambda params: {"threads": _THREADS},
        block=lambda params: (_THREADS, 1, 1),
        grid=lambda params, one: (-(-_sum_size(one) // _THREADS), 1, 1),
        bytes=lambda one: 4.0 * _sum_size(one) * (one["batches"] * one["shared"] + 1),
        problems=lambda params, scale: [
            {"bias_batch": 2, "heads": 3, "columns": 101, "batches": 2, "shared": 5}
        ],
        inputs=_sum_inputs,
        outputs=lambda params, one: {
            "dbias": np.full(
                (one["bias_batch"], one["heads"], one["columns"]),
                np.nan,
                numpy_dtype(params["bias_dtype"]),
            )
        },
        arguments=_sum_arguments,
        reference=lambda one, arrays: {
            "dbias": arrays["dbias_parts"].astype(np.float64).sum((1, 3))
        },
        tolerance=lambda params: {"fp16": 1e-3, "bf16": 8e-3, "fp32": 1e-6}[params["bias_dtype"]],
    )
)
