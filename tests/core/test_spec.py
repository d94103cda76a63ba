"""KernelSpec: what is legal, and how a refusal reads."""

from __future__ import annotations

import itertools
import re
import sys
from dataclasses import replace

import numpy as np
import pytest

from fkjit import ops
from fkjit.arch import arch
from fkjit.errors import ParameterError
from fkjit.jit.render import load
from fkjit.paths import kernels_dir
from fkjit.spec import KernelSpec, Param, Verification, Work, find, register, registered
from tests.core.sampling import spread

SPEC = KernelSpec(
    op="toy",
    name="kernel",
    source="toy.cu",
    entry="toy",
    params=(
        Param("dtype", ("fp16", "bf16"), "element type"),
        Param("block", (16, 32, 64, (64, 32)), "tile", tunable=True),
        Param("wide", (True, False), "a flag"),
    ),
    illegal=lambda p: "is too wide" if p["wide"] and p["block"] == 64 else None,
    features=lambda p: frozenset({"bf16_mma"} if p["dtype"] == "bf16" else ()),
    superseded=lambda p: frozenset({"wgmma"} if p["block"] == 16 else ()),
    shared_bytes=lambda p: 4096 * (p["block"][0] if isinstance(p["block"], tuple) else p["block"]),
    block=lambda p: (32, 1, 1),
    grid=lambda p, problem: (1, 1, 1),
)
GOOD = {"dtype": "fp16", "block": 32, "wide": False}


def test_variants_are_the_legal_combinations():
    everywhere = list(SPEC.variants())
    assert len(everywhere) == 2 * (4 * 2 - 1)
    on_turing = list(SPEC.variants(arch("sm_75")))  # no bf16_mma, 64 KB: block 16 only
    assert on_turing == [{"dtype": "fp16", "block": 16, "wide": w} for w in (True, False)]
    assert all(p["block"] != 16 for p in SPEC.variants(arch("sm_90a")))
    assert all(SPEC.why_not(p, arch("sm_80")) is None for p in SPEC.variants(arch("sm_80")))


def test_of_too_many_variants_only_those_compiled_ahead_are_gone_through():
    other = {"wide": True, "dtype": "bf16", "block": 16}
    spec = replace(SPEC, ahead=[other, GOOD, {**GOOD, "block": 64, "wide": True}])
    assert list(spec.variants()) == [GOOD, other]  # in the parameters' order; one is illegal
    assert list(spec.variants(fixed={"block": 16})) == [other]
    assert list(spec.variants(arch("sm_90a"))) == [GOOD]
    with pytest.raises(ParameterError, match="is compiled when it is called"):
        spec.check({**GOOD, "block": 16})


@pytest.mark.parametrize(
    ("change", "name", "message"),
    [
        (
            {"block": 48},
            "sm_80",
            r"toy: block=48 is not one of \[16, 32\] \(dtype=fp16, wide=False",
        ),
        (
            {"block": 64},
            "sm_80",
            r"toy: block=64 needs 262,144 bytes of shared memory; sm_80 has 166,912 "
            r"\(legal here: 16, 32\)",
        ),
        ({"dtype": "bf16"}, "sm_75", "toy: .*needs bf16_mma, which sm_75 has not"),
        ({"block": 16}, "sm_90a", "block=16 is for GPUs without wgmma, which sm_90a has"),
        ({"block": 64, "wide": True}, "sm_80", r"toy: block=64 is too wide \(legal here: 16, 32"),
        (
            {"extra": 1},
            "sm_80",
            r"toy: kernel has no parameter 'extra' \(has: dtype, block, wide\)",
        ),
    ],
)
def test_a_refusal_names_the_parameter_and_what_would_be_legal(change, name, message):
    with pytest.raises(ParameterError, match=message):
        SPEC.check({**GOOD, **change}, arch(name))


def test_a_missing_parameter_is_named():
    with pytest.raises(ParameterError, match="toy: kernel needs a value for 'wide'"):
        SPEC.check({"dtype": "fp16", "block": 32})


