"""Inputs of the study, and numbers as each scheme's codes have them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from fkjit.ops.quantize.cases import decode, encode, scales_of
from fkjit.ops.quantize.schemes import SCHEMES, Scheme
from fkjit.runtime.interop import numpy_dtype

HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
GREATEST = {"fp8": 448.0, "int8": 127.0}
_OUTLIERS, _LARGE = 128, 30.0  # a channel in so many is so many times as large
_FREEDOM = 3  # of Student's t


def normal(rng: np.random.Generator, rows: int, k: int) -> np.ndarray:
    """N(0, 1)."""
    return rng.standard_normal((rows, k))


def heavy(rng: np.random.Generator, rows: int, k: int) -> np.ndarray:
    """Student's t: some numbers are far from all others."""
    return rng.standard_t(_FREEDOM, (rows, k))


def channels(rng: np.random.Generator, rows: int, k: int) -> np.ndarray:
    """N(0, 1) with large columns, as activations of transformers have them."""
    scale = np.ones(k)
    scale[rng.permutation(k)[: max(k // _OUTLIERS, 1)]] = _LARGE
    return rng.standard_normal((rows, k)) * scale


KINDS: dict[str, Callable[[np.random.Generator, int, int], np.ndarray]] = {
    "N(0, 1)": normal, "heavy tails": heavy, "outlier channels": channels,
}  # fmt: skip


def rounded(x: torch.Tensor, dtype: str) -> torch.Tensor:
    """Numbers of 16 bits, in fp32."""
    return x.to(HALVES[dtype]).float()


def coded(x: torch.Tensor, code: str, over: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes in fp32, and the scale that all numbers along the dimensions `over` share."""
    scale = (x.abs().amax(over, keepdim=True) / GREATEST[code]).clamp_min(2.0**-126)
    scaled = (x / scale).clamp(-GREATEST[code], GREATEST[code])
    return (as_e4m3(scaled) if code == "fp8" else scaled.round()), scale


def as_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Numbers up to 448 to the nearest of e4m3, ties to even, in fp32."""
    return x.to(torch.float8_e4m3fn).float()


def of_scheme(x: torch.Tensor, how: Scheme | None) -> torch.Tensor:
    """bf16 numbers [rows, k] as `fkjit.quantize` makes them codes; without a scheme as they are."""
    own = rounded(x, "bf16")
    if how is None:
        return own
    made = own.numpy().astype(numpy_dtype("bf16"))
    scales = scales_of(made, how)
    return torch.from_numpy(decode(encode(made, scales, how), scales, how))


def pair(scheme: str) -> tuple[Scheme | None, Scheme]:
    """What happens to x and to the weight."""
    how = SCHEMES[scheme]
    if scheme == "fp8_block":
        return how, Scheme("fp8", "block")
    return (None if how.code == "int4" or scheme == "int8_group" else how), how


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """||found - exact|| / ||exact||."""
    exact = exact.double()
    return float((found.double() - exact).norm() / exact.norm())
