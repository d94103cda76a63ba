"""`fkjit explain`: which kernel a call takes on an architecture, why, and what will limit it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod
from typing import Any

import fkjit
from fkjit.arch import Target, target
from fkjit.cli import console as report
from fkjit.cli.select import machine_target
from fkjit.errors import ParameterError, did_you_mean
from fkjit.jit.build import build, quiet
from fkjit.occupancy import occupancy
from fkjit.runtime import abstract
from fkjit.spec import KernelSpec, Params, find

# Flops for each byte at which dense bf16 tensor cores and memory take as long, by NVIDIA's data
# sheets: A100, L40S, H100, B200, RTX 5090; T4 in fp16.
_BALANCE = {(7, 5): 203, (8, 0): 153, (8, 9): 420, (9, 0): 295, (10, 0): 281, (12, 0): 117}
_FIELDS = {"batch": 1, "heads": 32, "heads_kv": 0, "seqlen_q": 4096, "seqlen_k": 0, "head_dim": 128}
_SHORT = {"D": "head_dim", "S": "seqlen", "B": "batch", "H": "heads"}
_SHAPE = '"bf16 D128 causal seqlen=4096 batch=1 heads=32/8"'


def run(call: str, shape: str, arch: str | None) -> None:
    """Print what `fkjit.attention` takes. ParameterError for other calls and unknown words."""
    if call != "attention":
        near = did_you_mean(call, ["attention"])
        raise ParameterError(f"explain: {call!r} is not one of attention{near}")
    problem = parse(shape)
    to = target((arch or machine_target()).replace("compute_", "sm_"))
    out = report.console()
    chosen = _taken(problem, to)
    for spec, params in chosen:
        made = report.table("", "")
        out.print(report.add_rows(made, _rows(spec, params, problem, to)))
    arrays = ", ".join(map(repr, _arrays(problem)))
    call_ = f"fkjit.prepare('attention', {arrays}, causal={problem['causal']}, arch='{to.name}')"
    print(f'warm it: python -c "import fkjit; {call_}"')


def parse(text: str) -> dict[str, Any]:
    """A problem of attention out of "D128 causal S4096" or "head_dim=128 seqlen=1/4096".

    ParameterError for a word that it cannot be.
    """
    found: dict[str, Any] = {**_FIELDS, "dtype": "bf16", "causal": False}
    for word in text.replace(",", " ").split():
        short = re.fullmatch(r"([DSBH])(\d+(?:/\d+)?)", word)
        name, _, value = f"{_SHORT[short[1]]}={short[2]}".partition("=") if short else ("", "", "")
        if not short:
            name, _, value = word.partition("=")
        if word in ("fp16", "bf16", "fp32"):
            found["dtype"] = word
        elif word in ("causal", "full"):
            found["causal"] = word == "causal"
        elif re.fullmatch(r"[1-9]\d*(/[1-9]\d*)?", value) and name in {*_FIELDS, "seqlen"}:
            first, _, second = value.partition("/")
            found["seqlen_q" if name == "seqlen" else name] = int(first)
            if name in ("seqlen", "heads"):
                found["seqlen_k" if name == "seqlen" else "heads_kv"] = int(second or first)
        else:
            near = did_you_mean(name, [*_FIELDS, "seqlen", "causal"])
            raise ParameterError(f"explain: --shape {word!r} is no part of {_SHAPE}{near}")
    found["seqlen_k"] = found["seqlen_k"] or found["seqlen_q"]
    heads, dim = found.pop("heads"), found["head_dim"]
    found["heads_kv"] = found["heads_kv"] or heads
    return {**found, "heads_q": heads, "head_dim_v": dim, "softmax_scale": dim**-0.5}


def _arrays(p: dict[str, Any]) -> list[str]:
    """q, k and v as `fkjit.prepare` takes them."""
    q = f"{p['dtype']}[{p['batch']}, {p['heads_q']}, {p['seqlen_q']}, {p['head_dim']}]"
    kv = f"{p['dtype']}[{p['batch']}, {p['heads_kv']}, {p['seqlen_k']}, {p['head_dim']}]"
    return [q, kv, kv]


def _taken(problem: dict[str, Any], to: Target) -> list[tuple[KernelSpec, Params]]:
    """The kernels that the public call itself selects, from shapes alone."""
    taken: list[tuple[KernelSpec, Params]] = []
    with abstract.taking(lambda spec, params, to: taken.append((spec, params))):
        fkjit.prepare("attention", *_arrays(problem), causal=problem["causal"], arch=to.name)
    return taken


def _rows(
    spec: KernelSpec, params: Params, problem: dict[str, Any], to: Target
) -> Sequence[tuple[str, Any]]:
    with quiet():
        used = build(spec, params, to).meta["resources"]
    threads = prod(spec.block(params))
    shared = used["shared"] + spec.shared_bytes(params)
    fits = occupancy(to.arch, used["registers"], shared, threads)
    sms = abstract.multiprocessors_of(abstract.device_for(to.name))
    spilled = used["spill_stores"] + used["spill_loads"]
    return [
        ("kernel", spec.id),
        ("variant", spec.label(params)),
        ("why", f"{spec.doc or spec.source}; the call's own choice for {to.name}, {sms} SMs"),
        ("registers", f"{used['registers']} a thread, {spilled} bytes spilled"),
        ("block", f"{threads} threads, {report.size(shared)} of shared memory"),
        ("occupancy", f"{fits.blocks} blocks an SM, {fits.share:.0%} of its warps ({fits.limit})"),
        ("limiter", _limiter(spec, problem, to, sms)),
    ]


def _limiter(spec: KernelSpec, problem: dict[str, Any], to: Target, sms: int) -> str:
    """A prediction from counted work alone, which is the same for every kernel of a call."""
    work_of = find("attention.flash").work
    flops, moved = work_of.flops(problem), work_of.bytes(problem)
    rate = flops / max(moved, 1)
    work = f"{flops / 1e9:.3g} GFLOP, {report.size(moved)}: {rate:.0f} flops a byte"
    tiles = problem["batch"] * problem["heads_q"] * -(-problem["seqlen_q"] // 128)
    if tiles < sms and spec.op == "attention":  # decoding shares keys out over all SMs
        return f"idle SMs, predicted: some {tiles} tiles for {sms} SMs ({work})"
    balance = _BALANCE.get(to.arch.capability)
    if balance is None or problem["dtype"] == "fp32":
        return work
    by = "arithmetic" if rate > balance else "memory"
    return f"{by}, predicted: {work}, the GPU's balance is about {balance}"
