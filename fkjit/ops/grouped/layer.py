"""`fkjit.moe_layer`: a whole mixture of experts, from router logits to weighted sums."""

from __future__ import annotations

import inspect
from typing import Any

from fkjit.errors import ParameterError
from fkjit.ops.gemm.call import linear
from fkjit.ops.grouped.call import grouped_linear
from fkjit.ops.grouped.codes import SCHEME
from fkjit.ops.grouped.few import block_size_of, implementation
from fkjit.ops.moe.gradient import weights_of
from fkjit.ops.moe.groups import MoeGroups, made, places_of
from fkjit.ops.moe.route_and_regroup import moe_route_and_regroup
from fkjit.ops.quantize.schemes import WIDTH, QuantizedTensor, dtype_name
from fkjit.runtime import interop
from fkjit.types import Scoring

_CALL = "moe_layer"


def moe_layer(
    x: Any,
    router_logits: Any,
    w_gate_up: Any,
    w_down: Any,
    top_k: int,
    *,
    router_weight: Any = None,
    activation: str = "silu",
    scoring: Scoring = "softmax",
    renormalize: bool = False,
    bias: Any = None,
    num_groups: int | None = None,
    topk_groups: int | None = None,
    routed_scaling_factor: float = 1.0,
    expert_map: Any = None,
    capacity: int | None = None,
    shared_gate_up: Any = None,
    shared_down: Any = None,
    block_size: int | None = None,
    save_pre_activation: bool = True,
    impl: str = "auto",
    precision: str = "ieee",
) -> Any:
    """Each token's best experts, weighted: sum over k of weights[t, k] * down(act(gate) * up).

    Args:
        x: fp16, bf16 or fp32 [tokens, H]: torch, CuPy, NumPy or any DLPack array.
        router_logits: [tokens, E], or None with `router_weight`: x router_weightᵀ then.
        w_gate_up: [E, 2 I, H], gate first, of x's dtype, contiguous.
        w_down: [E, H, I].
        top_k: experts of a token.
        router_weight: [E, H], of x's dtype.
        activation: of gate, as `linear` names it.
        scoring, renormalize, bias, num_groups, topk_groups, routed_scaling_factor, capacity: as in
            `moe_route` and `moe_regroup`.
        expert_map: int32 [experts of the router]: which of the experts here each one is, or -1; for
            expert parallelism. The weights are of those that are here.
        shared_gate_up, shared_down: [2 J, H] and [H, J], an expert that every token goes to.
        block_size: of the layout, a multiple of 64, with tiles that are ragged of 16; default: the
            least that the kernels take.
        save_pre_activation: keep what the activation is of for gradients; False: compute it again.
        impl: of both products, as `grouped_linear` has it; "auto" is "stream" of up to 16 tokens
            and "gather" of up to 64 on Hopper, where no gradient is wanted.
        precision: as `grouped_linear` has it: "short" of weights quantized by "fp8_row".

    Returns:
        [tokens, H] in x's dtype and framework, the same bits at every call. With torch it has
        gradients of x, the logits (or router_weight) and all weights, those too the same bits.

    Raises:
        ParameterError: shapes, options. ArgumentTypeError: not arrays, mixed dtypes. DeviceError:
        mixed devices. CaptureError: first call of a geometry under CUDA graph capture; see
        `fkjit.prepare`.

    Five launches: route and sort, rows to experts, gate and up with the activation, down, weighted
    sums; with a router_weight one more, with a shared expert two; with "stream" or "gather", which
    read rows where they are, one less. None waits for the host.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> x, router = (rng.standard_normal((n, 16), np.float32) for n in (3, 4))
        >>> gate_up = rng.standard_normal((4, 32, 16), np.float32)
        >>> down = rng.standard_normal((4, 16, 16), np.float32)
        >>> fkjit.moe_layer(x, None, gate_up, down, top_k=2, router_weight=router).shape
        (3, 16)
    """
    logits = _logits(x, router_logits, router_weight)
    _check(logits, w_gate_up, expert_map, shared_gate_up, shared_down)
    impl = implementation(impl, x, w_gate_up, w_down)
    rows = x.shape[0] * top_k / logits.shape[-1]
    size = block_size_of(block_size, impl, precision, rows, x, w_gate_up, w_down)
    weights, ids, groups = moe_route_and_regroup(
        _detached(logits), top_k, size, scoring=scoring, renormalize=renormalize, bias=bias,
        num_groups=num_groups, topk_groups=topk_groups,
        routed_scaling_factor=routed_scaling_factor, expert_map=expert_map,
        num_local_experts=None if expert_map is None else int(w_gate_up.shape[0]),
        capacity=capacity,
    )  # fmt: skip
    if _wants_grad(logits):
        weights = weights_of(logits, ids, scoring, renormalize, routed_scaling_factor)
    said: dict[str, Any] = {"impl": impl, "precision": precision}
    hidden = grouped_linear(
        x, w_gate_up, groups, gather=True, activation=activation, gate=True,
        save_pre_activation=save_pre_activation, out_scheme=_between(x, w_gate_up, w_down), **said,
    )  # fmt: skip
    out = grouped_linear(hidden, w_down, groups, weights=weights, **said)
    if shared_gate_up is None:
        return out
    shared = linear(x, shared_gate_up, activation=activation, gate=True)
    return linear(shared, shared_down, residual=out)


