"""PyTorch's attention: the textbook in eager mode, that compiled, and SDPA with each backend."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from fkjit.spec import Problem

from ..core.op import Arrays, Candidate, Prepared, Refused

_SCORES_BYTES = 24 << 30  # more than this for the scores is not worth the wait
# How a backend says that a problem is not for it.
_NO_KERNEL = ("No available kernel", "No viable backend", "No valid execution plan")


def _textbook(problem: Problem, arrays: Arrays) -> Callable[..., Any]:
    """matmul, softmax, matmul; the mask and repeated KV heads are made beforehand."""
    torch = import_module("torch")
    scale = problem["softmax_scale"]
    mask = _mask(torch, problem, arrays["q"].device) if problem["causal"] else None

    def attention(q: Any, k: Any, v: Any) -> Any:
        scores = torch.matmul(q, k.transpose(-1, -2)) * scale
        if mask is not None:
            scores = scores + mask
        return torch.matmul(torch.softmax(scores, -1), v)

    return attention


def _mask(torch: Any, problem: Problem, device: Any) -> Any:
    sq, sk = problem["seqlen_q"], problem["seqlen_k"]
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[problem["dtype"]]
    hidden = torch.full((sq, sk), float("-inf"), dtype=kind, device=device)
    return hidden.triu(1 + sk - sq)


def _fits(problem: Problem, size: int | None = None) -> None:
    """Refuse what would fill the memory with scores of `size` bytes (None: the dtype's)."""
    size = size or (4 if problem["dtype"] == "fp32" else 2)
    pairs = problem["seqlen_q"] * problem["seqlen_k"]
    need = 3 * size * problem["batch"] * problem["heads_q"] * pairs
    if need > _SCORES_BYTES:
        raise Refused(f"its score matrices would take {need / 2**30:.0f} GiB")


def _all_heads(problem: Problem, arrays: Arrays) -> tuple[Any, Any, Any]:
    """q, k, v with a KV head for each query head."""
    group = problem["heads_q"] // problem["heads_kv"]
    k, v = (
        arrays[name].repeat_interleave(group, 1) if group > 1 else arrays[name] for name in "kv"
    )
    return arrays["q"], k, v


def _eager(problem: Problem, arrays: Arrays) -> Prepared:
    _fits(problem)
    attention, tensors = _textbook(problem, arrays), _all_heads(problem, arrays)
    return Prepared(lambda: attention(*tensors))


def _compiled(problem: Problem, arrays: Arrays) -> Prepared:
    _fits(problem)
    torch = import_module("torch")
    import_module("torch._dynamo").reset()  # a fresh compilation, no dynamic shapes
    attention = torch.compile(_textbook(problem, arrays), mode="max-autotune", dynamic=False)
    tensors = _all_heads(problem, arrays)
    # Its result lives in the memory of its own CUDA graph, which the next call overwrites.
    return Prepared(lambda: attention(*tensors), capturable=False)


def _is_ragged(problem: Problem) -> bool:
    return problem["causal"] and problem["seqlen_q"] != problem["seqlen_k"]


def _own_choice(problem: Problem, arrays: Arrays) -> Prepared:
    """SDPA as most people call it: PyTorch chooses the backend."""
    if _is_ragged(problem):
        raise Refused("is_causal is aligned to the top left here, ours to the bottom right")
    grouped, causal = problem["heads_q"] != problem["heads_kv"], problem["causal"]
    q, k, v = (arrays[name] for name in "qkv")
    attention = import_module("torch").nn.functional.scaled_dot_product_attention
    return Prepared(lambda: attention(q, k, v, is_causal=causal, enable_gqa=grouped))


def _to_the_last_key(problem: Problem, arrays: Arrays) -> Callable[..., Any]:
    """Causal where queries and keys differ in number, which FlashAttention-2 alone has."""
    bias = import_module("torch.nn.attention.bias")
    mask = bias.causal_lower_right(problem["seqlen_q"], problem["seqlen_k"])
    grouped = problem["heads_q"] != problem["heads_kv"]
    q, k, v = (arrays[name] for name in "qkv")
    attention = import_module("torch").nn.functional.scaled_dot_product_attention
    return lambda: attention(q, k, v, attn_mask=mask, enable_gqa=grouped)


def _sdpa(backend: str) -> Callable[[Problem, Arrays], Prepared]:
    def prepare(problem: Problem, arrays: Arrays) -> Prepared:
        choice = import_module("torch.nn.attention")
        if backend == "MATH":
            _fits(problem, size=4)  # it works in fp32
        if backend == "FLASH_ATTENTION" and _is_ragged(problem):
            attention = _to_the_last_key(problem, arrays)
        else:
            attention = _own_choice(problem, arrays).call
        chosen = getattr(choice.SDPBackend, backend)

        def call() -> Any:
            with choice.sdpa_kernel(chosen):
                return attention()

        try:
            call()
        except RuntimeError as error:
            if not any(text in str(error) for text in _NO_KERNEL):
                raise
            raise Refused("no kernel of this backend for this problem") from error
        return Prepared(call)

    return prepare


PEERS = (
    Candidate(name="eager", package="torch", module="torch", prepare=_eager),
    Candidate(
        name="compile", package="torch", module="torch", prepare=_compiled,
        slow="torch.compile(mode='max-autotune') takes up to a minute a case",
    ),
    Candidate(name="sdpa", package="torch", module="torch", prepare=_own_choice),
    *(
        Candidate(name=f"sdpa-{short}", package="torch", module="torch", prepare=_sdpa(backend))
        for short, backend in (
            ("flash", "FLASH_ATTENTION"),
            ("cudnn", "CUDNN_ATTENTION"),
            ("efficient", "EFFICIENT_ATTENTION"),
            ("math", "MATH"),
        )
    ),
)  # fmt: skip
