"""Attention forward against PyTorch's SDPA backends, in one run, taken in turns.

    python -m bench.attention [--dtype bf16] [--dims 64 128] [--seqlens 2048 …] [--blocks] [--out F]

B * S = 16k tokens, H * D = 2048. TFLOP/s count 4 * B * H * S * S * D, half of it when causal.
Each cell is checked against float64 on a slice before it is timed. `--blocks` times every legal
tile instead of the spec's choice.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import fkjit
from bench.common import interleaved, parser, progress, write
from fkjit.arch import Arch
from fkjit.device import device_target
from fkjit.errors import FkjitError
from fkjit.ops import attention_choice as choice

TOKENS, WIDTH = 16_384, 2048


def peers(q: Any, k: Any, v: Any, causal: bool) -> dict[str, Callable[[], Any]]:
    """SDPA's backends that take this input."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def sdpa(backend: Any) -> Callable[[], Any]:
        def run() -> Any:
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

        return run

    backends = {"fa2": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
    if q.dtype == torch.float32:  # the two above do not take it
        backends = {"mem_efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH}
    found = {}
    for name, backend in backends.items():
        try:
            sdpa(backend)()
            found[name] = sdpa(backend)
        except RuntimeError as error:
            progress(f"{name}: missing here ({str(error).splitlines()[0]})")
    return found


def check(q: Any, k: Any, v: Any, causal: bool, o: Any) -> None:
    """The last rows of one head against float64: a wrong kernel has no time."""
    rows = slice(max(0, q.shape[2] - 256), q.shape[2])
    scores = q[0, 0, rows].double() @ k[0, 0].double().T * q.shape[-1] ** -0.5
    if causal:
        scores = scores.masked_fill(
            scores.new_ones(scores.shape).bool().tril(k.shape[2] - scores.shape[0]).logical_not(),
            float("-inf"),
        )
    expected = scores.softmax(-1) @ v[0, 0].double()
    error = (o[0, 0, rows].double() - expected).abs().max().item()
    assert error < 2e-2, f"wrong by {error}"


def ours(
    q: Any, k: Any, v: Any, causal: bool, blocks: bool, arch: Arch, dtype: str
) -> dict[str, Any]:
    def call(block: Any) -> Callable[[], Any]:
        return lambda: fkjit.attention(q, k, v, causal=causal, block=block)

    if not blocks:
        return {"fkjit": call(None)}
    dim = q.shape[-1]
    spec = choice.implementation("flash", dtype, arch)
    dims = choice.padded_dims(spec, dim, dim)
    fixed = {"dtype": dtype, "head_dim": dims[0], "head_dim_v": dims[1], "aligned": True}
    legal = spec.legal_values("block", {**fixed, "block": None}, arch)
    return {f"fkjit {block}": call(block) for block in legal}


def cell(dim: int, seqlen: int, causal: bool, dtype: str, blocks: bool) -> list[dict[str, Any]]:
    """All candidates on one shape."""
    import torch

    heads, batch = WIDTH // dim, max(1, TOKENS // seqlen)
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    q, k, v = (torch.randn(batch, heads, seqlen, dim, device="cuda").to(kind) for _ in range(3))
    mine = ours(q, k, v, causal, blocks, device_target(0).arch, dtype)
    for run in mine.values():
        check(q, k, v, causal, run())
    times = interleaved({**mine, **peers(q, k, v, causal)})
    flops = 4 * batch * heads * seqlen * seqlen * dim / (2 if causal else 1)
    rows = []
    for name, found in times.items():
        median = statistics.median(found)
        rows.append(
            {
                "bench": "attention",
                "candidate": name,
                "dtype": dtype,
                "head_dim": dim,
                "seqlen": seqlen,
                "causal": causal,
                "batch": batch,
                "heads": heads,
                "ms": median,
                "ms_min": min(found),
                "tflops": flops / median / 1e9,
            }
        )
    return rows


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--dtype", default="bf16", choices=("bf16", "fp16", "fp32"))
    options.add_argument("--dims", type=int, nargs="+", default=[64, 128])
    options.add_argument("--seqlens", type=int, nargs="+", default=[2048, 4096, 8192, 16384])
    options.add_argument("--blocks", action="store_true", help="every legal tile")
    chosen = options.parse_args()
    for dim in chosen.dims:
        for causal in (False, True):
            for seqlen in chosen.seqlens:
                try:
                    rows = cell(dim, seqlen, causal, chosen.dtype, chosen.blocks)
                except FkjitError as error:
                    progress(f"D{dim} S{seqlen}: {error}")
                    continue
                write(chosen.out, rows)
                show(rows)


def show(rows: list[dict[str, Any]]) -> None:
    first = rows[0]
    speed = {row["candidate"]: row["tflops"] for row in rows}
    best = max(tflops for name, tflops in speed.items() if name.startswith("fkjit"))
    ratio = f"  fkjit/fa2 {best / speed['fa2']:.3f}" if "fa2" in speed else ""
    cells = "  ".join(f"{name} {tflops:6.1f}" for name, tflops in speed.items())
    mask = "causal" if first["causal"] else "full"
    print(
        f"D{first['head_dim']:<3} S{first['seqlen']:<5} {mask:6} TFLOP/s: {cells}{ratio}",
        flush=True,
    )


if __name__ == "__main__":
    main()
