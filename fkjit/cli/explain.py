"""`fkjit explain`: which kernel a call takes on an architecture, why, and what will limit it."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import fkjit
from fkjit import ops, warm_calls
from fkjit.arch import BALANCE, Target, target
from fkjit.cli import console as report
from fkjit.cli.select import machine_target
from fkjit.errors import ParameterError, did_you_mean
from fkjit.jit.build import build, quiet
from fkjit.occupancy import occupancy
from fkjit.runtime import abstract
from fkjit.runtime.abstract import Abstract
from fkjit.spec import KernelSpec, Params, find
from fkjit.warm_calls import Call

_FIELDS = {"batch": 1, "heads": 32, "heads_kv": 0, "seqlen_q": 4096, "seqlen_k": 0, "head_dim": 128}
_SHORT = {"D": "head_dim", "S": "seqlen", "B": "batch", "H": "heads"}
_DEFAULT = "bf16 D128 causal seqlen=4096 heads=32"
# Calls whose work follows from what arrays hold: lengths, tables.
_BY_VALUES = (
    "attention", "attention_varlen", "attention_decode", "paged_attention", "attention_backward",
    "kv_append", "kv_read", "rope_kv_append",
)  # fmt: skip
_SMALL = 1 << 20  # bytes that a GPU moves in about a microsecond
_SHAPE = '"bf16 D128 causal seqlen=4096 batch=1 heads=32/8"'


def run(call: str, shape: str | None, arch: str | None) -> None:
    """Print what `fkjit.<call>` takes. ParameterError for other calls and unknown words."""
    to = target((arch or machine_target()).replace("compute_", "sm_"))
    ops.load()
    asked, problem = _asked(call, shape)
    taken = _taken(asked, to)
    if not taken:
        raise ParameterError(f"explain: {call} of these sizes runs no kernel")
    out = report.console()
    limiter = _limiter(problem, to, taken[0][0]) if problem else _of_arrays(asked, to)
    for spec, params in taken:
        out.print(report.add_rows(report.table("", ""), _rows(spec, params, limiter, to)))
    if not any(map(_unwritable, asked.args)):
        options = "".join(f", {name}={value!r}" for name, value in asked.options.items())
        written = f"{', '.join(map(repr, (asked.op, *asked.args)))}{options}, arch={to.name!r}"
        print(f'warm it: python -c "import fkjit; fkjit.prepare({written})"')


def _unwritable(value: Any) -> bool:
    """Whether an argument is one of fkjit's own tuples, which a literal cannot write."""
    return hasattr(value, "_fields")


def _asked(call: str, shape: str | None) -> tuple[Call, dict[str, Any] | None]:
    """The call, and attention's problem. ParameterError for a call that is not known."""
    known = warm_calls.names()
    if call not in known:
        near = did_you_mean(call, known)
        raise ParameterError(f"explain: {call!r} is not one of {', '.join(known)}{near}")
    if call == "attention" and "[" not in (shape or ""):
        problem = parse(shape or _DEFAULT)
        return Call(call, tuple(_arrays(problem)), {"causal": problem["causal"]}), problem
    usual = next(warm_calls.calls(call, ("bf16",), (128,)))
    return written(call, shape) if shape else usual, None


def written(call: str, text: str) -> Call:
    """The call whose arguments `text` has as Python would, arrays by dtype and shape:
    "bf16[512, 4096], bf16[4096, 4096], activation='gelu'". ParameterError for anything else."""
    quoted = re.sub(r"\b\w+\[[\d, ]*\]", lambda match: repr(match[0]), text)
    try:
        made = ast.parse(f"f({quoted})", mode="eval").body
        assert isinstance(made, ast.Call)
        options = {str(word.arg): ast.literal_eval(word.value) for word in made.keywords}
        return Call(call, tuple(map(ast.literal_eval, made.args)), options)
    except (SyntaxError, ValueError, AssertionError) as error:
        raise ParameterError(
            f"explain: --shape {text!r} is not the arguments of {call}, as in "
            '"bf16[512, 4096], bf16[4096, 4096], name=value"'
        ) from error


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


