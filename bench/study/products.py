"""Errors of products: what each scheme's codes cost, and what short sums add."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from fkjit.ops.quantize.schemes import SCHEMES

from .codes import HALVES, KINDS, coded, error, of_scheme, pair, rounded
from .tensor_core import BITS, Sums, product

K = 4096
LENGTHS = (1024, 4096, 16384, 65536)
INTERVALS = (0, 4096, 1024, 512, 128, 32)
SIGNS = ("of both signs", "positive")


def schemes(rng: np.random.Generator, quick: bool) -> Iterator[dict[str, Any]]:
    """A record a scheme and kind of x, by an N(0, 1) weight; sums exact."""
    rows, k, outputs = (16, 512, 32) if quick else (64, K, 256)
    weight = torch.from_numpy(KINDS["N(0, 1)"](rng, outputs, k))
    for kind, draw in KINDS.items():
        x = torch.from_numpy(draw(rng, rows, k))
        for scheme in (*HALVES, *SCHEMES):
            found = multiplied(x, weight, scheme)
            yield {"part": "products", "scheme": scheme, "kind": kind, "k": k,
                   "error": error(found, x @ weight.T)}  # fmt: skip


def multiplied(
    x: torch.Tensor, weight: torch.Tensor, scheme: str, sums: Sums | None = None
) -> torch.Tensor:
    """[rows, k] by [outputs, k] in a scheme, its result of 16 bits. `sums`: of fp8_row's codes."""
    if scheme in HALVES:
        return rounded(rounded(x, scheme) @ rounded(weight, scheme).T, scheme)
    if sums is not None:
        (a, of_a), (b, of_b) = (coded(rounded(y, "bf16"), "fp8", (-1,)) for y in (x, weight))
        return rounded(product(a, b, sums) * of_a * of_b.T, "bf16")
    of_x, of_weight = pair(scheme)
    return rounded(of_scheme(x, of_x) @ of_scheme(weight, of_weight).T, "bf16")


def short_sums(rng: np.random.Generator, quick: bool) -> Iterator[dict[str, Any]]:
    """What the accumulator adds to products of the same e4m3 codes, by k, interval and bits."""
    for k in (256, 1024) if quick else LENGTHS:
        drawn = [torch.from_numpy(rng.standard_normal((n, k))) for n in (16, 32)]
        for sign in SIGNS:
            made = [x.abs() if sign == "positive" else x for x in drawn]
            a, b = (coded(x.float(), "fp8", (-1,))[0] for x in made)
            exact = a.double() @ b.double().T
            for interval in (n for n in INTERVALS if n < k):
                found = product(a, b, Sums(BITS, interval))
                yield {"part": "product sums", "sign": sign, "k": k, "interval": interval,
                       "bits": BITS, "error": error(found, exact)}  # fmt: skip
