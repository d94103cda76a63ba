"""Random calls of every public function: valid ones, with some arguments replaced by anything."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

import numpy as np
import torch

import fkjit
import fkjit.compat
from fkjit import spec as spec_module
from fkjit import warming

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Target:
    """A public function: its name as errors say it, and arguments that it takes."""

    name: str
    call: Callable[..., Any]
    arguments: Callable[[random.Random], Arguments]
    also: tuple[str, ...] = ()  # other names that its errors may begin with
    parts: tuple[str, ...] = ()  # names of what is in its parameters

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(inspect.signature(self.call).parameters)


# ------------------------------------------------------------------ valid arrays


def _array(chance: random.Random, *shape: int, dtype: str = "f2") -> Any:
    """Zeros, of NumPy or torch as the call's random generator has it for all of its arrays."""
    made = np.zeros(shape, dtype)
    return torch.from_numpy(made) if chance.use_torch else made  # type: ignore[attr-defined]


class Chance(random.Random):
    """A generator that also says which framework this call's arrays are of."""

    use_torch = False


def _qkv(c: random.Random, seqlen: int = 16) -> Arguments:
    return {name: _array(c, 1, 2, seqlen, 32) for name in ("q", "k", "v")}


def _packed(c: random.Random) -> Arguments:
    ends = np.array([0, 5, 16], np.int32)
    made = torch.from_numpy(ends) if c.use_torch else ends  # type: ignore[attr-defined]
    rows = {name: _array(c, 16, 2, 32) for name in ("q", "k", "v")}
    lengths = {"max_seqlen_q": 11, "max_seqlen_k": 11}
    return {**rows, "cu_seqlens_q": made, "cu_seqlens_k": made, **lengths}


def _backward(c: random.Random) -> Arguments:
    lse = _array(c, 1, 2, 16, dtype="f4")
    return {**_qkv(c), "dout": _array(c, 1, 2, 16, 32), "o": _array(c, 1, 2, 16, 32), "lse": lse}


def paged(c: random.Random) -> Any:
    framework = "torch" if c.use_torch else "numpy"  # type: ignore[attr-defined]
    cache = fkjit.PagedKVCache(
        4, page_size=16, num_kv_heads=2, head_dim=32, dtype="fp16", device="cpu",
        framework=framework, max_sequences=4,
    )  # fmt: skip
    cache.extend([cache.allocate()], 3)
    return cache


def _slots(c: random.Random, count: int = 3) -> Any:
    return _array(c, count, dtype="i8")


def _paged_call(c: random.Random) -> Arguments:
    cache = paged(c)
    table, lengths = _array(c, 1, 4, dtype="i4"), _array(c, 1, dtype="i4")
    return {"q": _array(c, 1, 2, 1, 32), "cache": cache, "page_table": table, "seq_lens": lengths}


def _groups(c: random.Random) -> Any:
    made = {
        "sorted_token_ids": _array(c, 6, dtype="i4"), "expert_ids": _array(c, 6, dtype="i4"),
        "num_tokens_post_padded": _array(c, 1, dtype="i4"), "inverse": _array(c, 3, 2, dtype="i4"),
        "offsets": _array(c, 5, dtype="i4"), "counts": _array(c, 4, dtype="i4"),
    }  # fmt: skip
    return fkjit.MoeGroups(**made)


def _rope(c: random.Random) -> Arguments:
    return {"q": _array(c, 1, 2, 16, 32), "k": _array(c, 1, 2, 16, 32)}


def _rope_append(c: random.Random) -> Arguments:
    rows = {name: _array(c, 3, 2, 32) for name in ("q", "k", "v")}
    places = {"slot_mapping": _slots(c), "positions": _array(c, 3, dtype="i4")}
    return {**rows, "cache": paged(c), **places}


def _states(c: random.Random) -> Arguments:
    o, lse = _array(c, 1, 2, 16, 32), _array(c, 1, 2, 16, dtype="f4")
    return {"o": o, "lse": lse, "other": o, "other_lse": lse}


def _method(name: str, **arguments: Any) -> Target:
    """A method of a cache with one sequence of three tokens."""
    method = getattr(fkjit.PagedKVCache, name)
    return Target(
        f"PagedKVCache.{name}", method, lambda c: {"self": paged(c), **arguments},
        also=("PagedKVCache", "kv_read"), parts=("slot_mapping",),  # which nothing filled
    )  # fmt: skip


_NEW_CACHE = {"num_pages": 4, "num_kv_heads": 2, "head_dim": 32, "dtype": "fp16", "device": "cpu"}


def _op(name: str, arguments: Callable[[random.Random], Arguments], *also: str) -> Target:
    return Target(
        name, getattr(fkjit, name), arguments, also, ("k is", "v is", "k_pages", "v_pages")
    )


