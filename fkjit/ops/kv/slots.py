"""`fkjit.kv_slots`: where the tokens of sequences lie, from tables on the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fkjit.arguments import whole
from fkjit.errors import ArgumentTypeError, ParameterError
from fkjit.ops.kv.planes import refuse_traced
from fkjit.ops.op.checks import check_dtype, check_flag, check_shape
from fkjit.ops.op.op import Launch, Op, Output, Request
from fkjit.runtime.interop import CPU, View, as_numpy
from fkjit.spec import KernelSpec, Param, Params, Problem, Work, register

_CALL = "kv_slots"


def kv_slots(
    cache: Any,
    rows: Any,
    cu_seqlens: Any = None,
    *,
    num_tokens: int | None = None,
    append: bool = True,
) -> Any:
    """The slots of tokens of some sequences of a `PagedKVCache`.

    Args:
        cache: the cache; its tables on the device are read when the kernel runs.
        rows: [sequences] int32, of `cache.rows(...)`, each at most once; below 0: no sequence.
        cu_seqlens: [sequences + 1] int32 on the device: the tokens of sequence i are those from
            cu_seqlens[i] to cu_seqlens[i + 1]; default: one token for each sequence.
        num_tokens: cu_seqlens[-1], where there is a cu_seqlens: the host needs to know it.
        append: True: tokens that come after those there are. The lengths on the device count them
            from now on (`cache.advance` counts them on the host). Tokens that go beyond what
            `cache.reserve` made room for have slot -1 and are not counted. False: the first tokens
            of each sequence; -1 where it has fewer.

    Returns:
        [tokens] int32, for `kv_append` or `kv_read`; -1 for tokens of rows below 0.

    One launch, which does not wait; it may be captured into a CUDA graph, and reads the tables at
    each replay. ParameterError, ArgumentTypeError, DeviceError, CaptureError as for `kv_append`;
    CaptureError also where the host has changes that the device's tables lack: `cache.flush()`.

    Example:
        >>> cache = fkjit.PagedKVCache(
        ...     8, page_size=16, num_kv_heads=1, head_dim=8, dtype="fp32", device="cpu",
        ...     framework="numpy",
        ... )
        >>> a, b = cache.allocate(), cache.allocate()
        >>> cache.reserve([a, b], 1)
        >>> fkjit.kv_slots(cache, cache.rows([a, b])) % 16  # each begins a page
        array([0, 0], dtype=int32)
    """
    return _OP(*_call(cache, rows, cu_seqlens, num_tokens, append))


def _prepare(
    cache: Any,
    rows: Any,
    cu_seqlens: Any = None,
    *,
    num_tokens: int | None = None,
    append: bool = True,
) -> None:
    """Compile and load what the call with the same arguments needs, without running it."""
    arrays, outputs, options = _call(cache, rows, cu_seqlens, num_tokens, append)
    _OP.prepare([*arrays, *outputs], options)


def _call(cache: Any, rows: Any, cu_seqlens: Any, num_tokens: Any, append: bool) -> Any:
    if not hasattr(cache, "page_table"):
        raise ArgumentTypeError(
            f"{_CALL}: cache is a {type(cache).__qualname__}; allowed: a PagedKVCache"
        )
    refuse_traced(_CALL)
    if (cu_seqlens is None) != (num_tokens is None):
        raise ParameterError(f"{_CALL}: cu_seqlens and num_tokens go together: pass both or none")
    if num_tokens is not None:
        num_tokens = whole(_CALL, "num_tokens", num_tokens, 0, 2**31 - 1)
    append = check_flag(_CALL, "append", append)
    cache.flush()
    tables = (cache.page_table, cache.lengths, cache.capacities)
    return (rows, cu_seqlens, *tables), (None,), (num_tokens, cache.page_size, append)


def _check(
    views: Mapping[str, View | None], tokens: int | None, page_size: int, append: bool
) -> Request:
    rows, ends, table = views["rows"], views["cu_seqlens"], views["page_table"]
    assert rows is not None and table is not None
    _check_list("rows", rows)
    sequences = rows.shape[0]
    tokens = sequences if tokens is None else tokens
    if ends is not None:
        _check_list("cu_seqlens", ends)
        check_shape(_CALL, "cu_seqlens", ends, (sequences + 1,), "[sequences + 1], here")
    if rows.device == CPU:
        _check_values(as_numpy(rows), None if ends is None else as_numpy(ends), tokens)
    inputs = {name: views[name] for name in _INPUTS}
    made = {"slot_mapping": Output((tokens,), "int32")}
    problem = {
        **{"sequences": sequences, "tokens": tokens, "append": append, "page_size": page_size},
        **{"max_sequences": table.shape[0], "max_pages": table.shape[1]},
    }
    return Request(inputs, made, (Launch(SLOTS, _TUNED, problem),) if sequences else ())


def _check_list(name: str, view: View) -> None:
    check_dtype(_CALL, name, view, ("int32",))
    if len(view.shape) != 1 or (view.shape[0] > 1 and view.strides[0] != 1):
        raise ParameterError(
            f"{_CALL}: {name} has shape {tuple(view.shape)}, strides {tuple(view.strides)}; "
            "allowed: one dimension, contiguous"
        )


def _check_values(rows: np.ndarray, ends: np.ndarray | None, tokens: int) -> None:
    """On the CPU, where they can be looked at."""
    known = rows[rows >= 0]
    if len(np.unique(known)) < known.size:
        raise ParameterError(f"{_CALL}: rows={rows.tolist()} has a row more than once")
    if ends is not None and (ends[0] != 0 or ends[-1] != tokens or (np.diff(ends) < 0).any()):
        raise ParameterError(
            f"{_CALL}: cu_seqlens={ends.tolist()}; allowed: 0 to num_tokens ({tokens}), rising"
        )


def arguments(params: Params, problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Kernel arguments by name."""
    return {
        **{name: arrays.get(name) for name in (*_INPUTS, "slot_mapping")},
        **{name: problem[name] for name in ("tokens", "max_sequences", "max_pages", "append")},
        "page_log2": problem["page_size"].bit_length() - 1,
    }


def _worth_timing(params: Params) -> list[Problem]:
    """Those that leave the cache's lengths as they are."""
    made = SLOTS.verification.problems(params, "full")
    return [problem for problem in made if not problem["append"]]


_TUNED: dict[str, Any] = {"threads": 512}

SLOTS = register(
    KernelSpec(
        op=_CALL,
        name="rows",
        source="kv/slots.cu",
        entry="kv_slots",
        pdl=True,
        doc="slots of tokens of a paged KV cache, from its tables; counts those appended",
        params=(Param("threads", (512,), "threads of a block", tunable=True),),
        block=lambda params: (params["threads"], 1, 1),
        grid=lambda params, problem: (problem["sequences"], 1, 1),
        arguments=arguments,
        work=Work(
            bytes=lambda problem: 4.0 * (problem["tokens"] + 3 * problem["sequences"]),
            bench=_worth_timing,
            interpreter_work=lambda params, problem: 8.0 * problem["tokens"],
        ),
        verification="fkjit.ops.kv.cases:SLOTS",
    )
)

_INPUTS = ("rows", "cu_seqlens", "page_table", "lengths", "capacities")
_OP = Op(
    _CALL,
    inputs=_INPUTS,
    outputs=("slot_mapping",),
    check=_check,
    optional=("cu_seqlens",),
    written=("lengths",),
)
kv_slots.prepare = _prepare  # type: ignore[attr-defined]
