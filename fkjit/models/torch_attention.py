"""A context in which `torch.nn.functional.scaled_dot_product_attention` is fkjit's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fkjit.compat.sdpa import scaled_dot_product_attention
from fkjit.errors import ArgumentTypeError, ParameterError
from fkjit.ops.op import torch_ops
from fkjit.ops.op.checks import check_flag


@contextmanager
def torch_attention(fallback: bool = False) -> Iterator[None]:
    """Let code that calls `torch.nn.functional.scaled_dot_product_attention`, as PyTorch's own
    modules do, call `fkjit.compat`'s instead.

    Args:
        fallback: whether what fkjit refuses (dropout, other dtypes, head dimensions above 256, or
            without gradients in 16 bits above 512) goes to PyTorch's function; without it the
            refusal is raised.

    For the whole process, not a thread; names that were imported from the module before stay
    PyTorch's. Contexts may stand in one another. Raises ParameterError before torch is imported.
    """
    torch = torch_ops.torch_seen()
    if torch is None:
        raise ParameterError("torch_attention: torch is not imported; import it first")
    check_flag("torch_attention", "fallback", fallback)
    functional = torch.nn.functional
    before = functional.scaled_dot_product_attention

    def ours_or_before(*args: Any, **named: Any) -> Any:
        try:
            return scaled_dot_product_attention(*args, **named)
        except (ParameterError, ArgumentTypeError):
            return before(*args, **named)

    functional.scaled_dot_product_attention = (
        ours_or_before if fallback else scaled_dot_product_attention
    )
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = before
