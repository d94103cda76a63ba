"""Products in the suite, on CPU tensors: cases, shapes drawn from layers, variants, refusals."""

from __future__ import annotations

import json
import sys
import types

import pytest

from bench.core.catalog import operations
from bench.core.op import Refused
from bench.core.store import SCHEMA
from bench.gemm import ladder, products, round_trip, tables
from bench.gemm.cases_linear import OP, SETS
from bench.gemm.cases_linear_dweight import dweight
from bench.gemm.cases_linear_dx import dx
from bench.gemm.layers import LAYERS, MOST, drawn
from bench.gemm.products import label, problem
from bench.profile.target import cases
from bench.report.bandwidth import sources
from bench.report.cells import families, load, studies
from bench.report.tables import known_of
from fkjit.arch import arch
from fkjit.jit.build import quiet
from fkjit.spec import find

torch = pytest.importorskip("torch", reason="needs torch")


class Place:
    """What the suite makes inputs on."""

    torch, place = torch, "cpu"


SWIGLU = problem(24, 32, 16, gate=True, activation="silu")

# ------------------------------------------------------------------ cases


def test_labels_are_unique_and_name_what_differs():
    for op in (operations()[name] for name in ("linear", "linear_dx", "linear_dweight")):
        every = {op.label(p): p for problems in op.sets.values() for p in problems}
        distinct = {tuple(sorted(p.items())) for problems in op.sets.values() for p in problems}
        assert len(every) == len(distinct)
    assert label(problem(4096, 768, 3072, bias=True, activation="gelu_tanh")) == (
        "bf16 M4096 K768 N3072 bias gelu_tanh"
    )
    assert label({**SWIGLU, "residual": True}) == "bf16 M24 K32 N16 gate silu residual"
    assert label(dweight(8, 16, 32)) == "bf16 M32 K8 N16 km kn"


def test_the_sets_are_what_they_are_for():
    assert {p["weight_layout"] for p in SETS["default"]} == {"nk", "kn"}
    assert {p["dtype"] for p in SETS["fp32"]} == {"fp32"}
    assert all(p["m"] == p["k"] == p["n"] for p in SETS["square"])
    assert max(p["m"] for p in SETS["decode"]) == 64
    assert {p["weight_layout"] for p in SETS["gpt2"] if p["n"] != 50_257} == {"kn"}
    gated = [p for p in SETS["llama"] if p["gate"]]
    assert {(p["k"], p["n"]) for p in gated} == {(2048, 8192), (4096, 14_336), (8192, 28_672)}


def test_shapes_are_drawn_from_all_models_and_from_few_tokens_to_many():
    made = drawn(100)
    assert made == drawn(100) and made[:7] == drawn(7) and made != drawn(100, seed=1)
    assert len(set(made)) == 100 and len({label(p) for p in SETS["random"]}) == 100
    tokens = sorted(tokens for _, tokens in made)
    assert 1 <= tokens[0] < 4 and 8192 < tokens[-1] <= MOST and 32 < tokens[50] < 512
    assert {layer.model for layer, _ in made} == set(LAYERS)
    plain = {(p["activation"], p["gate"], p["residual"]) for p in SETS["random"]}
    assert plain == {("none", False, False)}


def test_work_counts_both_halves_of_a_gate():
    assert OP.flops(SWIGLU) == 2 * 24 * 32 * 2 * 16
    assert OP.bytes(SWIGLU) == 2 * (24 * 32 + 32 * 32 + 24 * 16)


def test_rows_that_are_no_whole_pieces_are_told():
    assert problem(3, 64, 48)["aligned"] and problem(3, 64, 48)["aligned_out"]
    assert not problem(3, 60, 48)["aligned"] and not problem(3, 64, 50_257)["aligned_out"]
    halves = problem(3, 64, 12, gate=True, activation="silu", weight_layout="kn")
    assert not halves["aligned"]  # up begins in the middle of 16 bytes


