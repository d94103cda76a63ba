"""Packed queries of keys in pages: chunks of prompts, and chunks beside sequences that decode."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import fkjit
from fkjit.arch import Arch
from fkjit.ops.attention.feature_kernels import FLASH_FORMS
from fkjit.ops.kv import cases as kv
from fkjit.runtime.interop import ITEMSIZE
from fkjit.spec import KernelSpec, Params, Problem

from ..core.accuracy import LIMITS, Expected
from ..core.op import Arrays, Candidate, Op, Prepared, Refused
from ..kv.cases_kv_append import DTYPES

_WORKSPACE = 512 << 20  # bytes of FlashInfer's
_ROWS = 64  # of a sequence that are compared, at its end
Lengths = Sequence[tuple[int, int]]  # new tokens and keys of each sequence


def problem(
    name: str, lengths: Lengths, page_size: int = 16, *, heads: tuple[int, int] = (32, 8),
    dim: int = 128, dtype: str = "bf16", storage: str = "same",
) -> dict[str, Any]:  # fmt: skip
    """A batch; causal, new tokens among the keys."""
    return {
        "name": name, "lengths": tuple(lengths), "page_size": page_size, "dtype": dtype,
        "heads_q": heads[0], "heads_kv": heads[1], "head_dim": dim, "storage": storage,
        "softmax_scale": dim**-0.5,
    }  # fmt: skip


def label(p: Problem) -> str:
    """ "bf16 64 x 8192, 1 x 2048 of 2048 H32/8 D128 p16"."""
    kept = "" if p["storage"] == "same" else f" {p['storage']}"
    return f"{p['dtype']} {p['name']} H{p['heads_q']}/{p['heads_kv']} D{p['head_dim']} " + (
        f"p{p['page_size']}{kept}"
    )


def _prefill() -> Iterator[dict[str, Any]]:
    """Chunks behind a context, and sequences of any lengths."""
    for heads in ((32, 8), (64, 8)):
        for chunk in (512, 2048, 8192):
            for context in (0, 8192, 32_768):
                name = f"{chunk} of {chunk + context}"
                yield problem(name, [(chunk, chunk + context)], heads=heads)
    ragged = [(64 + 131 * i, 64 + 131 * i + 977 * (i % 5)) for i in range(16)]
    yield from (problem("16 ragged", ragged, size) for size in (16, 64, 256))


def _mix(decoding: int, keys: int, chunks: int, chunk: int, context: int) -> dict[str, Any]:
    name = f"{decoding} x 1 of {keys}, {chunks} x {chunk} of {chunk + context}"
    return problem(name, [(1, keys)] * decoding + [(chunk, chunk + context)] * chunks)


SETS: dict[str, list[dict[str, Any]]] = {
    "paged-prefill": list(_prefill()),
    "mixed": [
        _mix(64, 8192, 1, 2048, 0), _mix(64, 8192, 1, 2048, 8192), _mix(16, 4096, 1, 512, 0),
        _mix(128, 1024, 4, 512, 2048), _mix(256, 2048, 2, 1024, 0),
    ],
    "codes": [problem("2048 of 10240", [(2048, 10_240)], storage=kept) for kept in kv.CODES],
}  # fmt: skip
SETS["default"] = [SETS["paged-prefill"][4], *SETS["mixed"][:2]]
SETS["quick"] = SETS["default"][:2]


def inputs(problem: Problem, device: Any) -> Arrays:
    """Fresh N(0, 1) q, k and v, or codes; pages in an order drawn anew, as a server leaves them."""
    torch, place = device.torch, getattr(device, "place", "cuda")
    dtype, heads = getattr(torch, DTYPES[problem["dtype"]]), problem["heads_kv"]
    dim, size, kept = problem["head_dim"], problem["page_size"], problem["storage"]
    pages = [-(-keys // size) for _, keys in problem["lengths"]]
    shape = kv.page_shape("nhd", sum(pages), size, heads, dim)

    def held() -> Any:
        if kept == "same":
            return torch.randn(shape, device=place, dtype=dtype)
        codes = torch.randint(0, 100, shape, device=place, dtype=torch.int8)
        return codes.view(getattr(torch, kv.CODES[kept]))

    order = torch.randperm(sum(pages), device=place).int()
    table = torch.zeros((len(pages), max(pages)), dtype=torch.int32, device=place)
    for row, (own, part) in enumerate(zip(pages, order.split(pages), strict=True)):
        table[row, :own] = part
    tokens = torch.tensor([0, *(n for n, _ in problem["lengths"])], device=place)
    total = sum(n for n, _ in problem["lengths"])
    made = {"q": torch.randn((total, problem["heads_q"], dim), device=place, dtype=dtype)}
    made |= {"k": held(), "v": held(), "page_table": table, "order": order}
    made["seq_lens"] = torch.tensor([k for _, k in problem["lengths"]], device=place).int()
    made["ends"] = tokens.cumsum(0).int()
    if kept != "same":
        made["scale"] = torch.full((heads,), 3 / kv.GREATEST[kept], device=place)
    return made


def expected(problem: Problem, arrays: Arrays) -> Expected:
    """The last rows of the first and the last sequence, of the first and the last head."""
    last = len(problem["lengths"]) - 1
    ends = dict.fromkeys([(0, 0), (last, problem["heads_q"] - 1)])
    parts = [_rows(problem, arrays, row, head) for row, head in ends]
    return Expected(parts, LIMITS[problem["dtype"]])


def _rows(problem: Problem, arrays: Arrays, row: int, head: int) -> tuple[Any, Any]:
    """Where they are in o, and what they should be, the textbook way in float64."""
    torch = import_module("torch")
    end, (new, keys) = int(arrays["ends"][row + 1]), problem["lengths"][row]
    count = min(new, _ROWS)
    kv_head = head // (problem["heads_q"] // problem["heads_kv"])
    pages = arrays["page_table"][row, : -(-keys // problem["page_size"])].long()

    def held(side: str) -> Any:
        x = arrays[side][pages][:, :, kv_head].flatten(0, 1)[:keys]
        if problem["storage"] == "same":
            return x.double()
        x = x.view(torch.float8_e4m3fn).float() if problem["storage"] == "fp8" else x
        return x.double() * arrays["scale"][kv_head].double()

    own = slice(end - count, end)
    scores = arrays["q"][own, head].double() @ held("k").T * problem["softmax_scale"]
    apart = torch.arange(keys, device=scores.device) - (keys - count)
    hidden = apart > torch.arange(count, device=scores.device)[:, None]
    return (own, head), scores.masked_fill(hidden, float("-inf")).softmax(-1) @ held("v")


def ours(problem: Problem, arrays: Arrays) -> Prepared:
    """The public call, with lengths on the device."""
    return _call(problem, arrays, any(new == 1 for new, _ in problem["lengths"]))


def _call(problem: Problem, arrays: Arrays, mixed: bool) -> Prepared:
    scales = {f"{side}_scale": arrays["scale"] for side in "kv"} if "scale" in arrays else {}
    call = partial(
        fkjit.paged_attention, arrays["q"], (arrays["k"], arrays["v"]), arrays["page_table"],
        arrays["seq_lens"], cu_seqlens_q=arrays["ends"], mixed=mixed,
        max_seqlen_q=max(new for new, _ in problem["lengths"]), **scales,
    )  # fmt: skip
    return Prepared(call)


def _one_kernel(problem: Problem, arrays: Arrays) -> Prepared:
    """All sequences by prefill's kernel."""
    if all(new > 1 for new, _ in problem["lengths"]):
        raise Refused("is what ours does: nothing decodes")
    return _call(problem, arrays, False)


