"""Copying pages of a KV cache in Triton, the twin of kernels_cu/kv/copy.cu.

A program copies BLOCK words of 8 bytes of a page in one plane.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fkjit.spec import Problem

from ..core.op import Arrays, Prepared, Refused


def _config(block: int, warps: int) -> triton.Config:
    return triton.Config({"BLOCK": block}, num_warps=warps)


_ALL = [_config(512, 4), _config(1024, 4), _config(2048, 8), _config(4096, 8)]
_INTERPRETED = [_config(16, 4)]  # Triton's interpreter times nothing


@triton.autotune(
    configs=_INTERPRETED if triton.knobs.runtime.interpret else _ALL,
    key=["page_words", "copies"],
)
@triton.jit
def _copy(
    storage,  # [planes, num_pages, page_words]
    pairs,  # [copies, 2]: source and target page
    num_pages,
    page_words,
    copies,
    BLOCK: tl.constexpr,
):
    pieces = tl.cdiv(page_words, BLOCK)
    piece, page = tl.program_id(0) % pieces, tl.program_id(0) // pieces
    plane, copy = (page // copies).to(tl.int64), page % copies
    source = tl.load(pairs + 2 * copy)
    target = tl.load(pairs + 2 * copy + 1)
    word = piece * BLOCK + tl.arange(0, BLOCK)
    inside, base = word < page_words, plane * num_pages
    x = tl.load(storage + (base + source) * page_words + word, mask=inside)
    tl.store(storage + (base + target) * page_words + word, x, mask=inside)


def kv_copy(storage: torch.Tensor, pairs: torch.Tensor) -> None:
    """Pages of storage [planes, num_pages, words] int64, from and to those of each pair."""
    planes, num_pages, words = storage.shape
    copies = len(pairs)
    if copies:
        _copy[lambda tiles: (triton.cdiv(words, tiles["BLOCK"]) * copies * planes,)](
            storage, pairs, num_pages, words, copies
        )


def prepare(problem: Problem, arrays: Arrays) -> Prepared:
    """The twin on a problem of the benchmark."""
    if problem["page_bytes"] % 8:
        raise Refused("takes pages of whole 8 bytes")
    storage, pairs = arrays["storage"], arrays["pairs"]
    words = storage.view(torch.int64)
    return Prepared(lambda: kv_copy(words, pairs), lambda _: storage[0, pairs[:, 1].long()])
