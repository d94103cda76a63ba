"""Host time of a warm call, beside PyTorch's.

    python -m bench.host [--out F]

Small tensors, so that the GPU is never what is waited for.
"""

from __future__ import annotations

import fkjit
from bench.common import host_microseconds, parser, write


def main() -> None:
    import cupy
    import torch

    chosen = parser(__doc__).parse_args()
    q, k, v = (torch.randn(1, 8, 64, 64, device="cuda", dtype=torch.float16) for _ in range(3))
    arrays = [cupy.from_dlpack(x) for x in (q, k, v)]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    calls = {
        "fkjit.attention, torch tensors": lambda: fkjit.attention(q, k, v),
        "fkjit.attention, torch tensors, lse": lambda: fkjit.attention(q, k, v, return_lse=True),
        "fkjit.attention, CuPy arrays": lambda: fkjit.attention(*arrays),
        "torch scaled_dot_product_attention": lambda: sdpa(q, k, v),
        "torch add_": lambda: q.add_(0),
    }
    rows = []
    for name, call in calls.items():
        rows.append({"bench": "host", "candidate": name, "us": host_microseconds(call)})
        print(f"{name:40} {rows[-1]['us']:6.2f} us", flush=True)
    write(chosen.out, rows)


if __name__ == "__main__":
    main()
