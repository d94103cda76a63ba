"""A call imports what it computes with, and nothing that kernels are checked with."""

from __future__ import annotations

import subprocess
import sys
from functools import cache

import pytest

from fkjit import ops
from fkjit.spec import Verification, registered
from tests.core.user_kernel import ROOT

ARRAYS = (
    "import sys, numpy as np, fkjit\n"
    "def ones(*shape, dtype=np.float16): return np.ones(shape, dtype)\n"
    "def ints(*values): return np.array(values, np.int32)\n"
)
PAGES = "pages = ones(2, 16, 1, 16), ones(2, 16, 1, 16)\n"
CALLS = {
    "elementwise": "fkjit.vector_add(ones(8), ones(8))",
    "reduce": "fkjit.reduce_sum(ones(4, 8)); fkjit.reduce_max(ones(4, 8))",
    "norm": "fkjit.rms_norm(ones(2, 64)); fkjit.layer_norm(ones(2, 64))",
    "rope": "fkjit.rope(ones(1, 1, 2, 16))",
    "kv": f"{PAGES}k = ones(1, 1, 16)\nfkjit.kv_append(k, k, pages, ints(3))\n"
    "fkjit.kv_read(pages, ints(3)); fkjit.rope_kv_append(k, k, k, pages, ints(3), ints(3))",
    "cache": "cache = fkjit.PagedKVCache("
    "4, page_size=16, num_kv_heads=1, head_dim=16, dtype='fp16', device='cpu')\n"
    "mine = [cache.allocate()]; cache.reserve(mine); fkjit.kv_slots(cache, cache.rows(mine))",
    "moe": "weights, ids = fkjit.moe_route(ones(2, 8), 2)\n"
    "groups = fkjit.moe_regroup(ids, 8); fkjit.moe_route_and_regroup(ones(2, 8), 2)\n"
    "fkjit.moe_combine(fkjit.moe_permute(ones(2, 8), groups), groups, weights)",
    "attention": "q = ones(1, 1, 16, 32); fkjit.attention(q, q, q, block=16)\n"
    "fkjit.attention(q, q, q, window=(4, 0))",
    "backward": "q = ones(1, 1, 16, 32); o, lse = fkjit.attention(q, q, q, return_lse=True)\n"
    "fkjit.attention_backward(o, q, q, q, o, lse)",
    "decode": "k = ones(1, 1, 16, 16)\nfkjit.attention_decode(ones(1, 1, 1, 16), k, k)",
    "merge": "o, lse = ones(1, 2, 16), ones(1, 2, dtype=np.float32)\n"
    "fkjit.merge_states(o, lse, o, lse)",
}


@cache
def checks_imported(*codes: str) -> list[list[str]]:
    """Modules of problems and references that are there after each of `codes`, which one process
    runs in this order."""
    show = "\nprint(*[m for m in sys.modules if m.rpartition('.')[2].startswith('cases')])\n"
    command = [sys.executable, "-c", ARRAYS + "".join(code + show for code in codes)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [line.split() for line in done.stdout.splitlines()]


@pytest.mark.parametrize("family", CALLS)
def test_a_call_leaves_the_code_of_checks_alone(family):
    found = dict(zip(CALLS, checks_imported(*CALLS.values()), strict=True))
    assert found[family] == []


def test_the_code_of_checks_is_found_when_it_is_there():
    code = "fkjit.reduce_sum(ones(4, 8))\nfrom fkjit.spec import find\n"
    code += "find('reduce').verification.tolerance({'out_dtype': 'fp32'})"
    assert checks_imported(code) == [["fkjit.ops.reduce.cases"]]


def test_kernels_name_their_verification_and_do_not_bring_it():
    ops.load()
    ours = [spec for spec in registered() if spec.root is None]
    assert {spec.id for spec in ours if isinstance(spec.verification, Verification)} == set()
    for spec in ours:
        assert spec.verification.reference is not None, spec.id
