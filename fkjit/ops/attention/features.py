"""Score features of attention: what a kernel is compiled for beside shapes, and as which text.

They are the value of a kernel's parameter `form`, so they are written as text: "window",
"softcap alibi bias=bf16:paired mask sinks varlen", with a score_mod last: "alibi score_mod=score *
slope; float slope". Every text has a band of keys (causal, window); "window" has nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

FLAGS = ("softcap", "alibi", "bias", "mask", "sinks", "varlen", "paged")
BIAS_DTYPES = ("fp16", "bf16", "fp32")
SCALARS = {"float": "float", "int": "int"}
ARRAYS = {  # dtype of an array that a score_mod reads -> what its expression sees
    "fp32": "const float*", "int32": "const int*", "fp16": "const fp16*", "bf16": "const bf16*",
}  # fmt: skip
MAX_ARRAYS = 8  # that a score_mod reads
SLOTS = tuple(f"score_{i}" for i in range(MAX_ARRAYS))  # kernel arguments
PACKED_ENDS = ("cu_seqlens_q", "cu_seqlens_k")
PAGES = ("page_table", "seq_lens", "rows")  # where keys are in pages, in place of cu_seqlens_k
SCALES = ("k_scale", "v_scale")  # and where these are codes
FEATURE_ARRAYS = ("alibi_slopes", "bias", "mask", "sinks")
# Small arrays that kernels read as these dtypes; near ones are cast (ops/op/casts.py).
CASTS = {
    **dict.fromkeys((*PACKED_ENDS, *PAGES), "int32"),
    **dict.fromkeys(("alibi_slopes", "sinks"), "fp32"),
}
# Arrays besides q, k and v that kernels have arguments for, null where there is none.
POINTERS = (*PACKED_ENDS, *FEATURE_ARRAYS, *SLOTS)
_MOD = "score_mod="
_GRAD = "derivative="
_PAIRED = ":paired"


@dataclass(frozen=True)
class ScoreFeatures:
    """What scores meet; `score_args` are (name, key of SCALARS or ARRAYS)."""

    softcap: bool = False
    alibi: bool = False
    bias: str = ""  # its dtype, if there is one
    bias_paired: bool = False
    mask: bool = False
    mask_paired: bool = False
    sinks: bool = False
    varlen: bool = False
    score_mod: str = ""
    score_args: tuple[tuple[str, str], ...] = ()
    score_mod_grad: str = ""  # in the backward alone, as is the next one
    dalibi: bool = False  # slopes have a gradient
    dbias: bool = False  # and the bias has one that this kernel makes
    dbias_sums: bool = False  # of one row for all queries, on sm_90
    paged: bool = False  # packed queries of keys in pages; in the forward alone
    codes: str = ""  # what those are kept as, "fp8" or "int8", if not as q
    mixed: bool = False  # sequences of one new token are left to decoding's kernel
    together: bool = False  # or are this kernel's, too; on sm_90
    seeded: bool = False  # sums of products start from bias and mask, which are read in runs

    @cached_property
    def text(self) -> str:
        words = [
            name
            for name in (*FLAGS, "mixed", "together", "dalibi", "dbias", "dbias_sums", "seeded")
            if getattr(self, name)
        ]
        words += [f"codes={self.codes}"] * bool(self.codes)
        shown = {
            "bias": f"bias={self.bias}" + _PAIRED * self.bias_paired,
            "mask": "mask" + _PAIRED * self.mask_paired,
        }
        text = " ".join(shown.get(word, word) for word in words)
        if not self.score_mod:
            return text or "window"
        args = "".join(f"; {kind} {name}" for name, kind in self.score_args)
        grad = f"; {_GRAD}{self.score_mod_grad}" if self.score_mod_grad else ""
        return f"{text} {_MOD}{self.score_mod}{args}{grad}".strip()

    @property
    def arrays(self) -> list[tuple[str, str]]:
        """Of score_args, those that are arrays: slot k of the kernel is the k-th of them."""
        return [(name, kind) for name, kind in self.score_args if kind in ARRAYS]

    @property
    def scalars(self) -> list[tuple[str, str]]:
        return [(name, kind) for name, kind in self.score_args if kind in SCALARS]

    def values(self) -> dict[str, Any]:
        """What the templates name."""
        arrays = [(ARRAYS[kind], name, SLOTS[i]) for i, (name, kind) in enumerate(self.arrays)]
        scalars = [(SCALARS[kind], name, f"score_{name}") for name, kind in self.scalars]
        return {
            **{name: bool(getattr(self, name)) for name in FLAGS},
            **{"form": True, "seqlen_q": "max_seqlen_q", "seqlen_k": "max_seqlen_k"},
            **{"bias_dtype": self.bias or "float", "bias_paired": self.bias_paired},
            **{"mask_paired": self.mask_paired, "has_mod": bool(self.score_mod)},
            "score_mod": self.score_mod or "score",
            **{"score_mod_grad": self.score_mod_grad or "1.f", "dalibi": self.dalibi},
            **{"dbias": self.dbias, "dbias_sums": self.dbias_sums, "seeded": self.seeded},
            "score_fields": "".join(f"; {kind} {name}" for kind, name, _ in arrays + scalars),
            "score_arrays": "".join(f", {kind} __restrict__ {slot}" for kind, _, slot in arrays),
            "score_scalars": "".join(f", const {kind} {name}" for kind, _, name in scalars),
            "page_arrays": (_PAGE_ARRAYS if self.paged else "")
            + _SCALE_ARRAYS * bool(self.codes)
            + _LISTED * self.mixed,
            **_PACKED[self.varlen],
            **NOT_RESUMED,
            "mixed": self.mixed,
            "together": "together" if self.together else "",
            "listed": f", {LISTED}" if self.mixed else _LENGTHS if self.together else "",
            "works": _WORKS[self.mixed + 2 * self.together],
            **{"codes": self.codes, "kept_keys": _KEPT.get(self.codes, "elem_t")},
            "page_numbers": _PAGE_NUMBERS if self.paged else "",
            "score_values": "".join(f", {argument}" for _, _, argument in arrays + scalars),
        }


# Of rows that begin with what other keys left (resumed/kernels.py).
NOT_RESUMED: Mapping[str, Any] = {"resumed": False, "state_array": "", "state_numbers": ""}
_PAGE_ARRAYS = "".join(f", const int* __restrict__ {name}" for name in PAGES)
LISTED = "long_sequences"  # of more than one new token: how many, then which
_LISTED = f", const int* __restrict__ {LISTED}"
_WORKS = ("AttentionWorkItems", "ListedWorkItems", "MixedWorkItems")
_LENGTHS = (
    ", ROWS, cu_seqlens_q, max_seqlen_q, PagedKeys{page_table, seq_lens, rows, table_width, "
    "page_log2, num_pages, max_seqlen_k}, form.window_left, abreast, tile_weight"
)
# Of decoding's kernel, whose new tokens may be packed, one of a sequence.
_PACKED: tuple[dict[str, str], dict[str, str]] = (
    {"packed_array": "", "packed_ends": "", "packed_rows": ""},
    {
        "packed_array": ", const int* __restrict__ cu_seqlens_q",
        "packed_ends": ", cu_seqlens_q", "packed_rows": ", form.total_q",
    },
)  # fmt: skip
NOT_PACKED = _PACKED[False]
_SCALE_ARRAYS = "".join(f", const float* __restrict__ {name}" for name in SCALES)
_KEPT = {"fp8": "e4m3", "int8": "i8"}
_PAGE_NUMBERS = ", const int table_width, const int page_log2, const int num_pages"

# What templates name where there are no score features.
PLAIN: Mapping[str, Any] = {
    **{
        **NOT_RESUMED,
        "form": False,
        "seeded": False,
        "paged": False,
        "codes": "",
        "kept_keys": "elem_t",
        "mixed": False,
        "together": "",
        "listed": "",
        "works": "AttentionWorkItems",
        "seqlen_q": "seqlen_q",
        "seqlen_k": "seqlen_k",
    },
}


@lru_cache(maxsize=1024)
def parse(text: str) -> ScoreFeatures:
    """The features of a text made by `ScoreFeatures.text`."""
    words, _, mod = text.partition(_MOD)
    mod, _, grad = mod.partition(f"; {_GRAD}")
    expression, *declared = mod.split(";")
    args = tuple(tuple(item.split()[::-1]) for item in declared)
    found: dict[str, Any] = {"score_mod": expression, "score_args": args, "score_mod_grad": grad}
    for word in words.split():
        name, _, dtype = word.removesuffix(_PAIRED).partition("=")
        if name == "window":
            continue
        found[name] = dtype or True
        if word.endswith(_PAIRED):
            found[f"{name}_paired"] = True
    return ScoreFeatures(**found)


# What is compiled ahead, swept and shown; all else is compiled when it is first called.
EXAMPLE_MOD = "score + slope * (k_idx - q_idx) + table[k_idx]"
EXAMPLE_ARGS = (("slope", "float"), ("table", "fp32"))
SHIPPED = tuple(
    features.text
    for features in (
        ScoreFeatures(),
        ScoreFeatures(softcap=True),
        ScoreFeatures(alibi=True),
        ScoreFeatures(bias="fp16", bias_paired=True),
        ScoreFeatures(mask=True),
        ScoreFeatures(sinks=True),
        ScoreFeatures(varlen=True),
        ScoreFeatures(varlen=True, paged=True),
        ScoreFeatures(score_mod=EXAMPLE_MOD, score_args=EXAMPLE_ARGS),
        ScoreFeatures(True, True, "fp32", False, True, True, True, True, EXAMPLE_MOD, EXAMPLE_ARGS),
    )
)
# Of the kernel for sm_90.
SHIPPED_SM90 = tuple(
    features.text
    for features in (
        ScoreFeatures(sinks=True),
        ScoreFeatures(bias="bf16"),
        ScoreFeatures(varlen=True, paged=True),
        ScoreFeatures(varlen=True, paged=True, codes="fp8"),
        ScoreFeatures(score_mod=EXAMPLE_MOD, score_args=EXAMPLE_ARGS),
        ScoreFeatures(True, True, "fp32", False, True, False, True, True),
    )
)
