"""Decoding: PyTorch's attention where keys are in one piece, FlashInfer's where they are in pages.

FlashInfer builds each module with nvcc when it is first used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

from fkjit.spec import Problem

from ..core.op import Arrays, Candidate, Prepared, Refused
from . import peers_torch

_WORKSPACE = 256 << 20  # bytes
_BACKENDS = ("sdpa", "sdpa-cudnn", "sdpa-flash")


def _in_one_piece(prepare: Callable[[Problem, Arrays], Prepared]) -> Any:
    def prepared(problem: Problem, arrays: Arrays) -> Prepared:
        if problem["page_size"] or problem["storage"] != "same" or problem["layout"] != "hnd":
            raise Refused("takes [B, H, S, D] in q's dtype")
        return prepare({**problem, "seqlen_k": problem["longest"]}, arrays)

    return prepared


def _flashinfer(tensor_cores: bool) -> Callable[[Problem, Arrays], Prepared]:
    def prepare(problem: Problem, arrays: Arrays) -> Prepared:
        """The very pages and tables that ours reads."""
        size = problem["page_size"]
        if not size or problem["seqlen_q"] != 1:
            raise Refused("takes one new token, and pages")
        if problem["storage"] != "same":
            raise Refused("is measured with keys and values as they are")
        torch, flashinfer = import_module("torch"), import_module("flashinfer")
        q, table = arrays["q"].squeeze(2).contiguous(), arrays["page_table"]
        lengths = torch.tensor(problem["lengths"])
        pages = -(-lengths // size)
        indptr = torch.cat([torch.zeros(1, dtype=torch.int64), pages.cumsum(0)]).int()
        indices = torch.cat([row[:n] for row, n in zip(table, pages.tolist(), strict=True)])
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            torch.zeros(_WORKSPACE, dtype=torch.uint8, device=q.device),
            problem["layout"].upper(),
            use_tensor_cores=tensor_cores,
        )
        wrapper.plan(
            indptr.to(q.device), indices, ((lengths - 1) % size + 1).int().to(q.device),
            problem["heads_q"], problem["heads_kv"], problem["head_dim"], size,
            sm_scale=problem["softmax_scale"], q_data_type=q.dtype,
        )  # fmt: skip
        cache = (arrays["k"], arrays["v"])
        return Prepared(lambda: wrapper.run(q, cache), lambda made: made.unsqueeze(2))

    return prepare


PEERS = (
    *(
        replace(peer, prepare=_in_one_piece(peer.prepare))
        for peer in peers_torch.PEERS
        if peer.name in _BACKENDS
    ),
    *(
        Candidate(
            name=name, package="flashinfer-python", module="flashinfer",
            prepare=_flashinfer(tensor_cores),
            slow="builds a module with nvcc, 15 to 45 s each",
        )
        for name, tensor_cores in (("flashinfer", True), ("flashinfer-cuda-cores", False))
    ),
)  # fmt: skip
