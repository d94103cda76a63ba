"""Copying pages of a KV cache: for sequences that stop sharing one, and for defragmentation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fkjit.ops.op.op import Launch, Op, Request
from fkjit.ops.op.shapes import MAX_GRID
from fkjit.runtime.interop import View
from fkjit.spec import Dim3, KernelSpec, Param, Params, Problem, Work, register

_CALL = "kv_copy"
_WORD = 16  # bytes of an access


def kv_copy(storage: Any, pairs: Any) -> None:
    """Copy pages within each plane of a cache.

    Args:
        storage: [planes, num_pages, page_bytes] uint8, contiguous, pages of whole 16 bytes.
        pairs: [copies, 2] int32: source and target. No target is a source or stands twice.
    """
    _OP((storage, pairs))


def _check(views: Mapping[str, View | None]) -> Request:
    storage, pairs = views["storage"], views["pairs"]
    assert storage is not None and pairs is not None
    planes, num_pages, page_bytes = storage.shape
    problem = {
        "planes": planes, "num_pages": num_pages, "page_bytes": page_bytes,
        "copies": pairs.shape[0],
    }  # fmt: skip
    most = max(1, MAX_GRID // max(1, planes * _pieces(_TUNED, problem)))
    assert problem["copies"] <= most, "more pages than a cache in memory can have"
    launches = (Launch(COPY, _TUNED, problem),) if problem["copies"] else ()
    return Request({"storage": storage, "pairs": pairs}, {}, launches)


def _pieces(params: Params, problem: Problem) -> int:
    """Blocks of a page."""
    return -(-problem["page_bytes"] // (_WORD * params["threads"] * params["unroll"]))


def grid(params: Params, problem: Problem) -> Dim3:
    """Pieces of every page to copy, in every plane."""
    return (_pieces(params, problem) * problem["copies"] * problem["planes"], 1, 1)


def arguments(params: Params, problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Kernel arguments by name."""
    return {
        **{"storage": arrays["storage"], "pairs": arrays["pairs"]},
        **{"num_pages": problem["num_pages"], "page_words": problem["page_bytes"] // _WORD},
        **{"copies": problem["copies"], "pieces": _pieces(params, problem)},
    }


_TUNED: dict[str, Any] = {"threads": 256, "unroll": 4}

COPY = register(
    KernelSpec(
        op=_CALL,
        name="pages",
        source="kv/copy.cu",
        entry="kv_copy",
        pdl=True,
        doc="pages of a KV cache to other pages, in every layer",
        params=(
            Param("threads", (256,), "threads of a block", tunable=True),
            Param("unroll", (4,), "16-byte accesses of a thread", tunable=True),
        ),
        block=lambda params: (params["threads"], 1, 1),
        grid=grid,
        arguments=arguments,
        work=Work(
            bytes=lambda problem: (
                2.0 * problem["planes"] * problem["copies"] * problem["page_bytes"]
            ),
            interpreter_work=lambda params, problem: (
                problem["planes"] * problem["copies"] * problem["page_bytes"] / 4
            ),
        ),
        verification="fkjit.ops.kv.cases:COPY",
    )
)

_OP = Op(_CALL, inputs=("storage", "pairs"), check=_check, written=("storage",))
