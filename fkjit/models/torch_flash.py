"""fkjit as a flash attention of PyTorch's own registry: behind `scaled_dot_product_attention`,
`nn.MultiheadAttention` and `torch.nn.attention.varlen`, without a copy of q, k or v."""

from __future__ import annotations

import warnings
from typing import Any

from fkjit.compat.arguments import refuse
from fkjit.errors import ParameterError
from fkjit.ops.attention.backward.call import gradients
from fkjit.ops.attention.backward.problem import PACKED, Options
from fkjit.ops.attention.features import ScoreFeatures
from fkjit.ops.attention.forward import attention, attention_varlen
from fkjit.ops.op import torch_ops

NAME = "fkjit"
_CALL = "register_flash_attention"
_SDPA = "scaled_dot_product_attention (flash)"
_FLASH = "_flash_attention_forward"


def register_flash_attention() -> None:
    """Put "fkjit" among PyTorch's flash attentions (PyTorch 2.11 and newer).

        fkjit.models.register_flash_attention()
        torch.nn.attention.activate_flash_attention_impl("fkjit")  # from now on, on GPUs
        torch.nn.attention.restore_flash_attention_impl()          # PyTorch's own again

    What PyTorch sends to its flash backend then comes to fkjit, with gradients: fp16 and bf16
    without masks; the other backends stay. Pages and `seqused_k` raise ParameterError, and dropout
    does where PyTorch may not take another backend.

    Raises ParameterError where torch is not imported, or has no such registry.
    """
    torch = torch_ops.torch_seen()
    if torch is None:
        raise ParameterError(f"{_CALL}: torch is not imported; import it first")
    register = getattr(torch.nn.attention, "register_flash_attention_impl", None)
    if register is None:
        raise ParameterError(
            f"{_CALL}: PyTorch {torch.__version__} has no registry of flash attentions; allowed: "
            "2.11 and newer; fkjit.models.torch_attention() works with older ones"
        )
    register(NAME, register_fn=activated)


