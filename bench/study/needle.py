"""A needle among keys: whether attention in fp8 still finds one value among many.

Keys, queries and values are N(0, 1); values lie around 1 as well. Each query has one key of its own
whose logit is raised until it has `SHARE` of the query's weight. Found is the key whose value, less
the mean of all, has the greatest product with the output: float64 finds nearly every one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from .attention import DIM, NAMED, Seen, attend, exact
from .codes import error
from .tensor_core import BITS, EXACT, Sums

LENGTHS = (1024, 4096, 16384, 65536, 131072)
INTERVALS = (0, 8192, 1024, 256, 128, 64)
QUERIES = 32
SHARE = 0.2  # of a query's weight that its needle has
SHIFT = 1.0  # what values lie around


def planted(rng: np.random.Generator, keys: int, queries: int) -> tuple[Seen, torch.Tensor]:
    """A head, and each query's needle: its place, spread evenly over the sequence."""
    q, k, v = (torch.from_numpy(rng.standard_normal((n, DIM))) for n in (queries, keys, keys))
    places = ((torch.arange(queries) + 0.5) * keys / queries).long()
    logits = q @ k.T * DIM**-0.5
    logits[torch.arange(queries), places] = -torch.inf
    wanted = torch.logsumexp(logits, -1) + math.log(SHARE / (1 - SHARE))
    k[places] = q * (wanted * DIM**0.5 / (q * q).sum(-1))[:, None]
    return Seen(q[None].float(), k[None].float(), (v + SHIFT)[None].float()), places


def retrieved(o: torch.Tensor, seen: Seen, places: torch.Tensor) -> float:
    """The share of queries whose needle is found."""
    values = seen.v[0].double()
    middle = values.mean(0)
    found = ((o[0].double() - middle) @ (values - middle).T).argmax(-1)
    return float((found == places).double().mean())


def records(rng: np.random.Generator, quick: bool) -> Iterator[dict[str, Any]]:
    """By length: exact, bf16, fp8 with fp32 sums, fp8 with short sums by interval."""
    form = NAMED["fp8, block"]
    for keys in (256, 1024) if quick else LENGTHS:
        seen, places = planted(rng, keys, 8 if quick else QUERIES)
        right = exact(seen)
        outputs = {"float64": right, "bf16": attend(seen, NAMED["bf16"]),
                   "fp32 sums": attend(seen, form, EXACT)}  # fmt: skip
        for interval in (n for n in INTERVALS if n < keys):
            outputs[name_of(interval)] = attend(seen, form, Sums(BITS, interval))
        for name, o in outputs.items():
            yield {"part": "needle", "sums": name, "keys": keys, "error": error(o, right),
                   "found": retrieved(o, seen, places)}  # fmt: skip


def name_of(interval: int) -> str:
    """As tables call it."""
    return f"every {interval:,}" if interval else "never"