def _codes() -> fkjit.QuantizedTensor:
    return fkjit.QuantizedTensor(np.zeros((4, 32), "i1"), np.ones(4, "f4"), "int8_row")


# ------------------------------------------------------------------ names of other libraries


def _torch(c: random.Random, *shape: int, dtype: Any = torch.half) -> Any:
    return torch.zeros(shape, dtype=dtype)


def _rows(c: random.Random) -> Arguments:
    return {name: _torch(c, 1, 16, 2, 32) for name in ("q", "k", "v")}


def _ends(c: random.Random, *names: str) -> Arguments:
    ends = torch.tensor([0, 5, 16], dtype=torch.int32)
    return {name: ends if name.startswith("cu") else 11 for name in names}


_BOTH = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")


def _flash_cache(c: random.Random) -> Arguments:
    caches = {name: _torch(c, 1, 32, 2, 32) for name in ("k_cache", "v_cache")}
    new = {name: _torch(c, 1, 1, 2, 32) for name in ("q", "k", "v")}
    return {**new, **caches, "cache_seqlens": _torch(c, 1, dtype=torch.int32)}


def _compat(name: str, arguments: Callable[[random.Random], Arguments], *also: str) -> Target:
    called = ("attention", "attention_varlen", "attention_decode", "paged_attention", "kv_append")
    parts = (
        "q is",
        "k is",
        "v is",
        "q has",
        "k has",
        "v has",
        "cache",
        "window",
        "pages",
        "k_",
        "v's",
    )
    return Target(name, getattr(fkjit.compat, name), arguments, (*also, *called), parts)


_FLASH, _VARLEN = "flash_attn_func", "flash_attn_varlen_func"
COMPAT = (
    _compat("scaled_dot_product_attention", lambda c: {
        "query": _torch(c, 1, 2, 16, 32), "key": _torch(c, 1, 2, 16, 32),
        "value": _torch(c, 1, 2, 16, 32),
    }),
    _compat(_FLASH, _rows),
    _compat("flash_attn_qkvpacked_func", lambda c: {"qkv": _torch(c, 1, 16, 3, 2, 32)}, _FLASH),
    _compat("flash_attn_kvpacked_func", lambda c: {
        "q": _torch(c, 1, 16, 2, 32), "kv": _torch(c, 1, 16, 2, 2, 32)}, _FLASH),
    _compat(_VARLEN, lambda c: {
        **{name: _torch(c, 16, 2, 32) for name in ("q", "k", "v")}, **_ends(c, *_BOTH)}),
    _compat("flash_attn_varlen_qkvpacked_func", lambda c: {
        "qkv": _torch(c, 16, 3, 2, 32), **_ends(c, "cu_seqlens", "max_seqlen")}, _VARLEN),
    _compat("flash_attn_varlen_kvpacked_func", lambda c: {
        "q": _torch(c, 16, 2, 32), "kv": _torch(c, 16, 2, 2, 32), **_ends(c, *_BOTH)}, _VARLEN),
    _compat("flash_attn_with_kvcache", _flash_cache),
)  # fmt: skip


# ------------------------------------------------------------------ calls that leave something


def _warm(ops: Any, arch: Any, jobs: Any, progress: Any) -> Any:
    """`fkjit.warm` that chooses what to compile, but compiles nothing."""
    with mock.patch.object(warming, "_run", lambda work, processes: iter(())):
        names = ops if isinstance(ops, (tuple, list)) else (ops,)
        return fkjit.warm(*names, arch=arch, jobs=jobs, progress=progress)


def _register(spec: Any, replace: Any) -> Any:
    with mock.patch.multiple(spec_module, _REGISTRY={}, _HOME={}):
        return fkjit.register(spec, replace=replace)


def _compile_timeout(seconds: Any) -> Any:
    try:
        return fkjit.compile_timeout(seconds)
    finally:
        fkjit.compile_timeout(600)


LEAVING = (
    Target("warm", _warm, lambda c: {
        "ops": ("vector_add",), "arch": "sm_80", "jobs": 1, "progress": None,
    }, ("show", "choose_target", "arch", "target")),
    Target("register", _register, lambda c: {
        "spec": fkjit.KernelSpec(
            op="fuzz", name="plain", source="kernels_cu/fuzz.cu", entry="fuzz", params=(),
            block=lambda params: (1, 1, 1), grid=lambda params, problem: (1, 1, 1),
            arguments=lambda params, problem, arrays: {}),
        "replace": False,
    }),
    Target("compile_timeout", _compile_timeout, lambda c: {"seconds": 5}),
)  # fmt: skip

