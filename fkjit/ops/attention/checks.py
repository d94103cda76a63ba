"""Everything that can be wrong with a call of `fkjit.attention`, found before anything runs."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fkjit.errors import ArgumentTypeError, DeviceError, ParameterError
from fkjit.jit.build import interpreter_target
from fkjit.ops.attention import kernels_sm90, short_q
from fkjit.ops.attention import select as choice
from fkjit.ops.attention.problem import MAX_HEAD_DIM
from fkjit.runtime import interop
from fkjit.runtime.device import device_target, multiprocessors
from fkjit.runtime.interop import CPU, Pointer, View
from fkjit.spec import KernelSpec, Problem

IMPLEMENTATIONS = ("auto", "flash", "tiled", "naive")
LAYOUTS = {"bhsd": (0, 1, 2, 3), "bshd": (0, 2, 1, 3)}  # where batch, head, row, column stand
_MAX_SCALE = 2e38  # times log2(e) it is still an fp32
_MAX_SIZE = 2**31 - 1
_DTYPES = ("fp16", "bf16", "fp32")


@dataclass(frozen=True)
class Request:
    """A checked call: which kernel, with what parameters, on which problem."""

    q: View
    k: View
    v: View
    spec: KernelSpec
    params: Mapping[str, Any]
    problem: Problem
    device: int
    layout: str
    return_lse: bool
    empty: bool  # no output element
    few: bool = False  # queries, so that decoding's kernel takes them

    @property
    def output_shape(self) -> tuple[int, ...]:
        sizes = [self.problem[n] for n in ("batch", "heads_q", "seqlen_q", "head_dim_v")]
        return tuple(sizes[i] for i in LAYOUTS[self.layout])

    @property
    def lse_shape(self) -> tuple[int, ...]:
        return tuple(self.problem[n] for n in ("batch", "heads_q", "seqlen_q"))

    def pointers(self, o: Pointer, lse: Pointer) -> dict[str, Pointer]:
        """All arrays as the spec's `arguments` wants them: batch, head, row, column."""
        order = LAYOUTS[self.layout]
        seen = {n: Pointer(getattr(self, n)) for n in ("q", "k", "v")} | {"o": o}
        return {**{n: pointer.transposed(order) for n, pointer in seen.items()}, "lse": lse}


def check(
    q: Any, k: Any, v: Any,
    causal: Any, softmax_scale: Any, block: Any, impl: Any, return_lse: Any, layout: Any,
) -> Request:  # fmt: skip
    """Everything that can be wrong with a call, found before anything is allocated."""
    views = {n: interop.view(x, "attention", n) for n, x in (("q", q), ("k", k), ("v", v))}
    one_of("impl", impl, IMPLEMENTATIONS)
    one_of("layout", layout, tuple(LAYOUTS))
    _check_alike(views)
    _check_grad(views)
    sizes = check_shapes(views, layout)
    scale = check_scale(softmax_scale, sizes["head_dim"])
    problem = {
        **sizes, "dtype": views["q"].dtype, "causal": _check_flag("causal", causal),
        "softmax_scale": scale,
    }  # fmt: skip
    device = views["q"].device
    arch = interpreter_target().arch if device == CPU else device_target(device).arch
    if device != CPU:
        problem["multiprocessors"] = multiprocessors(device)
    aligned, block = aligned_rows(views, sizes), check_block(block)
    suits = aligned and kernels_sm90.takes(problem, views, LAYOUTS[layout], block)
    spec = choice.implementation(impl, problem["dtype"], arch, suits)
    params = choice.parameters(spec, problem, block, aligned, arch)
    output = sizes["batch"] * sizes["heads_q"] * sizes["seqlen_q"] == 0
    return Request(
        **views, spec=spec, params=params, problem=problem, device=device, layout=layout,
        return_lse=_check_flag("return_lse", return_lse), empty=output,
        few=not output and short_q.takes(problem, views, impl, block, aligned, arch),
    )  # fmt: skip


def one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    """ParameterError for any other."""
    if not isinstance(value, str) or value not in allowed:
        raise ParameterError(f"attention: {name}={value!r} is not one of {', '.join(allowed)}")


def _check_alike(views: dict[str, View]) -> None:
    """One framework, one device, one floating dtype."""
    q = views["q"]
    for name, view in views.items():
        if view.dtype not in _DTYPES:
            raise ArgumentTypeError(
                f"attention: {name} is {view.dtype}; allowed: {', '.join(_DTYPES)}"
            )
        if view.dtype != q.dtype:
            raise ArgumentTypeError(
                f"attention: {name} is {view.dtype} but q is {q.dtype}; convert them to one dtype"
            )
        if view.device != q.device:
            raise DeviceError(
                f"attention: {name} is on {_place(view)} but q is on {_place(q)}; move them to one "
                "device (fkjit never copies between devices)"
            )
        if view.kind != q.kind:
            raise ArgumentTypeError(
                f"attention: {name} is a {view.kind} array but q is a {q.kind} array; "
                "pass arrays of one framework"
            )


def _place(view: View) -> str:
    return "the CPU" if view.device == CPU else f"cuda:{view.device}"


