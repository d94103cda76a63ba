"""The study's rows of a Hopper GPU: errors of the kernels themselves, needles that they find, and
how long each form takes. Nothing where there is no such GPU."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

import fkjit
from fkjit.jit.build import quiet
from fkjit.ops.quantize.schemes import SCHEMES

from . import needle
from .attention import KINDS, LENGTHS, MANY, RARE, Seen, drawn, exact, look_back
from .codes import error, pair
from .device import is_hopper

INTERVALS = (0, 1024, 512, 256)  # of needles; keys that a tensor core sums
HEADS, DIM, TIMED = (32, 8), 128, (4096, 16384, 65536)  # of what is timed, batch 1
PRODUCTS = {"4096 x 4096 x 4096": (4096, 4096, 4096), "1 x 4096 x 14336": (1, 4096, 14336)}
_COLD = 240 << 20  # bytes of weights, so that none is in L2 when its turn comes
_ROUNDS = 5

Call = Callable[..., torch.Tensor]


def _sixteen(dtype: torch.dtype, q: Any, k: Any, v: Any, **said: Any) -> torch.Tensor:
    return fkjit.attention(*(x.to(dtype) for x in (q, k, v)), **said)


def _codes(how: dict[str, Any], promote: int | None, q: Any, k: Any, v: Any, **said: Any) -> Any:
    made = fkjit.quantize_attention(*(x.bfloat16() for x in (q, k, v)), **how)
    return fkjit.quantized_attention(made, promote=promote, **said)


def _how(scheme: str, scales: str = "block", smooth: bool = False, rotate: bool = False) -> Any:
    return {"scheme": scheme, "scales": scales, "smooth_k": smooth, "rotate": rotate}


# How each form is made of codes, and after how many keys its sums are promoted.
FORMS: dict[str, tuple[dict[str, Any], int | None]] = {
    "fp8, tensor": (_how("fp8", "tensor"), None),
    "fp8, head": (_how("fp8", "head"), None),
    "fp8, block": (_how("fp8"), None),
    "fp8, block, rotated": (_how("fp8", rotate=True), None),
    "fp8, block, smooth": (_how("fp8", smooth=True), None),
    "fp8, block, smooth, rotated": (_how("fp8", smooth=True, rotate=True), None),
    "fp8, block of 128 rows, smooth": (_how("fp8", "block128", smooth=True), None),
    "fp8, block, smooth, never promoted": (_how("fp8", smooth=True), 0),
    "fp8_e5m2, block, smooth": (_how("fp8_e5m2", smooth=True), None),
    "int8, tensor": (_how("int8", "tensor"), None),
    "int8, block": (_how("int8"), None),
    "int8, block, rotated": (_how("int8", rotate=True), None),
    "int8, block, smooth": (_how("int8", smooth=True), None),
    "int8_fp8, block, smooth": (_how("int8_fp8", smooth=True), None),
}
HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
CALLS: dict[str, Call] = {
    **{name: partial(_sixteen, dtype) for name, dtype in HALVES.items()},
    **{name: partial(_codes, *form) for name, form in FORMS.items()},
}


def forms(rng: np.random.Generator, quick: bool) -> Iterator[dict[str, Any]]:
    """A record a form, kind, length, causal or not: the kernels' own errors."""
    if not is_hopper():
        return
    for keys in LENGTHS[:1] if quick else LENGTHS:
        for kind in (*KINDS, RARE):
            made = Seen(*(x.cuda() for x in drawn(rng, kind, keys, MANY)[:3]))
            for causal in (False, True):
                mask = look_back(keys, MANY).cuda() if causal else None
                right = exact(made._replace(mask=mask))
                for name, call in CALLS.items():
                    found = _found(call, made, causal)
                    yield {"part": "kernel forms", "scheme": name, "kind": kind, "keys": keys,
                           "causal": causal, "error": error(found, right)}  # fmt: skip


def _found(call: Call, seen: Seen, causal: bool) -> torch.Tensor:
    """Causal queries stand where they belong, zeros between them."""
    q, k, v = (x[None] for x in seen[:3])
    with quiet():
        if not causal:
            return call(q, k, v)[0].double()
        rows, keys = q.shape[2], k.shape[2]
        places = (torch.arange(rows, device=q.device) + 1) * keys // rows - 1
        whole = q.new_zeros(*q.shape[:2], keys, q.shape[3])
        whole[:, :, places] = q
        return call(whole, k, v, causal=True)[0][:, places].double()


