"""RMSNorm, with the residual added before and without."""

from __future__ import annotations

from .cases_norms import operation
from .peers_norms import RMS_NORM

OP = operation("rms_norm", RMS_NORM)
