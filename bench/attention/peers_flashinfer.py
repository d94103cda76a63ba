"""FlashInfer (package flashinfer-python): one prompt, a batch of prompts, paged decoding.

It builds each module with nvcc when it is first used.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from fkjit.spec import Problem

from ..core.op import Arrays, Candidate, Prepared, Refused

_WORKSPACE = 256 << 20  # bytes


def _tokens(array: Any) -> Any:
    """[B, H, S, D] -> [B * S, H, D]"""
    return array.transpose(1, 2).flatten(0, 1).contiguous()


def _rows(problem: Problem) -> Callable[[Any], Any]:
    """[B * S, H, D] -> [B, H, S, D]"""
    shape = (problem["batch"], problem["seqlen_q"], problem["heads_q"], problem["head_dim_v"])
    return lambda made: made.view(shape).transpose(1, 2)


def _takes(problem: Problem, decoding: bool) -> None:
    if problem["dtype"] == "fp32":
        raise Refused("takes fp16 and bf16")
    if decoding and problem["seqlen_q"] != 1:
        raise Refused("decoding is one query a sequence")
    if not decoding and problem["seqlen_q"] == 1:
        raise Refused("prefill is more than one query a sequence")


def _single(problem: Problem, arrays: Arrays) -> Prepared:
    _takes(problem, decoding=False)
    if problem["batch"] != 1:
        raise Refused("takes one sequence")
    prefill = import_module("flashinfer").single_prefill_with_kv_cache
    q, k, v = (_tokens(arrays[name]) for name in "qkv")
    scale, causal = problem["softmax_scale"], problem["causal"]
    return Prepared(lambda: prefill(q, k, v, causal=causal, sm_scale=scale), _rows(problem))


def _batch(problem: Problem, arrays: Arrays) -> Prepared:
    _takes(problem, decoding=False)
    torch, flashinfer = import_module("torch"), import_module("flashinfer")
    q, k, v = (_tokens(arrays[name]) for name in "qkv")
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(_workspace(torch, q), "NHD")
    wrapper.plan(
        _offsets(q, problem["batch"], problem["seqlen_q"]),
        _offsets(q, problem["batch"], problem["seqlen_k"]),
        problem["heads_q"],
        problem["heads_kv"],
        problem["head_dim"],
        causal=problem["causal"],
        sm_scale=problem["softmax_scale"],
        q_data_type=q.dtype,
    )
    return Prepared(lambda: wrapper.run(q, k, v), _rows(problem))


def _decode(page: int) -> Callable[[Problem, Arrays], Prepared]:
    def prepare(problem: Problem, arrays: Arrays) -> Prepared:
        """Keys and values in pages, in an order drawn anew: as a server leaves them."""
        _takes(problem, decoding=True)
        torch, flashinfer = import_module("torch"), import_module("flashinfer")
        batch, length = problem["batch"], problem["seqlen_k"]
        if length % page:
            raise Refused(f"{length} keys are not whole pages of {page}")
        pages = batch * length // page
        order = torch.randperm(pages, device=arrays["q"].device)
        cache = tuple(_paged(torch, arrays[name], page, order) for name in "kv")
        q = arrays["q"].squeeze(2).contiguous()
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            _workspace(torch, q), "NHD", use_tensor_cores=problem["heads_q"] > problem["heads_kv"]
        )
        wrapper.plan(
            _offsets(q, batch, length // page),
            order.int(),
            torch.full((batch,), page, dtype=torch.int32, device=q.device),
            problem["heads_q"],
            problem["heads_kv"],
            problem["head_dim"],
            page,
            sm_scale=problem["softmax_scale"],
            q_data_type=q.dtype,
        )
        return Prepared(lambda: wrapper.run(q, cache), lambda made: made.unsqueeze(2))

    return prepare


def _paged(torch: Any, array: Any, page: int, order: Any) -> Any:
    """[B, H, S, D] -> [pages, page, H, D], page i of the sequences at place order[i]."""
    tokens = _tokens(array)
    made = torch.empty_like(tokens).view(-1, page, *tokens.shape[1:])
    made[order] = tokens.view_as(made)
    return made


def _workspace(torch: Any, like: Any) -> Any:
    return torch.zeros(_WORKSPACE, dtype=torch.uint8, device=like.device)


def _offsets(like: Any, count: int, length: int) -> Any:
    """0, length, 2 * length … as int32, where `like` is."""
    torch = import_module("torch")
    return torch.arange(count + 1, dtype=torch.int32, device=like.device) * length


def _peer(name: str, prepare: Callable[[Problem, Arrays], Prepared]) -> Candidate:
    return Candidate(
        name=name, package="flashinfer-python", module="flashinfer", prepare=prepare,
        slow="builds a module with nvcc, 15 to 45 s each",
    )  # fmt: skip


PEERS = (
    _peer("flashinfer-single", _single),
    _peer("flashinfer-batch", _batch),
    _peer("flashinfer-decode-p16", _decode(16)),
    _peer("flashinfer-decode-p256", _decode(256)),
)
