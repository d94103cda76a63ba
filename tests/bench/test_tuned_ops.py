"""Every op with something to choose takes what `fkjit tune` found, where it holds the problem; each
variant is launched by the suite as the op itself would launch it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from bench.core.catalog import operations
from bench.core.kernels import launched
from bench.elementwise import cases_vector_add
from bench.gemm import products
from bench.kv import cases_kv_append
from bench.norm import cases_norm_gradients, cases_norms
from bench.reduce import cases_reduce
from bench.rope import cases_rope
from bench.tune.task import tasks
from fkjit import tuning
from fkjit.arch import arch
from fkjit.jit.build import quiet
from fkjit.ops.norm import kernels as norm_kernels
from fkjit.ops.op.op import Op
from fkjit.settings import settings
from tests.core.sampling import one_in

torch = pytest.importorskip("torch", reason="needs torch")
GPU = "NVIDIA H200 (test)"
H200 = replace(arch("sm_90a"), gpu=GPU)
DEVICE = SimpleNamespace(torch=torch, place="cpu")
# An op, a problem of the suite, a kernel that runs it, and what is not its default there.
CASES = [
    ("vector_add", cases_vector_add.problem(1 << 24), "vector_add.rows", {"threads": 256}),
    ("reduce", cases_reduce.problem("sum", 1, 1 << 28), "reduce.blocks", {"threads": 256}),
    ("reduce", cases_reduce.problem("sum", 1 << 17, 128, axis=-1), "reduce.lanes", {"unroll": 8}),
    ("rope", cases_rope.problem("thd", 1, 16_384, 32, 8), "rope.fused", {"unroll": 1}),
    ("rope", cases_rope.problem("thd", 1, 8, 32, 8, source="table"), "rope.table", {"unroll": 2}),
    ("layer_norm", cases_norms.problem("layer_norm", 9999, 4096, True), "layer_norm.rows",
     {"tile": (256, 2, 1)}),
    ("rms_norm_backward", cases_norm_gradients.problem("rms_norm", 9999, 4096), "rms_norm.backward",
     {"tile": (512, 2, 1)}),
    ("kv_append", cases_kv_append.problem(16_384), "kv_append.tokens",
     {"threads": 256, "unroll": 2}),
    ("kv_read", cases_kv_append.problem(16_384), "kv_read.tokens", {"threads": 64, "unroll": 4}),
    ("linear", products.problem(4096, 4096, 4096, bias=True, activation="relu"), "linear.wgmma",
     {"block": (128, 192), "schedule": "cooperative", "shares": False}),
    ("linear_dx", products.problem(4096, 3072, 4096, weight_layout="kn"), "linear.mma",
     {"block": (64, 64, 64)}),
]  # fmt: skip
IDS = [f"{name} {spec}" for name, _, spec, _ in CASES]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """No files but those of a test."""
    monkeypatch.setenv("FKJIT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tuning, "SHIPPED", tmp_path / "shipped")
    settings.cache_clear()
    tuning.forget()
    yield tmp_path
    monkeypatch.undo()
    settings.cache_clear()
    tuning.forget()


def store(spec, params, problem, choice):
    whole = {**tuning.free(spec, params), **choice}
    entry = {**tuning.key(spec, params, problem, H200), "choice": whole}
    tuning.store(tuning.user_file(GPU), GPU, [entry])


@pytest.mark.parametrize(("name", "problem", "kernel", "choice"), CASES, ids=IDS)
def test_the_suite_chooses_what_was_found(folder, name, problem, kernel, choice):
    op = operations()[name]
    (spec,) = [spec for spec in op.specs if spec.id == kernel]
    default = op.choose(spec, problem, H200)
    assert {**default, **choice} != default
    store(spec, default, problem, choice)
    assert op.choose(spec, problem, H200) == {**default, **choice}
    assert op.choose(spec, problem, arch("sm_90a")) == default


CALLS = {  # the operation's call, as the public function makes it, for arrays of the suite
    "vector_add": ("elementwise.vector_add", "_OP", ("a", "b"), ()),
    "reduce": ("reduce.call", "_SUM", ("x",), (None, None, False)),
    "rope": ("rope.call", "_OP", ("q", "k", "positions", None),
             (0, None, None, None, False, "bhsd", False)),
    "layer_norm": ("norm.call", "_LAYER", ("x", "weight", "bias", "residual"), (1e-5,)),
    "kv_append": ("kv.append", "_OP", ("k", "v", "slot_mapping", "k_pages", "v_pages", None, None),
                  ("same", "nhd")),
    "kv_read": ("kv.read", "_OP", ("k_pages", "v_pages", "slot_mapping", None, None),
                ("same", "nhd", None)),
}  # fmt: skip
CALLED = [
    ("vector_add", cases_vector_add.problem(1000), {"threads": 1024}),
    ("reduce", cases_reduce.problem("sum", 1, 70_000), {"threads": 512}),
    ("rope", cases_rope.problem("thd", 1, 9, 3, 2, head_dim=16), {"unroll": 2}),
    ("layer_norm", cases_norms.problem("layer_norm", 9, 256, True), {"tile": (128, 2, 1)}),
    ("kv_append", cases_kv_append.problem(20, heads=2, head_dim=16), {"threads": 64, "unroll": 2}),
    ("kv_read", cases_kv_append.problem(20, heads=2, head_dim=16), {"threads": 256, "unroll": 4}),
]


def requested(name, problem, monkeypatch):
    """The launch that a call on this problem's arrays asks for, if they lay on the GPU."""
    module, attribute, inputs, options = CALLS[name]
    found = __import__(f"fkjit.ops.{module}", fromlist=[attribute])
    op: Op = getattr(found, attribute)
    for owner in (
        "elementwise.vector_add", "reduce.call", "rope.checks", "norm.checks", "kv.append",
        "kv.read",
    ):  # fmt: skip
        monkeypatch.setattr(f"fkjit.ops.{owner}.arch_of", lambda view: H200)
    arrays = operations()[name].inputs(problem, DEVICE)
    given = [arrays[n] if n else None for n in inputs] + [None] * len(op.outputs)
    (launch,) = op._request(op._views(given), options).launches
    return launch


