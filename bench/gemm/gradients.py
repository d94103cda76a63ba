"""What the cases of a product's gradients share: products of one layer's arrays, transposed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..core.op import Op
from . import peers_linear, peers_quack, products

# Of forwards m x k x n.
_DEFAULT = ((8192, 8192, 8192), (8192, 4096, 16_384), (4096, 768, 3072), (4096, 14_336, 4096))
_QUICK = ((4096, 4096, 4096),)


def operation(name: str, product: Callable[[int, int, int], dict[str, Any]]) -> Op:
    """`product`: of a forward's m, k and n, the product that makes the gradient."""
    return Op(
        name=name,
        sets={
            "default": [product(*shape) for shape in _DEFAULT],
            "quick": [product(*shape) for shape in _QUICK],
        },
        label=products.label,
        inputs=products.inputs,
        expected=products.expected,
        ours=products.ours,
        choose=products.choose,
        chosen=products.chosen,
        launch=products.launch,
        whole=products.whole,
        peers=(*peers_linear.GRADIENTS, *peers_quack.GRADIENTS),
        kernel="linear",
    )