def test_gradients_are_products_of_the_forwards_arrays():
    m, k, n = 12, 16, 24
    x, weight, dy = torch.randn(m, k), torch.randn(n, k), torch.randn(m, n)
    for given, arrays, right in (
        (dx(m, k, n), {"x": dy, "weight": weight}, dy @ weight),
        (dweight(m, k, n), {"x": dy, "weight": x}, dy.t() @ x),
    ):
        left, other = products.operands(given, arrays)
        assert torch.allclose(left @ other.t(), right, atol=1e-5)
        assert OP.flops(given) == 2 * m * k * n


# ------------------------------------------------------------------ ours


def test_the_checked_rows_are_the_last_and_some_of_all_others():
    given = problem(1000, 8, 8, dtype="fp32")
    ((rows, want),) = OP.expected(given, OP.inputs(given, Place)).parts
    assert {0, *range(936, 1000)} <= set(rows.tolist()) and rows.unique().numel() == rows.numel()
    assert want.shape == (rows.numel(), 8) and rows.diff().max() <= 16


@pytest.mark.parametrize(
    ("impl", "given"),
    [("tiled", dx(9, 16, 24)), ("mma", problem(24, 16, 40)), ("tiled", dweight(24, 16, 40)),
     ("skinny", problem(9, 1024, 32)), ("gemv", problem(3, 256, 32, dtype="fp32")),
     ("fma", problem(40, 24, 32, dtype="fp32", bias=True))],
)  # fmt: skip
def test_kernels_by_name(impl, given):
    """With the scratch memory that some of them want."""
    spec = find(f"linear.{impl}")
    params = OP.choose(spec, given, arch("sm_80"))
    arrays = OP.inputs(given, Place)
    prepared = OP.launch(spec, params, given, arrays, Place)
    with quiet():
        made = prepared.call()
    assert OP.expected(given, arrays).judge(made).why_wrong() is None
    assert prepared.variant == (spec, params)


# ------------------------------------------------------------------ peers


def peer(name):
    return next(one for one in OP.peers if one.name == name)


@pytest.mark.parametrize(
    ("name", "given", "why"),
    [
        ("addmm_activation", SWIGLU, "takes bias and gelu_tanh or relu"),
        ("addmm_activation", problem(8, 8, 8, bias=True, activation="gelu"), "gelu_tanh"),
        ("addmm", problem(8, 8, 8), "takes a residual"),
        ("torch + compiled tail", problem(8, 8, 8, bias=True), "nothing follows"),
        ("quack", problem(8, 8, 8, dtype="fp32"), "takes fp16 and bf16"),
        ("quack", problem(8, 8, 8, activation="gelu"), "gelu_tanh, relu and silu"),
    ],
)
def test_refusals(name, given, why, monkeypatch):
    monkeypatch.setitem(sys.modules, "quack.gemm_interface", types.SimpleNamespace())
    with pytest.raises(Refused, match=why):
        peer(name).prepare(given, OP.inputs(given, Place))


def _gemm_act(x, columns, *, bias, activation, store_preact, tuned):
    """quack's words: gate and up in turns."""
    z = x @ columns if bias is None else x @ columns + bias
    assert (activation, store_preact) == ("swiglu", False)
    return None, torch.nn.functional.silu(z[:, ::2]) * z[:, 1::2]


FAKE = types.SimpleNamespace(
    gemm=lambda x, columns, *, bias, tuned: x @ columns if bias is None else x @ columns + bias,
    gemm_add=lambda x, columns, c, *, bias, tuned: x @ columns + c,
    gemm_act=_gemm_act,
)


@pytest.mark.parametrize(
    "given",
    [problem(9, 16, 24, bias=True), problem(9, 16, 24, residual=True, weight_layout="kn"),
     SWIGLU, {**SWIGLU, "bias": True}],
    ids=label,
)  # fmt: skip
def test_quack_is_given_what_it_takes(given, monkeypatch):
    monkeypatch.setitem(sys.modules, "quack.gemm_interface", FAKE)
    arrays = OP.inputs(given, Place)
    prepared = peer("quack").prepare(given, arrays)
    assert OP.expected(given, arrays).judge(prepared.output(prepared.call())).why_wrong() is None