@pytest.mark.parametrize(("name", "problem", "choice"), CALLED, ids=[c[0] for c in CALLED])
def test_the_call_takes_what_was_found_for_its_class(folder, name, problem, choice, monkeypatch):
    plain = requested(name, problem, monkeypatch)
    assert {**plain.params, **choice} != plain.params
    store(plain.spec, plain.params, problem, choice)  # the suite's problem has the call's key
    assert requested(name, problem, monkeypatch).params == {**plain.params, **choice}


def test_a_tile_that_does_not_hold_the_row_is_not_taken(folder):
    """What was found for 3000 columns stands in the class of up to 4096."""
    narrow, wide = (cases_norms.problem("layer_norm", 9999, n, False) for n in (3000, 4096))
    op = operations()["layer_norm"]
    (spec,) = [spec for spec in op.specs if spec.name == "rows"]
    default = op.choose(spec, wide, H200)
    for tile, holds in (((256, 2, 1), True), ((128, 2, 1), False)):
        assert (norm_kernels.capacity("bf16", tile) >= 4096) == holds
        store(spec, op.choose(spec, narrow, H200), narrow, {"tile": tile})
        assert (op.choose(spec, wide, H200)["tile"] == tile) == holds
    assert op.choose(spec, wide, H200) == default


SMALL = [
    *(
        ("kv_append", cases_kv_append.problem(20, heads=2, head_dim=16, storage=s))
        for s in ("same", "fp8")
    ),
    ("kv_read", cases_kv_append.problem(20, heads=2, head_dim=16, storage="int8")),
    ("linear", products.problem(9, 256, 40, bias=True, activation="relu")),
    ("reduce", cases_reduce.problem("sum", 1, 70_000)),
    ("reduce", cases_reduce.problem("mean", 100, 40, "bf16", -1)),
    ("rms_norm", cases_norms.problem("rms_norm", 9, 1000, True)),
    ("rope", cases_rope.problem("thd", 1, 9, 3, 2, head_dim=16)),
    ("vector_add", cases_vector_add.problem(1000)),
]


class Arrays:
    """Outputs of specs as CPU tensors."""

    def array(self, values):
        if values.dtype.name == "bfloat16":
            return torch.from_numpy(values.view(np.int16).copy()).view(torch.bfloat16)
        return torch.from_numpy(values.copy())


@one_in(2)
@pytest.mark.parametrize(
    ("name", "problem"), SMALL, ids=[f"{n} {i}" for i, (n, _) in enumerate(SMALL)]
)
def test_every_variant_that_would_be_tried_is_right_or_refused(name, problem):
    op, here = operations()[name], arch("sm_80")
    arrays, tried = op.inputs(problem, DEVICE), 0
    case = SimpleNamespace(op=op, problem=problem, label="")
    for task in tasks(op.specs, [case], here):
        for params in task.variants:
            if name == "rms_norm" and norm_kernels.capacity("bf16", params["tile"]) < 1000:
                continue
            with quiet():
                made = launched(op, task.spec, params, problem, arrays, Arrays())
                found = made.output(made.call())
            assert op.expected(problem, arrays).judge(found).why_wrong() is None, params
            tried += 1
    assert tried > 1