class Handle:
    """The registration; without it PyTorch's kernels are back."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def remove(self) -> None:
        """Undo it."""
        if self._library is not None:
            self._library._destroy()
        self._library = None


def activated(key: str = "CUDA") -> Handle:
    """Register the kernels for a dispatch key; what PyTorch calls on activation."""
    torch = torch_ops.torch_seen()
    library = torch.library.Library("aten", "IMPL", key)
    with warnings.catch_warnings():  # that there is one already is what this is for
        warnings.filterwarnings("ignore", ".*Overriding a previously registered kernel")
        for name, function in (
            ("_scaled_dot_product_flash_attention", _dense_forward),
            ("_scaled_dot_product_flash_attention_backward", _dense_backward),
            ("_flash_attention_forward", _flash_forward),
            ("_flash_attention_backward", _flash_backward),
        ):
            library.impl(name, function, key)
    return Handle(library)


# ------------------------------------------------------------------ scaled_dot_product_attention


def _dense_forward(
    query: Any, key: Any, value: Any, dropout_p: float = 0.0, is_causal: bool = False,
    return_debug_mask: bool = False, *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """query [B, H, S, D]. The output lies in memory as query does, which is what PyTorch's
    compiler assumes."""
    refuse(_SDPA, dropout_p=(dropout_p, 0.0), return_debug_mask=(return_debug_mask, False))
    by_rows = not query.is_contiguous() and query.transpose(1, 2).is_contiguous()
    arrays = (query, key, value)
    arrays = tuple(x.transpose(1, 2) for x in arrays) if by_rows else arrays
    with torch_ops.torch_seen().no_grad():
        o, lse = attention(
            *arrays, causal=is_causal, softmax_scale=scale, return_lse=True,
            layout="bshd" if by_rows else "bhsd", deterministic=None,
        )  # fmt: skip
    o = o.transpose(1, 2) if by_rows else o
    return (o, lse, None, None, query.shape[2], key.shape[2], *_nothing_random(query))


def _dense_backward(
    grad_out: Any, query: Any, key: Any, value: Any, out: Any, logsumexp: Any, cum_seq_q: Any,
    cum_seq_k: Any, max_q: int, max_k: int, dropout_p: float, is_causal: bool, philox_seed: Any,
    philox_offset: Any, *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    refuse(_SDPA, dropout_p=(dropout_p, 0.0))
    options = Options(causal=is_causal, softmax_scale=scale, deterministic=_deterministic())
    return gradients(_last_contiguous(grad_out, query, key, value, out, logsumexp), options)


# ------------------------------------------------------------------ packed, and torch's varlen


def _flash_forward(
    query: Any, key: Any, value: Any, cum_seq_q: Any, cum_seq_k: Any, max_q: int, max_k: int,
    dropout_p: float, is_causal: bool, return_debug_mask: bool, *, scale: float | None = None,
    window_size_left: int | None = None, window_size_right: int | None = None,
    seqused_k: Any = None, alibi_slopes: Any = None, **others: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """query [B, S, H, D], or with cum_seq_q [total, H, D]."""
    refuse(
        _FLASH, dropout_p=(dropout_p, 0.0), return_debug_mask=(return_debug_mask, False),
        seqused_k=(seqused_k, None), **{name: (value, None) for name, value in others.items()},
    )  # fmt: skip
    options = {
        "causal": is_causal, "softmax_scale": scale, "return_lse": True, "deterministic": None,
        "window": _window(window_size_left, window_size_right), "alibi_slopes": alibi_slopes,
    }  # fmt: skip
    with torch_ops.torch_seen().no_grad():
        if cum_seq_q is None:
            o, lse = attention(query, key, value, layout="bshd", **options)
        else:
            ends = (cum_seq_q, cum_seq_k if cum_seq_k is not None else cum_seq_q)
            o, lse = attention_varlen(query, key, value, *ends, max_q, max_k, **options)
    return (o, lse, *_nothing_random(query))


def _flash_backward(
    grad_out: Any, query: Any, key: Any, value: Any, out: Any, logsumexp: Any, cum_seq_q: Any,
    cum_seq_k: Any, max_q: int, max_k: int, dropout_p: float, is_causal: bool, rng_state: Any,
    unused: Any, *, scale: float | None = None, window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    refuse(_FLASH, dropout_p=(dropout_p, 0.0))
    left, right = _window(window_size_left, window_size_right) or (None, None)
    packed, windowed = cum_seq_q is not None, (left, right) != (None, None)
    options = Options(
        features=ScoreFeatures(varlen=packed).text if packed or windowed else "",
        layout=PACKED if packed else "bshd", causal=is_causal, softmax_scale=scale,
        window=(-1 if left is None else left, -1 if right is None else right),
        max_seqlen_q=max_q if packed else 0, max_seqlen_k=max_k if packed else 0,
        deterministic=_deterministic(),
    )  # fmt: skip
    arrays = _last_contiguous(grad_out, query, key, value, out, logsumexp)
    ends = (cum_seq_q, cum_seq_k if cum_seq_k is not None else cum_seq_q) if packed else ()
    return gradients((*arrays, None, *ends), options)


def _window(left: int | None, right: int | None) -> tuple[int | None, int | None] | None:
    """PyTorch's sides, where -1 and None have no bound."""
    sides = tuple(None if side is None or side < 0 else side for side in (left, right))
    return None if sides == (None, None) else (sides[0], sides[1])


def _deterministic() -> bool:
    return torch_ops.torch_seen().are_deterministic_algorithms_enabled()


def _last_contiguous(*arrays: Any) -> tuple[Any, ...]:
    """As they are, but for gradients that are one number for all, as those of a sum."""
    return tuple(x if x.stride(-1) == 1 else x.contiguous() for x in arrays)


def _nothing_random(query: Any) -> tuple[Any, Any, Any]:
    """The state, the offset and the mask of a dropout that there is not."""
    torch = torch_ops.torch_seen()
    state = torch.zeros(2, dtype=torch.uint64, device=query.device)
    return state, state.new_zeros(()), query.new_empty(0)
