"""Everything that can be wrong with a call of paged_attention with packed queries."""

from __future__ import annotations

from fkjit.arguments import one_of
from fkjit.errors import ParameterError
from fkjit.ops.attention import mixed
from fkjit.ops.attention.checks import Views, check_grid, ends, length, present, request
from fkjit.ops.attention.options import PagedOptions
from fkjit.ops.attention.page_checks import (
    check_list,
    check_scales,
    check_table,
    codes_of,
    page_size,
    storage_of,
)
from fkjit.ops.attention.shapes import (
    PACKED_AXES,
    PAGE_AXES,
    check_columns,
    check_dims,
    check_heads,
)
from fkjit.ops.op.checks import check_dtype, check_flag
from fkjit.ops.op.op import Request

_DTYPES = ("bf16", "fp16")


def check_pages(views: Views, options: PagedOptions) -> Request:
    """A call of paged_attention with packed queries."""
    call, seen = "paged_attention", present(views)
    one_of(call, "layout", options.layout, PAGE_AXES)
    seen |= {name: codes_of(seen[name]) for name in "kv"}
    axes, (q, k, v) = PAGE_AXES[options.layout], (seen[name] for name in "qkv")
    check_dtype(call, "q", q, _DTYPES)
    for name, view in (("k_pages", k), ("v_pages", v)):
        if len(view.shape) != 4:
            raise ParameterError(
                f"{call}: {name} has shape {tuple(view.shape)}; allowed: 4 dimensions "
                f"(layout={options.layout!r})"
            )
        check_columns(call, name, view)
    heads_kv, dim, dim_v = k.shape[axes[1]], k.shape[3], v.shape[3]
    if len(q.shape) != 3 or q.shape[2] != dim:
        raise ParameterError(
            f"{call}: q has shape {tuple(q.shape)}, k_pages {tuple(k.shape)}; allowed: q "
            "[total_q, Hq, D] with k's D"
        )
    check_columns(call, "q", q)
    check_heads(call, {"q": q, "k": k, "v": v}, q.shape[1], heads_kv)
    check_dims(call, dim, dim_v)
    storage = storage_of(call, k, v, q.dtype)
    check_scales(call, seen, storage, heads_kv)
    rows, pages, step = check_table(call, seen["page_table"])
    size, batch = page_size(call, k.shape, v.shape, axes[2]), ends(call, seen, "cu_seqlens_q") - 1
    check_list(call, "seq_lens", seen["seq_lens"], rows)
    if "rows" in seen:
        check_list(call, "rows", seen["rows"], batch)
    elif batch != rows:
        raise ParameterError(
            f"{call}: cu_seqlens_q has {batch} sequences, page_table {rows} rows; pass rows: which "
            "row each sequence has"
        )
    total, heads = q.shape[:2]
    problem = {
        "axes": PACKED_AXES, "page_axes": axes, "batch": batch, "total_q": total,
        "heads_q": heads, "heads_kv": heads_kv, "head_dim": dim, "head_dim_v": dim_v,
        "seqlen_q": length(call, "max_seqlen_q", options.max_seqlen_q),
        "seqlen_k": pages * size, "page_size": size, "num_pages": k.shape[0], "table_width": step,
        "storage": storage,
    }  # fmt: skip
    check_grid(call, problem)
    shapes = ((total, heads, dim_v), (heads, total))
    takes_apart = check_flag(call, "mixed", options.mixed) or problem["seqlen_q"] == 1
    problem["mixed"] = takes_apart and mixed.decodes(call, seen, problem)
    made = request(call, seen, problem, shapes, options, True)
    return mixed.with_decode(made, rows) if problem["mixed"] and made.launches else made