TARGETS = (
    *COMPAT,
    *LEAVING,
    _op("attention", _qkv),
    _op("attention_varlen", _packed),
    _op("attention_backward", _backward),
    _op("attention_decode", lambda c: {**_qkv(c), "q": _array(c, 1, 2, 1, 32)}),
    _op("paged_attention", _paged_call),
    _op("quantize_attention", _qkv),
    _op("quantized_attention", _qkv, "quantize_attention"),
    _op("merge_states", _states),
    _op("vector_add", lambda c: {"a": _array(c, 8), "b": _array(c, 8)}),
    *(_op(f"reduce_{how}", lambda c: {"x": _array(c, 4, 8)}) for how in ("sum", "max", "mean")),
    _op("layer_norm", lambda c: {"x": _array(c, 4, 8), "weight": _array(c, 8)}),
    _op("rms_norm", lambda c: {"x": _array(c, 4, 8), "weight": _array(c, 8)}),
    _op("rope", _rope),
    _op("rope_table", lambda c: {"length": 8, "rotary_dim": 16}),
    _op("kv_append", lambda c: {
        "k": _array(c, 3, 2, 32), "v": _array(c, 3, 2, 32), "cache": paged(c),
        "slot_mapping": _slots(c),
    }),
    _op("kv_read", lambda c: {"cache": paged(c), "slot_mapping": _slots(c)}),
    _op("kv_slots", lambda c: {"cache": paged(c), "rows": _array(c, 1, dtype="i4")}),
    _op("rope_kv_append", _rope_append),
    _op("moe_route", lambda c: {"logits": _array(c, 3, 8, dtype="f4"), "top_k": 2}),
    _op("moe_regroup", lambda c: {"topk_ids": _array(c, 3, 2, dtype="i4"), "num_experts": 4}),
    _op("moe_route_and_regroup", lambda c: {"logits": _array(c, 3, 8, dtype="f4"), "top_k": 2}),
    _op("moe_permute", lambda c: {"x": _array(c, 3, 16), "groups": _groups(c)}),
    _op("moe_combine", lambda c: {"y": _array(c, 6, 16), "inverse": _array(c, 3, 2, dtype="i4")}),
    _op("linear", lambda c: {"x": _array(c, 4, 32), "weight": _array(c, 16, 32)}),
    _op("gelu_linear", lambda c: {"x": _array(c, 4, 32), "weight": _array(c, 16, 32)}, "linear"),
    _op("quantize", lambda c: {"x": _array(c, 4, 32), "scheme": "int8_group"}),
    _op("dequantize", lambda c: {"quantized": _codes()}),
    _op("quantize_rms_norm", lambda c: {"x": _array(c, 4, 32), "weight": _array(c, 32)}),
    _op("quantize_layer_norm", lambda c: {"x": _array(c, 4, 32), "weight": _array(c, 32)}),
    _op("quantize_gated", lambda c: {"gate": _array(c, 4, 32), "up": _array(c, 4, 32)}),
    _op("PagedKVCache", lambda c: dict(_NEW_CACHE)),
    _method("advance", sequences=[0], tokens=1),
    _method("extend", sequences=[0], tokens=1),
    _method("reserve", sequences=[0], tokens=1),
    _method("fork", sequence=0),
    _method("free", sequence=0),
    _method("length", sequence=0),
    _method("pages", layer=0),
    _method("read", sequences=[0]),
    _method("rows", sequences=[0]),
    _method("slots", sequences=[0]),
    _method("flashinfer", sequences=[0]),
    _op("launch_cpu", lambda c: {"source": "nothing.cu", "grid": 1, "block": 32, "args": []},
        "sanitize"),
    _op("launch", lambda c: {
        "spec": "vector_add.plain", "params": {}, "problem": {"n": 8}, "arrays": {},
    }),
    _op("variants", lambda c: {"kernel": "vector_add", "arch": "sm_80"}, "choose_target", "arch"),
    _op("sanitize", lambda c: {}),
    _op("prepare", lambda c: {"op": "attention", "args": (), "options": {}}, "attention"),
)  # fmt: skip


# ------------------------------------------------------------------ anything


class Hostile:
    """An object whose every conversion fails, each in its own way."""

    def __index__(self) -> int:
        raise RuntimeError("no index")

    def __float__(self) -> float:
        raise OverflowError("no float")

    def __bool__(self) -> bool:
        raise AttributeError("no bool")

    def __dlpack__(self, **_: Any) -> Any:
        raise RuntimeError("no capsule")

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


class Named(str):
    """A string of another type."""