def _flashinfer(problem: Problem, arrays: Arrays) -> Prepared:
    """The very pages and tables that ours reads."""
    if problem["storage"] != "same":
        raise Refused("is measured with keys and values as they are")
    torch, flashinfer = import_module("torch"), import_module("flashinfer")
    q, size = arrays["q"], problem["page_size"]
    lengths = torch.tensor([keys for _, keys in problem["lengths"]])
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), (-(-lengths // size)).cumsum(0)]).int()
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        torch.zeros(_WORKSPACE, dtype=torch.uint8, device=q.device), "NHD"
    )
    wrapper.plan(
        arrays["ends"], indptr.to(q.device), arrays["order"],
        ((lengths - 1) % size + 1).int().to(q.device), problem["heads_q"], problem["heads_kv"],
        problem["head_dim"], size, causal=True, sm_scale=problem["softmax_scale"],
        q_data_type=q.dtype,
    )  # fmt: skip
    return Prepared(lambda: wrapper.run(q, (arrays["k"], arrays["v"])))


class _Packed(Op):
    """Work and traffic of each sequence, which a kernel's spec has of the longest alone."""

    def flops(self, problem: Problem) -> float:
        pairs = sum(new * (keys - (new - 1) / 2) for new, keys in problem["lengths"])
        return 4.0 * pairs * problem["heads_q"] * problem["head_dim"]

    def bytes(self, problem: Problem) -> float:
        size = ITEMSIZE[problem["dtype"]]
        held = 1 if problem["storage"] != "same" else size
        new, keys = (sum(of) for of in zip(*problem["lengths"], strict=True))
        rows = 2 * new * problem["heads_q"] * size + 2 * keys * problem["heads_kv"] * held
        return float(rows * problem["head_dim"])


def choose(spec: KernelSpec, problem: Problem, arch: Arch) -> Params:
    raise Refused("is measured as calls: what a kernel gets depends on a list made before")


OP = _Packed(
    name="paged_attention",
    kernel=f"{FLASH_FORMS.op}.{FLASH_FORMS.name}",
    sets=SETS,
    label=label,
    inputs=inputs,
    expected=expected,
    ours=ours,
    choose=choose,
    peers=(
        Candidate(name="one-kernel", prepare=_one_kernel),
        Candidate(
            name="flashinfer", package="flashinfer-python", module="flashinfer",
            prepare=_flashinfer, slow="builds a module with nvcc, 15 to 45 s each",
        ),
    ),
)  # fmt: skip
