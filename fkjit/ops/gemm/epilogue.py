"""What a product's kernels are compiled for besides tiles and types: the activation, as a text.

"none", one of `ACTIVATIONS`, or "mod=EXPRESSION; derivative=EXPRESSION": the caller's CUDA
expression of x, the sum with scale and bias.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

from fkjit.spec import KernelSpec, Param, Params

# Text of a parameter -> type in templates/gemm/activation.cuh.
ACTIVATIONS = {
    "none": "Identity", "gelu": "Gelu", "gelu_tanh": "GeluTanh", "silu": "Silu", "relu": "Relu",
}  # fmt: skip
_MOD, _DERIVATIVE = "mod=", "; derivative="
_DOC = "what happens to sums before anything goes to memory; any mod= is compiled when called"
# What is compiled ahead and swept; all else is compiled when it is first called.
SHIPPED = (("none", False), ("gelu_tanh", False), ("gelu", False), ("silu", True))
PARAMS = (
    Param("activation", tuple(ACTIVATIONS), _DOC),
    Param("gate", (False, True), "weight holds gate and up: act(gate) * up"),
)


def mod_text(expression: str, derivative: str | None = None) -> str:
    """The text of a caller's expression; expressions hold no semicolon."""
    return f"{_MOD}{expression}" + (f"{_DERIVATIVE}{derivative}" if derivative else "")


def values(activation: str) -> dict[str, Any]:
    """What the templates name: `activation` is a C++ type."""
    if not activation.startswith(_MOD):
        made = {"has_mod": False, "epilogue_mod": "x", "epilogue_mod_grad": "1.f"}
        return {**made, "activation": ACTIVATIONS[activation]}
    expression, _, slope = activation.removeprefix(_MOD).partition(_DERIVATIVE)
    made = {"has_mod": True, "epilogue_mod": expression, "epilogue_mod_grad": slope or "1.f"}
    return {**made, "activation": "Mod"}


@lru_cache(maxsize=1024)
def kernel_for(spec: KernelSpec, activation: str) -> KernelSpec:
    """The kernel with this activation among its legal ones: itself but for a "mod="."""
    if activation in ACTIVATIONS:
        return spec
    fixed = [replace(p, values=(activation,)) if p.name == "activation" else p for p in spec.params]
    return replace(spec, params=tuple(fixed))


def shipped(spec: KernelSpec, illegal: Callable[[Params], str | None] | None = None) -> KernelSpec:
    """The kernel with few of its variants, to be registered: compiled ahead, swept and listed. A
    call takes any other of `spec` as well. `illegal`: in place of the spec's own."""

    def refused(params: Params) -> str | None:
        pair = (params["activation"], params["gate"])
        if pair not in SHIPPED:
            return f"is compiled when called (ahead: {', '.join(map(str, SHIPPED))})"
        return (illegal or spec.illegal)(params)

    return replace(spec, illegal=refused)