def test_parameters_have_one_order_and_the_declared_values():
    mixed = {"wide": np.bool_(False), "block": np.int64(32), "dtype": "fp16"}
    found = SPEC.canonical(mixed)
    assert found == GOOD and list(found) == ["dtype", "block", "wide"]
    assert type(found["block"]) is int and type(found["wide"]) is bool
    assert SPEC.canonical({**GOOD, "block": 48})["block"] == 48  # left for check() to refuse


def first_cost(problem):
    return 2.0 * problem["n"]


CASES = Verification(tolerance=lambda params: 0.5)


def test_flat_keywords_become_parts_and_replace_keeps_them():
    flat = replace(SPEC, flops=first_cost, tolerance=lambda params: 0.25, dependent=True)
    assert flat.work == Work(flops=first_cost) and flat.pdl
    assert flat.verification.tolerance({}) == 0.25 and flat.verification.reference is None
    again = replace(flat, bytes=first_cost, params=SPEC.params[:1])
    assert again.work == Work(flops=first_cost, bytes=first_cost) and again.pdl
    assert again.verification is flat.verification
    assert SPEC.work.flops({"n": 3}) == 0.0 and not SPEC.pdl


def test_a_named_verification_is_imported_when_it_is_read(tmp_path, monkeypatch):
    (tmp_path / "toy_cases.py").write_text(
        "from fkjit.spec import Verification\n"
        "TOY = Verification(problems=lambda params, scale: [{'scale': scale}])\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = replace(replace(SPEC, verification="toy_cases:TOY"), params=SPEC.params)
    assert "toy_cases" not in sys.modules
    assert list(spec.verification.problems({}, "small")) == [{"scale": "small"}]
    assert "toy_cases" in sys.modules
    with pytest.raises(
        ParameterError, match=r"toy\.kernel has .*'toy_cases:TOY' and tolerance too"
    ):
        replace(spec, tolerance=lambda params: 1.0)
    assert replace(spec, verification=CASES).verification is CASES


def test_the_registry_refuses_a_second_kernel_of_the_same_name(monkeypatch):
    monkeypatch.setattr("fkjit.spec._REGISTRY", {})
    register(SPEC)
    with pytest.raises(ParameterError, match=r"a kernel named 'toy\.kernel' stands already"):
        register(SPEC)
    register(SPEC, replace=True)
    assert registered("toy") == [SPEC] and find("toy") is SPEC and find("toy.kernel") is SPEC
    with pytest.raises(
        ParameterError,
        match=r"'toys' is not registered; did you mean toy\?",
    ):
        find("toys")


# Read weights ahead of it, which their calls say that no kernel under way may write.
CONSTANT_WEIGHTS = {"step/normed_gemv.cu", "step/stream.cu"}


def test_dependent_kernels_and_no_others_wait_for_the_one_before():
    """Before anything is read: ahead of it are addresses, barriers and prefetches to L2."""
    ops.load()
    for spec in registered():
        if spec.root is None:
            text = (kernels_dir() / spec.source).read_text()
            head = r'extern "C" __global__.*?\) \{[^\n]*\n(.*)'  # it may have ${values}
            body = re.search(head, text, re.DOTALL)
            assert body is not None
            ahead, wait, _ = body[1].partition("after_previous_kernel(")
            reads = re.search(r"load|\w\[[^\]]", ahead)  # an element of an array
            early = reads and spec.source not in CONSTANT_WEIGHTS
            assert spec.pdl == bool(wait and not early), spec.id


def test_arguments_are_maps_then_pointers_then_numbers():
    """As plans write them anew; of each kernel the variants that have each of its values."""
    ops.load()
    orders: dict[str, str] = {}
    for spec in registered():
        variants = list(itertools.islice(spec.variants(), 2000))
        for at in spread(variants, max(1, len(variants) // 8)):
            text = re.sub(r"//.*|#line.*", "", load(spec, variants[at]).text)
            found = re.search(rf"__global__[^;{{]*?\b{spec.entry}\(([^{{]*)\)\s*{{", text)
            assert found, spec.id
            said = found[1].split(",")
            kinds = ("p" if "*" in one else "m" if "TensorMap" in one else "n" for one in said)
            orders.setdefault("".join(kind for kind, _ in itertools.groupby(kinds)), spec.id)
    assert orders.keys() <= {"mpn", "pn", "p", "mn", "mp"}, orders
