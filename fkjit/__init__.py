"""fkjit: CUDA kernels for LLM inference and training, compiled when first called.

    import fkjit
    o = fkjit.attention(q, k, v, causal=True)      # torch, CuPy, NumPy or DLPack arrays

Nothing but this file is imported until a name is used; see `fkjit.attention`, `fkjit.prepare`,
`fkjit.warm`, `fkjit.register`, `fkjit.launch`, `fkjit.launch_cpu`, `fkjit.sanitize`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

_MODULES = ("compat", "distributed", "errors", "models")  # public names that are modules
# public name -> the module that has it
_PUBLIC = {
    "attention": "fkjit.ops.attention.forward",
    "attention_backward": "fkjit.ops.attention.backward.call",
    "attention_varlen": "fkjit.ops.attention.forward",
    "attention_decode": "fkjit.ops.attention.decode.call",
    "paged_attention": "fkjit.ops.attention.decode.call",
    "merge_states": "fkjit.ops.attention.merge.call",
    "vector_add": "fkjit.ops.elementwise.vector_add",
    "reduce_sum": "fkjit.ops.reduce.call",
    "reduce_max": "fkjit.ops.reduce.call",
    "reduce_mean": "fkjit.ops.reduce.call",
    "layer_norm": "fkjit.ops.norm.call",
    "rms_norm": "fkjit.ops.norm.call",
    "rope": "fkjit.ops.rope.call",
    "rope_table": "fkjit.ops.rope.frequencies",
    "Llama3Scaling": "fkjit.ops.rope.frequencies",
    "YarnScaling": "fkjit.ops.rope.frequencies",
    "PagedKVCache": "fkjit.ops.kv.cache",
    "kv_append": "fkjit.ops.kv.append",
    "kv_read": "fkjit.ops.kv.read",
    "kv_slots": "fkjit.ops.kv.slots",
    "rope_kv_append": "fkjit.ops.kv.rope_append",
    "moe_route": "fkjit.ops.moe.route",
    "moe_regroup": "fkjit.ops.moe.regroup",
    "moe_route_and_regroup": "fkjit.ops.moe.route_and_regroup",
    "moe_permute": "fkjit.ops.moe.permute",
    "moe_combine": "fkjit.ops.moe.combine",
    "MoeGroups": "fkjit.ops.moe.groups",
    "linear": "fkjit.ops.gemm.call",
    "quantize": "fkjit.ops.quantize.call",
    "dequantize": "fkjit.ops.quantize.call",
    "quantize_rms_norm": "fkjit.ops.quantize.made",
    "quantize_layer_norm": "fkjit.ops.quantize.made",
    "quantize_gated": "fkjit.ops.quantize.made",
    "QuantizedTensor": "fkjit.ops.quantize.schemes",
    "quantize_attention": "fkjit.ops.attention.quantized.quantize",
    "quantized_attention": "fkjit.ops.attention.quantized.call",
    "AttentionCodes": "fkjit.ops.attention.quantized.quantize",
    "gelu_linear": "fkjit.ops.gemm.call",
    "grouped_linear": "fkjit.ops.grouped.call",
    "moe_layer": "fkjit.ops.grouped.layer",
    "prepare": "fkjit.api",
    "compile_timeout": "fkjit.api",
    "launch": "fkjit.api",
    "launch_cpu": "fkjit.cpu.launch",
    "sanitize": "fkjit.sanitizer",
    "SanitizerError": "fkjit.errors",
    "variants": "fkjit.api",
    "warm": "fkjit.warming",
    "register": "fkjit.spec",
    "KernelSpec": "fkjit.spec",
    "Param": "fkjit.spec",
    "Work": "fkjit.spec",
    "Verification": "fkjit.spec",
    "errors": "fkjit.errors",
    "compat": "fkjit.compat",
    "distributed": "fkjit.distributed",
    "models": "fkjit.models",
}
_MODULES = ("compat", "distributed", "errors", "models")

__all__ = [
    "AttentionCodes",
    "KernelSpec",
    "Llama3Scaling",
    "MoeGroups",
    "PagedKVCache",
    "Param",
    "QuantizedTensor",
    "SanitizerError",
    "Verification",
    "Work",
    "YarnScaling",
    "attention",
    "attention_backward",
    "attention_decode",
    "attention_varlen",
    "compile_timeout",
    "dequantize",
    "gelu_linear",
    "grouped_linear",
    "kv_append",
    "kv_read",
    "kv_slots",
    "launch",
    "launch_cpu",
    "layer_norm",
    "linear",
    "merge_states",
    "moe_combine",
    "moe_layer",
    "moe_permute",
    "moe_regroup",
    "moe_route",
    "moe_route_and_regroup",
    "paged_attention",
    "prepare",
    "quantize",
    "quantize_attention",
    "quantize_gated",
    "quantize_layer_norm",
    "quantize_rms_norm",
    "quantized_attention",
    "reduce_max",
    "reduce_mean",
    "reduce_sum",
    "register",
    "rms_norm",
    "rope",
    "rope_kv_append",
    "rope_table",
    "sanitize",
    "variants",
    "vector_add",
    "warm",
]


def _unknown(name: str) -> str:
    """What an AttributeError says; libraries that look for `__wrapped__` need no search."""
    if name.startswith("_"):
        return f"module 'fkjit' has no attribute {name!r}"
    near = import_module("fkjit.errors").did_you_mean(name, _PUBLIC)
    return f"module 'fkjit' has no attribute {name!r}{near} (has: {', '.join(_PUBLIC)})"


def __dir__() -> list[str]:
    return sorted(["__version__", *_PUBLIC])


if TYPE_CHECKING:
    from fkjit import compat as compat
    from fkjit import distributed as distributed
    from fkjit import errors as errors
    from fkjit import models as models
    from fkjit.api import compile_timeout, launch, prepare, variants
    from fkjit.cpu.launch import launch_cpu
    from fkjit.errors import SanitizerError
    from fkjit.ops.attention.backward.call import attention_backward
    from fkjit.ops.attention.decode.call import attention_decode, paged_attention
    from fkjit.ops.attention.forward import attention, attention_varlen
    from fkjit.ops.attention.merge.call import merge_states
    from fkjit.ops.attention.quantized.call import quantized_attention
    from fkjit.ops.attention.quantized.quantize import AttentionCodes, quantize_attention
    from fkjit.ops.elementwise.vector_add import vector_add
    from fkjit.ops.gemm.call import gelu_linear, linear
    from fkjit.ops.grouped.call import grouped_linear
    from fkjit.ops.grouped.layer import moe_layer
    from fkjit.ops.kv.append import kv_append
    from fkjit.ops.kv.cache import PagedKVCache
    from fkjit.ops.kv.read import kv_read
    from fkjit.ops.kv.rope_append import rope_kv_append
    from fkjit.ops.kv.slots import kv_slots
    from fkjit.ops.moe.combine import moe_combine
    from fkjit.ops.moe.groups import MoeGroups
    from fkjit.ops.moe.permute import moe_permute
    from fkjit.ops.moe.regroup import moe_regroup
    from fkjit.ops.moe.route import moe_route
    from fkjit.ops.moe.route_and_regroup import moe_route_and_regroup
    from fkjit.ops.norm.call import layer_norm, rms_norm
    from fkjit.ops.quantize.call import dequantize, quantize
    from fkjit.ops.quantize.made import quantize_gated, quantize_layer_norm, quantize_rms_norm
    from fkjit.ops.quantize.schemes import QuantizedTensor
    from fkjit.ops.reduce.call import reduce_max, reduce_mean, reduce_sum
    from fkjit.ops.rope.call import rope
    from fkjit.ops.rope.frequencies import Llama3Scaling, YarnScaling, rope_table
    from fkjit.sanitizer import sanitize
    from fkjit.spec import KernelSpec, Param, Verification, Work, register
    from fkjit.warming import warm
else:  # a name that is not there is an error to type checkers

    def __getattr__(name: str) -> Any:
        if name not in _PUBLIC:
            raise AttributeError(_unknown(name), name=name)
        module = import_module(_PUBLIC[name])
        value = module if name in _MODULES else getattr(module, name)
        globals()[name] = value
        return value
