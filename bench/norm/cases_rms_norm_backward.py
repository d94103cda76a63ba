"""RMSNorm's gradients, with that of the residual stream and without."""

from __future__ import annotations

from .cases_norm_gradients import operation
from .peers_norm_gradients import peers

OP = operation("rms_norm", peers("rms_norm"))
