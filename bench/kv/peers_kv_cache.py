"""Paged KV caches: PyTorch's indexing, eager and compiled, and FlashInfer's append."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from fkjit.spec import Problem

from ..core.op import Arrays, Candidate, Prepared, Refused


def emptied(arrays: Arrays) -> dict[str, Any]:
    """With pages of its own, full of zeros: no candidate inherits what another one wrote."""
    names = ("k_pages", "v_pages")
    return {**arrays, **{name: arrays[name].new_zeros(arrays[name].shape) for name in names}}


def _flat(problem: Problem, arrays: Arrays) -> Any:
    """(k_pages, v_pages) as [slots, heads, head_dim]."""
    if problem["storage"] != "same":
        raise Refused("keeps numbers as they are")
    if problem["layout"] != "nhd":
        raise Refused("takes pages of [page_size, heads, head_dim]")
    return tuple(arrays[f"{side}_pages"].flatten(0, 1) for side in "kv")


def _append(k: Any, v: Any, k_flat: Any, v_flat: Any, slots: Any) -> None:
    k_flat.index_copy_(0, slots, k)
    v_flat.index_copy_(0, slots, v)


def _read(k_flat: Any, v_flat: Any, slots: Any) -> Any:
    return k_flat.index_select(0, slots), v_flat.index_select(0, slots)


def _pages(arrays: Arrays) -> Callable[[Any], Any]:
    stack = import_module("torch").stack
    return lambda _: stack([arrays["k_pages"], arrays["v_pages"]])


def _torch_append(compiled: bool) -> Callable[[Problem, Arrays], Prepared]:
    def prepare(problem: Problem, arrays: Arrays) -> Prepared:
        arrays = emptied(arrays)
        torch, flat = import_module("torch"), _flat(problem, arrays)
        slots = arrays["slot_mapping"].long()
        call = torch.compile(_append) if compiled else _append
        k, v = arrays["k"], arrays["v"]
        return Prepared(lambda: call(k, v, *flat, slots), _pages(arrays))

    return prepare


def _torch_read(compiled: bool) -> Callable[[Problem, Arrays], Prepared]:
    def prepare(problem: Problem, arrays: Arrays) -> Prepared:
        torch, flat = import_module("torch"), _flat(problem, arrays)
        slots = arrays["slot_mapping"].long()
        call = torch.compile(_read) if compiled else _read
        return Prepared(lambda: call(*flat, slots), torch.stack)

    return prepare


def _flashinfer(problem: Problem, arrays: Arrays) -> Prepared:
    """One sequence of all tokens, whose pages are those that the slots name."""
    torch, flashinfer = import_module("torch"), import_module("flashinfer")
    _flat(problem, arrays := emptied(arrays))
    tokens, size = problem["tokens"], problem["page_size"]
    slots = arrays["slot_mapping"]
    device = slots.device
    pages = (slots[::size] // size).int()
    numbers = torch.arange(tokens, dtype=torch.int32, device=device)
    indptr = torch.tensor([0, len(pages)], dtype=torch.int32, device=device)
    last = torch.tensor([(tokens - 1) % size + 1], dtype=torch.int32, device=device)
    given = (arrays["k"], arrays["v"], torch.zeros_like(numbers), numbers)
    cache = (arrays["k_pages"], arrays["v_pages"])
    append = flashinfer.append_paged_kv_cache
    return Prepared(lambda: append(*given, cache, pages, indptr, last), _pages(arrays))


def _eager_and_compiled(make: Callable[[bool], Any]) -> tuple[Candidate, ...]:
    return tuple(
        Candidate(name=name, package="torch", module="torch", prepare=make(compiled))
        for name, compiled in (("torch", False), ("torch.compile", True))
    )


READ = _eager_and_compiled(_torch_read)
APPEND = (
    *_eager_and_compiled(_torch_append),
    Candidate(
        name="flashinfer", package="flashinfer-python", module="flashinfer", prepare=_flashinfer,
        slow="builds a module with nvcc, 15 to 45 s",
    ),
)  # fmt: skip