def needles(rng: np.random.Generator, quick: bool) -> Iterator[dict[str, Any]]:
    """The needles of needle.py, looked for by the kernels."""
    if not is_hopper():
        return
    calls = {"bf16": CALLS["bf16"]}
    calls |= {needle.name_of(n): partial(_codes, _how("fp8"), n) for n in INTERVALS}
    for keys in LENGTHS[:1] if quick else LENGTHS:
        seen, places = needle.planted(rng, keys, needle.QUERIES)
        seen, places = Seen(*(x.cuda() for x in seen[:3])), places.cuda()
        right = exact(seen)
        for name, call in calls.items():
            o = _found(call, seen, False)
            yield {"part": "kernel needle", "sums": name, "keys": keys, "error": error(o, right),
                   "found": needle.retrieved(o, seen, places)}  # fmt: skip


# ------------------------------------------------------------------ time


def speed(rng: np.random.Generator, quick: bool) -> Iterator[dict[str, Any]]:
    """Seconds of attention and of products in each form, medians in turns."""
    if not is_hopper():
        return
    torch.manual_seed(int(rng.integers(1 << 31)))
    with quiet():
        for keys in TIMED[:1] if quick else TIMED:
            for causal in (False, True):
                yield from _attention_speed(keys, causal)
        for name, sizes in PRODUCTS.items():
            yield from _product_speed(name, *sizes)


def _attention_speed(keys: int, causal: bool) -> Iterator[dict[str, Any]]:
    q, k, v = (torch.randn(1, n, keys, DIM, device="cuda").bfloat16() for n in (*HEADS, HEADS[1]))
    calls: dict[str, Callable[[], Any]] = {
        name: partial(fkjit.attention, *(x.to(dtype) for x in (q, k, v)), causal=causal)
        for name, dtype in HALVES.items()
    }
    makes: dict[str, Callable[[], Any]] = {}
    for name, (how, promote) in FORMS.items():
        codes = fkjit.quantize_attention(q, k, v, **how)
        calls[name] = partial(fkjit.quantized_attention, codes, promote=promote, causal=causal)
        makes[name] = partial(fkjit.quantize_attention, q, k, v, **how)
    times, made = in_turns(calls), in_turns(makes)
    flops = 4.0 * HEADS[0] * keys * keys * DIM * (0.5 if causal else 1)
    for name, seconds in times.items():
        yield {"part": "attention speed", "scheme": name, "keys": keys, "causal": causal,
               "seconds": seconds, "quantize_seconds": made.get(name), "flops": flops}  # fmt: skip


def _product_speed(name: str, m: int, k: int, n: int) -> Iterator[dict[str, Any]]:
    x, plain = (torch.randn(rows, k, device="cuda").bfloat16() for rows in (m, n))
    calls: dict[str, Callable[[], Any]] = {}
    for scheme in ("bf16", *SCHEMES):
        of_x, _ = pair(scheme) if scheme in SCHEMES else (None, None)
        made = plain if scheme == "bf16" else fkjit.quantize(plain, scheme, weight=True)
        size = (
            made.numel() * 2 if scheme == "bf16" else made.data.numel() * made.data.element_size()
        )
        weights = [_copy(made) for _ in range(max(1, _COLD // size) if m == 1 else 1)]
        given = x if of_x is None or m == 1 else fkjit.quantize(x, scheme)
        calls[scheme] = partial(_each, given, weights)
    for scheme, seconds in in_turns(calls).items():
        count = len(calls[scheme].args[1])  # type: ignore[attr-defined]
        yield {"part": "product speed", "scheme": scheme, "product": name,
               "seconds": seconds / count, "flops": 2.0 * m * k * n}  # fmt: skip


def _copy(weight: Any) -> Any:
    if isinstance(weight, fkjit.QuantizedTensor):
        return weight._replace(data=weight.data.clone(), scales=weight.scales.clone())
    return weight.clone()


def _each(x: Any, weights: list[Any]) -> None:
    for weight in weights:
        fkjit.linear(x, weight)


def in_turns(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Seconds of each call in a CUDA graph: the median of rounds in which all take their turn."""
    graphs = {name: _graph(call) for name, call in calls.items()}
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(_ROUNDS + 1):
        for name, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            if number:
                taken[name].append(begin.elapsed_time(end) * 1e-3)
    return {name: statistics.median(times) for name, times in taken.items()}


def _graph(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph
