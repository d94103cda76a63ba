"""A whole layer by PyTorch's grouped products, and by transformers' experts."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import fkjit
from fkjit.runtime.interop import ITEMSIZE
from fkjit.spec import Problem

from ..core.op import Arrays, Candidate, Prepared, Refused
from . import layer

_MOST_GATHERED = 4 << 30  # bytes of weights that batched_mm copies, a weight for each choice
Layer = Callable[..., Any]  # (x, logits, w_gate_up, w_down) -> out


def grouped_mm() -> Callable[..., Any]:
    """PyTorch's grouped product (x, weight, offs), under the name that this version has for it."""
    torch = import_module("torch")
    found = getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
    if found is None:
        raise Refused("this PyTorch has no grouped_mm")
    return found


def by_expert(ids: Any, experts: int) -> tuple[Any, Any]:
    """(choices in order of experts, int32 [experts] where each one's end), nothing read back."""
    torch = import_module("torch")
    of, order = ids.flatten().sort(stable=True)
    every = torch.arange(experts, device=ids.device, dtype=of.dtype)
    return order, torch.searchsorted(of, every, right=True).int()


def torch_layer(p: Problem) -> Layer:
    """Softmax, top-k, a sort, a gather, two grouped products with SwiGLU between, index_add."""
    torch, product = import_module("torch"), grouped_mm()

    def call(x: Any, logits: Any, w_gate_up: Any, w_down: Any) -> Any:
        best = torch.softmax(logits, -1).topk(p["top_k"])
        order, ends = by_expert(best.indices, p["experts"])
        tokens = order // p["top_k"]
        z = product(x[tokens], w_gate_up.transpose(1, 2), offs=ends)
        y = product(layer.swiglu(z), w_down.transpose(1, 2), offs=ends)
        y = y * best.values.flatten()[order, None].to(y.dtype)
        return torch.zeros_like(x).index_add(0, tokens, y)

    return call


def transformers_experts(p: Problem, arrays: Arrays, implementation: str) -> Any:
    """Qwen3-MoE's module of experts with these weights, computing by one of transformers' ways."""
    torch = import_module("torch")
    transformers = import_module("transformers")
    module = import_module("transformers.models.qwen3_moe.modeling_qwen3_moe")
    if not hasattr(module, "Qwen3MoeExperts"):
        raise Refused("this transformers has no experts in one array; allowed: 5 or newer")
    config = transformers.Qwen3MoeConfig(
        num_experts=p["experts"], num_experts_per_tok=p["top_k"], hidden_size=p["hidden"],
        moe_intermediate_size=p["width"],
    )  # fmt: skip
    config._experts_implementation = implementation
    with torch.device("meta"):
        experts = module.Qwen3MoeExperts(config)
    experts.gate_up_proj = torch.nn.Parameter(arrays["w_gate_up"])
    experts.down_proj = torch.nn.Parameter(arrays["w_down"])
    return experts


def transformers_layer(p: Problem, experts: Any) -> Callable[[Any, Any], Any]:
    """(x, logits) -> out: a softmax, top-k, and such a module."""
    torch = import_module("torch")

    def call(x: Any, logits: Any) -> Any:
        best = torch.softmax(logits, -1).topk(p["top_k"])
        return experts(x, best.indices, best.values.to(x.dtype))

    return call


def given(arrays: Arrays) -> tuple[Any, Any, Any, Any]:
    """x, logits, w_gate_up, w_down."""
    x, logits, up, down = (arrays[name] for name in ("x", "logits", "w_gate_up", "w_down"))
    return x, logits, up, down


def _torch(p: Problem, arrays: Arrays) -> Prepared:
    made = torch_layer(p)
    return Prepared(lambda: made(*given(arrays)))


def _our_rows(p: Problem, arrays: Arrays) -> Prepared:
    """PyTorch's products and SwiGLU on rows that our kernels sort and sum up."""
    (x, logits, up, down), product = given(arrays), grouped_mm()
    up, down = up.transpose(1, 2), down.transpose(1, 2)

    def call() -> Any:
        weights, _, groups = fkjit.moe_route_and_regroup(logits, p["top_k"], 64)
        rows, ends = fkjit.moe_permute(x, groups), groups.offsets[1:]
        y = product(layer.swiglu(product(rows, up, offs=ends)), down, offs=ends)
        return fkjit.moe_combine(y, groups, weights)

    return Prepared(call)


def _compiled(p: Problem, arrays: Arrays) -> Prepared:
    torch = import_module("torch")
    import_module("torch._dynamo").reset()
    made = torch.compile(torch_layer(p), dynamic=False)
    made(*given(arrays))
    return Prepared(lambda: made(*given(arrays)))


def _transformers(implementation: str) -> Callable[[Problem, Arrays], Prepared]:
    def prepare(p: Problem, arrays: Arrays) -> Prepared:
        gathered = 2 * layer.choices(p) * p["hidden"] * p["width"] * ITEMSIZE[p["dtype"]]
        if implementation == "batched_mm" and gathered > _MOST_GATHERED:
            raise Refused(f"would copy {gathered / 2**30:.0f} GiB of weights")
        torch, x, logits = import_module("torch"), arrays["x"], arrays["logits"]
        made = transformers_layer(p, transformers_experts(p, arrays, implementation))

        def call() -> Any:
            with torch.no_grad():
                return made(x, logits)

        return Prepared(call)

    return prepare


def _of_transformers(implementation: str) -> Candidate:
    return Candidate(
        name=f"transformers {implementation}", package="transformers", module="transformers",
        prepare=_transformers(implementation),
    )  # fmt: skip


PEERS = (
    Candidate(name="grouped_mm", package="torch", module="torch", prepare=_torch),
    Candidate(
        name="compile", package="torch", module="torch", prepare=_compiled,
        slow="torch.compile takes seconds a case",
    ),
    Candidate(name="our rows + grouped_mm", kind="ours", module="torch", prepare=_our_rows),
    _of_transformers("grouped_mm"),
    _of_transformers("batched_mm"),
)  # fmt: skip
