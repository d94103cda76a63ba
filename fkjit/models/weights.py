"""A model's weights as its forward pass takes them: what is multiplied together stands together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from fkjit.arguments import shown, whole
from fkjit.errors import ArgumentTypeError, ParameterError
from fkjit.models.config import ModelConfig
from fkjit.models.joined import as_one
from fkjit.models.sampling import SEEDS
from fkjit.ops.kv.memory import Memory
from fkjit.ops.op import torch_ops
from fkjit.ops.quantize.schemes import QuantizedTensor

_CALL = "Decoder"
_BIASED = ("qkv", "qwen2")  # a product of a model that has a bias, where others need none


class Affine(NamedTuple):
    """weight and bias (None: there is none) of a product, [N, K] and [N], or of a norm. A product's
    weight may be a QuantizedTensor."""

    weight: Any
    bias: Any = None


class Layer(NamedTuple):
    """qkv: rows of q's heads, then k's, then v's. up: where it is gated gate, and behind it up.
    q_norm, k_norm: [head_dim] weights, None where heads are not normalised."""

    norm: Affine
    qkv: Affine
    out: Affine
    mlp_norm: Affine
    up: Affine
    down: Affine
    q_norm: Any = None
    k_norm: Any = None


Keep = Callable[[Layer], Layer]


class Weights(NamedTuple):
    """embedding and head: [vocabulary, hidden]. positions: [max_length, hidden], or None."""

    embedding: Any
    positions: Any
    layers: tuple[Layer, ...]
    norm: Affine
    head: Any


def dtype_of(call: str, dtype: Any) -> Any:
    """A torch.dtype of "fp16", "bf16" or itself. ParameterError: another one."""
    torch = torch_ops.torch_seen()
    if torch is None:
        raise ParameterError(f"{call}: torch is not imported; import it first")
    names = {"fp16": torch.float16, "bf16": torch.bfloat16}
    chosen = names.get(dtype) if isinstance(dtype, str) else dtype
    if chosen not in names.values():
        raise ParameterError(f"{call}: dtype={shown(dtype)}; allowed: {', '.join(names)}")
    return chosen


def fitting(config: ModelConfig, weights: Weights) -> Weights:
    """Themselves. ParameterError, ArgumentTypeError: a dtype, a shape or strides that are not what
    the configuration and kernels take."""
    kind = dtype_of(_CALL, weights.embedding.dtype)
    if len(weights.layers) != config.layers:
        raise ParameterError(
            f"{_CALL}: weights have {len(weights.layers)} layers; allowed: {config.layers}"
        )
    for name, array, shape in _shapes(config, weights):
        found = getattr(array, "shape", None)
        if found is None or tuple(found) != shape:
            said = "is missing" if found is None else f"has shape {tuple(found)}"
            raise ParameterError(f"{_CALL}: weights.{name} {said}; allowed: {shape}")
        coded = isinstance(array, QuantizedTensor)
        if not coded and array.dtype is not kind:
            raise ArgumentTypeError(f"{_CALL}: weights.{name} is {array.dtype}; allowed: {kind}")
        if not (array.data if coded else array).is_contiguous():
            raise ParameterError(f"{_CALL}: weights.{name} has gaps; allowed: none")
    return weights


def _shapes(config: ModelConfig, weights: Weights) -> Iterator[tuple[str, Any, tuple[int, ...]]]:
    """Names of arrays, these, and what they should be."""
    table, learned = (config.vocabulary, config.hidden), config.theta is None
    yield "embedding", weights.embedding, table
    yield "head", weights.head, table
    yield from _of_norm("norm", weights.norm, learned, config.hidden)
    if learned:
        yield "positions", weights.positions, (config.max_length, config.hidden)
    for number, layer in enumerate(weights.layers):
        for name, shape in config.products().items():
            product = getattr(layer, name)
            yield f"layers[{number}].{name}", product.weight, shape
            if product.bias is not None or learned or (name, config.model_type) == _BIASED:
                yield f"layers[{number}].{name}.bias", product.bias, shape[:1]
        for name in ("norm", "mlp_norm"):
            one = getattr(layer, name)
            yield from _of_norm(f"layers[{number}].{name}", one, learned, config.hidden)
        for name in ("q_norm", "k_norm") if config.qk_norm else ():
            yield f"layers[{number}].{name}", getattr(layer, name), (config.head_dim,)


def _of_norm(
    name: str, norm: Affine, biased: bool, columns: int
) -> Iterator[tuple[str, Any, tuple[int, ...]]]:
    yield name, norm.weight, (columns,)
    if biased:
        yield f"{name}.bias", norm.bias, (columns,)


def arranged(
    config: ModelConfig, state: Mapping[str, Any], dtype: Any, device: Any,
    keep: Keep = lambda layer: layer,
) -> Weights:  # fmt: skip
    """The weights of a Hugging Face `state_dict()`, in `dtype` on `device`; each layer as `keep`
    returns it, before the next one is read.

    q, k and v, and gate and up, become one array each; GPT-2's are transposed. Those are copies,
    but of weights that lie so already (`joined.join`): drop the state where memory is short.

    Raises:
        ArgumentTypeError: state is no mapping, or has something else than tensors. ParameterError:
        a weight is missing, or its shape is not what the configuration says.
    """
    if not isinstance(state, Mapping):
        raise ArgumentTypeError(
            f"{_CALL}: state_dict is a {type(state).__name__}; allowed: a mapping of names to "
            "tensors, as model.state_dict()"
        )
    reader = _Reader(config, state, dtype, device)
    made = _gpt2 if config.model_type == "gpt2" else _llama
    return made(config, reader, keep)


class _Reader:
    """Weights by name, as they lie in `state`: with or without the name of the model before."""

    def __init__(self, config: ModelConfig, state: Mapping[str, Any], dtype: Any, device: Any):
        self.prefix = "transformer." if config.model_type == "gpt2" else "model."
        self.state, self.dtype, self.device = state, dtype, device

    def find(self, name: str) -> Any:
        found = self.state.get(self.prefix + name)
        return self.state.get(name) if found is None else found

    def __call__(self, name: str, *shape: int) -> Any:
        """ParameterError unless there is one of this shape."""
        found = self.find(name)
        if found is None:
            raise ParameterError(f"{_CALL}: state_dict lacks {self.prefix}{name}")
        if not isinstance(found, torch_ops.torch_seen().Tensor):
            raise ArgumentTypeError(
                f"{_CALL}: {self.prefix}{name} is a {type(found).__name__}; allowed: a torch tensor"
            )
        if tuple(found.shape) != shape:
            raise ParameterError(
                f"{_CALL}: {self.prefix}{name} has shape {tuple(found.shape)}; allowed: {shape}"
            )
        return found.detach().to(self.device, self.dtype)


def _llama(config: ModelConfig, read: _Reader, keep: Keep) -> Weights:
    embedding = read("embed_tokens.weight", config.vocabulary, config.hidden)
    layers = tuple(keep(_llama_layer(config, read, f"layers.{n}.")) for n in range(config.layers))
    head = embedding
    if not config.tied:
        head = read("lm_head.weight", config.vocabulary, config.hidden)
    return Weights(embedding, None, layers, Affine(read("norm.weight", config.hidden)), head)


def _llama_layer(config: ModelConfig, read: _Reader, at: str) -> Layer:
    hidden, dim = config.hidden, config.head_dim
    heads = {"q": config.heads_q, "k": config.heads_kv, "v": config.heads_kv}
    names = [(f"{at}self_attn.{name}_proj.", n * dim) for name, n in heads.items()]
    norms = [
        read(f"{at}self_attn.{name}_norm.weight", dim) if config.qk_norm else None for name in "qk"
    ]
    both = [(f"{at}mlp.{name}_proj.", config.mlp) for name in ("gate", "up")]
    return Layer(
        Affine(read(f"{at}input_layernorm.weight", hidden)),
        _joined(read, names, hidden, ("qkv", config.model_type) == _BIASED),
        _joined(read, [(f"{at}self_attn.o_proj.", hidden)], config.heads_q * dim),
        Affine(read(f"{at}post_attention_layernorm.weight", hidden)),
        _joined(read, both, hidden),
        _joined(read, [(f"{at}mlp.down_proj.", hidden)], config.mlp),
        *norms,
    )


def _joined(
    read: _Reader, parts: list[tuple[str, int]], width: int, biased: bool = False
) -> Affine:
    """Products of one input as one: rows below each other; biases of all of them, or of none."""
    torch = torch_ops.torch_seen()
    weights = [read(f"{name}weight", rows, width) for name, rows in parts]
    biased = biased or any(read.find(f"{name}bias") is not None for name, _ in parts)
    biases = [read(f"{name}bias", rows) for name, rows in parts] if biased else [None]
    if len(parts) == 1:
        return Affine(weights[0].contiguous(), biases[0])
    return Affine(_one(torch, weights), _one(torch, biases) if biased else None)


def _one(torch: Any, parts: list[Any]) -> Any:
    """Rows below each other: a view where they lie so already."""
    found = as_one(parts)
    return torch.cat(parts) if found is None else found


def _gpt2(config: ModelConfig, read: _Reader, keep: Keep) -> Weights:
    hidden = config.hidden
    embedding = read("wte.weight", config.vocabulary, hidden)
    positions = read("wpe.weight", config.max_length, hidden)
    layers = tuple(keep(_gpt2_layer(config, read, f"h.{n}.")) for n in range(config.layers))
    head = embedding if config.tied else read("lm_head.weight", config.vocabulary, hidden)
    return Weights(embedding, positions, layers, _normalizing(read, "ln_f.", hidden), head)


def _gpt2_layer(config: ModelConfig, read: _Reader, at: str) -> Layer:
    hidden, mlp = config.hidden, config.mlp
    return Layer(
        _normalizing(read, f"{at}ln_1.", hidden),
        _transposed(read, f"{at}attn.c_attn.", hidden, 3 * hidden),
        _transposed(read, f"{at}attn.c_proj.", hidden, hidden),
        _normalizing(read, f"{at}ln_2.", hidden),
        _transposed(read, f"{at}mlp.c_fc.", hidden, mlp),
        _transposed(read, f"{at}mlp.c_proj.", mlp, hidden),
    )


def _normalizing(read: _Reader, name: str, width: int) -> Affine:
    return Affine(read(f"{name}weight", width), read(f"{name}bias", width))


def _transposed(read: _Reader, name: str, width: int, rows: int) -> Affine:
    """GPT-2 keeps [inputs, outputs]; for a few rows of x [outputs, inputs] is fastest."""
    weight = read(f"{name}weight", width, rows).t().contiguous()
    return Affine(weight, read(f"{name}bias", rows))


# ------------------------------------------------------------------ random ones


def random_weights(config: Any, dtype: Any, device: Any, seed: int = 0) -> Weights:
    """Weights from a seed, to measure with: normal, of standard deviation 0.02; norms of 1, biases
    of 0. The same seed makes others on another device.

    Args:
        config: as `Decoder` takes it.
        dtype: "fp16" or "bf16", or torch's. device: "cuda", "cuda:1", "cpu".
        seed: of a torch.Generator.

    Returns: what `Decoder` takes for weights, which are in this dtype and on this device then.

    Raises ParameterError, ArgumentTypeError, DeviceError as `Decoder` does.
    """
    call = "random_weights"
    config, dtype, torch = ModelConfig.of(config), dtype_of(call, dtype), torch_ops.torch_seen()
    whole(call, "seed", seed, *SEEDS)
    device = Memory(call, "torch", device).device
    made = torch.Generator(device).manual_seed(seed)

    def matrix(*shape: int) -> Any:
        return torch.randn(shape, generator=made, dtype=dtype, device=device).mul_(0.02)

    def ones(*shape: int) -> Any:
        return torch.ones(shape, dtype=dtype, device=device)

    def zeros(*shape: int) -> Any:
        return torch.zeros(shape, dtype=dtype, device=device)

    embedding = matrix(config.vocabulary, config.hidden)
    learned = config.theta is None
    positions = matrix(config.max_length, config.hidden) if learned else None
    biases = zeros if learned or config.model_type == "qwen2" else lambda *shape: None
    layers = tuple(_random_layer(config, matrix, ones, biases) for _ in range(config.layers))
    norm = Affine(ones(config.hidden), zeros(config.hidden) if learned else None)
    head = embedding if config.tied else matrix(config.vocabulary, config.hidden)
    return Weights(embedding, positions, layers, norm, head)


def _random_layer(
    config: ModelConfig, matrix: Callable[..., Any], ones: Callable[..., Any],
    bias: Callable[..., Any],
) -> Layer:  # fmt: skip
    hidden, dim, learned = config.hidden, config.head_dim, config.theta is None
    wide = (config.heads_q + 2 * config.heads_kv) * dim
    up = (2 if config.gated else 1) * config.mlp

    def product(rows: int, width: int, biased: bool = learned) -> Affine:
        return Affine(matrix(rows, width), bias(rows) if biased else None)

    def norm() -> Affine:
        return Affine(ones(hidden), bias(hidden) if learned else None)

    heads = [ones(dim) if config.qk_norm else None for _ in "qk"]
    return Layer(
        norm(), product(wide, hidden, True), product(hidden, config.heads_q * dim), norm(),
        product(up, hidden), product(hidden, config.mlp), *heads,
    )  # fmt: skip
