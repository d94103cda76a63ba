"""fkjit: CUDA kernels for LLM inference and training, compiled when first called.

    import fkjit
    o = fkjit.attention(q, k, v, causal=True)      # torch, CuPy, NumPy or DLPack arrays

Nothing but this file is imported until a name is used; see `fkjit.attention`, `fkjit.prepare`,
`fkjit.warm`, `fkjit.register`, `fkjit.launch`, `fkjit.launch_cpu`, `fkjit.sanitize`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# public name -> the module that has it
_PUBLIC = {
    "attention": "fkjit.ops.attention",
    "attention_backward": "fkjit.ops.attention_backward",
    "attention_varlen": "fkjit.ops.attention_forms",
    "attention_decode": "fkjit.ops.decode",
    "paged_attention": "fkjit.ops.decode",
    "merge_states": "fkjit.ops.merge_states",
    "vector_add": "fkjit.ops.vector_add",
    "reduce_sum": "fkjit.ops.reduce",
    "reduce_max": "fkjit.ops.reduce",
    "reduce_mean": "fkjit.ops.reduce",
    "layer_norm": "fkjit.ops.norm",
    "rms_norm": "fkjit.ops.norm",
    "rope": "fkjit.ops.rope",
    "rope_table": "fkjit.ops.rope_frequencies",
    "Llama3Scaling": "fkjit.ops.rope_frequencies",
    "YarnScaling": "fkjit.ops.rope_frequencies",
    "PagedKVCache": "fkjit.ops.kv_cache",
    "kv_append": "fkjit.ops.kv_append",
    "kv_read": "fkjit.ops.kv_read",
    "kv_slots": "fkjit.ops.kv_slots",
    "rope_kv_append": "fkjit.ops.rope_kv_append",
    "moe_route": "fkjit.ops.moe_route",
    "moe_regroup": "fkjit.ops.moe_regroup",
    "moe_route_and_regroup": "fkjit.ops.moe_route_and_regroup",
    "moe_permute": "fkjit.ops.moe_permute",
    "moe_combine": "fkjit.ops.moe_combine",
    "MoeGroups": "fkjit.ops.moe_groups",
    "prepare": "fkjit.api",
    "launch": "fkjit.api",
    "launch_cpu": "fkjit.cpu_launch",
    "sanitize": "fkjit.sanitizer",
    "SanitizerError": "fkjit.errors",
    "variants": "fkjit.api",
    "warm": "fkjit.warming",
    "register": "fkjit.spec",
    "KernelSpec": "fkjit.spec",
    "Param": "fkjit.spec",
    "errors": "fkjit.errors",
    "compat": "fkjit.compat",
}

__all__ = [
    "KernelSpec",
    "Llama3Scaling",
    "MoeGroups",
    "PagedKVCache",
    "Param",
    "SanitizerError",
    "YarnScaling",
    "attention",
    "attention_backward",
    "attention_decode",
    "attention_varlen",
    "kv_append",
    "kv_read",
    "kv_slots",
    "launch",
    "launch_cpu",
    "layer_norm",
    "merge_states",
    "moe_combine",
    "moe_permute",
    "moe_regroup",
    "moe_route",
    "moe_route_and_regroup",
    "paged_attention",
    "prepare",
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


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(
            f"module 'fkjit' has no attribute {name!r} (has: {', '.join(_PUBLIC)})"
        )
    module = import_module(_PUBLIC[name])
    value = module if name in ("compat", "errors") else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})


if TYPE_CHECKING:
    from fkjit import compat as compat
    from fkjit import errors as errors
    from fkjit.api import launch, prepare, variants
    from fkjit.cpu_launch import launch_cpu
    from fkjit.errors import SanitizerError
    from fkjit.ops.attention import attention
    from fkjit.ops.attention_backward import attention_backward
    from fkjit.ops.attention_forms import attention_varlen
    from fkjit.ops.decode import attention_decode, paged_attention
    from fkjit.ops.kv_append import kv_append
    from fkjit.ops.kv_cache import PagedKVCache
    from fkjit.ops.kv_read import kv_read
    from fkjit.ops.kv_slots import kv_slots
    from fkjit.ops.merge_states import merge_states
    from fkjit.ops.moe_combine import moe_combine
    from fkjit.ops.moe_groups import MoeGroups
    from fkjit.ops.moe_permute import moe_permute
    from fkjit.ops.moe_regroup import moe_regroup
    from fkjit.ops.moe_route import moe_route
    from fkjit.ops.moe_route_and_regroup import moe_route_and_regroup
    from fkjit.ops.norm import layer_norm, rms_norm
    from fkjit.ops.reduce import reduce_max, reduce_mean, reduce_sum
    from fkjit.ops.rope import rope
    from fkjit.ops.rope_frequencies import Llama3Scaling, YarnScaling, rope_table
    from fkjit.ops.rope_kv_append import rope_kv_append
    from fkjit.ops.vector_add import vector_add
    from fkjit.sanitizer import sanitize
    from fkjit.spec import KernelSpec, Param, register
    from fkjit.warming import warm
