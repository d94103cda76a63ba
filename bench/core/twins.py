"""Triton twins: `bench/<family>/triton_<op>.py`, each with `prepare(problem, arrays)`.

Such a file imports triton, so it is imported only when its twin is prepared.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from pathlib import Path

from fkjit.spec import Problem

from .families import SUITE, modules
from .op import Arrays, Candidate, Prepared

# Operations of ours that have no twin yet, and why.
MISSING: dict[str, str] = {
    "adamw": "PyTorch's fused AdamW stands beside it: bench.models.train measures whole steps",
    "attention_backward_form": "the twin of attention_backward, with a line or two more for each",
    "attention_few": "the twin of attention, on a grid of parts",
    "attention_resumed": "a step of ring attention: bench distributed measures whole ones",
    "cross_entropy": "a part of the loss: bench.models.train measures whole steps",
    "decode_form": "the twin of attention_decode, with a line or two more for each form",
    "decode_step": "a whole decode step: bench.models.decode measures it",
    "dequantize": "a product of two arrays, which PyTorch's own kernels do as well",
    "quantize": "not written yet",
    "quantize_attention": "not written yet",
    "quantized_attention": "not written yet",
    "quantized_linear": "not written yet; PyTorch's _scaled_mm stands beside it",
    "linear_flagged": "a part of parallel products: bench distributed measures whole ones",
    "normed_append": "a part of decode steps: bench.models.decode measures whole ones",
    "normed_linear": "a part of decode steps: bench.models.decode measures whole ones",
    "pick_largest": "a part of decode steps: bench.models.decode measures whole ones",
    "scale_gradient": "a part of the loss: bench.models.train measures whole steps",
    "settled_attention": "the twin of attention_decode, which starts early",
    "step_begin": "a part of decode steps: bench.models.decode measures whole ones",
    "streamed_logits": "a part of decode steps: bench.models.decode measures whole ones",
    "streamed_append": "a part of decode steps: bench.models.decode measures whole ones",
    "streamed_linear": "a part of decode steps: bench.models.decode measures whole ones",
}


def names() -> list[str]:
    """The operations that have a twin."""
    return list(modules("triton_"))


def unaccounted(ops: Iterable[str]) -> list[str]:
    """Those of some operations that have neither a twin nor a reason in MISSING."""
    return [op for op in ops if op not in names() and op not in MISSING]


def source(op: str) -> Path:
    """The file of a twin."""
    return SUITE.joinpath(*modules("triton_")[op].split(".")[-2:]).with_suffix(".py")


def twin(op: str) -> Candidate | None:
    """The candidate "triton" of an operation; None where there is no twin."""
    if op not in names():
        return None

    def prepare(problem: Problem, arrays: Arrays) -> Prepared:
        return import_module(modules("triton_")[op]).prepare(problem, arrays)

    return Candidate(name="triton", kind="twin", package="triton", module="triton", prepare=prepare)
