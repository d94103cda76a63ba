"""What a Decoder's step in one launch takes: its weights as one table, its cache and its angles."""

from __future__ import annotations

from typing import Any

from fkjit.models.network import Network
from fkjit.models.plan import fits_whole, model_of
from fkjit.models.quantized import PRODUCTS
from fkjit.models.slots import State
from fkjit.models.weights import Layer
from fkjit.ops.kv.cache import PagedKVCache
from fkjit.ops.op import torch_ops
from fkjit.ops.op.request import arch_of
from fkjit.ops.quantize.schemes import QuantizedTensor
from fkjit.ops.rope.frequencies import rope_table
from fkjit.ops.step.whole import (
    Arrays,
    LayerArrays,
    blocks_on,
    decode_step,
    exchange_words,
    layer_table,
    map_words,
)
from fkjit.runtime.interop import view

_ALIGNED, _ROUNDED = 16, 8  # elements between arrays; of a row of scales


class WholeStep:
    """Steps of up to eight sequences. length: positions that there are angles for."""

    def __init__(self, network: Network, cache: PagedKVCache, length: int) -> None:
        config, weights = network.config, network.weights
        self.network, self.cache = network, cache
        codes = network.codes is not None
        self.model = model_of(config, cache.layout, cache.page_size, codes, length)
        base, layers = _together(weights.embedding, [_arrays(one) for one in weights.layers])
        table = layer_table(base.data_ptr(), layers, list(config.windows))
        torch = torch_ops.torch_seen()
        self._base, self._kept = base, layers
        kind = weights.embedding.dtype
        self._head = (_numbers(weights.head).view(kind), _scales(weights.head))
        self._exchanges: dict[int, Any] = {}
        self._maps: dict[int, Any] = {}
        self._host_table, self._table = table, torch.from_numpy(table).to(base.device)
        like = torch.zeros(1, dtype=torch.float32, device=base.device)
        self._angles = None if config.theta is None else rope_table(
            length, config.head_dim, theta=config.theta, scaling=config.scaling, like=like
        )  # fmt: skip

    def __call__(self, state: State, logits: Any, advance: int = 0) -> Any:
        """The largest of each row of `logits`, which are written; the cache counts the tokens.
        advance: 1: positions become the next ones; 2: the tokens these, too."""
        weights, cache = self.network.weights, self.cache
        exchange = self._exchange(len(state.tokens))
        arrays = Arrays(
            state.tokens, state.positions, state.active, state.rows, weights.embedding,
            weights.positions, self._base, self._table, weights.norm.weight, weights.norm.bias,
            *self._head, self._angles, cache.page_table, cache.capacities, cache.lengths,
            cache.all_pages, exchange,
        )  # fmt: skip
        arrays = arrays._replace(maps=self._maps_for(arrays))
        return decode_step(arrays, logits, self.model._replace(advance=advance))

    def _maps_for(self, arrays: Arrays) -> Any:
        """Tensor maps of the weights; of stages of so many columns, which rows decide."""
        if not self._base.is_cuda:
            return None
        rows = len(arrays.tokens)
        if rows not in self._maps:
            made = map_words(arrays, self.model, self._host_table)
            self._maps[rows] = torch_ops.torch_seen().from_numpy(made.copy()).to(self._base.device)
        return self._maps[rows]

    def _exchange(self, rows: int) -> Any:
        """What blocks hand to one another, of steps of so many sequences."""
        found = self._exchanges.get(rows)
        if found is None:
            torch, device = torch_ops.torch_seen(), view(self._base, "Decoder", "weights").device
            hidden = self.network.config.hidden
            words = exchange_words(self.model, rows, hidden, blocks_on(device, hidden))
            found = torch.zeros(words, dtype=torch.int32, device=self._base.device)
            self._exchanges[rows] = found
        return found


def has_whole(network: Network, rows: int) -> bool:
    """Whether so many sequences of a network, where its weights are, can have one."""
    seen = view(network.weights.embedding, "Decoder", "weights")
    blocks = blocks_on(seen.device, network.config.hidden)
    return fits_whole(network.config, rows, network.codes, arch_of(seen), blocks)


def _arrays(layer: Layer) -> LayerArrays:
    parts = (layer.norm, layer.qkv, layer.out, layer.mlp_norm, layer.up, layer.down)
    pairs = [(_numbers(part.weight), part.bias) for part in parts]
    scales = [_scales(getattr(layer, name).weight) for name in PRODUCTS]
    return LayerArrays(*(x for pair in pairs for x in pair), *scales)


def _numbers(weight: Any) -> Any:
    return weight.data if isinstance(weight, QuantizedTensor) else weight


def _scales(weight: Any) -> Any:
    """Rows of whole sixteens of bytes, of a weight of codes; else None."""
    if not isinstance(weight, QuantizedTensor):
        return None
    torch = torch_ops.torch_seen()
    return torch.nn.functional.pad(weight.scales, (0, -weight.scales.shape[1] % _ROUNDED))


def _together(embedding: Any, layers: list[LayerArrays]) -> tuple[Any, list[LayerArrays]]:
    """An array, and arrays that lie any number of elements before or behind it. In the interpreter,
    where a pointer leads to one array alone, that is a copy of all of them."""
    if embedding.is_cuda:
        return embedding, layers
    torch = torch_ops.torch_seen()
    kind = embedding.dtype
    seen = [x.flatten().view(kind) for one in layers for x in one if x is not None]
    room = torch.zeros(sum(-(-x.numel() // _ALIGNED) * _ALIGNED for x in seen), dtype=kind)
    at = 0

    def moved(array: Any) -> Any:
        nonlocal at
        if array is None:
            return None
        flat = array.flatten().view(kind)
        view = room[at : at + flat.numel()]
        at += -(-flat.numel() // _ALIGNED) * _ALIGNED
        return view.copy_(flat)

    return room, [LayerArrays(*map(moved, one)) for one in layers]
