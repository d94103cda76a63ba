"""The kernel of decoding with a form rendered in: see attention_form.py."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

from fkjit.ops.attention.decode import feature_problem as problem
from fkjit.ops.attention.decode import grid as grid
from fkjit.ops.attention.decode.kernels import SPLIT
from fkjit.ops.attention.features import EXAMPLE_ARGS, EXAMPLE_MOD, ScoreFeatures, parse
from fkjit.spec import KernelSpec, Param, Params, register

_FORM = "what the kernel does beside causal attention; any other form is compiled when called"
_ALL = ScoreFeatures(True, True, "fp16", True, True, False, True, False, EXAMPLE_MOD, EXAMPLE_ARGS)
# What is compiled ahead, where the sweep meets all of the code
SHIPPED = (ScoreFeatures().text, _ALL.text)
_SHOWN = {"dtype": ("bf16",), "storage": ("same", "int8"), "head_dim": (64,), "form": SHIPPED}
_SHOWN_ROWS = {"same": 16, "int8": 64}


def _derive(params: Params) -> dict[str, Any]:
    usual, form = grid.derive(params), parse(params["form"])
    if params["rows"] > 16 and (form.bias or form.mask or form.score_mod):
        usual["q_in_registers"] = params["head_dim"] <= 64
    return {**usual, **form.values()}


def _illegal(params: Params) -> str | None:
    form = parse(params["form"])
    if params["head_dim"] > 128 and (form.bias or form.mask):
        return "bias and mask need registers that head_dim above 128 does not leave"
    return grid.illegal(params)


def _illegal_shown(params: Params) -> str | None:
    if params["rows"] != _SHOWN_ROWS[params["storage"]]:
        return "is compiled when it is first called"
    return _illegal(params)


_SPEC = replace(
    SPLIT,
    op="decode_form",
    doc="decoding with windows, soft caps, biases …: what its form says",
    params=(*SPLIT.params, Param("form", SHIPPED, _FORM)),
    derive=_derive,
    illegal=_illegal,
    interpreter_work=problem.padded_flops,
    bytes=problem.traffic,
    arguments=problem.arguments,
    problems=problem.problems,
    inputs=problem.inputs,
    reference=problem.reference,
)
SPLIT_FORMS = register(
    replace(
        _SPEC,
        illegal=_illegal_shown,
        params=tuple(replace(p, values=_SHOWN.get(p.name, p.values)) for p in _SPEC.params),
    )
)


@lru_cache(maxsize=1024)
def kernel(form: str) -> KernelSpec:
    """The kernel with a form; every variant of it is legal that is without."""
    return replace(_SPEC, params=(*_SPEC.params[:-1], Param("form", (form,), _FORM)))
