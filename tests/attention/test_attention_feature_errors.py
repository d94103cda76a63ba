"""What calls of attention with a form refuse, and that they say what would be right."""

from __future__ import annotations

import numpy as np
import pytest

import fkjit
from fkjit.errors import ArgumentTypeError, ParameterError
from fkjit.jit.build import quiet

X = np.zeros((1, 2, 20, 32), np.float16)
BIAS = np.zeros((1, 1, 20, 20), np.float32)
F4 = np.zeros(2, np.float32)
MOD = "score + a[k_idx]"
WRONG = [  # options, error, words
    ({"window": 5}, ArgumentTypeError, r"window=5 is not a pair \(left, right\)"),
    ({"window": (1, 2, 3)}, ArgumentTypeError, "not a pair"),
    ({"window": (1.5, 2)}, ArgumentTypeError, "of whole numbers or None"),
    ({"window": (3, -2)}, ParameterError, r"window=\(3, -2\): a side is at least 0; None or -1"),
    ({"softcap": "1"}, ArgumentTypeError, "softcap='1' is not a plain number or None"),
    ({"softcap": float("nan")}, ArgumentTypeError, "softcap=nan"),
    ({"softcap": -1.0}, ParameterError, r"softcap=-1.0 is not in 1e-6 .. 1e30; None or 0"),
    ({"alibi_slopes": F4.astype("i4")}, ArgumentTypeError, "alibi_slopes is int32; allowed: fp32"),
    ({"alibi_slopes": F4[:1]}, ParameterError, r"allowed: \[Hq\] \(2,\) or \[B, Hq\] \(1, 2\)"),
    ({"alibi_slopes": 0.5}, ArgumentTypeError, "alibi_slopes is a builtins.float"),
    ({"bias": BIAS.astype("f8")}, ArgumentTypeError, "bias is fp64; allowed: fp16, bf16, fp32"),
    ({"bias": BIAS[0]}, ParameterError, r"bias has shape \(1, 20, 20\); allowed: four dimensions"),
    ({"bias": BIAS[..., :1]}, ParameterError, r"broadcast to \(1, 2, 20, 20\), the last one in"),
    ({"bias": np.zeros((1, 3, 20, 20), "f4")}, ParameterError, "bias has shape"),
    ({"bias": BIAS.swapaxes(2, 3)}, ParameterError, "bias has stride 20 in its last dimension"),
    ({"mask": BIAS}, ArgumentTypeError, "mask is fp32; allowed: bool"),
    ({"mask": np.ones((20, 20), bool)}, ParameterError, "mask has shape"),
    ({"sinks": F4[:1]}, ParameterError, r"sinks has shape \(1,\); allowed: \[Hq\], \(2,\)"),
    ({"impl": "naive", "softcap": 1.0}, ParameterError, "impl='naive' is not one of auto, flash"),
    ({"block": 128, "softcap": 1.0}, ParameterError, r"attention: block=128 is not one of \[16"),
    ({"layout": "sbhd", "softcap": 1.0}, ParameterError, "layout='sbhd' is not one of"),
    ({"causal": 2, "softcap": 1.0}, ArgumentTypeError, "causal=2 is not True or False"),
    ({"score_mod": 3}, ArgumentTypeError, "score_mod=3 is not a str"),
    ({"score_mod": ""}, ParameterError, "is not one expression"),
    ({"score_mod": "score; q_idx"}, ParameterError, "no ; { } # or quotes"),
    ({"score_mod": "score} {"}, ParameterError, "is not one expression"),
    ({"score_mod": "#define x"}, ParameterError, "is not one expression"),
    ({"score_mod": 'asm("trap")'}, ParameterError, "is not one expression"),
    ({"score_mod": "asm (score)"}, ParameterError, "no statements"),
    ({"score_mod": "score // x"}, ParameterError, "no comments"),
    ({"score_mod": "score) + (h"}, ParameterError, r"each \( and \[ closed"),
    ({"score_mod": "score\\"}, ParameterError, "is not one expression"),
    ({"score_mod": "scör"}, ParameterError, "is not one expression"),
    ({"score_mod": "score + c"}, ParameterError, r'compile: .*identifier "c" is undefined'),
    ({"score_mod": "score +"}, ParameterError, "does not compile: .*expected an expression"),
    ({"score_mod": MOD}, ParameterError, 'identifier "a" is undefined'),
    ({"score_mod": MOD, "score_args": 3}, ArgumentTypeError, "score_args=3 is not a mapping"),
    ({"score_mod": MOD, "score_args": {"1a": 3}}, ParameterError, "'1a' is not a name"),
    ({"score_mod": MOD, "score_args": {"score": 3}}, ParameterError, "'score' is not a name"),
    ({"score_mod": MOD, "score_args": {"a": 2**31}}, ParameterError, "a=2147483648 is not"),
    ({"score_mod": MOD, "score_args": {"a": BIAS}}, ParameterError, "allowed: one dimension"),
    ({"score_mod": MOD, "score_args": {"a": F4.astype("f8")}}, ArgumentTypeError,
     "score_args a is fp64; allowed: fp32, int32, fp16, bf16"),
    ({"score_mod": MOD, "score_args": {f"a{i}": F4 for i in range(9)}}, ParameterError, "up to 8"),
    ({"score_args": {"a": 1}, "softcap": 1.0}, ParameterError, "no score_mod to read them"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "error", "words"), WRONG, ids=lambda x: str(x)[:50])
