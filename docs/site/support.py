"""The table of docs/SUPPORT.md: which kernel each call takes on each architecture.

    python -m docs.site.support            write it anew

The calls are selected as a GPU would have them, by `fkjit.prepare(…, arch=…)` without compiling;
"timed" are operations that a run in bench/results/ has measured on an H200, in that dtype and with
that head dimension.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import fkjit
from bench.core.store import read
from bench.report.tables import markdown, with_tables
from fkjit import ops
from fkjit.errors import FkjitError
from fkjit.runtime.abstract import taking

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "SUPPORT.md"
# Column -> architectures that choose alike.
ARCHS = {
    "7.5": ("sm_75",), "8.0, 8.6, 8.9": ("sm_80", "sm_86", "sm_89"), "9.0": ("sm_90a",),
    "10.0, 12.0": ("sm_100a", "sm_120a"),
}  # fmt: skip
REFUSED = "refused"
# Kernels that no GPU has run yet. README.md's Limits name them in words.
NOT_RUN: set[str] = set()


class Row(NamedTuple):
    """A call, as the page names it."""

    label: str
    op: str
    args: tuple[Any, ...]
    options: Mapping[str, Any] = MappingProxyType({})
    storage: str = "same"  # of pages: dtype that they have beside the call's


def _qkv(dtype: str, dim: int, queries: int = 4096, keys: int = 4096) -> tuple[str, str, str]:
    kv = f"{dtype}[1, 8, {keys}, {dim}]"
    return f"{dtype}[1, 32, {queries}, {dim}]", kv, kv


def _gradient(dtype: str, dim: int) -> tuple[str, ...]:
    q, k, v = _qkv(dtype, dim)
    return q, q, k, v, q, "fp32[1, 32, 4096]"


def _decode(dtype: str) -> tuple[str, ...]:
    kv = f"{dtype}[8, 8, 4096, 128]"
    return f"{dtype}[8, 32, 128]", kv, kv, "int32[8]"


def _paged(pages: str = "bf16") -> tuple[Any, ...]:
    shape = "[1024, 16, 8, 128]"
    return "bf16[8, 32, 128]", (pages + shape, pages + shape), "int32[8, 256]", "int32[8]"


_NEW_KV = ("bf16[8, 8, 128]",) * 2
_PAGES = ("bf16[1024, 16, 8, 128]",) * 2
_PACKED = ("bf16[8192, 32, 128]", *("bf16[8192, 8, 128]",) * 2, *("int32[9]",) * 2, 4096, 4096)
_GROUPS = fkjit.MoeGroups("int32[8192]", "int32[64]", "int32[1]", "int32[1024, 8]", "int32[65]",
                          "int32[64]")  # fmt: skip
_INT4 = fkjit.QuantizedTensor("uint8[4096, 2048]", "bf16[4096, 32]", "int4_group")
_FP8 = fkjit.QuantizedTensor("uint8[4096, 4096]", "fp32[4096]", "fp8_row")
_FP8_EXPERTS = (
    fkjit.QuantizedTensor("uint8[8192, 4096]", "fp32[8192, 32]", "fp8_block"),
    fkjit.QuantizedTensor("uint8[64, 1024, 4096]", "fp32[64, 8, 32]", "fp8_block"),
)
_INT8 = fkjit.QuantizedTensor("int8[4096, 4096]", "fp32[4096]", "int8_row")
ROWS = (
    Row("attention, fp16", "attention", _qkv("fp16", 128)),
    Row("attention, bf16", "attention", _qkv("bf16", 128)),
    Row("attention, bf16, head dimension 512", "attention", _qkv("bf16", 512)),
    Row("attention, fp32", "attention", _qkv("fp32", 128)),
    Row("attention with soft cap, ALiBi, bias, mask or score_mod", "attention", _qkv("bf16", 128),
        {"softcap": 30.0, "window": (1024, 0)}),
    Row("attention on int8 codes", "quantized_attention", _qkv("bf16", 128)),
    Row("attention on e4m3 codes", "quantized_attention", _qkv("bf16", 128), {"scheme": "fp8"}),
    Row("few queries of many keys", "attention", _qkv("bf16", 128, 64, 131072)),
    Row("packed sequences", "attention_varlen", _PACKED, {"causal": True}),
    Row("gradients, bf16, head dimension up to 128", "attention_backward", _gradient("bf16", 128)),
    Row("gradients, bf16, head dimension 256", "attention_backward", _gradient("bf16", 256)),
    Row("gradients, fp32", "attention_backward", _gradient("fp32", 128)),
    Row("decoding, contiguous cache", "attention_decode", _decode("bf16")),
    Row("decoding from pages", "paged_attention", _paged()),
    Row("decoding from fp8 pages", "paged_attention", _paged("float8_e4m3fn"),
        {"k_scale": "fp32[8]", "v_scale": "fp32[8]"}, "fp8"),
    Row("many new tokens from pages", "paged_attention", ("bf16[4096, 32, 128]", *_paged()[1:]),
        {"cu_seqlens_q": "int32[9]", "max_seqlen_q": 512}),
    Row("merging parts of attention", "merge_states",
        ("bf16[8, 32, 1, 128]", "fp32[8, 32, 1]") * 2),
    Row("appending to pages", "kv_append", (*_NEW_KV, _PAGES, "int32[8]")),
    Row("RoPE and appending in one", "rope_kv_append",
        ("bf16[8, 32, 128]", *_NEW_KV, _PAGES, "int32[8]", "int32[8]")),
    Row("RoPE", "rope", ("bf16[1, 32, 4096, 128]", "bf16[1, 8, 4096, 128]")),
    Row("RMSNorm", "rms_norm", ("bf16[4096, 4096]", "bf16[4096]")),
    Row("LayerNorm", "layer_norm", ("bf16[4096, 4096]", "bf16[4096]")),
    Row("reductions", "reduce_sum", ("bf16[4096, 4096]", -1)),
    Row("product, fp16", "linear", ("fp16[4096, 4096]",) * 2),
    Row("product, bf16", "linear", ("bf16[4096, 4096]",) * 2),
    Row("product, bf16, one row", "linear", ("bf16[1, 4096]", "bf16[4096, 4096]")),
    Row("product, fp32", "linear", ("fp32[4096, 4096]",) * 2),
    Row("product, fp32 as tf32", "linear", ("fp32[4096, 4096]",) * 2, {"precision": "tf32"}),
    Row("product, int4 weights, one row", "linear", ("bf16[1, 4096]", _INT4)),
    Row("product, fp8", "linear", ("bf16[4096, 4096]", _FP8)),
    Row("product, int8", "linear", ("bf16[4096, 4096]", _INT8)),
    Row("quantizing", "quantize", ("bf16[4096, 4096]", "fp8_block")),
    Row("routing and sorting of a mixture of experts", "moe_route_and_regroup",
        ("fp32[4096, 128]", 8)),
    Row("products of experts, bf16", "grouped_linear",
        ("bf16[8192, 4096]", "bf16[64, 1024, 4096]", _GROUPS)),
    Row("products of experts, fp8", "grouped_linear", (*_FP8_EXPERTS, _GROUPS)),
    Row("weighted sums of experts", "moe_combine",
        ("bf16[8192, 4096]", "int32[1024, 8]", "fp32[1024, 8]")),
)  # fmt: skip


def chosen(row: Row, arch: str) -> list[str]:
    """Ids of the kernels that the call launches there, each once; none where it is refused."""
    found: list[str] = []
    try:
        with taking(lambda spec, params, to: found.append(spec.id)):
            fkjit.prepare(row.op, *row.args, **row.options, arch=arch)
    except FkjitError:
        return []
    return list(dict.fromkeys(found))


def measured() -> list[dict[str, Any]]:
    """Times of fkjit's kernels on an H200, of all results that are kept."""
    files = (ROOT / "bench" / "results").glob("*h200*.jsonl")
    cells = [cell for path in files for run in read(path) for cell in run.cells]
    return [cell for cell in cells if cell["kind"] == "ours" and "missing" not in cell]


