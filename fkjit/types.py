"""What annotations of public calls say: arrays of any framework, and words that are one of a few.

    def head(q: Array, layout: Layout = "bhsd") -> Array: ...

Nothing is checked by these at run time; calls raise typed errors of their own.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol, TypeVar


class Array(Protocol):
    """An array of torch, CuPy, NumPy, JAX or another framework with DLPack."""

    @property
    def shape(self) -> Any:
        """Its extents."""

    @property
    def dtype(self) -> Any:
        """The framework's own dtype."""


AnyArray = TypeVar("AnyArray", bound=Array)  # the caller's framework, which results have too

Impl = Literal["auto", "flash", "tiled", "naive"]
Layout = Literal["bhsd", "bshd"]
PageLayout = Literal["nhd", "hnd"]
Scoring = Literal["softmax", "sigmoid", "sqrtsoftplus"]
