"""Rotary embeddings of PyTorch, eager and compiled, and of FlashInfer."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from fkjit.ops.rope.frequencies import frequencies
from fkjit.spec import Problem

from ..core.op import Arrays, Candidate, Prepared, Refused


def in_place(q: Any, k: Any, turn: Callable[[Any, Any], Any]) -> Prepared:
    """What is timed turns the same rows on and on; what is judged begins anew."""
    target = q.clone(), k.clone()

    def once(_: Any) -> Any:
        fresh = q.clone(), k.clone()
        turn(*fresh)
        return fresh[0]

    return Prepared(lambda: turn(*target), once)


def _textbook(problem: Problem, arrays: Arrays) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The rotation of halves as models spell it in PyTorch, and what it is called with.

    Cosines and sines are made beforehand and lie beside the rows, in the dtype of q.
    """
    if problem["interleaved"] or problem["inplace"]:
        raise Refused("turns halves, into new arrays")
    torch, q = import_module("torch"), arrays["q"]
    turning = torch.from_numpy(frequencies(q.shape[-1], problem["theta"], None).astype("f8"))
    angle = torch.arange(problem["length"])[:, None] * torch.cat([turning, turning])
    angle = angle if problem["layout"] == "bhsd" else angle[:, None]
    half = q.shape[-1] // 2

    def turn(x: Any, cosine: Any, sine: Any) -> Any:
        other = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
        return x * cosine + other * sine

    def rope(q: Any, k: Any, cosine: Any, sine: Any) -> Any:
        return turn(q, cosine, sine), turn(k, cosine, sine)

    return rope, (q, arrays["k"], angle.cos().to(q), angle.sin().to(q))


def _eager(problem: Problem, arrays: Arrays) -> Prepared:
    rope, arguments = _textbook(problem, arrays)
    return Prepared(lambda: rope(*arguments), lambda made: made[0])


def _compiled(problem: Problem, arrays: Arrays) -> Prepared:
    rope, arguments = _textbook(problem, arrays)
    torch = import_module("torch")
    import_module("torch._dynamo").reset()  # a fresh compilation, no dynamic shapes
    made = torch.compile(rope, dynamic=False)
    return Prepared(lambda: made(*arguments), lambda made: made[0])


def _flashinfer(problem: Problem, arrays: Arrays) -> Prepared:
    if problem["layout"] != "thd" or problem["dtype"] == "fp32":
        raise Refused("takes flat fp16 and bf16 with positions")
    library = import_module("flashinfer")
    q, k, ids = arrays["q"], arrays["k"], arrays["positions"].int()
    if problem["source"] == "fused":
        options = {"interleave": problem["interleaved"], "rope_theta": problem["theta"]}
        if problem["inplace"]:
            turn = library.apply_rope_pos_ids_inplace
            return in_place(q, k, lambda q, k: turn(q, k, ids, **options))
        return Prepared(
            lambda: library.apply_rope_pos_ids(q, k, ids, **options), lambda made: made[0]
        )
    flat, table, dim = (q.flatten(1), k.flatten(1)), arrays["table"], problem["head_dim"]
    neox = not problem["interleaved"]
    if problem["inplace"]:
        into = library.apply_rope_with_cos_sin_cache_inplace

        def turn(q: Any, k: Any) -> None:
            into(ids, q.flatten(1), k.flatten(1), dim, table, is_neox=neox)

        return in_place(q, k, turn)
    cached = library.apply_rope_with_cos_sin_cache
    return Prepared(
        lambda: cached(ids, *flat, dim, table, is_neox=neox), lambda made: made[0].view_as(q)
    )


PEERS = (
    Candidate(name="eager", package="torch", module="torch", prepare=_eager),
    Candidate(
        name="compile", package="torch", module="torch", prepare=_compiled,
        slow="torch.compile takes seconds a case",
    ),
    Candidate(
        name="flashinfer", package="flashinfer-python", module="flashinfer", prepare=_flashinfer,
        slow="builds a module with nvcc, 15 to 45 s each",
    ),
)  # fmt: skip