def _check_grad(views: dict[str, View]) -> None:
    torch = sys.modules.get("torch")
    for name, view in views.items():
        if view.kind == "torch" and view.array.requires_grad and torch.is_grad_enabled():  # type: ignore[union-attr]
            raise ParameterError(
                f"attention: {name} requires grad, but attention has no backward yet; call it "
                "under torch.no_grad() or pass detached tensors"
            )


def check_shapes(views: dict[str, View], layout: str) -> dict[str, int]:
    """The sizes of a problem, of q, k and v that fit."""
    shapes = {}
    for name, view in views.items():
        if len(view.shape) != 4:
            raise ParameterError(
                f"attention: {name} has {len(view.shape)} dimensions {view.shape}; allowed: 4 "
                f"({', '.join(_axes(layout))})"
            )
        if view.shape[3] > 1 and view.strides[3] != 1 and 0 not in view.shape:
            raise ParameterError(
                f"attention: {name} has stride {view.strides[3]} in its last dimension; it must be "
                "contiguous: call .contiguous() or transpose before the projection"
            )
        shapes[name] = tuple(view.shape[i] for i in LAYOUTS[layout])
    (b, hq, sq, d), (_, hkv, sk, _), dv = shapes["q"], shapes["k"], shapes["v"][3]
    _expect(views, layout, "k", "v's batch, heads or length", shapes["k"][:3] == shapes["v"][:3])
    _expect(views, layout, "q", "k's batch or head_dim", (b, d) == (shapes["k"][0], shapes["k"][3]))
    check_dims(d, dv)
    for name, size in (("q", sq), ("k", sk)):
        if size > _MAX_SIZE:
            raise ParameterError(f"attention: {name} has {size} rows; allowed: up to {_MAX_SIZE}")
    if hq and (not hkv or hq % hkv):
        raise ParameterError(
            f"attention: q has {hq} heads, not a multiple of k's {hkv} (shapes "
            f"{', '.join(f'{n} {v.shape}' for n, v in views.items())})"
        )
    return {
        "batch": b, "heads_q": hq, "heads_kv": hkv, "seqlen_q": sq, "seqlen_k": sk,
        "head_dim": d, "head_dim_v": dv,
    }  # fmt: skip


def _axes(layout: str) -> tuple[str, ...]:
    names = ("batch", "heads", "seqlen", "head_dim")
    return tuple(names[i] for i in LAYOUTS[layout])


def _expect(views: dict[str, View], layout: str, name: str, what: str, right: bool) -> None:
    if not right:
        shapes = ", ".join(f"{n} {view.shape}" for n, view in views.items())
        raise ParameterError(
            f"attention: {name} does not match {what}: {shapes}; allowed: q [B, Hq, Sq, D], "
            f"k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv] (here in layout={layout!r})"
        )


def check_dims(head_dim: int, head_dim_v: int, call: str = "attention") -> None:
    """ParameterError for head dimensions that no kernel has."""
    for name, size in (("head_dim", head_dim), ("head_dim_v", head_dim_v)):
        if not 1 <= size <= MAX_HEAD_DIM:
            raise ParameterError(f"{call}: {name}={size} is not in 1 .. {MAX_HEAD_DIM}")


def check_scale(scale: Any, head_dim: int, call: str = "attention") -> float:
    """softmax_scale as a float that fp32 can hold."""
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    try:
        if isinstance(scale, (str, bytes)) or getattr(scale, "requires_grad", False):
            raise TypeError
        value = float(scale)
    except (TypeError, ValueError, OverflowError):
        raise ArgumentTypeError(
            f"{call}: softmax_scale={scale!r} is not a plain number; None means 1/sqrt(head_dim)"
        ) from None
    if not abs(value) <= _MAX_SCALE:
        raise ParameterError(
            f"{call}: softmax_scale={value} is not a finite number up to {_MAX_SCALE:g}"
        )
    return value


def check_block(block: Any, call: str = "attention") -> Any:
    """An int or a pair of ints, a square pair as one int; None stays."""
    if block is None:
        return None
    try:
        pair = block if isinstance(block, (tuple, list)) else (block, block)
        block_q, block_k = (operator.index(x) for x in pair)
    except (TypeError, ValueError):
        raise ArgumentTypeError(
            f"{call}: block={block!r} is not a number, a pair (block_q, block_k) or None"
        ) from None
    return block_q if block_q == block_k else (block_q, block_k)


def _check_flag(name: str, value: Any) -> bool:
    """True or False, in whatever form of 0 and 1."""
    try:
        return (False, True)[operator.index(value)] if not isinstance(value, bool) else value
    except (TypeError, IndexError):
        if type(value).__name__ in ("bool", "bool_"):  # NumPy's
            return bool(value)
    raise ArgumentTypeError(f"attention: {name}={value!r} is not True or False")


def aligned_rows(views: dict[str, View], sizes: Mapping[str, int]) -> bool:
    """Whether every row of q, k, v and o starts on a 16-byte boundary."""
    itemsize = interop.ITEMSIZE[views["q"].dtype]
    numbers = [sizes["head_dim_v"] * itemsize]
    for view in views.values():
        steps = (
            s * itemsize for s, n in zip(view.strides[:-1], view.shape[:-1], strict=True) if n > 1
        )
        numbers += [view.pointer, *steps]
    return all(number % 16 == 0 for number in numbers)
