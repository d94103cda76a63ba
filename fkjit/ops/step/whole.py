"""A whole decode step in one launch. No part of the public API: it takes what a Decoder has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from fkjit.arch import Arch
from fkjit.errors import ParameterError
from fkjit.ops.gemm.epilogue import SHIPPED
from fkjit.ops.kv.problem import LAYOUTS, page_shape
from fkjit.ops.op.checks import check_dtype, check_same_dtype, check_shape
from fkjit.ops.op.op import Launch, Op, Output, Request
from fkjit.ops.step import whole_kernel as kernel
from fkjit.ops.step.whole_kernel import GROUPS, HEAD_DIMS, KERNEL, ROWS, Ring
from fkjit.ops.step.whole_maps import LAYER_WORDS, MAP_WORDS, NONE, SCALES, tensor_maps
from fkjit.runtime import abstract, interop
from fkjit.runtime.device import multiprocessors
from fkjit.runtime.interop import CPU, View
from fkjit.runtime.tensor_map import MapTable

_CALL = "decode_step"
_SPAN, _GROUP = 32, 128  # columns of a weight that a warp takes at a time; of codes
_COPIED = 8  # rows of a weight in a copy
_MAPPED = 64  # elements of 16 bits of a row that stand side by side in a stage
_CPU_BLOCKS = 4
_ITEMS = 4  # of a query head, at least, where it has items of its own
_LONG = 2048  # tokens, from which on no key is read for each query head by itself
_BATCH = 10240  # elements of keys that an item of one query head has under way


class LayerArrays(NamedTuple):
    """Of a layer; None: there is no such array. A weight with scales is codes of int4, [n, k / 2]
    bytes; its scales are [n, those of k in groups of 128, as many as fill 16 bytes]."""

    norm: Any
    norm_bias: Any
    qkv: Any
    qkv_bias: Any
    out: Any
    out_bias: Any
    mlp_norm: Any
    mlp_norm_bias: Any
    up: Any
    up_bias: Any
    down: Any
    down_bias: Any
    qkv_scales: Any = None
    out_scales: Any = None
    up_scales: Any = None
    down_scales: Any = None


class Model(NamedTuple):
    """What a step's kernel is made for. heads_q, heads_kv, head_dim, mlp, eps: as a ModelConfig's.
    advance: 1: positions become the next ones; 2: tokens, too, by the largest logits. codes: some
    weights of layers are of int4. length: tokens of the longest sequence there is room for; 0: any
    number. ring: one of whole_kernel.RINGS; None: the usual."""

    heads_q: int
    heads_kv: int
    head_dim: int
    mlp: int
    activation: str
    gate: bool
    eps: float
    layout: str
    page_size: int
    advance: int = 0
    codes: bool = False
    length: int = 0
    ring: Ring | None = None


class Arrays(NamedTuple):
    """maps: on a GPU of the weights, as `map_words` has them; else None.

    tokens int64, positions, active and rows int32 [m]; rows below 0 are no sequences. embedding
    and head [vocabulary, hidden]; with head_scales the head is codes of int4, as in LayerArrays, as
    elements of 16 bits. weights: where all arrays of the layers are, by table_of_layers,
    int64 [layers, LAYER_WORDS] (`layer_table`). exchange: int32, `exchange_words` zeros when it is
    new, for steps of so many sequences alone, one after the other. table: of
    `fkjit.rope_table`, None: nothing turns. The rest is a PagedKVCache's."""

    tokens: Any
    positions: Any
    active: Any
    rows_of_cache: Any
    embedding: Any
    position_embedding: Any
    weights: Any
    table_of_layers: Any
    norm_weight: Any
    norm_bias: Any
    head: Any
    head_scales: Any
    table: Any
    page_table: Any
    capacities: Any
    lengths: Any
    pages: Any
    exchange: Any
    maps: Any = None


def layer_table(base: int, layers: list[LayerArrays], windows: list[int | None]) -> np.ndarray:
    """int64 [layers, LAYER_WORDS]: how many elements of 16 bits behind the address `base` arrays
    begin. By their `data_ptr()`."""

    def place(array: Any) -> int:
        return NONE if array is None else (array.data_ptr() - base) // 2

    rows = [
        [*map(place, one[:-SCALES]), seen or 0, *map(place, one[-SCALES:])]
        for one, seen in zip(layers, windows, strict=True)
    ]
    return np.array(rows, np.int64).reshape(len(layers), LAYER_WORDS)


