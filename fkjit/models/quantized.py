"""Products with weights of codes; embedding, norms and biases stay numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from fkjit.arguments import one_of
from fkjit.errors import ParameterError
from fkjit.models.config import ModelConfig
from fkjit.models.weights import Affine, Layer, Weights
from fkjit.ops.quantize.call import quantize
from fkjit.ops.quantize.product import EVEN
from fkjit.ops.quantize.schemes import (
    SCHEMES,
    STORED,
    WIDTH,
    QuantizedTensor,
    Scheme,
    scale_dtype,
    scales_shape,
)

PRODUCTS = ("qkv", "out", "up", "down")
_CALL = "Decoder"


def keeper(config: ModelConfig, scheme: str | None) -> Callable[[Layer], Layer]:
    """What becomes of each layer as it is read: by the scheme, None: nothing. Weights that are
    codes already stay.

    ParameterError: no such scheme, or a model whose products have no kernel with such codes.
    """
    if scheme is None:
        return lambda layer: layer
    _check(config, scheme)

    def kept(layer: Layer) -> Layer:
        made = {name: _codes(getattr(layer, name), scheme) for name in PRODUCTS}
        return layer._replace(**made)

    return kept


def scheme_of(weights: Weights) -> str | None:
    """Of the weights that are codes; "": of several schemes. None: all are numbers."""
    layers = (getattr(layer, name).weight for layer in weights.layers for name in PRODUCTS)
    return one_scheme(getattr(one, "scheme", None) for one in (*layers, weights.head))


def one_scheme(schemes: Iterable[str | None]) -> str | None:
    """Of weights by these schemes, None: of numbers, what `scheme_of` says."""
    found = set(schemes) - {None}
    return None if not found else found.pop() if len(found) == 1 else ""


def with_head(weights: Weights, config: ModelConfig, scheme: str | None) -> Weights:
    """The head as codes by the scheme; None, or a head that is codes already: as it is."""
    if scheme is None:
        return weights
    check_head(config, scheme)
    return weights._replace(head=_codes(Affine(weights.head), scheme).weight)


def check_head(config: ModelConfig, scheme: str) -> None:
    """ParameterError: no such scheme, or a head that has no kernel with such codes."""
    one_of(_CALL, "quantize_head", scheme, tuple(SCHEMES))
    even = EVEN[SCHEMES[scheme].code]
    if config.hidden % even:
        raise ParameterError(
            f"{_CALL}: quantize_head={scheme!r} and {config.hidden} columns; allowed: a multiple "
            f"of {even}"
        )


def described(scheme: str, n: int, k: int, dtype: str) -> QuantizedTensor:
    """A weight [n, k] of that dtype by its scheme, its arrays as texts."""
    how = SCHEMES[scheme]
    columns = k // 2 if how.code == "int4" else k
    spans = Scheme("fp8", "block") if scheme == "fp8_block" else how
    scales = ", ".join(map(str, scales_shape(spans, (n, k))))
    data = f"{STORED[how.code]}[{n}, {columns}]"
    return QuantizedTensor(data, f"{scale_dtype(how, dtype)}[{scales}]", scheme)


def _codes(product: Affine, scheme: str) -> Affine:
    if isinstance(product.weight, QuantizedTensor):
        return product
    return product._replace(weight=quantize(product.weight, scheme, weight=True))


def _check(config: ModelConfig, scheme: Any) -> None:
    one_of(_CALL, "quantize", scheme, tuple(SCHEMES))
    even = EVEN[SCHEMES[scheme].code]
    for name, (_, columns) in config.products().items():
        if columns % even:
            raise ParameterError(
                f"{_CALL}: quantize={scheme!r} and {columns} columns of the product {name!r}; "
                f"allowed: a multiple of {even}"
            )
    if scheme == "fp8_block" and config.gated and config.mlp % WIDTH:
        raise ParameterError(
            f"{_CALL}: quantize={scheme!r} and a gate of {config.mlp} columns; allowed: a multiple "
            f"of {WIDTH}"
        )
