"""The backward of attention with a form, dense and packed: which kernels a call takes, its results.

There is no public call: torch's autograd comes here (attention_form_gradients.py). What the forward
has looked at is not looked at again.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from math import prod
from typing import Any

from fkjit.arch import Arch
from fkjit.ops.attention.backward import feature_kernels as kernels
from fkjit.ops.attention.backward import feature_kernels_sm90 as hopper
from fkjit.ops.attention.backward import kernels as plain
from fkjit.ops.attention.backward import problem as shared
from fkjit.ops.attention.backward import select as choice
from fkjit.ops.attention.backward.checks import check as check_plain
from fkjit.ops.attention.backward.checks import check_scale
from fkjit.ops.attention.backward.feature_problem import bias_size
from fkjit.ops.attention.backward.feature_texts import Forms, Views
from fkjit.ops.attention.features import SLOTS
from fkjit.ops.attention.shapes import LAYOUTS, PACKED_AXES
from fkjit.ops.op import torch_ops
from fkjit.ops.op.node import Node, like
from fkjit.ops.op.op import Launch, Op, Output, Request, arch_of
from fkjit.runtime.device import multiprocessors
from fkjit.runtime.interop import CPU, ITEMSIZE, View

PACKED = "packed"  # a layout: [total, heads, head_dim]
ROWS = ("q", "k", "v")
OF_FORM = ("alibi_slopes", "bias", "sinks")  # what may have a gradient besides
INPUTS = (
    *("dout", *ROWS, "o", "lse", "dlse", "cu_seqlens_q", "cu_seqlens_k"),
    *("alibi_slopes", "bias", "mask", "sinks", *SLOTS),
)
_GRADIENTS = tuple(f"d{name}" for name in (*ROWS, *OF_FORM))
_SCRATCH = ("lse_log2", "delta", "dq_sum", "dalibi_rows", "dbias_parts")
_OUTPUTS = (*_GRADIENTS, *_SCRATCH, "turns", "mask_bits")
_CPU_MULTIPROCESSORS = 8  # what the interpreter shares work out for
_MAKES = {"keys": ("k", "v"), "queries": ("q", "alibi_slopes")}
_SCHEMA = (
    "str form, str layout, bool causal, float? softmax_scale, int[] window, float softcap, "
    "SymInt max_seqlen_q, SymInt max_seqlen_k, str[] wanted, bool deterministic"
)

# A problem, launches that come first, and the kernels without a form that multiply
_Made = tuple[dict[str, Any], list[Launch], list[Launch]]


def check(
    views: Views, form: str, layout: str, causal: bool, softmax_scale: Any,
    window: tuple[int, int], softcap: float, max_seqlen_q: int, max_seqlen_k: int,
    wanted: tuple[str, ...], deterministic: bool,
    scalars: tuple[tuple[str, str, Any], ...] = (),
) -> Request:  # fmt: skip
    """Launches and results of a call.

    form: the text of `ScoreFeatures`. window: -1 for a side without a bound. wanted: names of
    inputs whose gradients are made, in the order of _GRADIENTS. max_seqlen_*: of packed sequences.
    deterministic: False lets blocks add up dq in any order.
    """
    make = _packed if layout == PACKED else _dense
    problem, rows, products = make(views, layout, softmax_scale, (max_seqlen_q, max_seqlen_k))
    wide = max(problem["seqlen_q"], problem["seqlen_k"])
    left, right = (wide if side < 0 else min(side, wide) for side in window)
    problem |= {"window": (left, 0 if causal else right), "softcap": softcap}
    problem["score_scalars"] = {name: value for name, _, value in scalars}
    slopes, bias = views["alibi_slopes"], views["bias"]
    if slopes is not None:
        problem["alibi_batches"] = slopes.shape[0] if len(slopes.shape) == 2 else 1
    forms = Forms(form, views, problem, products, wanted)
    launches = hopper.launches(views, form, rows[0], problem, wanted, deterministic)
    if not launches:
        launches = _of_rows(views, rows, products, forms, problem, wanted, deterministic)
    if "bias" in wanted and bias is not None and products:
        launches += _of_bias(bias, forms, problem, products[0], arch_of(bias))
    if "sinks" in wanted or "alibi_slopes" in wanted:
        launches.append(Launch(kernels.HEADS, {"varlen": layout == PACKED}, problem))
    made = [one for one in launches if prod(one.spec.grid(one.params, one.problem))]
    counters = hopper.counters(made)
    return Request(dict(views), _outputs(views, problem, wanted), tuple(made), counters=counters)


def _of_rows(
    views: Views, rows: list[Launch], products: list[Launch], forms: Forms,
    problem: dict[str, Any], wanted: tuple[str, ...], deterministic: bool,
) -> list[Launch]:  # fmt: skip
    """What rows bring along, and what of dq, dk and dv is wanted."""
    q = views["q"]
    assert q is not None
    summed = {"q", "k"} <= set(wanted) and "alibi_slopes" not in wanted
    if not deterministic and summed and forms.dbias != "queries" and _may_sum(products, forms):
        return _by_sums(rows[0], products[0], forms, problem, arch_of(q))
    made = list(rows)
    for launch in products:
        name = launch.spec.name
        if not set(_MAKES[name.removesuffix("_fp32")]) & set(wanted):
            continue
        one = _launch(name, launch, forms.of(name), problem, arch_of(q))
        made += forms.in_turn(one) if name == forms.dbias == "queries" else [one]
    return made


def _dense(views: Views, layout: str, softmax_scale: Any, _: tuple[int, int]) -> _Made:
    plain_views = {name: views[name] for name in INPUTS[:7]}
    request = check_plain(plain_views, False, softmax_scale, True, "portable", layout)
    rows = [launch for launch in request.launches if launch.spec is plain.ROWS]
    problem = {**request.launches[0].problem, "axes": LAYOUTS[layout]}
    return problem, rows, [launch for launch in request.launches if launch.spec is not plain.ROWS]


def _packed(views: Views, layout: str, softmax_scale: Any, longest: tuple[int, int]) -> _Made:
    q, k, v, ends = (views[name] for name in (*ROWS, "cu_seqlens_q"))
    assert q is not None and k is not None and v is not None and ends is not None
    problem = {
        "batch": ends.shape[0] - 1, "heads_q": q.shape[1], "heads_kv": k.shape[1],
        "seqlen_q": longest[0], "seqlen_k": longest[1], "head_dim": q.shape[2],
        "head_dim_v": v.shape[2], "total_q": q.shape[0], "axes": PACKED_AXES, "dtype": q.dtype,
        "softmax_scale": check_scale(softmax_scale, q.shape[2]), "causal": False,
    }  # fmt: skip
    if q.device != CPU:
        problem["multiprocessors"] = multiprocessors(q.device)
    aligned = _aligned([view for n in INPUTS[:5] if (view := views[n]) is not None])
    rows = Launch(kernels.PACKED_ROWS, {"dtype": q.dtype, "aligned": aligned}, problem)
    return problem, [rows], choice.portable(problem, aligned, arch_of(q))


def _aligned(views: list[View]) -> bool:
    """Whether every row, also of the results, starts on a 16-byte boundary."""
    numbers = []
    for view in views:
        size = ITEMSIZE[view.dtype]
        pairs = zip(view.strides[:-1], view.shape[:-1], strict=True)
        numbers += [view.shape[-1] * size, view.pointer, *(s * size for s, n in pairs if n > 1)]
    return all(number % 16 == 0 for number in numbers)


def _launch(name: str, like_it: Launch, form: str, problem: dict[str, Any], arch: Arch) -> Launch:
    """The kernel `name`, with a form, for the same head dimensions and rows as another one."""
    spec, old = kernels.kernel(name, form), like_it.params
    dims = old["head_dim"], old["head_dim_v"]
    tiles = kernels.tiles(name, dims[0], form)
    more = {"aligned": old["aligned"], "arch": arch, "form": form}
    params = choice.parameters(spec, tiles, dims, problem, **more)
    if name in ("keys", "sums"):
        problem["warps_alike"] = params["tile"][3]  # each leaves sums of its own
    return Launch(spec, params, problem)


def _may_sum(products: list[Launch], forms: Forms) -> bool:
    """Whether there is a kernel that adds up dq beside dk and dv."""
    if not products or products[0].spec is not plain.KEYS or not products[0].params["aligned"]:
        return False
    dims = (products[0].params["head_dim"], products[0].params["head_dim_v"])
    if forms.seeded and dims[0] > 64:  # two kernels of wider tiles are faster
        return False
    return dims[0] == dims[1] and bool(kernels.tiles("sums", dims[0], forms.of("sums")))


def _by_sums(
    rows: Launch, keys: Launch, forms: Forms, problem: dict[str, Any], arch: Arch
) -> list[Launch]:
    """dk, dv and sums of dq in one kernel: first they are set to 0, at last rounded."""
    problem["sum_columns"] = keys.params["head_dim"]
    dq = kernels.PACKED_DQ if "total_q" in problem else plain.DQ
    return [
        Launch(rows.spec, rows.params, problem),
        _launch("sums", keys, forms.of("sums"), problem, arch),
        Launch(dq, {"dtype": problem["dtype"]}, problem),
    ]


def _of_bias(
    bias: View, forms: Forms, problem: dict[str, Any], like_it: Launch, arch: Arch
) -> list[Launch]:
    """Its gradient, or what is left of it to do: in parts where that keeps a GPU busy."""
    heads, columns = problem["heads_q"], problem["seqlen_k"]
    if forms.dbias == "queries":
        return []
    if forms.dbias == "keys":
        batch, own, _ = problem["bias_shape"]
        parts = heads // own * problem["warps_alike"]
        sizes = (batch, problem["batch"] // batch, own, parts, columns)
        return [_bias_sum(bias, problem, sizes)]
    name = "bias_fp32" if like_it.spec.name.endswith("_fp32") else "bias"
    made = _launch(name, like_it, forms.of(name), problem, arch)
    tiles = prod(made.spec.grid(made.params, problem))
    if not tiles:
        return []
    batch, own, rows = problem["bias_shape"]
    steps = problem["batch"] // batch * (heads // own)
    if rows == 1:
        steps *= -(-problem["seqlen_q"] // made.params["tile"][0])
    wished = -(-2 * problem.get("multiprocessors", _CPU_MULTIPROCESSORS) // tiles)
    problem["bias_parts"] = max(1, min(wished, steps // 2))
    if problem["bias_parts"] == 1:
        return [made]
    return [made, _bias_sum(bias, problem, (1, problem["bias_parts"], 1, 1, bias_size(problem)))]


def _bias_sum(bias: View, problem: dict[str, Any], sizes: tuple[int, ...]) -> Launch:
    """What adds up parts of it."""
    problem["parts_shape"] = sizes
    names = ("bias_batch", "batches", "heads", "shared", "columns")
    one: dict[str, Any] = dict(zip(names, sizes, strict=True))
    return Launch(kernels.BIAS_SUM, {"bias_dtype": bias.dtype}, one)


def _outputs(
    views: Views, problem: Mapping[str, Any], wanted: tuple[str, ...]
) -> dict[str, Output | None]:
    """Results, with zeros to write them to where the caller has some; and what kernels hand on."""
    made: dict[str, Output | None] = {}
    for name in wanted:
        view = views[name]
        assert view is not None
        made[f"d{name}"] = Output(tuple(view.shape), view.dtype, views[f"d{name}"])
    keys = {name for name in ("k", "v") if name not in wanted}
    if len(keys) == 1:  # one kernel makes both
        name = keys.pop()
        view = views[name]
        assert view is not None
        made[f"d{name}"] = Output(tuple(view.shape), view.dtype, None, False)
    if "alibi_slopes" in wanted and "q" not in wanted:
        view = views["q"]
        assert view is not None
        made["dq"] = Output(tuple(view.shape), view.dtype, None, False)
    scratch: dict[str, tuple[int, ...]] = dict.fromkeys(
        ("lse_log2", "delta"), shared.rows_shape(problem)
    )
    if "sum_columns" in problem:
        scratch["dq_sum"] = (*shared.rows_shape(problem), problem["sum_columns"])
    if "bits_shape" in problem:
        scratch["mask_bits"] = problem["bits_shape"]
    if "turn_rows" in problem:
        *more, count = shared.rows_shape(problem)
        scratch["turns"] = (*more, count // problem["turn_rows"])
    if "alibi_slopes" in wanted:
        scratch["dalibi_rows"] = shared.rows_shape(problem)
    if "parts_shape" in problem:
        scratch["dbias_parts"] = problem["parts_shape"]
    return made | {n: Output(size, "fp32", returned=False) for n, size in scratch.items()}


# ------------------------------------------------------------------ the op


def _written_to(inputs: tuple[Any, ...], options: tuple[Any, ...]) -> tuple[Any, ...]:
    """Packed rows of no sequence, and those beyond the longest, have gradient 0."""
    given = dict(zip(INPUTS, inputs, strict=True))
    wanted, packed = options[8], options[1] == PACKED
    zeros = sys.modules["torch"].zeros_like
    made = (
        zeros(given[name], memory_format=sys.modules["torch"].contiguous_format)
        if packed and name in wanted
        else None
        for name in ROWS
    )
    return (*made, *(None,) * (len(_OUTPUTS) - len(ROWS)))


def _fake(*given: Any) -> list[Any]:
    arrays = dict(zip(INPUTS, given, strict=False))
    return [like(arrays[name]) for name in given[-2]]


def _pack(*options: Any) -> tuple[Any, ...]:
    """As the schema has them: without the numbers of a score_mod, which is no node."""
    *others, window, softcap, longest_q, longest_k, wanted, deterministic, _ = options
    return (*others, list(window), softcap, longest_q, longest_k, list(wanted), deterministic)


def _unpack(*options: Any) -> tuple[Any, ...]:
    *others, window, softcap, longest_q, longest_k, wanted, deterministic = options
    sides = tuple(window)
    return (*others, sides, softcap, longest_q, longest_k, tuple(wanted), deterministic, ())


_OP = Op(
    "attention (backward)",
    inputs=INPUTS,
    outputs=_OUTPUTS,
    check=check,
    optional=tuple(name for name in INPUTS if name not in ("dout", *ROWS, "o", "lse")),
    node=Node(
        _fake, _SCHEMA, None, name="attention_form_backward", pack=_pack, unpack=_unpack,
        outputs=_written_to,
    ),
)  # fmt: skip


def gradients(inputs: tuple[Any, ...], options: tuple[Any, ...]) -> tuple[Any, ...]:
    """Gradients of the inputs that options name, for torch tensors; see `check` for both."""
    if torch_ops.wrapped(*inputs):  # torch.func
        found = _OP.traced(inputs, (None,) * len(_OUTPUTS), options)
    else:
        found = _OP(inputs, _written_to(inputs, options), options)
    return tuple(found) if isinstance(found, (tuple, list)) else (found,)
