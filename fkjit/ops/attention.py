"""`fkjit.attention`: scaled dot-product attention, forward."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from fkjit import interop
from fkjit.errors import ArgumentTypeError, DeviceError, ParameterError
from fkjit.interop import CPU, View
from fkjit.interpret import interpret
from fkjit.device import LoadedKernel, device_target, flatten, launch_on_device, loaded
from fkjit.build import interpreter_target
from fkjit.ops import attention_kernels as kernels
from fkjit.spec import KernelSpec, Problem

IMPLEMENTATIONS = ("auto", "flash", "tiled", "naive")
LAYOUTS = {"bhsd": (0, 1, 2, 3), "bshd": (0, 2, 1, 3)}  # where batch, head, row, column stand
_DTYPES = ("fp16", "bf16", "fp32")
_MAX_PLANS = 4096

_plans: dict[Any, _Plan] = {}


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    block: int | tuple[int, int] | None = None,
    impl: str = "auto",
    return_lse: bool = False,
    layout: str = "bhsd",
) -> Any:
    """softmax(softmax_scale * q kᵀ + mask) v, in one kernel, fp32 accumulation.

    Args:
        q: [B, Hq, Sq, D]; k: [B, Hkv, Sk, D]; v: [B, Hkv, Sk, Dv]. fp16, bf16 or fp32, all alike;
            torch, CuPy, NumPy or any DLPack arrays on one device. Any strides, as long as the last
            dimension is contiguous. D and Dv from 1 to 256. Hq a multiple of Hkv (GQA, MQA: query
            head h reads KV head h // (Hq // Hkv)). With layout="bshd" heads and rows trade places.
        causal: query i sees keys j <= i + Sk - Sq: the mask is aligned to the bottom right, as in
            FlashAttention, so that the last query sees every key.
        softmax_scale: default 1 / sqrt(D).
        block: tile, (query rows, keys) or one number for both; default: the spec's choice for this
            architecture and shape. Every legal tile gives the same result within rounding.
        impl: "flash" (online softmax on tensor cores; fp32 exact on FMA units), "tiled" (shared
            memory, two passes), "naive" (a warp a row, for reading), "auto": flash.
        return_lse: also return the log-sum-exp of each row's scaled scores, fp32 [B, Hq, Sq].

    Returns:
        o [B, Hq, Sq, Dv] (layout as q) in q's dtype and framework, or (o, lse). A row that sees no
        key (Sk = 0, or causal with Sq > Sk) gives o = 0 and lse = -inf.

    Raises:
        ParameterError: shapes, tile, scale or flags that no kernel accepts.
        ArgumentTypeError: not arrays, integer or mixed dtypes. DeviceError: mixed devices.
        CaptureError: first call of a variant under CUDA graph capture; see `prepare`.

    CUDA arrays run on their GPU, on the caller's current stream. CPU arrays run the same kernel in
    the interpreter, up to FKJIT_INTERPRETER_LIMIT seconds of estimated work.

    Source: Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning".
    """
    if type(q) is _torch_tensor:
        try:
            q_pointer, k_pointer, v_pointer = q.data_ptr(), k.data_ptr(), v.data_ptr()
            aligned = not (q_pointer | k_pointer | v_pointer) & 15
            key = (
                q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(),
                q.dtype, k.dtype, v.dtype, q.get_device(), k.get_device(), v.get_device(),
                aligned, causal, softmax_scale, block, impl, return_lse, layout,
            )  # fmt: skip
            plan = _plans.get(key)
        except (AttributeError, TypeError):  # not tensors, or unhashable values: explained below
            plan = None
        if plan is not None and not (q.requires_grad or k.requires_grad or v.requires_grad):
            return plan.run(q, q_pointer, k_pointer, v_pointer)
    return _attend(q, k, v, causal, softmax_scale, block, impl, return_lse, layout)


_torch_tensor: Any = None  # torch.Tensor, once a tensor has been seen


def _prepare(q: Any, k: Any, v: Any, **options: Any) -> None:
    """Compile and load what `attention(q, k, v, **options)` needs, without running it.

    Call it before capturing a CUDA graph, or to pay the first-call cost early.
    """
    options = {
        "causal": False, "softmax_scale": None, "block": None, "impl": "auto",
        "return_lse": False, "layout": "bhsd", **options,
    }  # fmt: skip
    request = _check(q, k, v, *options.values())
    if request.device == CPU or request.empty:
        return
    stream = interop.current_stream(request.q)
    loaded(request.spec, request.params, request.device, stream)
    _remember(request)


attention.prepare = _prepare  # type: ignore[attr-defined]


@dataclass(frozen=True)
class _Request:
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
    key: Any
    empty: bool  # no output element

    @property
    def output_shape(self) -> tuple[int, ...]:
        sizes = [self.problem[n] for n in ("batch", "heads_q", "seqlen_q", "head_dim_v")]
        return tuple(sizes[i] for i in LAYOUTS[self.layout])

    @property
    def lse_shape(self) -> tuple[int, ...]:
        return tuple(self.problem[n] for n in ("batch", "heads_q", "seqlen_q"))


def _attend(q: Any, k: Any, v: Any, *options: Any) -> Any:
    """Everything but the warm path: checks, then the interpreter or the GPU."""
    request = _check(q, k, v, *options)
    o = interop.empty(request.q, request.output_shape, request.problem["dtype"])
    lse = interop.empty(request.q, request.lse_shape, "fp32") if request.return_lse else None
    if not request.empty:
        run = _on_cpu if request.device == CPU else _on_gpu
        run(request, o, lse)
    o = interop.give_back(request.q, o)
    return (o, interop.give_back(request.q, lse)) if request.return_lse else o


def _on_cpu(request: _Request, o: Any, lse: Any) -> None:
    order = LAYOUTS[request.layout]
    arrays = {n: interop.as_numpy(getattr(request, n)).transpose(order) for n in ("q", "k", "v")}
    output = interop.view(o, "attention", "o")
    arrays["o"] = interop.as_numpy(output).transpose(order)
    arrays["lse"] = None if lse is None else interop.as_numpy(interop.view(lse, "attention", "lse"))
    interpret(request.spec, request.params, request.problem, arrays)


def _on_gpu(request: _Request, o: Any, lse: Any) -> None:
    output = interop.view(o, "attention", "o")
    named = {
        "q": request.q.pointer,
        "k": request.k.pointer,
        "v": request.v.pointer,
        "o": output.pointer,
        "lse": 0 if lse is None else interop.view(lse, "attention", "lse").pointer,
        **_strides(request, output.strides),
        **kernels.scalars(request.problem),
    }
    stream = interop.current_stream(request.q)
    launch_on_device(
        request.spec, request.params, request.problem, named, request.device, stream
    )
    _remember(request)


def _strides(request: _Request, output: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """The Strides arguments: batch, head, row of q, k, v and o."""
    order = LAYOUTS[request.layout][:3]
    seen = {n: getattr(request, n).strides for n in ("q", "k", "v")} | {"o": output}
    return {f"{n}_strides": tuple(strides[i] for i in order) for n, strides in seen.items()}


# ------------------------------------------------------------------ the warm path


class _Plan:
    """One geometry of torch tensors, checked once: what is left is to allocate, pack, launch."""

    __slots__ = (
        "device", "dtype", "grid", "index", "kernel", "like_q", "lse_shape", "shape", "tail", "torch",
    )  # fmt: skip

    def __init__(self, request: _Request, kernel: LoadedKernel) -> None:
        self.torch = sys.modules["torch"]
        self.kernel = kernel
        self.index = request.device
        self.device = request.q.array.device
        self.dtype = request.q.array.dtype
        self.grid = request.spec.grid(request.params, request.problem)
        self.shape = request.output_shape
        self.like_q = self.shape == tuple(request.q.shape) and request.q.array.is_contiguous()
        self.lse_shape = request.lse_shape if request.return_lse else None
        named = {
            **dict.fromkeys(("q", "k", "v", "o", "lse"), 0),
            **_strides(request, _contiguous(self.shape)),
            **kernels.scalars(request.problem),
        }
        assert kernel.names[:5] == ("q", "k", "v", "o", "lse")
        self.tail = flatten(kernel.names, named)[5:]

    def run(self, like: Any, q: int, k: int, v: int) -> Any:
        """Launch on three pointers; `like` is the q tensor."""
        torch = self.torch
        if self.like_q:  # half the host time of torch.empty
            o = torch.empty_like(like)
        else:
            o = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        lse, lse_pointer = None, 0
        if self.lse_shape is not None:
            lse = torch.empty(self.lse_shape, dtype=torch.float32, device=self.device)
            lse_pointer = lse.data_ptr()
        values = (q, k, v, o.data_ptr(), lse_pointer, *self.tail)
        stream = torch._C._cuda_getCurrentRawStream(self.index)
        if torch._C._cuda_getDevice() == self.index:
            self.kernel.launch(self.grid, values, stream)
        else:
            with torch.cuda.device(self.index):
                self.kernel.launch(self.grid, values, stream)
        return o if lse is None else (o, lse)


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for size in shape[:0:-1]:
        strides.insert(0, strides[0] * max(size, 1))
    return tuple(strides)


def _remember(request: _Request) -> None:
    """The next call with tensors of this geometry takes the warm path."""
    global _torch_tensor
    if request.key is None:
        return
    _torch_tensor = sys.modules["torch"].Tensor
    if len(_plans) >= _MAX_PLANS:
        _plans.clear()
    kernel = loaded(request.spec, request.params, request.device)
    _plans[request.key] = _Plan(request, kernel)


# ------------------------------------------------------------------ checks


def _check(
    q: Any, k: Any, v: Any,
    causal: Any, softmax_scale: Any, block: Any, impl: Any, return_lse: Any, layout: Any,
) -> _Request:  # fmt: skip
    """Everything that can be wrong with a call, found before anything is allocated."""
    views = {n: interop.view(x, "attention", n) for n, x in (("q", q), ("k", k), ("v", v))}
    _one_of("impl", impl, IMPLEMENTATIONS)
    _one_of("layout", layout, tuple(LAYOUTS))
    _check_alike(views)
    _check_grad(views)
    sizes = _check_shapes(views, layout)
    scale = _check_scale(softmax_scale, sizes["head_dim"])
    problem = {**sizes, "dtype": views["q"].dtype, "causal": bool(causal), "softmax_scale": scale}
    device = views["q"].device
    arch = interpreter_target().arch if device == CPU else device_target(device).arch
    spec = kernels.implementation(impl, problem["dtype"], arch)
    params = kernels.parameters(spec, problem, _check_block(block), _aligned(views, sizes), arch)
    output = sizes["batch"] * sizes["heads_q"] * sizes["seqlen_q"] == 0
    return _Request(
        **views, spec=spec, params=params, problem=problem, device=device, layout=layout,
        return_lse=bool(return_lse), empty=output,
        key=_plan_key(views, causal, softmax_scale, block, impl, return_lse, layout),
    )  # fmt: skip


def _plan_key(views: dict[str, View], *options: Any) -> Any:
    """The key `attention` looks up; None for what never takes the warm path."""
    torch = sys.modules.get("torch")
    tensors = [view.array for view in views.values()]
    if torch is None or any(type(t) is not torch.Tensor or not t.is_cuda for t in tensors):
        return None
    try:
        hash(options)
    except TypeError:  # a tile given as a list, say
        return None
    pointers = [view.pointer for view in views.values()]
    aligned = not (pointers[0] | pointers[1] | pointers[2]) & 15
    return (
        *(t.shape for t in tensors), *(t.stride() for t in tensors), *(t.dtype for t in tensors),
        *(t.get_device() for t in tensors), aligned, *options,
    )  # fmt: skip


def _one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
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
                f"attention: {name} requires grad, but attention has no backward yet; call it under "
                "torch.no_grad() or pass detached tensors"
            )


def _check_shapes(views: dict[str, View], layout: str) -> dict[str, int]:
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
    _check_dims(d, dv)
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


def _check_dims(head_dim: int, head_dim_v: int) -> None:
    for name, size in (("head_dim", head_dim), ("head_dim_v", head_dim_v)):
        if not 1 <= size <= kernels.MAX_HEAD_DIM:
            raise ParameterError(
                f"attention: {name}={size} is not in 1 .. {kernels.MAX_HEAD_DIM}"
            )


def _check_scale(scale: Any, head_dim: int) -> float:
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    try:
        value = float(scale)
    except (TypeError, ValueError):
        raise ArgumentTypeError(
            f"attention: softmax_scale={scale!r} is not a number; None means 1/sqrt(head_dim)"
        ) from None
    if not math.isfinite(value):
        raise ParameterError(f"attention: softmax_scale={value} is not finite")
    return value


def _check_block(block: Any) -> Any:
    """An int or a pair of ints, a square pair as one int; None stays."""
    if block is None:
        return None
    pair = (block, block) if isinstance(block, int) else block
    try:
        block_q, block_k = (int(x) for x in pair)
    except (TypeError, ValueError):
        raise ArgumentTypeError(
            f"attention: block={block!r} is not a number, a pair (block_q, block_k) or None"
        ) from None
    return block_q if block_q == block_k else (block_q, block_k)


def _aligned(views: dict[str, View], sizes: Mapping[str, int]) -> bool:
    """Whether every row of q, k, v and o starts on a 16-byte boundary."""
    itemsize = interop.ITEMSIZE[views["q"].dtype]
    numbers = [sizes["head_dim_v"] * itemsize]
    for view in views.values():
        steps = (s * itemsize for s, n in zip(view.strides[:3], view.shape[:3], strict=True) if n > 1)
        numbers += [view.pointer, *steps]
    return all(number % 16 == 0 for number in numbers)
