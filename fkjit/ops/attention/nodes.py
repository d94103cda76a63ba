"""`fkjit.attention` as PyTorch's operators fkjit::attention and fkjit::attention_lse."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from fkjit.ops.attention import autograd
from fkjit.ops.attention.checks import LAYOUTS
from fkjit.ops.op import torch_ops

_ARGUMENTS = (
    "(Tensor q, Tensor k, Tensor v, bool causal=False, float? softmax_scale=None, "
    "int[]? block=None, str impl='auto', str layout='bhsd', bool? deterministic=True) -> "
)


def define(attention: Callable[..., Any]) -> None:
    """Two operators, since the number of results belongs to a schema: with lse and without."""

    def run(lse: bool) -> Callable[..., Any]:
        def made(
            q: Any, k: Any, v: Any, causal: bool = False, softmax_scale: float | None = None,
            block: Sequence[int] | None = None, impl: str = "auto", layout: str = "bhsd",
            deterministic: bool | None = True,
        ) -> Any:  # fmt: skip
            return attention(
                q, k, v, causal=causal, softmax_scale=softmax_scale, block=_tile(block), impl=impl,
                return_lse=lse, layout=layout, deterministic=deterministic,
            )  # fmt: skip

        return made

    for lse, results, fake in ((False, "Tensor", _fake), (True, "(Tensor, Tensor)", _fake_lse)):
        name = "attention_lse" if lse else "attention"
        torch_ops.define(
            torch_ops.Operator(
                name, _ARGUMENTS + results, run(lse), fake, _vmap(name), _gradients(lse), autocast=3
            )
        )


def traced(
    q: Any, k: Any, v: Any, causal: bool, softmax_scale: float | None, block: Any, impl: str,
    return_lse: bool, layout: str, deterministic: bool | None = True,
) -> Any:  # fmt: skip
    """What `attention` is while torch.compile traces it, or under torch.func.vmap."""
    tile = block if block is None else [block] if isinstance(block, int) else list(block)
    operator = torch_ops.known.attention_lse if return_lse else torch_ops.known.attention
    return operator(q, k, v, causal, softmax_scale, tile, impl, layout, deterministic)


def _gradients(lse: bool) -> Callable[..., Any]:
    """The operator where an input requires grad."""

    def made(
        q: Any, k: Any, v: Any, causal: bool = False, softmax_scale: float | None = None,
        block: Sequence[int] | None = None, impl: str = "auto", layout: str = "bhsd",
        deterministic: bool | None = True,
    ) -> Any:  # fmt: skip
        from fkjit.ops.attention.forward import _Differentiated

        options = (causal, softmax_scale, _tile(block), impl, lse, layout, deterministic)
        return autograd.attend(_Differentiated, (q, k, v), options)

    return made


def _vmap(name: str) -> Callable[..., Any]:
    """The mapped dimension becomes part of the batch: one launch."""

    def mapped(info: Any, dims: tuple[Any, ...], q: Any, k: Any, v: Any, *options: Any) -> Any:
        count = info.batch_size
        inputs = [
            x.movedim(dim, 0) if dim is not None else x.expand(count, *x.shape)
            for x, dim in zip((q, k, v), dims, strict=False)
        ]
        made = getattr(torch_ops.known, name)(*(x.flatten(0, 1) for x in inputs), *options)
        batch = inputs[0].shape[1]
        if name == "attention":
            return made.unflatten(0, (count, batch)), 0
        return tuple(x.unflatten(0, (count, batch)) for x in made), (0, 0)

    return mapped


def _tile(block: Sequence[int] | None) -> Any:
    """[128] or [128, 64] as `attention` takes it."""
    return block if block is None else block[0] if len(block) == 1 else tuple(block)


def _fake(
    q: Any, k: Any, v: Any, causal: bool = False, softmax_scale: float | None = None,
    block: Any = None, impl: str = "auto", layout: str = "bhsd", deterministic: Any = True,
) -> Any:  # fmt: skip
    return q.new_empty((*q.shape[:3], v.shape[3]))


def _fake_lse(
    q: Any, k: Any, v: Any, causal: bool = False, softmax_scale: float | None = None,
    block: Any = None, impl: str = "auto", layout: str = "bhsd", deterministic: Any = True,
) -> Any:  # fmt: skip
    rows = [q.shape[axis] for axis in LAYOUTS[layout]][:3]
    return _fake(q, k, v), q.new_empty(rows, dtype=sys.modules["torch"].float32)
