"""LayerNorm's gradients, with that of the residual stream and without."""

from __future__ import annotations

from ..peers.norm_gradients import peers
from .norm_gradients import operation

OP = operation("layer_norm", peers("layer_norm"))
