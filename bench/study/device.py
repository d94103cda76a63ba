"""Sums of the kernel itself on a Hopper GPU, beside those that the emulation makes of the same
codes; nothing where there is no such GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

import fkjit
from fkjit.ops.quantize import cases_linear
from fkjit.ops.quantize.kernels_bytes import WGMMA

from .codes import coded, error
from .products import LENGTHS, SIGNS
from .tensor_core import BITS, Sums, product

_STEPS = (0, 8, 4, 1)  # of 128 of k that a tensor core sums; 0: all
_ROWS, _OUTPUTS = 16, 32


def is_hopper() -> bool:
    """Whether this machine's GPU has the tensor cores that the study is about."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def records(rng: np.random.Generator, quick: bool) -> Iterator[dict[str, Any]]:
    """A record a sign, length and interval: both errors, and the share of sums with equal bits."""
    if not is_hopper():
        return
    for k in (256, 1024) if quick else LENGTHS:
        drawn = [torch.from_numpy(rng.standard_normal((n, k))) for n in (_ROWS, _OUTPUTS)]
        for sign in SIGNS:
            made = [x.abs() if sign == "positive" else x for x in drawn]
            a, b = (coded(x.float(), "fp8", (-1,))[0] for x in made)
            exact = a.double() @ b.double().T
            for steps in (n for n in _STEPS if 128 * n < k):
                found, emulated = kernel(a, b, steps), product(a, b, Sums(BITS, 128 * steps))
                yield {"part": "kernel sums", "sign": sign, "k": k, "interval": 128 * steps,
                       "error": error(found, exact), "emulated": error(emulated, exact),
                       "same": float((found == emulated).double().mean())}  # fmt: skip


def kernel(a: torch.Tensor, b: torch.Tensor, steps: int) -> torch.Tensor:
    """e4m3's numbers [m, k] by [n, k] -> the kernel's fp32 [m, n], promoted every so many steps."""
    params = {
        "dtype": "bf16", "out_dtype": "fp32", "code": "fp8", "scales": "rows",
        "activation": "none", "gate": False, "residual": False, "interval": steps,
        "block": (128, 128), "cluster": 1, "schedule": "cooperative",
    }  # fmt: skip
    (m, k), n = a.shape, len(b)
    problem = cases_linear.problem(params, m, n, k, span="row", bias=False)
    codes = (x.cuda().to(torch.float8_e4m3fn).view(torch.uint8) for x in (a, b))
    named = dict(zip(("x", "weight"), codes, strict=True))
    named |= {"x_scales": torch.ones(m, device="cuda"), "scales": torch.ones(n, device="cuda")}
    named["out"] = torch.full((m, n), float("nan"), device="cuda")
    fkjit.launch(WGMMA, params, problem, named)
    return named["out"].cpu()
