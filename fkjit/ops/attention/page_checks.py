"""What can be wrong with pages, page tables and lengths of a cache that attention reads, and with
what its numbers are kept as."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fkjit.errors import ParameterError
from fkjit.ops.kv.problem import CODES, check_scales_there
from fkjit.ops.op.checks import check_dtype, check_shape
from fkjit.runtime.interop import View, torch_dtype

MOST_TOKENS = 256  # of a page
_E4M3 = "float8_e4m3fn"  # of torch and ml_dtypes; to kernels it is bytes
_STORAGES = {"uint8": "fp8", "int8": "int8"}


def page_size(call: str, k: Sequence[int], v: Sequence[int], tokens_at: int) -> int:
    """Of pages of these shapes, whose tokens stand at `tokens_at`."""
    size = k[tokens_at]
    if tuple(k[:3]) != tuple(v[:3]) or size < 1 or size & (size - 1) or size > MOST_TOKENS:
        raise ParameterError(
            f"{call}: k_pages has shape {tuple(k)}, v_pages {tuple(v)}; allowed: alike, "
            '[num_pages, page_size, heads, D] (layout="nhd") or [num_pages, heads, page_size, D] '
            f'("hnd"), page_size a power of two up to {MOST_TOKENS}'
        )
    return size


def check_table(call: str, table: View) -> tuple[int, int, int]:
    """Rows, pages of a row, and elements from row to row."""
    check_dtype(call, "page_table", table, ("int32",))
    if len(table.shape) != 2 or (table.shape[1] > 1 and table.strides[1] != 1):
        raise ParameterError(
            f"{call}: page_table has shape {tuple(table.shape)}, strides {tuple(table.strides)}; "
            "allowed: [sequences, pages], rows contiguous"
        )
    rows, pages = table.shape
    return rows, pages, table.strides[0] if rows > 1 else pages


def check_list(call: str, name: str, view: View, size: int) -> None:
    """int32, one for each of `size` sequences."""
    check_dtype(call, name, view, ("int32",))
    check_shape(call, name, view, (size,), "one for each sequence, here")
    if size > 1 and view.strides[0] != 1:
        raise ParameterError(f"{call}: {name} must be contiguous")


# ------------------------------------------------------------------ quantized


def codes_of(view: View) -> View:
    """Keys or values as they are; but fp8 as bytes, which every framework has."""
    if view.dtype != _E4M3:
        return view
    kind, array, pointer, code = view.kind, view.array, view.pointer, CODES["fp8"]
    array = array.view(torch_dtype(code) if kind == "torch" else code)
    return View(kind, array, pointer, view.shape, view.strides, code, view.device, view.source)


def storage_of(call: str, k: View, v: View, dtype: str) -> str:
    """What k and v are in memory: "same" as q, "fp8" or "int8"."""
    stored = k.dtype
    if stored == v.dtype == dtype:
        return "same"
    check_dtype(call, "k", k, (dtype, *CODES.values()))
    check_dtype(call, "v", v, (stored,))
    return _STORAGES.get(stored, "same")


def check_scales(call: str, seen: Mapping[str, View], storage: str, heads: int) -> None:
    """One fp32 a head where keys and values are quantized, none elsewhere."""
    if storage == "same" and "k_scale" not in seen and "v_scale" not in seen:
        return
    check_scales_there(call, seen, storage)
    for name in ("k_scale", "v_scale"):
        view = seen.get(name)
        if view is not None:
            check_dtype(call, name, view, ("fp32",))
            check_shape(call, name, view, (heads,), "[heads], here")
            if heads > 1 and view.strides[0] != 1:
                raise ParameterError(f"{call}: {name} must be contiguous")
