"""Which token comes next: greedy, or drawn with temperature, top-k and top-p.

All of it is torch operations on the device, so that a captured step has them. One uniform number
decides a draw, so a sequence draws the same whatever else is in its batch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from fkjit.arguments import shown, whole
from fkjit.errors import ArgumentTypeError, ParameterError
from fkjit.ops.op import torch_ops

_CALL = "Sampling"
_GROUPS, _EVEN = 128, 4  # of a row of logits; rows of fp32 begin on 16-byte boundaries
_HOTTEST = sys.float_info.max
SEEDS = (-(1 << 63), (1 << 64) - 1)  # of torch.Generator
_FEW = 1024  # of top_k: as many are found without sorting all of the vocabulary

GREEDY, PLAIN, FEW, SORTED = "greedy", "plain", "few", "sorted"


class Sampling(NamedTuple):
    """How a sequence's tokens are chosen.

    temperature: logits are divided by it; 0: the largest one, whatever else is said. top_k: only so
    many of the largest; None: all. top_p: of those, the fewest whose probabilities reach it. seed:
    of the sequence's draws; None: another one each time.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None

    def checked(self) -> Sampling:
        """Itself, NumPy's numbers as Python's. ParameterError, ArgumentTypeError for what is out of
        range or no number."""
        temperature, top_k, top_p, seed = self
        temperature = _number("temperature", temperature)
        top_p = None if top_p is None else _number("top_p", top_p)
        if not 0 <= temperature <= _HOTTEST:
            raise ParameterError(
                f"{_CALL}: temperature={shown(temperature)}; allowed: from 0 on, finite"
            )
        if top_p is not None and not 0 < top_p <= 1:
            raise ParameterError(f"{_CALL}: top_p={top_p}; allowed: above 0, up to 1, or None")
        return Sampling(
            float(temperature),
            None if top_k is None else whole(_CALL, "top_k", top_k, 1, where=", or None"),
            None if top_p is None else float(top_p),
            None if seed is None else whole(_CALL, "seed", seed, *SEEDS),
        )


def _number(name: str, value: Any) -> float:
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ArgumentTypeError(f"{_CALL}: {name}={shown(value)}; allowed: a number")
    return value


def mode_of(samplings: Iterable[Sampling]) -> str:
    """What a batch needs: GREEDY, PLAIN (temperatures alone), FEW (a small top_k everywhere) or
    SORTED."""
    drawn = [one for one in samplings if one.temperature > 0]
    if not drawn:
        return GREEDY
    if all(one.top_k is None and one.top_p in (None, 1) for one in drawn):
        return PLAIN
    return FEW if all((one.top_k or _FEW + 1) <= _FEW for one in drawn) else SORTED


class Draws(NamedTuple):
    """Of each row: temperature, top_p and uniform fp32 [rows], from 0 up to 1; top_k int64 [rows].
    What is not wanted is a top_k of the vocabulary and a top_p of 1."""

    temperature: Any
    top_k: Any
    top_p: Any
    uniform: Any


class Logits:
    """Room for fp32 logits [rows, vocabulary], with -inf behind each row up to a whole number of
    groups: `argmax` shares one row out over few blocks, groups over many."""

    def __init__(self, rows: int, vocabulary: int, device: Any) -> None:
        torch = torch_ops.torch_seen()
        self._vocabulary = vocabulary
        self._width = -(-vocabulary // (_GROUPS * _EVEN)) * _EVEN  # of a group
        shape = (rows, _GROUPS * self._width)
        self._padded = torch.full(shape, float("-inf"), dtype=torch.float32, device=device)

    def rows(self, count: int) -> Any:
        """A view of the first rows, to be written."""
        return self._padded[:count, : self._vocabulary]

    def largest(self, count: int) -> Any:
        """[count] int64, `argmax` of the first rows."""
        values, at = self._padded[:count].unflatten(-1, (_GROUPS, -1)).max(-1)
        group = values.argmax(-1, keepdim=True)
        return (group * self._width + at.gather(-1, group))[:, 0]


def pick(logits: Any, draws: Draws | None, mode: str, best: Any = None) -> Any:
    """Tokens [rows] int64 by fp32 logits [rows, vocabulary]; best: their `argmax`, if it is known.
    Can be captured."""
    best = logits.argmax(-1) if best is None else best
    if mode == GREEDY or draws is None:
        return best
    torch = torch_ops.torch_seen()
    hot = draws.temperature > 0
    scaled = logits / torch.where(hot, draws.temperature, 1.0)[:, None]
    if mode == PLAIN:
        drawn = _draw(scaled.softmax(-1), draws.uniform)
    else:
        count = scaled.shape[-1] if mode == SORTED else min(_FEW, scaled.shape[-1])
        values, ids = scaled.topk(count) if mode == FEW else scaled.sort(-1, descending=True)
        drawn = ids.gather(-1, _draw(_kept(values, draws), draws.uniform)[:, None])[:, 0]
    return torch.where(hot, drawn, best)


def _kept(values: Any, draws: Draws) -> Any:
    """Probabilities of sorted logits, 0 for those that top_k and top_p leave out."""
    torch = torch_ops.torch_seen()
    rank = torch.arange(values.shape[-1], device=values.device)
    values = values.masked_fill(rank >= draws.top_k[:, None], float("-inf"))
    found = values.softmax(-1)
    before = found.cumsum(-1) - found
    return found.masked_fill((before >= draws.top_p[:, None]) & (rank > 0), 0.0)


def _draw(probabilities: Any, uniform: Any) -> Any:
    """[rows] int64: where the running sum first exceeds this part of the whole, which is where the
    probability is not 0. The last token where there is no such sum, of numbers that are none."""
    torch = torch_ops.torch_seen()
    sums = probabilities.cumsum(-1)
    whole = sums[:, -1]
    target = torch.minimum(uniform * whole, torch.nextafter(whole, torch.zeros_like(whole)))
    found = torch.searchsorted(sums, target[:, None], right=True)[:, 0]
    return found.clamp_(max=sums.shape[-1] - 1)
