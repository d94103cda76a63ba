"""Packed sequences in checks of kernels on codes: each sequence is a dense problem of its own,
whose arrays are put where packed ones are (`templates/attention/packed_codes.cuh`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np

from fkjit.ops.attention.quantized.quantize_kernels import KEY_ROOM, ROWS, key_places
from fkjit.ops.attention.shapes import PACKED_AXES
from fkjit.spec import Arrays, Params, Problem, Verification

_SHORT = (5, 70)  # rows and keys of the first of two sequences; the other is the dense problem's
_COLUMNS = ("k_means", "v_scales")  # a sequence has its own
_SCRATCH = ("workspace", "counters")  # as much for each sequence as for the one that wants most
_PLACES = ("k_scales", "v", "v_codes")  # keys at the places of packed sequences
_DENSE_AXES = (0, 1, 2, 3)


def also_packed(dense: Verification) -> Verification:
    """The same of a kernel with a parameter `packed`."""

    def problems(params: Params, scale: str) -> list[dict[str, Any]]:
        made = [dict(p) for p in dense.problems(params, scale)]
        return [_packed(made[0])] if params["packed"] else made

    def inputs(params: Params, p: Problem, rng: np.random.Generator) -> Arrays:
        if not params["packed"]:
            return dense.inputs(params, p, rng)
        p["parts"][:] = [dense.inputs(params, sub, rng) for sub in _subs(p)]
        made = _joined(p, p["parts"], given=True)
        for name, place in (("cu_seqlens_q", 0), ("cu_seqlens_k", 1)):
            made[name] = np.array(_ends(p, place), np.int32)
        return made

    def outputs(params: Params, p: Problem) -> Arrays:
        if not params["packed"]:
            return dense.outputs(params, p)
        made = _joined(p, [dense.outputs(params, sub) for sub in _subs(p)])
        if "v_codes" in made:
            made["v_codes"][...] = 0x55
        return made

    def reference(p: Problem, arrays: Any) -> Arrays:
        assert dense.reference is not None
        if "parts" not in p:
            return dense.reference(p, arrays)
        return _joined(
            p, [dense.reference(*each) for each in zip(_subs(p), p["parts"], strict=True)]
        )

    return replace(dense, problems=problems, inputs=inputs, outputs=outputs, reference=reference)


def _packed(p: dict[str, Any]) -> dict[str, Any]:
    lengths = (_SHORT, (p["seqlen_q"], p["seqlen_k"]))
    most, total = (tuple(map(how, zip(*lengths, strict=True))) for how in (max, sum))
    return {
        **p, "axes": PACKED_AXES, "batch": len(lengths), "lengths": lengths, "parts": [],
        "seqlen_q": most[0], "seqlen_k": most[1], "total_q": total[0], "total_k": total[1],
    }  # fmt: skip


def _subs(p: Problem) -> list[dict[str, Any]]:
    kept = {k: v for k, v in p.items() if k not in ("total_q", "total_k", "lengths", "parts")}
    return [
        {**kept, "batch": 1, "axes": _DENSE_AXES, "seqlen_q": rows, "seqlen_k": keys}
        for rows, keys in p["lengths"]
    ]


def _ends(p: Problem, place: int) -> list[int]:
    return [0, *accumulate(lengths[place] for lengths in p["lengths"])]


def _joined(p: Problem, parts: Sequence[Arrays], given: bool = False) -> Arrays:
    """`given`: q, k and v may be the caller's."""
    return {name: _join(p, name, [part[name] for part in parts], given) for name in parts[0]}


def _join(p: Problem, name: str, arrays: Sequence[np.ndarray], given: bool) -> np.ndarray:
    if name in _SCRATCH:
        most = max(arrays, key=len)
        return np.concatenate([most] * len(arrays))
    if name in _COLUMNS:
        return np.concatenate(arrays)
    if name == "span_scales":  # all of q, then all of k
        split = [np.split(each, [p["heads_q"]]) for each in arrays]
        return np.concatenate([half for halves in zip(*split, strict=True) for half in halves])
    is_16_bits = given and arrays[0].dtype.itemsize == 2 and name in "qkv"
    if name == "o" or is_16_bits:
        return np.concatenate([np.ascontiguousarray(x[0].swapaxes(0, 1)) for x in arrays])
    if name in _PLACES:
        return _at_places(p, arrays, 3 if name.startswith("v") else 2)
    whole = np.concatenate(arrays, axis=2)
    return whole[0] if name == "lse" else whole


def _at_places(p: Problem, arrays: Sequence[np.ndarray], axis: int) -> np.ndarray:
    """Codes of V^T, or scales of K, one for ROWS places."""
    size = 1 if axis == 3 else ROWS
    shape = list(arrays[0].shape)
    shape[axis] = key_places(p) // size
    fill = 0 if axis == 3 else np.nan
    whole = np.full(shape, fill, arrays[0].dtype)
    for i, (start, x) in enumerate(zip(_ends(p, 1), arrays, strict=False)):
        first = (start + i * KEY_ROOM) // ROWS * ROWS // size
        whole[..., first : first + x.shape[axis]] = x
    return whole
