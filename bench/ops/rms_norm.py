"""RMSNorm, with the residual added before and without."""

from __future__ import annotations

from ..peers.norms import RMS_NORM
from .norms import operation

OP = operation("rms_norm", RMS_NORM)