def test_bad_forms_are_refused(options, error, words):
    with quiet(), pytest.raises(error, match=words) as found:
        fkjit.attention(X, X, X, **options)
    assert str(found.value).startswith("attention: ")


ROWS = np.zeros((20, 2, 32), np.float16)
ENDS = np.array([0, 8, 20], np.int32)
WRONG_PACKED = [  # arguments by position, options, error, words
    ({0: X}, {}, ParameterError, r"allowed: three dimensions, \[total, heads, head_dim\]"),
    ({1: ROWS[:19]}, {}, ParameterError, r"v \[total_k, Hkv, Dv\]"),
    ({0: np.zeros((20, 3, 32), "f2")}, {}, ParameterError, "3 heads, not a multiple of k's 2"),
    ({2: ROWS.astype("f4")}, {}, ArgumentTypeError, "v is fp32 but q is fp16"),
    ({3: ENDS.astype("f4")}, {}, ArgumentTypeError, "cu_seqlens_q is fp32; allowed: int32"),
    ({3: None}, {}, ArgumentTypeError, "cu_seqlens_q is a builtins.NoneType"),
    ({4: ENDS[:2]}, {}, ParameterError, "has 3 elements, cu_seqlens_k 2"),
    ({4: ENDS[:0]}, {}, ParameterError, r"allowed: \[sequences \+ 1\]"),
    ({5: 2.5}, {}, ArgumentTypeError, "max_seqlen_q=2.5 is not a whole number"),
    ({6: -1}, {}, ParameterError, "max_seqlen_k=-1 is not in 0"),
    ({5: 2**30}, {}, ParameterError, "no grid"),
    ({}, {"bias": BIAS}, ParameterError, r"broadcast to \(2, 2, 12, 12\)"),
    ({}, {"softmax_scale": "x"}, ArgumentTypeError, "softmax_scale='x' is not a plain number"),
    ({}, {"block": 48}, ParameterError, r"block=48 is not one of \[16, 32"),
    ({}, {"score_mod": "score + nothing"}, ParameterError, "does not compile"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "options", "error", "words"), WRONG_PACKED)
def test_bad_packed_sequences_are_refused(given, options, error, words):
    arguments = [ROWS, ROWS, ROWS, ENDS, ENDS, 12, 12]
    for at, value in given.items():
        arguments[at] = value
    with quiet(), pytest.raises(error, match=words) as found:
        fkjit.attention_varlen(*arguments, **options)
    assert str(found.value).startswith("attention_varlen: ")


class TestTorch:
    @pytest.fixture
    def torch(self):
        return pytest.importorskip("torch", reason="needs torch")

    def test_gradients_that_are_not_there_are_refused(self, torch):
        x = torch.randn(1, 2, 4, 32, requires_grad=True)
        ends = torch.tensor([0, 2], dtype=torch.int32)
        with pytest.raises(ParameterError, match=r"attention_varlen: .* has no derivative"):
            fkjit.attention_varlen(*(x[0],) * 3, ends, ends, 2, 2, score_mod="score * 2")

    def test_a_score_mod_is_refused_while_compiling(self, torch):
        x = torch.randn(1, 2, 4, 32)
        call = torch.compile(
            lambda x: fkjit.attention(x, x, x, score_mod="score * 2"),
            backend="eager", fullgraph=True,
        )  # fmt: skip
        with pytest.raises(Exception, match=r"score_mod=.* is not supported under"):
            call(x)