def _taken(asked: Call, to: Target) -> list[tuple[KernelSpec, Params]]:
    """The kernels that the public call itself selects, from shapes alone."""
    taken: list[tuple[KernelSpec, Params]] = []
    with abstract.taking(lambda spec, params, to: taken.append((spec, params))):
        fkjit.prepare(asked.op, *asked.args, **asked.options, arch=to.name)
    return taken


def _rows(spec: KernelSpec, params: Params, limiter: str, to: Target) -> Sequence[tuple[str, Any]]:
    with quiet():
        used = build(spec, params, to).meta["resources"]
    threads = prod(spec.block(params))
    shared = used["shared"] + spec.shared_bytes(params)
    fits = occupancy(to.arch, used["registers"], shared, threads)
    sms = abstract.multiprocessors_of(abstract.device_for(to.name))
    spilled = used["spill_stores"] + used["spill_loads"]
    rows = [
        ("kernel", spec.id),
        ("variant", spec.label(params)),
        ("why", f"{spec.doc or spec.source}; the call's own choice for {to.name}, {sms} SMs"),
        ("registers", f"{used['registers']} a thread, {spilled} bytes spilled"),
        ("block", f"{threads} threads, {report.size(shared)} of shared memory"),
        ("occupancy", f"{fits.blocks} blocks an SM, {fits.share:.0%} of its warps ({fits.limit})"),
    ]
    return [*rows, ("limiter", limiter)] if limiter else rows


def _limiter(problem: dict[str, Any], to: Target, first: KernelSpec) -> str:
    """A prediction from counted work alone, which is the same for every kernel of a call."""
    work_of = find("attention.flash").work
    flops, moved = work_of.flops(problem), work_of.bytes(problem)
    tiles = problem["batch"] * problem["heads_q"] * -(-problem["seqlen_q"] // 128)
    sms = abstract.multiprocessors_of(abstract.device_for(to.name))
    text = _counted(flops, moved, problem["dtype"], to)
    if tiles < sms and first.op == "attention":  # others share keys out over all SMs
        return f"idle SMs, predicted: some {tiles} tiles for {sms} SMs ({text})"
    return text


def _counted(flops: float, moved: float, dtype: str, to: Target) -> str:
    rate = flops / max(moved, 1)
    work = f"{flops / 1e9:.3g} GFLOP, {report.size(moved)}: {rate:.0f} flops a byte"
    balance = BALANCE.get(to.arch.capability)
    if balance is None or dtype in ("fp32", "float32"):
        return work
    by = "arithmetic" if rate > balance else "memory"
    return f"{by}, predicted: {work}, the GPU's balance is about {balance}"


def _of_arrays(asked: Call, to: Target) -> str:
    """The same of any call, where its arrays alone say what it does; else "" """
    if asked.op in _BY_VALUES:
        return ""
    device = abstract.device_for(to.name)
    arrays = [one for one in map(_described(device), asked.args) if isinstance(one, Abstract)]
    if asked.op in ("linear", "gelu_linear") and len(arrays) > 1:
        (*rows, k), (n, _) = arrays[0].shape, arrays[1].shape
        m, size = prod(rows), arrays[0].dtype.itemsize
        flops, moved = 2 * m * n * k, (m * k + n * k + m * n) * size
        return _counted(flops, moved, arrays[0].dtype.name, to)
    moved = sum(one.size * one.dtype.itemsize for one in arrays)
    if moved < _SMALL:
        return f"the launch itself, predicted: {report.size(moved)} of arguments"
    return f"memory, predicted: at least {report.size(moved)} of arguments, a few flops a byte"


def _described(device: int) -> Callable[[Any], Any]:
    return lambda value: abstract.described(value, device)
