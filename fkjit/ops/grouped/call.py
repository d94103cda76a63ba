"""`fkjit.grouped_linear`: a product with a weight for each expert, on `moe_regroup`'s layout or on
one of a fixed capacity."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache, partial
from importlib import import_module
from typing import Any

from fkjit.errors import ArgumentTypeError, ParameterError
from fkjit.ops.grouped import checks, codes, select
from fkjit.ops.grouped.kernels import LEAST_BLOCK
from fkjit.ops.grouped.options import (
    CALL,
    INPUTS,
    GroupedOptions,
    RoutedOptions,
    Views,
    request,
)
from fkjit.ops.grouped.routed import IMPLEMENTATIONS as ROUTED_IMPLEMENTATIONS
from fkjit.ops.grouped.routed import ROUTED
from fkjit.ops.moe.combine import moe_combine
from fkjit.ops.moe.groups import MoeGroups
from fkjit.ops.moe.permute import moe_permute
from fkjit.ops.op.autograd import autograd_of
from fkjit.ops.op.checks import check_flag, check_same_dtype
from fkjit.ops.op.node import Node
from fkjit.ops.op.op import Op, Output, Request
from fkjit.runtime import interop


def grouped_linear(
    x: Any,
    weight: Any,
    groups: Any,
    bias: Any = None,
    *,
    activation: str | None = None,
    gate: bool = False,
    gather: bool = False,
    weights: Any = None,
    block: tuple[int, ...] | None = None,
    impl: str = "auto",
    weight_layout: str = "nk",
    save_pre_activation: bool = True,
    out_scheme: str | None = None,
    precision: str = "ieee",
) -> Any:
    """activation(x weight[e]ᵀ + bias[e]) for the rows of every expert e, in one kernel.

    Args:
        x: fp16, bf16 or fp32 [places, K]: a row for each place of `groups`, as `moe_permute` makes
            them; with gather=True [tokens, K]. Masked: [experts, capacity, K], contiguous, with a
            capacity that is a multiple of 64. torch, CuPy, NumPy or any DLPack array. Beside a
            quantized weight 16 bits, which are quantized here, or codes by the weight's scheme.
        weight: [experts, N, K], or [experts, K, N] with weight_layout="kn"; of x's dtype,
            contiguous. Or quantize(weight, "fp8_block", weight=True) or quantize(weight,
            "fp8_row") (Hopper, without gradients).
        groups: what `moe_regroup` or `moe_route_and_regroup` made, with a block_size that is a
            multiple of 64 ("ragged": of 16): rows of a tile have one expert. How many rows experts
            have is read when the kernel runs: the host does not wait, any counts serve one CUDA
            graph. Masked: int32 [experts], how many of each expert's rows are there.
        bias: [experts, N], contiguous, of x's dtype.
        activation: "gelu" (exact), "gelu_tanh", "silu", "relu", or None.
        gate: weight and bias hold gate and, behind it, up, N each; the result is
            activation(gate) * up, as in SwiGLU (activation="silu").
        gather: x has a row for each token; `moe_permute` brings them, or their codes, to their
            places first.
        weights: fp32 [tokens, top_k]: `moe_combine` puts the results of each token together.
        block: the tile; default: the fastest by estimate.
        impl: "auto", or a kernel: "wgmma" (Hopper), "ragged" (Hopper: tiles of as many rows as
            experts have, so that places may be a multiple of 16), "mma" (tensor cores), "fma"
            (exact fp32), or one that takes rows of tokens from where they are (gather=True without
            `moe_permute`; 16-bit, no gradients; what places without a token get is anything):
            "stream" (few rows of each expert: weights are read once), "gather" (Hopper's wgmma).
        weight_layout: "nk" or "kn".
        save_pre_activation: keep for gradients what the activation is of; False: compute it again.
        out_scheme: "fp8_block": the result is quantized in the kernel, for the next product with a
            weight quantized by blocks; of such a weight with gate=True.
        precision: "short", of a weight quantized by rows: tensor cores sum all of k, with 13 bits;
            in tiles of "ragged". "ieee": sums of 512 of k are added up in fp32 (of blocks 128).

    Returns:
        [places, N] in x's dtype and framework; with `weights` [tokens, N]. Rows behind the last
        expert's tiles (from groups.num_tokens_post_padded on) are not written. With torch it has
        gradients of x, weight, bias and weights, the same bits at every call. Products of places
        that no token has count towards the gradient of weight: rows of zeros, as `moe_permute`
        makes them, add nothing. Masked: [experts, capacity, N], of which rows behind an expert's
        last one are anything, and no gradients.

    Raises:
        ParameterError: shapes, strides, options. ArgumentTypeError: not arrays, other or mixed
        dtypes, no MoeGroups. DeviceError: mixed devices. CaptureError: first call of a geometry
        under CUDA graph capture; see `fkjit.prepare`.

    fp32 accumulation, rounded once. Source of the layout: vLLM's fused_moe.

    Example:
        >>> ids = np.array([[0], [1], [0]], np.int32)  # an expert for each of three tokens
        >>> groups = fkjit.moe_regroup(ids, num_experts=2, block_size=64)
        >>> x, weight = np.ones((3, 16), np.float32), np.ones((2, 8, 16), np.float32)
        >>> fkjit.grouped_linear(x, weight, groups, gather=True).shape[1]
        8
    """
    said = (activation, gate, block, impl, weight_layout, save_pre_activation)
    gather = check_flag(CALL, "gather", gather)
    coded = _is_coded(out_scheme, weight, weights)
    if _is_masked(x):
        _check_masked(groups, gather, weights)
        return _GROUPED((x, weight, bias, None, groups), (), (LEAST_BLOCK, *said))
    groups = _groups(groups)
    if _is_routed(impl, weight):
        routed = RoutedOptions(activation, gate, block, impl, weight_layout, gather)
        y = ROUTED((x, weight, bias, None, *groups), (), routed)
    else:
        size = _block_size(groups)
        if isinstance(weight, tuple):
            options = (size, *said[:-1], coded, precision)
            y = codes.call(codes.Rows(x, gather), weight, groups, bias, options)
        else:
            _check_precision(precision)
            rows = moe_permute(x, groups) if gather else x
            y = _GROUPED((rows, weight, bias, None, groups.offsets), (), (size, *said))
    return y if weights is None else moe_combine(y, groups, weights)


def _is_routed(impl: str, weight: Any) -> bool:
    return impl in ROUTED_IMPLEMENTATIONS and not isinstance(weight, tuple)


def _is_coded(out_scheme: Any, weight: Any, weights: Any) -> bool:
    """Whether the result is codes."""
    if out_scheme is None:
        return False
    if out_scheme != codes.SCHEME or not isinstance(weight, tuple) or weights is not None:
        raise ParameterError(
            f"{CALL}: out_scheme={out_scheme!r}; allowed: None, or {codes.SCHEME!r} of a quantized "
            "weight, without weights"
        )
    return True


def _is_masked(x: Any) -> bool:
    return len(getattr(x, "shape", ())) == 3


def _check_precision(precision: Any) -> None:
    """Of numbers."""
    if precision != "ieee":
        raise ParameterError(
            f"{CALL}: precision={precision!r}; allowed: 'ieee', or 'short' of a weight quantized "
            f"by {codes.ROWS!r}"
        )


def _check_masked(groups: Any, gather: bool, weights: Any) -> None:
    if isinstance(groups, MoeGroups) or gather or weights is not None:
        raise ParameterError(
            f"{CALL}: x has three dimensions, which is the masked layout; allowed: groups=counts, "
            "int32 [experts], without gather and weights"
        )


def _groups(groups: Any) -> MoeGroups:
    if not isinstance(groups, MoeGroups):
        raise ArgumentTypeError(
            f"{CALL}: groups is a {type(groups).__qualname__}; allowed: the MoeGroups of "
            "moe_regroup or moe_route_and_regroup, or counts beside an x [experts, capacity, K]"
        )
    return groups


def _block_size(groups: MoeGroups) -> int:
    """What experts' places are a multiple of; 0 where there are none."""
    tiles = groups.expert_ids.shape[0]
    return int(groups.sorted_token_ids.shape[0] // tiles) if tiles else 0


# ------------------------------------------------------------------ checks


def _check(views: Views, said: GroupedOptions, *, pre: bool = False) -> Request:
    x, weight = views["x"], views["weight"]
    assert x is not None and weight is not None
    checks.check_options(said)
    _check_own_options(said)
    dtype = check_same_dtype(CALL, {"x": x, "weight": weight, "bias": views["bias"]})
    sizes = checks.sizes_of(x, weight, said)
    m, n, wide = sizes["m"], sizes["n"], sizes["n"] * (2 if said.gate else 1)
    checks.check_bias(views["bias"], sizes["experts"], wide)
    masked = len(x.shape) == 3
    if masked:
        checks.check_counts(x, views["offsets"], sizes["experts"])
    else:
        least = select.least_block(said.impl)
        checks.check_groups(views["offsets"], m, sizes["experts"], said.block_size, least)
    problem = checks.problem_of(x, weight, views["bias"], said, sizes) | {
        "groups": "MASKED" if masked else "ROWS", "block_size": said.block_size, "pre": pre,
        "gather": False,
    }  # fmt: skip
    outputs = {
        "out": Output((*x.shape[:-1], n), dtype), "pre": Output((m, wide), dtype) if pre else None,
    }  # fmt: skip
    return request({name: views[name] for name in INPUTS}, outputs, problem, said)


def _check_own_options(said: GroupedOptions) -> None:
    check_flag(CALL, "save_pre_activation", said.save_pre_activation)
    allowed = (*select.IMPLEMENTATIONS, *ROUTED_IMPLEMENTATIONS)
    if said.impl not in allowed:
        raise ParameterError(f"{CALL}: impl={said.impl!r} is not one of {', '.join(allowed)}")


# ------------------------------------------------------------------ the op

_OPTIONS = (
    "int block_size, str? activation, bool gate, int[]? block, str impl, str weight_layout, "
    "bool save_pre_activation"
)


def _fake(x: Any, weight: Any, *rest: Any) -> list[Any]:
    said = GroupedOptions(*rest[3:])
    wide = weight.shape[1 if said.weight_layout == "nk" else 2]
    return [x.new_empty(*x.shape[:-1], wide // 2 if said.gate else wide)]


def _fake_with_pre(x: Any, weight: Any, *rest: Any) -> list[Any]:
    wide = weight.shape[1 if GroupedOptions(*rest[3:]).weight_layout == "nk" else 2]
    return [*_fake(x, weight, *rest), x.new_empty(x.shape[0], wide)]


def _packed(*options: Any) -> tuple[Any, ...]:
    """Options as the operator's schema has them: a tile is a list."""
    said = GroupedOptions(*options)
    return tuple(said._replace(block=None if said.block is None else list(said.block)))


def _unpacked(*options: Any) -> tuple[Any, ...]:
    said = GroupedOptions(*options)
    return tuple(said._replace(block=None if said.block is None else tuple(said.block)))


def _op(pre: bool, node: Node, autograd: Callable[..., Any] | None = None) -> Op:
    return Op(
        CALL, inputs=INPUTS, outputs=("out", "pre"), check=partial(_check, pre=pre),
        options=GroupedOptions, optional=("bias", "residual"), autocast=3, node=node,
        autograd=autograd,
    )  # fmt: skip


def _with_gradients(inputs: Any, outputs: Any, options: Any) -> Any:
    if inputs[0].dim() == 3:
        raise ParameterError(
            f"{CALL}: the masked layout has no gradients; call it under torch.no_grad() or pass "
            "detached tensors"
        )
    return _differentiable()(inputs, outputs, options)


@lru_cache(maxsize=1)
def _differentiable() -> Callable[..., Any]:
    return autograd_of(CALL, import_module(_AUTOGRAD).differentiable(_GROUPED, _WITH_PRE))


_AUTOGRAD = "fkjit.ops.grouped.autograd"  # imported where a gradient is wanted
_GROUPED = _op(False, Node(_fake, _OPTIONS, 1, None, _packed, _unpacked), _with_gradients)
_WITH_PRE = _op(True, Node(_fake_with_pre, _OPTIONS, 2, f"{CALL}_with_pre", _packed, _unpacked))

_SIGNATURE = inspect.signature(grouped_linear)


def _prepare(*args: Any, **named: Any) -> None:
    """Compile and load what the call with the same arguments needs, without running it."""
    bound = _SIGNATURE.bind(*args, **named)
    bound.apply_defaults()
    given = bound.arguments
    x, beside = given["x"], (given["weight"], given["bias"], None)
    said = tuple(given[name] for name in GroupedOptions._fields[1:])
    if _is_masked(x):
        _check_masked(given["groups"], given["gather"], given["weights"])
        return _GROUPED.prepare((x, *beside, given["groups"]), (LEAST_BLOCK, *said))
    groups = _groups(given["groups"])
    if _is_routed(given["impl"], given["weight"]):
        routed = RoutedOptions(*(given[name] for name in RoutedOptions._fields))
        ROUTED.prepare((x, *beside, *groups), routed)
    else:
        _prepare_rows(given, groups, (_block_size(groups), *said))
    _prepare_weights(given, groups)


def _prepare_rows(given: dict[str, Any], groups: MoeGroups, options: tuple[Any, ...]) -> None:
    x, weight, bias = given["x"], given["weight"], given["bias"]
    if isinstance(weight, tuple):
        coded = _is_coded(given["out_scheme"], weight, given["weights"])
        said = (*options[:-1], coded, given["precision"])
        codes.prepare(codes.Rows(x, given["gather"]), weight, groups, bias, said)
    else:
        _check_precision(given["precision"])
        if given["gather"]:
            moe_permute.prepare(x, groups)  # type: ignore[attr-defined]
            x = _like(x, groups.sorted_token_ids.shape[0], x.shape[1])
        _GROUPED.prepare((x, weight, bias, None, groups.offsets), options)


def _prepare_weights(given: dict[str, Any], groups: MoeGroups) -> None:
    if given["weights"] is not None:
        wide = given["weight"].shape[1 if given["weight_layout"] == "nk" else 2]
        columns = wide // 2 if given["gate"] else wide
        x, places = given["x"], groups.sorted_token_ids.shape[0]
        if isinstance(x, tuple):
            y = interop.empty(interop.view(x[1], CALL, "x.scales"), (places, columns), "bf16")
        else:
            y = _like(x, places, columns)
        moe_combine.prepare(y, groups, given["weights"])  # type: ignore[attr-defined]


def _like(x: Any, *shape: int) -> Any:
    """An array of the same framework."""
    seen = interop.view(x, CALL, "x")
    return interop.empty(seen, shape, seen.dtype)


grouped_linear.prepare = _prepare  # type: ignore[attr-defined]
