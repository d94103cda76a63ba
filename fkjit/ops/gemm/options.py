"""What a call of `fkjit.linear` says besides its arrays."""

from __future__ import annotations

from typing import Any, NamedTuple


class LinearOptions(NamedTuple):
    """As the caller gave them, in the order of the public function's parameters."""

    activation: Any = None
    gate: Any = False
    scale: Any = None
    out_dtype: Any = None
    block: Any = None
    impl: Any = "auto"
    deterministic: Any = True
    weight_layout: Any = "nk"
    epilogue_mod: Any = None
    epilogue_mod_grad: Any = None
    save_pre_activation: Any = True
    precision: Any = "ieee"
