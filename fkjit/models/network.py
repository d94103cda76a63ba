"""A forward pass of packed tokens, in as few launches as the kernels' epilogues permit.

A layer has eight: norm, one product for q, k and v, RoPE with the append to the cache, attention,
the output product with the residual added, norm, the product up with its activation or gate, and
the product down with the residual added. Fused, of a few tokens, five: the first three are one, and
so are the second norm and the product up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from fkjit.arch import Arch
from fkjit.models.config import ModelConfig
from fkjit.models.plan import StepPlan, fits, streams
from fkjit.models.quantized import scheme_of
from fkjit.models.slots import State
from fkjit.models.streamed import Places, Residual, StreamedLayers
from fkjit.models.weights import Affine, Layer, Weights
from fkjit.ops.gemm.call import linear
from fkjit.ops.kv.append import kv_append
from fkjit.ops.kv.rope_append import rope_kv_append
from fkjit.ops.norm.call import layer_norm, rms_norm
from fkjit.ops.op import torch_ops
from fkjit.ops.step.begin import step_begin
from fkjit.ops.step.call import Norm, normed_append, normed_linear
from fkjit.ops.step.logits import streamed_logits

_PLAN = StepPlan()
Attend = Callable[[Any, int], Any]  # q [tokens, heads, head_dim] and the layer -> the same shape


class Fused(NamedTuple):
    """What five launches a layer take. table: of `fkjit.rope_table`; None: nothing turns."""

    table: Any


class Network:
    """The layers of a model. All methods can be captured into a CUDA graph. codes: the scheme of
    weights that are codes, "" of several; None: all are numbers."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config, self.weights = config, weights
        self.codes = scheme_of(weights)

    def fits(self, rows: int) -> bool:
        """Whether so many tokens can have five launches a layer."""
        return fits(self.config, rows, self.codes)

    def streams(self, rows: int, arch: Arch) -> bool:
        """Whether so many tokens can have products that fetch their weight early."""
        return streams(self.config, rows, self.codes, arch)

    def hidden(
        self, tokens: Any, positions: Any, slots: Any, cache: Any, attend: Attend,
        plan: StepPlan = _PLAN, fused: Fused | None = None,
    ) -> Any:  # fmt: skip
        """The residual stream [tokens, hidden] behind the last layer.

        tokens, positions: [tokens], whole numbers. slots: [tokens] int32 of `cache`, where keys and
        values of each token go before `attend` is called. fused: five launches a layer, where
        `fits` says so; None: eight.
        """
        stream = self._embedded(tokens, positions)
        for number, layer in enumerate(self.weights.layers):
            if fused is None:
                heads = linear(self._norm(stream, layer.norm), *layer.qkv, impl=plan.qkv)
                q = self._append(layer, number, heads, positions, slots, cache)
            else:
                q = normed_append(
                    stream, *layer.qkv, self._as_norm(layer.norm), cache, slots,
                    None if fused.table is None else positions, fused.table,
                    heads_q=self.config.heads_q, layer=number,
                )  # fmt: skip
            attended = attend(q, number).flatten(1)
            stream = linear(attended, *layer.out, residual=stream, impl=plan.out)
            inner = self._inner(layer, stream, plan, fused)
            stream = linear(inner, *layer.down, residual=stream, impl=plan.down)
        return stream

    def streamed(self, state: State, cache: Any, table: Any, attend: Attend, out: Any) -> Any:
        """A step's fp32 logits [tokens, vocabulary] to `out`, by products that fetch their weight
        early, where `streams` says so; what `pick_largest` takes of them. The cache's lengths count
        the tokens. table: of `fkjit.rope_table`; None: nothing turns."""
        weights, made = self.weights, StreamedLayers(self.config)
        norms = [*(one.norm for one in weights.layers), weights.norm]
        slots, *begun = step_begin(
            state.tokens, state.positions, state.rows, weights.embedding, weights.positions,
            self._as_norm(norms[0]), cache,
        )  # fmt: skip
        at, places = Residual(*begun), Places(cache, slots, state.positions, table)
        for number, (layer, behind) in enumerate(zip(weights.layers, norms[1:], strict=True)):
            attended = attend(made.queries(at, layer, number, places), number).flatten(1)
            at = made.behind(at, attended, layer, behind)
        return streamed_logits(at.inner, weights.head, out)[1]

    def _embedded(self, tokens: Any, positions: Any) -> Any:
        torch, weights = torch_ops.torch_seen(), self.weights
        stream = torch.nn.functional.embedding(tokens, weights.embedding)
        if weights.positions is None:
            return stream
        return stream + torch.nn.functional.embedding(positions, weights.positions)

    def _inner(self, layer: Layer, stream: Any, plan: StepPlan, fused: Fused | None) -> Any:
        """What the product down takes."""
        said = {"activation": self.config.activation, "gate": self.config.gated}
        if fused is not None:
            return normed_linear(stream, *layer.up, self._as_norm(layer.mlp_norm), **said)
        return linear(self._norm(stream, layer.mlp_norm), *layer.up, impl=plan.up, **said)

    def logits(self, stream: Any, out: Any = None, plan: StepPlan = _PLAN) -> Any:
        """fp32 [rows, vocabulary] of rows of the residual stream; `out`: where to write them."""
        normed = self._norm(stream, self.weights.norm)
        return linear(normed, self.weights.head, out=out, out_dtype="fp32", impl=plan.head)

    def _append(
        self, layer: Layer, number: int, heads: Any, positions: Any, slots: Any, cache: Any
    ) -> Any:
        """q [tokens, heads, head_dim], ready; k and v are in the cache. heads: of all three, side
        by side."""
        config = self.config
        heads = heads.unflatten(-1, (-1, config.head_dim))
        q, k, v = heads.split((config.heads_q, config.heads_kv, config.heads_kv), 1)
        if config.qk_norm:
            q, k = rms_norm(q, layer.q_norm, config.eps), rms_norm(k, layer.k_norm, config.eps)
        if config.theta is None:
            kv_append(k, v, cache, slots, layer=number)
            return q
        return rope_kv_append(
            q, k, v, cache, slots, positions, theta=config.theta, scaling=config.scaling,
            layer=number,
        )  # fmt: skip

    def _as_norm(self, norm: Affine) -> Norm:
        return Norm(*norm, self.config.eps)

    def _norm(self, x: Any, norm: Affine) -> Any:
        if norm.bias is not None:
            return layer_norm(x, norm.weight, norm.bias, self.config.eps)
        return rms_norm(x, norm.weight, self.config.eps)