def scales_columns(columns: int) -> int:
    """Of the scales of codes with so many columns: one of each group, as many as fill 16 bytes."""
    return -(-columns // (8 * _GROUP)) * 8


def map_words(arrays: Arrays, model: Model, table: np.ndarray) -> np.ndarray:
    """int64 [4 layers + 1, 16], of a model with codes twice as many rows: tensor maps of all
    weights, for `Arrays.maps`. table: `arrays.table_of_layers` on the host. Of arrays on a GPU."""
    given = {name: x for name, x in arrays._asdict().items() if x is not None}
    views = {name: interop.view(x, _CALL, name) for name, x in given.items()}
    launch = _check(views, *model).launches[0]
    named = {name: interop.Pointer(views.get(name)) for name in ("weights", "head", "head_scales")}
    made = tensor_maps(launch.problem, table, named, launch.params["ring"][0])
    words = np.frombuffer(MapTable(tuple(made)).encode(), np.int64)
    return words.reshape(-1, MAP_WORDS)


def blocks_on(device: int, hidden: int) -> int:
    """Of a step of a model of this width on a CUDA device, or in the interpreter (CPU)."""
    return _CPU_BLOCKS if device == CPU else blocks_of(multiprocessors(device), hidden)


def blocks_of(multiprocessors: int, hidden: int) -> int:
    """One on each multiprocessor; of a narrow model as many as each have eight of its columns, as a
    copy brings: fewer have to hear of one another, and no copy brings others' rows."""
    narrow = hidden // _COPIED
    return narrow if multiprocessors * 2 // 3 <= narrow <= multiprocessors else multiprocessors


def fits(model: Model, rows: int, hidden: int, layers: int, arch: Arch, blocks: int) -> bool:
    """Whether there is a kernel for steps of so many sequences of this model."""
    widths = (hidden, model.mlp, model.heads_q * model.head_dim)
    group, rest = divmod(model.heads_q, model.heads_kv)
    return (
        rows * model.heads_kv <= blocks and rest == 0 and group in GROUPS
        and model.head_dim in HEAD_DIMS
        and all(_whole(model, wide) for wide in widths) and min(widths) >= blocks
        and (model.activation, model.gate) in SHIPPED
        and kernel.KERNEL.features({}) <= arch.features
        and _variant(model, rows, hidden, layers, "layer", blocks) is not None
    )  # fmt: skip


def _whole(model: Model, wide: int) -> bool:
    """Whether rows of so many columns are whole spans, and whole lines of a tensor map."""
    elements = wide // 4 if model.codes else wide
    fits = elements % _MAPPED == 0 or elements < _MAPPED
    return fits and wide % (_GROUP if model.codes else _SPAN) == 0 and wide % _MAPPED in (0, wide)


def splits_of(model: Model, rows: int, blocks: int) -> int:
    """Work items of a sequence and its heads: together no more than there are blocks, and no more
    than have keys enough."""
    own = own_heads(model, rows, blocks)
    splits = max(1, blocks * own // (rows * model.heads_q))
    if own > 1 or not model.length:
        return splits
    return min(splits, -(-model.length * model.head_dim // _BATCH))


def own_heads(model: Model, rows: int, blocks: int) -> int:
    """Query heads of a work item of attention: one, or all of a key head."""
    one = model.length <= _LONG and _ITEMS * rows * model.heads_q <= blocks
    return 1 if one else model.heads_q // model.heads_kv


def exchange_words(model: Model, rows: int, hidden: int, blocks: int) -> int:
    """Of `Arrays.exchange`."""
    splits = splits_of(model, rows, blocks)
    sizes = {"m": rows, "hidden": hidden, "blocks": blocks, "splits": splits}
    return kernel.exchange_places({**model._asdict(), **sizes})[-1]


def decode_step(arrays: Arrays, logits: Any, model: Model) -> Any:
    """Logits and the largest one of each row, int64 [m]; k and v of the tokens are in the cache,
    and its lengths count them.

    Args:
        logits: fp32 [m, vocabulary], rows contiguous; they are written.

    One cooperative launch, a block on each multiprocessor. It may be captured into a CUDA graph.
    ParameterError, ArgumentTypeError: shapes, strides, dtypes, and a model that `fits` refuses.
    """
    return _OP(arrays, (logits, None), model)[1]


def prepare(arrays: Arrays, model: Model) -> None:
    """Compile and load what `decode_step` with the same arguments needs; launches nothing. Without
    an `exchange` it is as large as it has to be."""
    if arrays.exchange is None:
        device, m, hidden = arrays.tokens.device, arrays.tokens.shape[0], arrays.embedding.shape[1]
        words = exchange_words(model, m, hidden, blocks_on(device, hidden))
        arrays = arrays._replace(exchange=abstract.made((words,), "int32", None, device))
    _OP.prepare((*arrays, None, None), model)


# ------------------------------------------------------------------ checks


def _variant(
    model: Model, rows: int, hidden: int, layers: int, norm: str, blocks: int
) -> dict[str, Any] | None:
    """Of the parameters those that the sizes decide; None: there is no room."""
    most = next((most for most in ROWS if most >= rows), None)
    aside = kernel.aside_for(norm, hidden, layers)
    if most is None or aside is None:
        return None
    group, dim = model.heads_q // model.heads_kv, model.head_dim
    widest = max(hidden, model.mlp, model.heads_q * dim)
    normed = (most + kernel.extra_rows(norm, most)) * (hidden + kernel.ROW_GAP)
    widest = max(widest, -(-normed // most) - kernel.ROW_GAP)
    widest += kernel.beside_digits(widest) if model.codes else 0
    own = own_heads(model, rows, blocks)
    room = kernel.room_for(most, widest, dim, own, aside)
    if room is None:
        return None
    space = kernel.ring_bytes(norm, most, room)
    rings = kernel.RINGS if model.ring is None else (model.ring,)
    fitting = [one for one in rings if kernel.ring_fits(one, model.codes, space)]
    ring = min(fitting, key=lambda one: hidden % one[0] > 0, default=None)  # the first whole one
    if ring is None:
        return None
    return {"most": most, "room": room, "aside": aside, "ring": ring, "group": group,
            "own": own, "head_dim": dim, "activation": model.activation, "gate": model.gate,
            "codes": model.codes}  # fmt: skip


def _check(views: Mapping[str, View | None], *options: Any) -> Request:
    model = Model(*options)
    seen = {name: view for name, view in views.items() if view is not None}
    floats = (
        "embedding",
        "position_embedding",
        "weights",
        "norm_weight",
        "norm_bias",
        "head",
        "head_scales",
        "pages",
    )
    dtype = check_same_dtype(_CALL, {n: seen[n] for n in floats if n in seen}, ("fp16", "bf16"))
    (m,), vocabulary = seen["tokens"].shape, seen["head"].shape[0]
    hidden = seen["embedding"].shape[1]
    layers = seen["table_of_layers"].shape[0]
    _check_arrays(seen, model, m, hidden, layers)
    norm = "layer" if "norm_bias" in seen else "rms"
    blocks = blocks_on(seen["tokens"].device, hidden)
    variant = _variant(model, m, hidden, layers, norm, blocks)
    widths = (hidden, model.mlp, model.heads_q * model.head_dim)
    whole = all(_whole(model, one) and one >= blocks for one in widths)
    refused = not whole or m * model.heads_kv > blocks
    if variant is None or refused:
        raise ParameterError(
            f"{_CALL}: no kernel for {m} sequences of widths {widths}; allowed: up to {ROWS[-1]}, "
            f"multiples of {_MAPPED} columns (codes of {4 * _MAPPED}), as many as "
            "multiprocessors, no more heads than those, "
            "rows that fit into shared memory"
        )
    words = exchange_words(model, m, hidden, blocks)
    check_dtype(_CALL, "exchange", seen["exchange"], ("int32",))
    check_shape(_CALL, "exchange", seen["exchange"], (words,), "here")
    logits = seen.get("logits")
    problem = {
        "m": m, "layers": layers, "hidden": hidden, "vocabulary": vocabulary, "dtype": dtype,
        **model._asdict(), "norm": norm, "rope": "table" in seen,
        "head_coded": "head_scales" in seen,
        "blocks": blocks, "splits": splits_of(model, m, blocks),
        "table_rows": seen["table"].shape[0] if "table" in seen else 0,
        "max_sequences": seen["page_table"].shape[0], "max_pages": seen["page_table"].shape[1],
        "logits_stride": vocabulary if logits is None or m == 1 else logits.strides[0],
        **_pages(seen["pages"], model),
    }  # fmt: skip
    params = {**{name: problem[name] for name in ("dtype", "norm", "rope")}, **variant}
    problem |= variant
    outputs = {"logits": Output((m, vocabulary), "fp32", logits), "largest": Output((m,), "int64")}
    return Request(
        views, outputs, (Launch(KERNEL, params, problem),),
        counters=1,
    )  # fmt: skip


def _pages(pages: View, model: Model) -> dict[str, Any]:
    """Elements of a layer's keys; from page to page, head to head, token to token."""
    heads, dim, size = model.heads_kv, model.head_dim, model.page_size
    inner = (dim, heads * dim) if model.layout == LAYOUTS[0] else (size * dim, dim)
    plane = pages.shape[2] * size * heads * dim
    return {"plane": plane, "pages": (size * heads * dim, *inner)}


def _check_arrays(seen: Mapping[str, View], model: Model, m: int, hidden: int, layers: int) -> None:
    rows, vocabulary = seen["page_table"].shape[0], seen["head"].shape[0]
    pages = page_shape(
        model.layout, seen["pages"].shape[2], model.page_size, model.heads_kv, model.head_dim
    )
    wanted = {
        "tokens": ((m,), "int64"), "positions": ((m,), "int32"), "active": ((m,), "int32"),
        "rows_of_cache": ((m,), "int32"),
        "embedding": ((seen["embedding"].shape[0], hidden), None),
        "head": ((vocabulary, hidden), None), "norm_weight": ((hidden,), None),
        "table_of_layers": ((layers, LAYER_WORDS), "int64"), "pages": ((layers, 2, *pages), None),
        "page_table": (tuple(seen["page_table"].shape), "int32"),
        "capacities": ((rows,), "int32"), "lengths": ((rows,), "int32"),
    }  # fmt: skip
    if "head_scales" in seen:
        wanted["head"] = ((vocabulary, hidden // 4), None)
        wanted["head_scales"] = ((vocabulary, scales_columns(hidden)), None)
        if not model.codes:
            raise ParameterError(f"{_CALL}: head_scales of a model without codes; allowed: None")
    if "maps" in seen:
        wanted["maps"] = (((4 * layers + 1) * (1 + model.codes), MAP_WORDS), "int64")
    if "norm_bias" in seen:
        wanted["norm_bias"] = ((hidden,), None)
    if "position_embedding" in seen:
        wanted["position_embedding"] = ((seen["position_embedding"].shape[0], hidden), None)
    if "table" in seen:
        wanted["table"] = ((seen["table"].shape[0], model.head_dim), "fp32")
    for name, (shape, dtype) in wanted.items():
        view = seen[name]
        check_shape(_CALL, name, view, shape, "here")
        if dtype is not None:
            check_dtype(_CALL, name, view, (dtype,))
        if not _contiguous(view) or (dtype is None and view.pointer % 16):
            raise ParameterError(f"{_CALL}: {name} has gaps, or does not start on 16 bytes")
    if "logits" in seen:
        check_dtype(_CALL, "logits", seen["logits"], ("fp32",))
        check_shape(_CALL, "logits", seen["logits"], (m, vocabulary), "here")
        if seen["logits"].strides[1] != 1:
            raise ParameterError(f"{_CALL}: logits has gaps in its rows; allowed: none")


def _contiguous(view: View) -> bool:
    step = 1
    for extent, stride in zip(reversed(view.shape), reversed(view.strides), strict=True):
        if extent > 1 and stride != step:
            return False
        step *= extent
    return True


_OP = Op(
    _CALL, inputs=Arrays._fields, outputs=("logits", "largest"), check=_check,
    optional=("position_embedding", "norm_bias", "head_scales", "table", "maps"),
    written=("tokens", "positions", "lengths", "pages", "exchange"),
)  # fmt: skip
