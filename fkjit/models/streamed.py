"""Layers of a decode step of a few sequences on Hopper, whose products fetch their weight before the
previous kernel is over: with RMSNorm five launches a layer, since what makes the residual stream
also says what the norm behind it takes; with LayerNorm seven.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from fkjit.models.config import ModelConfig
from fkjit.models.weights import Affine, Layer
from fkjit.ops.step.stream import Scaled, streamed_append, streamed_linear


class Residual(NamedTuple):
    """The residual stream [tokens, hidden], and what the product behind its norm takes."""

    stream: Any
    inner: Any


class Places(NamedTuple):
    """Where a step's tokens are: in the cache, and for RoPE. table: None, nothing turns."""

    cache: Any
    slots: Any
    positions: Any
    table: Any


class StreamedLayers:
    """norm: LayerNorm, or of the first layer RMSNorm."""

    def __init__(self, config: ModelConfig, norm: Callable[[Any, Affine], Any]) -> None:
        self.config, self.norm = config, norm

    def queries(self, at: Residual, layer: Layer, number: int, places: Places) -> Any:
        """q [tokens, heads, head_dim], ready; k and v are in the cache."""
        table = places.table
        return streamed_append(
            at.inner, *layer.qkv, places.cache, places.slots,
            None if table is None else places.positions, table,
            heads_q=self.config.heads_q, layer=number,
        )  # fmt: skip

    def behind(self, at: Residual, attended: Any, layer: Layer, following: Affine | None
               ) -> Residual:  # fmt: skip
        """What attention's outcome becomes. following: the norm behind the layer, if it counts."""
        said = {"activation": self.config.activation, "gate": self.config.gated}
        at = self._added(attended, layer.out, at.stream, layer.mlp_norm)
        inner = streamed_linear(at.inner, *layer.up, **said)
        return self._added(inner, layer.down, at.stream, following)

    def _added(self, x: Any, product: Affine, stream: Any, norm: Affine | None) -> Residual:
        if norm is None or norm.bias is not None:
            stream = streamed_linear(x, *product, residual=stream)
            return Residual(stream, None if norm is None else self.norm(stream, norm))
        stream, scaled, squares = streamed_linear(
            x, *product, residual=stream, norm_weight=norm.weight
        )
        return Residual(stream, Scaled(scaled, squares, self.config.eps))
