"""What a call of attention says besides its arrays: a tuple with names, for each of the two ops."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from fkjit.errors import ParameterError
from fkjit.ops.attention import score_mod as score_mods
from fkjit.ops.attention.features import MAX_ARRAYS

Scalars = tuple[tuple[str, str, Any], ...]  # (name, "float" or "int", value) of score_args


class AttentionOptions(NamedTuple):
    """Of `attention`. A call without score features gives the first seven.

    score_mod: an expression on one line, "" where there is none. score_names: of the arrays that it
    reads, in the order of their slots. score_mod_grad and deterministic matter to gradients alone.
    """

    causal: Any = False
    softmax_scale: Any = None
    block: Any = None
    impl: Any = "auto"
    return_lse: Any = False
    layout: Any = "bhsd"
    deterministic: Any = True
    window: Any = None
    softcap: Any = None
    score_mod: str = ""
    score_names: tuple[str, ...] = ()
    score_scalars: Scalars = ()
    score_mod_grad: str = ""


class VarlenOptions(NamedTuple):
    """Of `attention_varlen`; the fields that both have mean the same."""

    max_seqlen_q: Any
    max_seqlen_k: Any
    causal: Any = False
    softmax_scale: Any = None
    block: Any = None
    return_lse: Any = False
    deterministic: Any = True
    window: Any = None
    softcap: Any = None
    score_mod: str = ""
    score_names: tuple[str, ...] = ()
    score_scalars: Scalars = ()
    score_mod_grad: str = ""


class PagedOptions(NamedTuple):
    """Of `paged_attention` with packed queries; the fields that all have mean the same."""

    max_seqlen_q: Any
    layout: Any = "nhd"
    causal: Any = True
    softmax_scale: Any = None
    block: Any = None
    return_lse: Any = False
    window: Any = None
    softcap: Any = None
    mixed: Any = False
    score_mod: str = ""
    score_names: tuple[str, ...] = ()
    score_scalars: Scalars = ()


Options = AttentionOptions | VarlenOptions | PagedOptions


def unpack_score_mod(
    call: str, score_mod: Any, score_args: Mapping[str, Any] | None, score_mod_grad: Any = None
) -> tuple[tuple[Any, ...], tuple[str, tuple[str, ...], Scalars, str]]:
    """MAX_ARRAYS arrays or None, one for each slot; and score_mod, score_names, score_scalars,
    score_mod_grad as the options have them."""
    if score_mod is None:
        for name, given in (("score_args", score_args), ("score_mod_grad", score_mod_grad)):
            if not (given is None or (isinstance(given, Mapping | str) and not given)):
                raise ParameterError(_LONELY[name].format(call=call))
        return (None,) * MAX_ARRAYS, ("", (), (), "")
    text = score_mods.expression(call, score_mod)
    arrays, scalars = score_mods.arguments(call, score_args)
    grad = ""
    if score_mod_grad is not None:
        grad = score_mods.expression(call, score_mod_grad, "score_mod_grad")
    slots = (*arrays.values(), *(None,) * (MAX_ARRAYS - len(arrays)))
    return slots, (text, tuple(arrays), scalars, grad)


_LONELY = {
    "score_args": "{call}: score_args are given, but no score_mod to read them",
    "score_mod_grad": "{call}: score_mod_grad is given, but no score_mod that it is of",
}
