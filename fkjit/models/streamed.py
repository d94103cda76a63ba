"""Layers of a decode step of up to 64 sequences on Hopper, in five launches, whose products fetch
their weight before the previous kernel is over. What makes the residual stream also says what the
norm behind it takes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from fkjit.models.config import ModelConfig
from fkjit.models.weights import Affine, Layer
from fkjit.ops.step.call import Norm
from fkjit.ops.step.stream import streamed_append, streamed_linear


class Residual(NamedTuple):
    """The residual stream [tokens, hidden], and what the product behind its norm takes."""

    stream: Any
    inner: Any


class Places(NamedTuple):
    """Where a step's tokens are: in the cache, and for RoPE of `fkjit.rope_table`; table None:
    nothing turns."""

    cache: Any
    slots: Any
    positions: Any
    table: Any


class StreamedLayers:
    """Of a model, whose activations all of them share."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config

    def queries(self, at: Residual, layer: Layer, number: int, places: Places) -> Any:
        """q [tokens, heads, head_dim], ready; k and v are in the cache."""
        table = places.table
        return streamed_append(
            at.inner, *layer.qkv, places.cache, places.slots,
            None if table is None else places.positions, table,
            heads_q=self.config.heads_q, layer=number,
        )  # fmt: skip

    def behind(self, at: Residual, attended: Any, layer: Layer, following: Affine) -> Residual:
        """What attention's outcome becomes. following: the norm behind the layer."""
        said = {"activation": self.config.activation, "gate": self.config.gated}
        at = self._added(attended, layer.out, at.stream, layer.mlp_norm)
        inner = streamed_linear(at.inner, *layer.up, **said)
        return self._added(inner, layer.down, at.stream, following)

    def _added(self, x: Any, product: Affine, stream: Any, norm: Affine) -> Residual:
        behind = Norm(*norm, self.config.eps)
        return Residual(*streamed_linear(x, *product, residual=stream, norm=behind))
