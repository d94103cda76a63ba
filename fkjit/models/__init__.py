"""Whole models on fkjit's kernels.

    import fkjit
    report = fkjit.models.patch(model)     # a Hugging Face model, in place
    print(report)                          # what was replaced, what was left
    fkjit.models.unpatch(model)

docs/MODELS.md has what each replacement needs.
"""

from __future__ import annotations

from fkjit.models.patching import Report, patch, unpatch
from fkjit.models.torch_attention import torch_attention

__all__ = ["Report", "patch", "torch_attention", "unpatch"]