def test_peers_are_as_exact_as_the_problem_wants(monkeypatch):
    seen, linear, matmul = [], torch.nn.functional.linear, torch.backends.cuda.matmul
    before = matmul.allow_tf32
    monkeypatch.setattr(
        torch.nn.functional, "linear", lambda *a: (seen.append(matmul.allow_tf32), linear(*a))[1]
    )
    try:
        for precision, allowed in (("tf32", True), ("ieee", False)):
            matmul.allow_tf32 = not allowed
            given = problem(9, 16, 24, dtype="fp32", precision=precision)
            peer("torch").prepare(given, OP.inputs(given, Place)).call()
            assert seen.pop() is allowed and matmul.allow_tf32 is not allowed
    finally:
        matmul.allow_tf32 = before


def test_tf32_has_a_label_a_limit_and_our_call():
    exact, given = (problem(40, 64, 32, dtype="fp32", precision=p) for p in ("ieee", "tf32"))
    assert label(given) == "tf32 M40 K64 N32" and label(exact) == "fp32 M40 K64 N32"
    arrays = OP.inputs(given, Place)
    with quiet():
        made = products.ours(given, arrays).call()
    assert OP.expected(given, arrays).judge(made).why_wrong() is None


# ------------------------------------------------------------------ tables


def stored(tmp_path):
    """A run of all default and drawn cases, with times that say whose they are."""
    cases = [(op, p) for op in tables.OPS for p in op.sets["default"]]
    cases += [(OP, p) for p in SETS["random"]]
    lines = [{"record": "run", "schema": SCHEMA}]
    for op, p in cases:
        for us, name in ((20.0, "fkjit"), (40.0, "triton"), (30.0, "torch"), (25.0, "cublaslt")):
            decoded = p["m"] <= 8
            us = 3 * us if decoded and name == "fkjit" else us
            graph = {"p50": us * 1e-3, "tflops": 700.0, "gbs": 3900.0}
            graph |= {"share_copy": 0.9 if decoded else 0.2, "share_gemm": 0.5}
            kind = {"fkjit": "ours", "triton": "twin"}.get(name, "peer")
            cell = {"record": "cell", "op": op.name, "case": op.label(p), "candidate": name}
            lines.append({**cell, "kind": kind, "problem": p, "graph": graph})
    rest = "schedule=cooperative cluster=2 shares=False"
    variants = ["mma block=1", f"wgmma block=64x256 {rest}", f"wgmma block=128x256 {rest}"]
    for us, name in zip((70, 60, 50), variants, strict=True):
        graph = {"p50": us * 1e-3, "tflops": 700.0}
        cell = {"record": "cell", "op": "linear", "case": label(SETS["default"][0])}
        cell |= {"candidate": f"fkjit {name}", "kind": "ours", "problem": SETS["default"][0]}
        lines.append({**cell, "graph": graph})
    path = tmp_path / "run.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_tables_of_a_stored_run(tmp_path):
    path = stored(tmp_path)
    made = tables.tables([path])
    plain = "| bf16 M8192 K8192 N8192 | 20.0 | 700 TFLOP/s | 40.0 | 30.0 |  |  |  |  | 1.25 |  |"
    assert plain in made["products"]
    assert "| bf16 M1 K2048 N8192 | 60.0 | 3.90 TB/s | 40.0 |" in made["products"]
    assert "| linear_dweight bf16 M8192 K8192 N8192 km kn | 20.0 |" in made["products"]
    rows = made["drawn"].splitlines()
    assert rows[2].startswith("| 1 to 8 | ") and "| 0.417 | 19 | 0.417 |" in rows[2]
    assert rows[-1].startswith("| all | 100 | ") and all(
        "| 1.250 | 0 | 1.250 |" in r for r in rows[3:7]
    )
    page = tables.PAGE.read_text()
    assert tables.with_tables(page, made).count(made["products"]) == 1