def _state(row: Row, kernels: list[str], cells: list[dict[str, Any]]) -> str:
    if set(kernels) & NOT_RUN:
        return "interpreted"
    op = kernels[-1].partition(".")[0]
    timed = any(cell["op"] == op and _alike(cell["problem"], row) for cell in cells)
    return "timed" if timed else "run"


def _alike(problem: dict[str, Any], row: Row) -> bool:
    dtype, _, shape = row.args[0].partition("[")
    dim = int(shape.rstrip("]").rpartition(",")[2])
    of_sequences = row.op in ("paged_attention", "attention_varlen")
    return (
        problem.get("dtype", dtype) == dtype
        and problem.get("head_dim", dim) == dim
        and problem.get("storage", "same") == row.storage
        and (not of_sequences or problem.get("page_size", 0) > 0)
    )


def lines() -> Iterator[list[str]]:
    """The table."""
    ops.load()
    seen = measured()
    yield ["", *ARCHS]
    for row in ROWS:
        cells = []
        for column, archs in ARCHS.items():
            each = {arch: chosen(row, arch) for arch in archs}
            names = {_names(kernels) for kernels in each.values()}
            text = " or ".join(sorted(names))
            first = each[archs[0]]
            cells.append(
                f"{text}: {_state(row, first, seen)}" if column == "9.0" and first else text
            )
        yield [row.label, *cells]


def _names(kernels: list[str]) -> str:
    return ", ".join(f"`{re.sub('.*[.]', '', one)}`" for one in kernels) or REFUSED


def page() -> str:
    """The page with its table as it is now."""
    return with_tables(PAGE.read_text(), {"support": markdown(lines(), range(1 + len(ARCHS)))})


if __name__ == "__main__":
    PAGE.write_text(page())
