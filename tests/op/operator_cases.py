"""Calls of every public op, on tensors of any device: for what PyTorch asks of operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import fkjit


class Case(NamedTuple):
    """A function of tensors, which calls fkjit, and what makes fresh tensors on a device.

    op: the public call. grads: which tensors may require grad. written: those that it writes.
    """

    name: str
    op: str
    call: Callable[..., Any]
    inputs: Callable[[Any], list[torch.Tensor]]
    grads: tuple[int, ...] = ()
    written: tuple[int, ...] = ()


def normal(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Any:
    """What makes N(0, 1) tensors of these shapes on a device."""
    return lambda device: [torch.randn(s, device=device).to(dtype) for s in shapes]


def _pages(device: Any) -> list[torch.Tensor]:
    """k, v [5, 2, 16], pages, slots, positions, q."""
    k, v, q = (torch.randn(5, heads, 16, device=device).half() for heads in (2, 2, 4))
    k_pages, v_pages = (torch.randn(4, 16, 2, 16, device=device).half() for _ in "kv")
    slots = torch.tensor([3, 40, -1, 0, 17], device=device, dtype=torch.int32)
    positions = torch.tensor([3, 9, 0, 700, 17], device=device, dtype=torch.int32)
    return [k, v, k_pages, v_pages, slots, positions, q]


def _logits(device: Any) -> list[torch.Tensor]:
    order = torch.stack([torch.randperm(16, device=device) for _ in range(9)])
    return [(order / 4).float()]


def _choices(device: Any) -> list[torch.Tensor]:
    """x [9, 24], weights, ids."""
    weights, ids = _logits(device)[0].softmax(-1).topk(3)
    return [torch.randn(9, 24, device=device), weights.contiguous(), ids.int()]


def _decoding(device: Any) -> list[torch.Tensor]:
    """q [2, 4, 16], pages, table, lengths."""
    k, v = (torch.randn(6, 16, 2, 16, device=device).half() for _ in "kv")
    table = torch.tensor([[0, 3, 5], [1, 4, 2]], dtype=torch.int32, device=device)
    lengths = torch.tensor([33, 20], dtype=torch.int32, device=device)
    return [torch.randn(2, 4, 16, device=device).half(), k, v, table, lengths]


def _packed(device: Any) -> list[torch.Tensor]:
    """q, k, v of three sequences, and where they end."""
    rows = normal((15, 4, 32), (15, 2, 32), (15, 2, 32), dtype=HALF)(device)
    return [*rows, torch.tensor([0, 9, 9, 15], device=device, dtype=torch.int32)]


def _step(device: Any) -> list[torch.Tensor]:
    """q, k, v of a token of two sequences, pages, table, lengths before it."""
    made = [torch.randn(2, heads, 16, device=device).half() for heads in (4, 2, 2)]
    return [*made, *_decoding(device)[1:]]


def _appended(q: Any, k: Any, v: Any, k_pages: Any, v_pages: Any, table: Any, lengths: Any) -> Any:
    """What is written by one call is read by the next one."""
    pages = table.gather(1, (lengths // 16).long()[:, None])[:, 0]
    q = fkjit.rope_kv_append(q, k, v, (k_pages, v_pages), pages * 16 + lengths % 16, lengths)
    return fkjit.paged_attention(q, (k_pages, v_pages), table, lengths + 1)


def _there_and_back(x: Any, weights: Any, ids: Any) -> Any:
    groups = fkjit.moe_regroup(ids, 16)
    return fkjit.moe_combine(fkjit.moe_permute(x, groups), groups, weights)


def _routed(logits: Any) -> Any:
    found = fkjit.moe_route_and_regroup(logits, 2, 4)
    return found.topk_weights, found.topk_ids, *found.groups


HALF = torch.float16
QKV = ((1, 4, 20, 32), (1, 2, 24, 32), (1, 2, 24, 32))
LLAMA = fkjit.Llama3Scaling(8.0, 1.0, 4.0, 8192)
CASES = (
    Case("vector_add", "vector_add", fkjit.vector_add, normal((5, 9), (5, 9))),
    Case("sum", "reduce_sum", lambda x: fkjit.reduce_sum(x, -1, keepdim=True), normal((5, 9))),
    Case("mean", "reduce_mean", lambda x: fkjit.reduce_mean(x, dtype="fp32"),
         normal((5, 9), dtype=HALF)),
    Case("max", "reduce_max", fkjit.reduce_max, normal((5, 9))),
    Case("layer_norm", "layer_norm", lambda x, w, b: fkjit.layer_norm(x, w, b),
         normal((3, 7, 32), (32,), (32,)), (0, 1, 2)),
    Case("rms_norm", "rms_norm", lambda x, w: fkjit.rms_norm(x, w, 1e-5), normal((7, 40), (40,)),
         (0, 1)),
    Case("rms_norm with residual", "rms_norm",
         lambda x, w, r: fkjit.rms_norm(x, w, residual=r), normal((7, 40), (40,), (7, 40)),
         (0, 1, 2)),
    Case("linear", "linear",
         lambda x, w, b, r: fkjit.linear(x, w, b, activation="silu", residual=r, scale=0.5),
         normal((3, 7, 40), (24, 40), (24,), (3, 7, 24)), (0, 1, 2, 3)),
    Case("linear with a gate", "linear",
         lambda x, w: fkjit.linear(x, w, activation="silu", gate=True, weight_layout="kn",
                                   block=[64, 64, 16], impl="fma", save_pre_activation=False),
         normal((7, 40), (40, 48)), (0, 1)),
    Case("gelu_linear", "gelu_linear", lambda x, w, b: fkjit.gelu_linear(x, w, b),
         normal((7, 40), (24, 40), (24,)), (0, 1, 2)),
    Case("quantize", "quantize", lambda x: fkjit.quantize(x, "int8_group")[:2], normal((5, 64))),
    Case("there and back in int4", "dequantize",
         lambda x: fkjit.dequantize(fkjit.quantize(x, "int4_group"), "fp16"), normal((3, 64))),
    Case("codes of a norm", "quantize_rms_norm",
         lambda x, w, r: fkjit.quantize_rms_norm(x, w, "int8_row", residual=r)[0][:2],
         normal((5, 64), (64,), (5, 64), dtype=HALF)),
    Case("codes of LayerNorm", "quantize_layer_norm",
         lambda x, w, b: fkjit.quantize_layer_norm(x, w, b, "int8_row")[:2],
         normal((5, 64), (64,), (64,), dtype=HALF)),
    Case("codes of a gate", "quantize_gated",
         lambda g, u: fkjit.quantize_gated(g, u, "int8_row")[:2],
         normal((5, 64), (5, 64), dtype=HALF)),
    Case("codes of attention", "quantize_attention",
         lambda q, k, v: fkjit.quantize_attention(q, k, v)[3:5], normal(*QKV, dtype=HALF)),
    Case("attention of codes", "quantized_attention",
         lambda q, k, v: fkjit.quantized_attention(q, k, v, causal=True, return_lse=True),
         normal(*QKV, dtype=HALF)),
    Case("linear of codes", "linear",
         lambda x, w, b: fkjit.linear(x, fkjit.quantize(w, "int8_group"), b, activation="silu"),
         normal((3, 64), (24, 64), (24,), dtype=HALF)),
    Case("rope", "rope", lambda q, k: fkjit.rope(q, k, 5, scaling=LLAMA),
         normal((1, 4, 6, 16), (1, 2, 6, 16)), (0, 1)),
    Case("rope of q by a table", "rope",
         lambda q, table: fkjit.rope(q, table=table, interleaved=True, layout="bshd"),
         normal((2, 6, 3, 16), (9, 8)), (0,)),
    Case("kv_append", "kv_append",
         lambda k, v, kp, vp, slots, at, q: fkjit.kv_append(k, v, (kp, vp), slots), _pages,
         written=(2, 3)),
    Case("kv_read", "kv_read",
         lambda k, v, kp, vp, slots, at, q: fkjit.kv_read((kp, vp), slots), _pages),
    Case("rope_kv_append", "rope_kv_append",
         lambda k, v, kp, vp, slots, at, q: fkjit.rope_kv_append(
             q, k, v, (kp, vp), slots, at, scaling=LLAMA), _pages, written=(2, 3)),
    Case("append and attend", "paged_attention", _appended, _step, written=(3, 4)),
    Case("moe_route", "moe_route", lambda x: fkjit.moe_route(x, 3, scoring="sigmoid"), _logits),
    Case("moe_regroup", "moe_regroup",
         lambda x, w, ids: tuple(fkjit.moe_regroup(ids, 16, 4)), _choices),
    Case("moe_route_and_regroup", "moe_route_and_regroup", _routed, _logits),
    Case("moe_permute", "moe_permute",
         lambda x, w, ids: fkjit.moe_permute(x, fkjit.moe_regroup(ids, 16)), _choices, (0,)),
    Case("moe there and back", "moe_combine", _there_and_back, _choices, (0, 1)),
    Case("grouped_linear", "grouped_linear",
         lambda x, w, ids, weight: fkjit.grouped_linear(
             x, weight, fkjit.moe_regroup(ids, 16, 64), activation="silu", gate=True, gather=True,
             weights=w),
         lambda device: (*_choices(device), *normal((16, 48, 24))(device)), (0, 1, 3)),
    Case("moe_layer", "moe_layer",
         lambda x, logits, up, down: fkjit.moe_layer(x, logits, up, down, 2, renormalize=True),
         lambda device: [*normal((7, 24), (7, 5))(device),
                         *(x / 5 for x in normal((5, 32, 24), (5, 24, 16))(device))], (0, 1, 2, 3)),
    Case("two states", "merge_states", fkjit.merge_states,
         normal((1, 2, 3, 8), (1, 2, 3), (1, 2, 3, 8), (1, 2, 3)), (0, 1, 2, 3)),
    Case("a stack of states", "merge_states", lambda o, lse: fkjit.merge_states(o, lse),
         normal((3, 1, 2, 3, 8), (3, 1, 2, 3)), (0, 1)),
    Case("attention", "attention",
         lambda q, k, v: fkjit.attention(q, k, v, causal=True, return_lse=True),
         normal(*QKV, dtype=HALF)),
    Case("attention with a form", "attention",
         lambda q, k, v, bias, slopes: fkjit.attention(
             q, k, v, causal=True, window=(9, None), bias=bias, alibi_slopes=slopes),
         lambda device: [*normal(*QKV, dtype=HALF)(device), *normal((1, 4, 20, 24), (4,))(device)]),
    Case("attention_varlen", "attention_varlen",
         lambda q, k, v, ends: fkjit.attention_varlen(
             q, k, v, ends, ends, 9, 9, window=(3, 0), softcap=20.0, return_lse=True), _packed),
    Case("attention_decode", "attention_decode", lambda q, k, v: fkjit.attention_decode(q, k, v),
         normal((1, 4, 2, 32), *QKV[1:], dtype=HALF)),
    Case("paged_attention", "paged_attention",
         lambda q, k, v, table, lengths: fkjit.paged_attention(q, (k, v), table, lengths),
         _decoding),
)  # fmt: skip

# What is no call on tensors alone, but is given a cache; and what runs behind other calls.
OTHERS = {"kv_slots", "attention_backward"}
EVERY = {name for name in fkjit.__all__ if hasattr(getattr(fkjit, name), "prepare")}
