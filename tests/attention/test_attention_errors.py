"""Bad input to fkjit.attention: each gets one clear typed error before anything runs."""

from __future__ import annotations

import math

import numpy as np
import pytest

import fkjit
from fkjit.errors import ArgumentTypeError, FkjitError, ParameterError
from tests.attention.kit import normal

TYPE, VALUE = ArgumentTypeError, ParameterError
G = normal((2, 4, 8, 32))  # a good q, k and v


def odd_pointer():
    """fp16 elements that do not start on a multiple of their size."""
    return np.zeros(G.nbytes + 1, np.uint8)[1:].view(np.float16).reshape(G.shape)


WIDE = normal((1, 1, 4, 600))
LONG = np.broadcast_to(normal((1, 1, 1, 32)), (1, 1, 2**31, 32))
MASKED = np.ma.masked_array(G)

# fmt: off
ARRAYS = [  # id, arguments, error, what the message must say
    ("rank", (G[0], G, G), VALUE, r"q has 3 dimensions \(4, 8, 32\); allowed: 4"),
    ("batch", (G[:1], G, G), VALUE, "q does not match k's batch or head_dim"),
    ("head_dim", (G[..., :16], G, G), VALUE, "q does not match k's batch or head_dim"),
    ("keys", (G, G[:, :, :5], G), VALUE, "k does not match v's batch, heads or length"),
    ("heads", (G, G[:, :3], G[:, :3]), VALUE, "q has 4 heads, not a multiple of k's 3"),
    ("no kv heads", (G, G[:, :0], G[:, :0]), VALUE, "not a multiple of k's 0"),
    ("dtypes", (G, G, G.astype("f4")), TYPE, "v is fp32 but q is fp16"),
    ("integers", (G.astype("i4"),) * 3, TYPE, "q is int32; allowed: fp16, bf16"),
    ("float64", (G.astype("f8"),) * 3, TYPE, "q is fp64; allowed"),
    ("list", (G.tolist(), G, G), TYPE, r"q is a builtins\.list; allowed: a torch"),
    ("none", (G, None, G), TYPE, r"k is a builtins\.NoneType"),
    ("stride", (G.swapaxes(2, 3), G, G), VALUE, "q has stride 32 in its last dimension"),
    ("wide", (WIDE,) * 3, VALUE, r"head_dim=600 is not in 1 \.\. 512"),
    ("no dim", (G[..., :0],) * 3, VALUE, r"head_dim=0 is not in 1 \.\. 512"),
    ("big-endian", (G.astype(">f2"), G, G), TYPE, "q has byte order '>'; convert"),
    ("odd pointer", (odd_pointer(),) * 3, TYPE, "q has elements that are not aligned"),
    ("masked", (G, MASKED, G), TYPE, "k is a masked array"),
    ("long", (LONG,) * 3, VALUE, "q has 2147483648 rows; allowed: up to 2147483647"),
]
OPTIONS = [  # id, options, error, what the message must say
    ("nan", {"softmax_scale": math.nan}, VALUE, "softmax_scale=nan is not a finite number"),
    ("inf", {"softmax_scale": 1e39}, VALUE, r"softmax_scale=1e\+39 is not a finite number"),
    ("text scale", {"softmax_scale": "0.1"}, TYPE, "softmax_scale='0.1' is not a plain"),
    ("huge scale", {"softmax_scale": 10**400}, TYPE, "softmax_scale=1000"),
    ("block 48", {"block": 48}, VALUE, r"block=48 is not one of \[16, 32, 64"),
    ("block 0", {"block": 0}, VALUE, "block=0 is not one of"),
    ("pair", {"block": (64, 48)}, VALUE, r"block=\(64, 48\) is not one of"),
    ("text block", {"block": "32"}, TYPE, "block='32' is not a number, a pair"),
    ("float block", {"block": 32.0}, TYPE, r"block=32\.0 is not a number, a pair"),
    ("three", {"block": (1, 2, 3)}, TYPE, r"block=\(1, 2, 3\) is not a number, a pair"),
    ("naive block", {"block": 32, "impl": "naive"}, VALUE, "block=32: impl='naive' has no tiles"),
    ("impl", {"impl": "fast"}, VALUE, "impl='fast' is not one of auto, flash"),
    ("impl array", {"impl": np.ones(2)}, VALUE, "impl=<numpy.ndarray .* is not one of auto"),
    ("layout", {"layout": "sbhd"}, VALUE, "layout='sbhd' is not one of bhsd"),
    ("causal text", {"causal": "False"}, TYPE, "causal='False' is not True or False"),
    ("causal array", {"causal": np.ones(3)}, TYPE, "causal=<numpy.* is not True or False"),
    ("lse flag", {"return_lse": 2}, TYPE, "return_lse=2 is not True or False"),
]
# fmt: on
CALLS = [(name, arguments, {}, *rest) for name, arguments, *rest in ARRAYS]
CALLS += [(name, (G, G, G), *rest) for name, *rest in OPTIONS]


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [pytest.param(*call[1:], id=call[0]) for call in CALLS],
)
def test_bad_input_gets_one_clear_typed_error(arguments, options, error, message, monkeypatch):
    monkeypatch.setattr("fkjit.ops.op.op.interpret", lambda *_: pytest.fail("something ran"))
    with pytest.raises(error, match=message) as caught:
        fkjit.attention(*arguments, **options)
    assert isinstance(caught.value, FkjitError) and str(caught.value).startswith("attention: ")
    assert caught.value.__cause__ is None
