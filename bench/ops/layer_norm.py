"""LayerNorm, with the residual added before and without."""

from __future__ import annotations

from ..peers.norms import LAYER_NORM
from .norms import operation

OP = operation("layer_norm", LAYER_NORM)