def _logits(x: Any, router_logits: Any, router_weight: Any) -> Any:
    if (router_logits is None) == (router_weight is None):
        raise ParameterError(f"{_CALL}: give router_logits or router_weight, one of the two")
    return router_logits if router_weight is None else linear(x, router_weight)


def _check(
    logits: Any, w_gate_up: Any, expert_map: Any, shared_gate_up: Any, shared_down: Any
) -> None:
    """What no part of the layer sees; each looks at its own arguments."""
    experts, here = int(logits.shape[-1]), int(w_gate_up.shape[0])
    if expert_map is None and experts != here:
        raise ParameterError(
            f"{_CALL}: router_logits are of {experts} experts, w_gate_up is of {here}; allowed: as "
            "many, or an expert_map"
        )
    if (shared_gate_up is None) != (shared_down is None):
        raise ParameterError(f"{_CALL}: shared_gate_up and shared_down are given together or not")


def _between(x: Any, w_gate_up: Any, w_down: Any) -> str | None:
    """What the first product makes for the second: codes where that takes them."""
    blocks = all(isinstance(w, tuple) and w[2] == SCHEME for w in (w_gate_up, w_down))
    return SCHEME if blocks and dtype_name(x) == "bfloat16" else None


def _wants_grad(logits: Any) -> bool:
    return getattr(logits, "requires_grad", False) is True


def _detached(logits: Any) -> Any:
    return logits.detach() if _wants_grad(logits) else logits


# ------------------------------------------------------------------ prepare

_SIGNATURE = inspect.signature(moe_layer)
_ROUTING = (
    "scoring", "renormalize", "bias", "num_groups", "topk_groups", "routed_scaling_factor",
    "expert_map", "capacity",
)  # fmt: skip


def _prepare(*args: Any, **named: Any) -> None:
    """Compile and load what the call with the same arguments needs, without running it."""
    bound = _SIGNATURE.bind(*args, **named)
    bound.apply_defaults()
    given = bound.arguments
    x, up, down, top_k = (given[name] for name in ("x", "w_gate_up", "w_down", "top_k"))
    logits = given["router_logits"]
    if logits is None:
        _able(linear).prepare(x, given["router_weight"])
        logits = _like(x, x.shape[0], given["router_weight"].shape[0])
    _check(logits, up, given["expert_map"], given["shared_gate_up"], given["shared_down"])
    here, tokens = int(up.shape[0]), int(x.shape[0])
    impl = implementation(given["impl"], x, up, down)
    rows = tokens * top_k / logits.shape[-1]
    size = block_size_of(given["block_size"], impl, given["precision"], rows, x, up, down)
    routing = {name: given[name] for name in _ROUTING}
    local = None if given["expert_map"] is None else here
    _able(moe_route_and_regroup).prepare(logits, top_k, size, num_local_experts=local, **routing)
    groups = _groups_like(x, top_k, here, size)
    said: dict[str, Any] = {"impl": impl, "precision": given["precision"]}
    kept = {name: given[name] for name in ("activation", "save_pre_activation")}
    scheme = _between(x, up, down)
    _able(grouped_linear).prepare(
        x, up, groups, gate=True, gather=True, out_scheme=scheme, **kept, **said
    )
    hidden = _like(x, groups.sorted_token_ids.shape[0], down.shape[2])
    weights = _like(x, tokens, top_k, dtype="fp32")
    if scheme is not None:
        hidden = _codes_like(hidden)
    _able(grouped_linear).prepare(hidden, down, groups, weights=weights, **said)
    if given["shared_gate_up"] is not None:
        _prepare_shared(x, given)


def _prepare_shared(x: Any, given: Any) -> None:
    up, down = given["shared_gate_up"], given["shared_down"]
    _able(linear).prepare(x, up, activation=given["activation"], gate=True)
    hidden = _like(x, x.shape[0], down.shape[1])
    _able(linear).prepare(hidden, down, residual=_like(x, x.shape[0], down.shape[0]))


def _able(call: Any) -> Any:
    """The call, which has a `prepare`."""
    return call


def _groups_like(x: Any, top_k: int, experts: int, size: int) -> MoeGroups:
    """Groups of such sizes, without what is in them."""
    tokens = int(x.shape[0])
    sizes = {"tokens": tokens, "top_k": top_k, "groups": experts, "block_size": size}
    outputs = made({**sizes, "places": places_of(tokens * top_k, experts, size)}).values()
    return MoeGroups(*(_like(x, *o.shape, dtype=o.dtype) for o in outputs))


def _codes_like(x: Any) -> QuantizedTensor:
    """Room for x's codes."""
    rows, columns = x.shape
    scales = _like(x, rows, columns // WIDTH, dtype="fp32")
    return QuantizedTensor(_like(x, rows, columns, dtype="uint8"), scales, SCHEME)


def _like(x: Any, *shape: int, dtype: str | None = None) -> Any:
    """An array of the same framework; of x's dtype unless said."""
    seen = interop.view(x, _CALL, "x")
    return interop.empty(seen, shape, dtype or seen.dtype)


moe_layer.prepare = _prepare  # type: ignore[attr-defined]
