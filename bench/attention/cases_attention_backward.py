"""Attention's gradients: dq, dk and dv of what a forward saved."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import fkjit
from fkjit.arch import Arch, arch
from fkjit.ops.attention.backward import problem as shared
from fkjit.ops.attention.backward.kernels import DKDV
from fkjit.ops.attention.backward.problem import Options
from fkjit.ops.attention.backward.select import Selected, select
from fkjit.ops.op.op import Launch
from fkjit.spec import KernelSpec, Params, Problem

from ..core.accuracy import LIMITS, Expected
from ..core.kernels import arch_of
from ..core.op import Arrays, Candidate, Op, Prepared
from . import cases_attention
from .peers_attention_backward import PEERS, flat

_CHECKED = 32  # rows of dq, and of dk and dv, of the first and of the last head


def _sets() -> dict[str, list[dict[str, Any]]]:
    peers = [
        cases_attention.problem(
            cases_attention.TOKENS // seqlen, cases_attention.WIDTH // dim, seqlen, dim, causal
        )
        for dim in (64, 128)
        for causal in (False, True)
        for seqlen in (1024, 4096, 16_384)
    ]
    default = [case for case in peers if case["seqlen_q"] == 4096]
    grouped = cases_attention.problem(2, 32, 4096, 128, True, heads_kv=8)
    return {"default": default, "quick": default[-1:], "peers": [*peers, grouped]}


def inputs(problem: Problem, device: Any) -> Arrays:
    """Fresh N(0, 1) q, k, v and dout on the GPU, and o and lse of a forward."""
    made = dict(cases_attention.inputs(problem, device))
    made.pop("counters")
    shape = (*made["q"].shape[:3], made["v"].shape[3])
    made["dout"] = device.torch.randn(shape, dtype=made["q"].dtype, device=made["q"].device)
    made["o"], made["lse"] = fkjit.attention(
        made["q"], made["k"], made["v"], causal=problem["causal"], return_lse=True
    )
    return made


def expected(problem: Problem, arrays: Arrays) -> Expected:
    """Some rows of each gradient, in float64, out of q, k, v and dout."""
    torch, parts, offset = import_module("torch"), [], 0
    ends = dict.fromkeys([(0, 0), (problem["batch"] - 1, problem["heads_kv"] - 1)])
    heads = {end: _head(problem, arrays, *end) for end in ends}
    for name in ("dq", "dk", "dv"):
        shape = shared.shape(problem, name)
        size = shape[2] * shape[3]
        for (batch, kv), found in heads.items():
            per_kv = shape[1] // problem["heads_kv"]
            start = offset + (batch * shape[1] + kv * per_kv) * size
            rows, want = found[name]
            at = torch.tensor(rows, device=want.device)[:, None] * shape[3]
            columns = torch.arange(shape[3], device=want.device)
            parts.append((start + at + columns, want))
        offset += shape[0] * shape[1] * size
    return Expected(parts, LIMITS[problem["dtype"]])


def _head(problem: Problem, arrays: Arrays, batch: int, kv: int) -> dict[str, Any]:
    """Rows of dq of the first query head of a KV head, rows of its dk and dv."""
    torch = import_module("torch")
    group = problem["heads_q"] // problem["heads_kv"]
    rows_q, rows_k = (
        sorted({*range(0, n, max(1, n // _CHECKED)), n - 1})
        for n in (problem["seqlen_q"], problem["seqlen_k"])
    )
    k, v = (arrays[name][batch, kv].double() for name in "kv")
    made: dict[str, Any] = {"dk": 0.0, "dv": 0.0}
    for head in range(kv * group, (kv + 1) * group):
        q, dout, o = (arrays[name][batch, head].double() for name in ("q", "dout", "o"))
        lse, delta = arrays["lse"][batch, head].double(), (dout * o).sum(-1)

        def scores(some_q: Any, some_k: Any, q: Any = q, lse: Any = lse) -> Any:
            s = q[some_q] @ k[some_k].T * problem["softmax_scale"] - lse[some_q, None]
            if problem["causal"]:
                shift = problem["seqlen_k"] - problem["seqlen_q"]
                s = s.masked_fill(some_k[None] > some_q[:, None] + shift, float("-inf"))
            return s.exp()

        every_q, every_k, some_q, some_k = (
            torch.tensor(list(x), device=q.device)
            for x in (range(len(q)), range(len(k)), rows_q, rows_k)
        )
        p = scores(every_q, some_k)
        ds = p * (dout @ v[some_k].T - delta[:, None]) * problem["softmax_scale"]
        made["dk"], made["dv"] = made["dk"] + ds.T @ q, made["dv"] + p.T @ dout
        if head == kv * group:
            ds = dout[some_q] @ v.T - delta[some_q, None]
            ds = ds * scores(some_q, every_k) * problem["softmax_scale"]
            made["dq"] = ds @ k
    return {name: (rows_q if name == "dq" else rows_k, x) for name, x in made.items()}


def _call(deterministic: bool, impl: str = "auto") -> Any:
    def prepare(problem: Problem, arrays: Arrays) -> Prepared:
        names = ("dout", "q", "k", "v", "o", "lse")
        given, causal = [arrays[name] for name in names], problem["causal"]
        options = {"causal": causal, "deterministic": deterministic, "impl": impl}
        return Prepared(lambda: fkjit.attention_backward(*given, **options), flat)

    return prepare


def _portable(spec: KernelSpec, problem: Problem, arch: Arch) -> Selected:
    """What `attention_backward` launches where it takes this kernel, on every GPU."""
    options = Options(impl="portable", deterministic=spec.name != "sums")
    return select(dict(problem), options, {}, True, arch)


def choose(spec: KernelSpec, problem: Problem, arch: Arch) -> Params:
    """What `attention_backward` takes of a kernel on every GPU."""
    made = _portable(spec, problem, arch)
    return next(launch.params for launch in made.launches if launch.spec is spec)


def launch(
    spec: KernelSpec, params: Params, problem: Problem, arrays: Arrays, device: Any
) -> Prepared:
    """A kernel alone, on what the call's other kernels hand it; dq is made when it is judged."""
    q = arrays["q"]
    made = _portable(spec, problem, arch_of(q) if q.is_cuda else arch("sm_80"))
    named = {**arrays, **{f"d{name}": device.torch.empty_like(arrays[name]) for name in "qkv"}}
    for name, shape in made.scratch.items():
        named[name] = q.new_zeros(shape, dtype=device.torch.float32)
    own = next(i for i, one in enumerate(made.launches) if one.spec is spec)

    def run(launches: Iterable[Launch]) -> None:
        for one in launches:
            fkjit.launch(one.spec, one.params, one.problem, named)

    def call() -> Any:
        fkjit.launch(spec, params, made.launches[own].problem, named)
        return [named[f"d{name}"] for name in "qkv"]

    def output(gradients: Any) -> Any:
        run(made.launches[own + 1 :])
        return flat(gradients)

    run(made.launches[:own])
    return Prepared(call, output, variant=(spec, params))


@dataclass(frozen=True, kw_only=True)
class _Op(Op):
    """Work is that of the whole call, five products, whatever its kernels make again."""

    def flops(self, problem: Problem) -> float:
        return shared.flops(problem)


OP = _Op(
    name="attention_backward",
    sets=_sets(),
    label=cases_attention.label,
    inputs=inputs,
    expected=expected,
    ours=_call(True),
    choose=choose,
    launch=launch,
    kernel=DKDV.id,
    peers=(
        Candidate(name="any order", kind="ours", prepare=_call(False)),
        Candidate(name="portable", kind="ours", prepare=_call(True, "portable")),
        *PEERS,
    ),
)
