"""LayerNorm, with the residual added before and without."""

from __future__ import annotations

from .cases_norms import operation
from .peers_norms import LAYER_NORM

OP = operation("layer_norm", LAYER_NORM)
