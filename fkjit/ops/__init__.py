"""The operations of fkjit, a folder a family. `load()` registers all kernels and the user's own."""

from __future__ import annotations

import threading
from importlib import import_module

import fkjit
from fkjit import spec
from fkjit.errors import ParameterError, did_you_mean
from fkjit.settings import settings
from fkjit.user_kernels import load_folder

# Every module that registers kernels, in the order in which kernels are listed: a bare op name
# means the op's first kernel. A module that is not here is not loaded (tests/op/test_registry.py).
KERNELS = (
    "elementwise.vector_add",
    "elementwise.adamw",
    "elementwise.scale_gradient",
    "reduce.kernels",
    "reduce.cross_entropy",
    "norm.kernels",
    "norm.kernels_backward",
    "rope.kernels",
    "kv.append",
    "kv.copy",
    "kv.read",
    "kv.slots",
    "kv.rope_append_kernels",
    "gemm.kernels_sm90",
    "gemm.kernels_small",
    "gemm.kernels_mma",
    "gemm.kernels",
    "gemm.kernels_backward",
    "gemm.flagged",
    "grouped.kernels",
    "grouped.kernels_stream",
    "grouped.kernels_codes",
    "grouped.kernels_ragged",
    "quantize.kernels",
    "quantize.kernels_few",
    "quantize.kernels_made",
    "quantize.kernels_bytes",
    "quantize.kernels_blocks",
    "step.kernels",
    "step.stream_kernel",
    "step.logits",
    "step.begin",
    "step.whole_kernel",
    "moe.route",
    "moe.regroup",
    "moe.route_and_regroup",
    "moe.rows",
    "attention.kernels_sm90",
    "attention.kernels",
    "attention.feature_kernels",
    "attention.kernels_few",
    "attention.kernels_mixed",
    "attention.resumed.kernels",
    "attention.decode.kernels",
    "attention.decode.settled",
    "attention.merge.kernels",
    "attention.quantized.quantize_kernels",
    "attention.quantized.kernels",
    "attention.quantized.kernels_sm90",
    "attention.backward.registered",
)


# Public calls whose kernels are registered under another op than the call's own name.
OPS_OF_CALLS = {
    "gelu_linear": ("linear",),
    "moe_layer": ("moe_route_and_regroup", "moe_permute", "grouped_linear", "moe_combine"),
    "attention_varlen": ("attention_form",),
    "paged_attention": ("attention_decode", "attention_form"),
    "quantize_gated": ("quantize",),
    "quantize_layer_norm": ("quantize",),
    "quantize_rms_norm": ("quantize",),
    "reduce_sum": ("reduce",),
    "reduce_max": ("reduce",),
    "reduce_mean": ("reduce",),
    "PagedKVCache": ("kv_append", "kv_read", "kv_slots", "kv_copy"),
}


_loading = threading.RLock()
_begun = False


def load() -> None:
    """Import every module of kernels, so that the registry is complete; once a process.

    A user's file that calls fkjit while it is loaded finds what is registered by then.
    """
    global _begun
    with _loading:
        if _begun:
            return
        _begun = True
        try:
            _load()
        except BaseException:
            _begun = False
            raise


def _load() -> None:
    modules = [f"{__name__}.{name}" for name in KERNELS]
    for module in modules:
        import_module(module)
    spec.arrange(modules)
    for folder in settings().kernel_path:
        load_folder(folder)


def kernels(command: str, name: str) -> list[spec.KernelSpec]:
    """What a public call ("reduce_sum"), an op ("attention") or a kernel's full name means.

    ParameterError for any other name: it says which names are near, and lists the calls; `command`
    begins it.
    """
    load()
    known = spec.registered()
    wanted = OPS_OF_CALLS.get(name, (name,))
    found = [one for one in known if one.op in wanted or one.id == name]
    if not found:
        ids, ops = [one.id for one in known], [one.op for one in known]
        near = did_you_mean(name, [*calls(), *ops, *ids])
        raise ParameterError(
            f"{command}: {name!r} is no call and no kernel{near} (calls: {', '.join(calls())}; "
            "`fkjit list` has the others, `fkjit list CALL` a call's kernels)"
        )
    return found


def known_names() -> set[str]:
    """Every name that `kernels` takes."""
    specs = spec.registered()
    return {*OPS_OF_CALLS, *(one.op for one in specs), *(one.id for one in specs)}


def calls() -> list[str]:
    """Public calls that have kernels, and the names of the user's ops."""
    specs = spec.registered()
    others = [one.op for one in specs if one.root is not None]
    named = {one.op for one in specs} | OPS_OF_CALLS.keys()
    return list(dict.fromkeys([*(n for n in fkjit.__all__ if n in named), *others]))