@cache
def _oddities() -> tuple[Callable[[], Any], ...]:
    """What makes a value that a caller could pass by mistake."""
    plain: list[Any] = [
        None, True, False, 0, 1, -1, 2, 3, 7, 16, 64, 2**31, 2**31 - 1, -(2**31), 2**63, 10**400,
        0.0, -0.0, 0.5, 1.5, 1e300, -1e-300, float("nan"), float("inf"), -float("inf"), 1j,
        "", "x", "bhsd", "bshd", "fp16", "fp32", "bf16", "int8", "auto", "flash", "\x1b[31m",
        "a" * 999,
        "score * 2", "score + z", b"bytes", Named("nhd"), (), (1,), (1, 2), (None, None), (-1, -1),
        (0.5, 1), ("a", "b"), [], [1], [0, 0], [[1]], [None], {}, {"z": None}, {"z": 1.0},
        {"a": []},
        {1: 2}, set(), frozenset({1}), range(3), slice(1), Ellipsis, NotImplemented, int, object(),
        np.float32(1), np.float64("nan"), np.int8(3), np.int64(-1), np.bool_(True), np.str_("nhd"),
        np.dtype("f4"), np.float16, torch.float16, torch.int8, torch.device("cpu"), torch.Size([1]),
        len, lambda: 1, Hostile(), Exception("x"), fkjit.Llama3Scaling(),
        fkjit.YarnScaling(4.0, 64),
        fkjit.Llama3Scaling("a", None), fkjit.YarnScaling(None, "b"),
        fkjit.YarnScaling(2, 64, mscale="c"),
    ]  # fmt: skip
    shapes = [
        (),
        (0,),
        (1,),
        (3,),
        (8,),
        (4, 8),
        (3, 2),
        (1, 2, 16, 32),
        (3, 2, 32),
        (1, 0, 16, 32),
    ]
    dtypes = ["f2", "f4", "f8", "i4", "i8", "u1", "?", "c8", "V0", "V3", "O", "S3", "U2", "M8[s]",
              ">f4", "i1,f4", "f4,(0,)f4"]  # fmt: skip
    arrays = [lambda s=s, d=d: np.zeros(s, d) for s in shapes for d in dtypes]
    arrays += [
        lambda: np.zeros((4, 16), "f2")[:, ::2], lambda: np.zeros(8, "f2")[::-1],
        lambda: np.broadcast_to(np.zeros(1, "f2"), (4, 8)),
        lambda: np.zeros(17, "u1")[1:].view("f2"),
        lambda: np.ma.zeros((4, 8)), lambda: np.zeros((1,) * 30, "f2"), lambda: memoryview(b"abcd"),
        lambda: bytearray(8), lambda: np.full((1, 2, 16, 32), np.nan, "f2"),
    ]  # fmt: skip
    kinds = [torch.half, torch.float, torch.double, torch.int32, torch.int64, torch.bool,
             torch.bfloat16, torch.cfloat, torch.float8_e4m3fn, torch.uint16]  # fmt: skip
    tensors = [lambda s=s, d=d: torch.zeros(s, dtype=d) for s in shapes for d in kinds]
    tensors += [lambda s=s: torch.zeros(s, dtype=torch.half, requires_grad=True) for s in shapes]
    tensors += [
        lambda: torch.zeros(4, 8).to_sparse(), lambda: torch.zeros(4, 8, device="meta"),
        lambda: torch.zeros(4, 8, dtype=torch.half).expand(2, 4, 8), lambda: torch.zeros(3)[1:],
        lambda: torch.nn.Parameter(torch.zeros(4, 8)), lambda: torch.zeros(4, 8).T,
        lambda: torch.zeros(3, dtype=torch.cfloat).conj(), lambda: torch._neg_view(torch.zeros(4)),
        lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
        lambda: torch.quantize_per_tensor(torch.zeros(4), 1.0, 0, torch.qint8),
    ]  # fmt: skip
    return tuple([lambda v=v: v for v in plain] * 3 + arrays + tensors)


def random_call(seed: int) -> tuple[Target, Arguments, tuple[str, ...]]:
    """The function, its arguments, and which of them are not what it wants (perhaps)."""
    chance = Chance(seed)
    chance.use_torch = chance.random() < 0.5
    target = TARGETS[chance.randrange(len(TARGETS))]
    arguments = target.arguments(chance)
    names = [name for name in target.parameters if name != "self"]
    changed = tuple(chance.sample(names, min(len(names), chance.choice((1, 1, 1, 2, 3)))))
    for name in changed:
        arguments[name] = chance.choice(_oddities())()
    return target, arguments, changed


def run(target: Target, arguments: Arguments) -> Any:
    """The call; what has names goes by name."""
    given = dict(arguments)
    if target.name == "prepare":
        args, options = given.pop("args", ()), given.pop("options", {})
        args = args if isinstance(args, (tuple, list)) else (args,)
        options = (
            {k: v for k, v in options.items() if isinstance(k, str)}
            if isinstance(options, Mapping)
            else {}
        )
        return target.call(given["op"], *args, **options)
    result = target.call(**given)
    return list(result) if target.name == "variants" else result
