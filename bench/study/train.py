"""The recipe of the trained models: bytes of Python's own docstrings, minutes on one core.

The text is that of the standard library which runs the study (its licence allows it); nothing of it
is stored. The last twentieth of it is kept for the perplexity.
"""

from __future__ import annotations

import ast
import math
import sys
import sysconfig
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import torch

from .models import Shape, Weights, drawn, logits, loss

STEPS, BATCH = 600, 8
_RATE, _WARM = 3e-3, 30  # the greatest learning rate, and the steps until it is reached
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

_LEFT_OUT = {"site-packages", "test", "tests", "idlelib", "lib2to3"}
FEW = "[a-c]*.py"  # files of a quick run


@lru_cache(maxsize=2)
def text(pattern: str = "**/*.py") -> bytes:
    """Docstrings of the standard library's modules of such names, in the files' order."""
    return "\n\n".join(_docstrings(Path(sysconfig.get_path("stdlib")), pattern)).encode()


def _docstrings(folder: Path, pattern: str) -> Iterator[str]:
    for path in sorted(folder.glob(pattern)):
        if _LEFT_OUT & set(path.relative_to(folder).parts):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, _DOCUMENTED) and (found := ast.get_docstring(node)):
                yield found


def parts(quick: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes to learn from, and bytes to be judged by."""
    every = torch.tensor(list(text(FEW) if quick else text()))
    cut = len(every) * 19 // 20
    return every[:cut], every[cut:]


def windows(source: torch.Tensor, starts: torch.Tensor, length: int) -> torch.Tensor:
    """[len(starts), length + 1] bytes."""
    return source[starts[:, None] + torch.arange(length + 1)]


def judged(shape: Shape, kept: torch.Tensor, count: int) -> torch.Tensor:
    """Windows spread evenly over the text that no model has learnt from."""
    starts = torch.arange(count) * ((len(kept) - shape.context - 1) // count)
    return windows(kept, starts, shape.context)


def trained(shape: Shape, learnt: torch.Tensor, seed: int, steps: int) -> Weights:
    """AdamW, a warm-up, then a cosine. The loss is shown on stderr."""
    weights = {name: value.requires_grad_() for name, value in drawn(shape, seed).items()}
    matrices = [value for value in weights.values() if value.ndim == 2]
    others = [value for value in weights.values() if value.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=_RATE, betas=(0.9, 0.95),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        share = min(1.0, (step + 1) / _WARM) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = _RATE * share
        starts = torch.randint(len(learnt) - shape.context - 1, (BATCH,), generator=generator)
        tokens = windows(learnt, starts, shape.context)
        found = loss(logits(weights, shape, tokens[:, :-1]), tokens)
        optimizer.zero_grad()
        found.backward()
        torch.nn.utils.clip_grad_norm_(list(weights.values()), 1.0)
        optimizer.step()
        if step % 50 == 49 or step == steps - 1:
            line = f"  step {step + 1} of {steps}, loss {float(found.detach()):.3f}"
            print(line, file=sys.stderr, flush=True)
    return {name: value.detach() for name, value in weights.items()}
