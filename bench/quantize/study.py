"""What codes cost in accuracy, on the CPU: products of quantized numbers against those of the
numbers themselves in float64, by scheme and by kind of numbers.

    python -m bench.quantize.study [--rows 64] [--k 4096] [--outputs 256] [--seed 0]

Prints a Markdown table of ||error|| / ||product||. Codes are the kernels' to the bit (NumPy does
the same roundings); sums are exact, so this is the error of quantization alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import numpy as np

from fkjit.ops.quantize.cases import decode, encode, scales_of
from fkjit.ops.quantize.schemes import SCHEMES, Scheme
from fkjit.runtime.interop import numpy_dtype

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


def rounded(x: np.ndarray, how: Scheme | None) -> np.ndarray:
    """bf16 numbers as codes have them, in float64; without a scheme as they are."""
    own = x.astype(numpy_dtype("bf16"))
    if how is None:
        return own.astype(np.float64)
    scales = scales_of(own, how)
    return decode(encode(own, scales, how), scales, how).astype(np.float64)


def pair(scheme: str) -> tuple[Scheme | None, Scheme]:
    """What happens to x and to the weight."""
    how = SCHEMES[scheme]
    if scheme == "fp8_block":
        return how, Scheme("fp8", "block")
    return (None if how.code == "int4" or scheme == "int8_group" else how), how


def error(scheme: str, x: np.ndarray, weight: np.ndarray) -> float:
    """||error|| / ||product||."""
    of_x, of_weight = pair(scheme)
    exact = rounded(x, None) @ rounded(weight, None).T
    found = rounded(x, of_x) @ rounded(weight, of_weight).T
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


def table(rows: int, k: int, outputs: int, seed: int) -> str:
    """Markdown: a row a scheme, a column a kind of x; the weight is N(0, 1)."""
    rng = np.random.default_rng(seed)
    weight = normal(rng, outputs, k)
    made = {name: kind(rng, rows, k) for name, kind in KINDS.items()}
    lines = [f"| scheme | {' | '.join(made)} |", "|---|" + "---:|" * len(made)]
    for scheme in SCHEMES:
        errors = [f"{100 * error(scheme, x, weight):.2f} %" for x in made.values()]
        lines.append(f"| `{scheme}` | {' | '.join(errors)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for name, value in (("rows", 64), ("k", 4096), ("outputs", 256), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args(arguments)
    print(table(given.rows, given.k, given.outputs, given.seed))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