def test_a_step_of_the_ladder_is_its_fastest_variant_beside_what_was_predicted(tmp_path):
    known = known_of([stored(tmp_path)])
    found = {one.step.text: one for one in ladder.outcomes(known)}
    assert found["5. clusters of two"].name.endswith("shares=False")
    assert found["5. clusters of two"].time == 50.0 and "4. wgmma" not in "".join(found)
    assert found["what the call chooses"].name == "fkjit"
    rows = list(ladder.rows(known))
    assert ["400 to 440", "0.43"] in [row[-2:] for row in rows]  # 30 us of cuBLAS for mma's 70
    picture = ladder.picture(known)
    assert picture and "mma.cu" in picture and "cuBLAS 700" in picture
    assert ladder.picture({}) is None


def test_shapes_drawn_anew_are_told_with_their_seed_and_peers_that_were_not_there(tmp_path):
    path = tmp_path / "run.jsonl"
    header = {"record": "run", "schema": SCHEMA, "command": "fkjit bench linear --set drawn"}
    header |= {"configuration": {"seed": 77}}
    header["peers"] = [{"name": "quack", "kind": "peer", "missing": "not installed"}]
    lines = [header]
    for p in (SETS["random"][0], problem(3, 64, 48), problem(4096, 768, 2048)):
        for us, name in ((20.0, "fkjit"), (18.0, "torch")):
            cell = {"record": "cell", "op": "linear", "case": label(p), "candidate": name}
            kind = "ours" if name == "fkjit" else "peer"
            lines.append({**cell, "kind": kind, "problem": p, "graph": {"p50": us * 1e-3}})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    made = tables.tables([path])
    assert made["anew"].splitlines()[-2].startswith("| all | 2 | 0.900 | 2 | 0.900 |")
    assert "--seed 77" in made["anew"]
    assert "quack: not installed" in made["runs"]


def test_the_page_has_the_tables_and_pictures_of_its_runs():
    page = tables.PAGE.read_text()
    runs = sources(page)
    assert tables.with_tables(page, tables.tables(runs)) == page
    for path, text in tables.pictures(runs).items():
        assert path.read_text() == text


def test_the_report_has_products(tmp_path):
    (study, *_) = studies(load([stored(tmp_path)]))
    rows = {family.label: family for family in families(study) if family.along == "rows"}
    assert len(rows["bf16 K4096 N16384"].places) == 4


# ------------------------------------------------------------------ the intermediate's round trip


def test_bytes_beyond_what_must_move(monkeypatch, capsys):
    given = problem(8192, 4096, 16_384, bias=True, activation="gelu_tanh")
    needed, once = OP.bytes(given), 2 * 8192 * 16_384

    def kernel(read, written):
        return {"dram_read_bytes": read, "dram_write_bytes": written}

    candidates = [
        {"candidate": "fkjit", "kernels": [kernel(needed - once, once)]},
        {"candidate": "torch", "kernels": [kernel(needed - once, once), kernel(once, once)]},
        {"candidate": "addmm_activation", "missing": "why not"},
    ]
    entry = {"case": label(given), "problem": given, "bytes": needed, "candidates": candidates}
    asked = []
    monkeypatch.setattr(
        round_trip.collect, "counters", lambda r: (asked.append(r), {"entries": [entry]})[1]
    )
    assert round_trip.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "| fkjit | 1 | 201 | 268 | 0.00 |" in lines
    assert "| torch | 2 | 470 | 537 | 2.00 |" in lines
    assert any(line.startswith("| addmm_activation | why not |") for line in lines)
    (case,) = cases(OP, asked[0]["shapes"])
    assert case.label == label(given)  # the default shape is a case of the suite


def test_without_ncu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr("shutil.which", lambda *a, **k: None)
    assert round_trip.main([]) == 1 and "ncu is neither on the PATH" in capsys.readouterr().err
