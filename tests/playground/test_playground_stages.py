"""What the playground finds out about a variant, stage by stage, in this process."""

from __future__ import annotations

import re

import numpy as np
import pytest

from fkjit.arch import target
from fkjit.errors import DeviceError, ParameterError
from fkjit.playground import catalog, fragments, timing
from fkjit.playground.fragments import _operands
from fkjit.playground.listing import Ptx
from fkjit.playground.mix import kind
from fkjit.playground.request import MOST_TEXT, check_text, variants
from fkjit.playground.stages import Stages, differences
from fkjit.spec import find
from tests.playground.kit import FLASH, NEW, events_of, template_of


@pytest.fixture(scope="module")
def flash():
    """The events of attention.flash, unedited."""
    return events_of({**FLASH})


@pytest.fixture(scope="module")
def new():
    """Those of the scaffold."""
    return events_of({**NEW})


def line_of(text: str, part: str) -> int:
    return next(n for n, line in enumerate(text.split("\n"), 1) if part in line)


def test_a_kernel_goes_through_all_stages(new):
    assert new["source"]["name"].endswith("new_kernel.cu")
    resources = new["resources"]
    assert resources["registers"] > 0 and resources["spilled"] == 0
    assert resources["limit"] and 0 < resources["occupancy"] <= 1
    assert new["check"]["findings"] == [] and new["check"]["error"]["ratio"] < 1
    assert new["code"]["mix"]["global memory"] == 2  # a load, a store
    assert not new["errors"]


@pytest.mark.parametrize("view", ["source", "ptx", "code"])
def test_texts_are_linked_with_the_line_of_the_template(new, view):
    found, text = new[view], template_of(NEW)
    lines = found["text"].split("\n")
    assert len(lines) == len(found["cu"]) == len(found["inner"])
    store = line_of(text, "y[i] = ")
    linked = [t for t, cu in zip(lines, found["cu"], strict=True) if store in cu]
    assert any(re.search(r"y\[i\] = |st\.global|STG", t) for t in linked), linked


def test_inlined_functions_lead_to_the_line_that_calls_them(flash):
    text = template_of(FLASH)
    q_load = line_of(text, "ldmatrix_x4(q_fragments")
    ptx, code = flash["ptx"], flash["code"]
    for found, opcode in ((ptx, "ldmatrix.sync"), (code, "LDSM")):
        rows = zip(found["text"].split("\n"), found["cu"], found["inner"], strict=True)
        hits = [inner for t, cu, inner in rows if opcode in t and q_load in cu]
        assert len(hits) == 4
        assert {found["places"][i] for i in hits} == {"templates/ptx/ldmatrix.cuh:20"}


def test_shared_memory_is_seen_with_and_without_the_swizzle(flash):
    """64 halves a row, 128 bytes: without the XOR eight rows meet in four banks."""
    q_load = line_of(template_of(FLASH), "ldmatrix_x4(q_fragments")
    own, plain = (
        [row for row in flash[name]["banks"] if row["lines"] == [q_load]]
        for name in ("check", "unswizzled")
    )
    assert [row["ratio"] for row in own] == [1.0] * 4
    assert [row["ratio"] for row in plain] == [8.0] * 4
    picture = own[0]["picture"]
    assert picture["lanes"] == list(range(32)) and picture["width"] == 16
    assert picture["where"].startswith("byte 0 of Q")
    banks = {at % 128 // 16 for at in picture["bytes"][:8]}
    assert len(banks) == 8  # eight rows of a matrix, all 32 banks


def test_the_roofline_is_counted(flash):
    work = flash["work"]
    assert work["flops"] / work["bytes"] > 1 and work["balance"] == 295


def by_isa(operand: str, lane: int, register: int, part: int) -> tuple[int, int]:
    """Row and column in mma.m16n8k16 with halves; PTX ISA, "Matrix Fragments for mma.m16n8k16"."""
    group, pair = divmod(lane, 4)
    if operand == "A":
        return group + 8 * (register % 2), 2 * pair + part + 8 * (register // 2)
    if operand == "B":
        return 2 * pair + part + 8 * register, group
    return group + 8 * (register // 2), 2 * pair + register % 2


def test_fragments_are_those_of_the_ptx_manual(flash):
    found = next(f for f in flash["ptx"]["fragments"] if f["instruction"].startswith("mma.sync"))
    assert found["lines"]
    for operand, picture in zip("ABC", found["operands"], strict=True):
        owners = picture["owners"]
        for row, some in enumerate(owners):
            for column, (lane, register, part) in enumerate(some):
                assert by_isa(operand, lane, register, part) == (row, column)


FORMS = (
    "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {d0,d1,d2,d3}, {a0,a1,a2,a3}, {b0,b1}",
    "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e5m2.f32 {d0,d1,d2,d3}, {a0,a1,a2,a3}, {b0,b1}",
    "mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 {d0,d1,d2,d3}, {a0,a1,a2,a3}, {b0,b1}",
    "mma.sync.aligned.m16n8k64.row.col.s32.s4.s4.s32 {d0,d1,d2,d3}, {a0,a1,a2,a3}, {b0,b1}",
    "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {d0,d1}, {a0,a1,a2,a3}, {b0,b1}",
    "mma.sync.aligned.m16n8k256.row.col.s32.b1.b1.s32.xor.popc "
    "{d0,d1,d2,d3}, {a0,a1,a2,a3}, {b0,b1}",
)


@pytest.mark.parametrize("form", FORMS)
def test_every_element_of_an_operand_has_one_owner(form):
    from fkjit.interp.core.parse import _instruction

    ins = _instruction(re.sub(r"([abd]\d)", r"%\1", form) + ", {%c0}", "", 0, {})
    for picture in _operands(ins):
        owners = np.array(picture["owners"]).reshape(-1, 3)
        assert len(np.unique(owners, axis=0)) == len(owners), picture["title"]
        assert set(owners[:, 0]) == set(range(32))


def test_what_differs_is_told():
    one, other = (Stages(variants({"a": a})[0], lambda *a, **k: None) for a in (NEW, {**NEW}))
    other.texts = {"SASS": ["MOV", "EXIT"], "PTX": ["ret;"]}
    one.texts = {"SASS": ["EXIT"], "PTX": ["ret;"]}
    assert differences(one, other).split("\n")[0] == "@@@ SASS @@@"
    assert "+MOV" in differences(one, other) and "ret" not in differences(one, other)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("@!P1 IMAD.IADD R9, R9, 0x1, -R14", "integer"),
        ("HMMA.16816.F32 R4, R8, R6, RZ", "tensor"),
        ("HGMMA.64x64x16.F32 R24, gdesc[UR4], RZ", "tensor"),
        ("LDSM.16.M88.4 R4, [R0]", "shared memory"),
        ("LDGSTS.E.BYPASS.128 [R3], desc[UR4][R2.64]", "async copy"),
        ("STL [R1], R2", "local memory"),
        ("@P0 EXIT", "control"),
        ("MUFU.EX2 R3, R4", "special functions"),
        ("@UP0 UMOV UR4, 0x1", "moves"),
        ("FFMA R1, R2, R3, R4", "floating point"),
    ],
)
def test_instructions_have_a_kind(text, expected):
    assert kind(text) == expected


def edited(asked: dict, *pairs: tuple[str, str]) -> dict:
    text = template_of(asked)
    for before, after in pairs:
        assert before in text
        text = text.replace(before, after)
    return {**asked, "text": text}


@pytest.mark.parametrize(
    ("before", "after", "stage", "said"),
    [
        ("y[i] = ", "y[i] == oops;", "compile", "oops"),
        ("//% endif", "", "source", "no '//% endif'"),
        ("${dtype}", "${dtyp}", "source", "'dtyp' is undefined"),
        ('#include "prelude.cuh"', '#include "prelud.cuh"', "compile", "prelud.cuh"),
    ],
)
def test_an_error_marks_its_line(before, after, stage, said):
    asked = edited(NEW, (before, after))
    found = events_of(asked)
    (error,) = found["errors"]
    assert error["stage"] == stage and said in error["text"]
    wanted = "//% if" if "endif" in before else after
    assert error["marks"][0]["line"] == line_of(asked["text"], wanted)


def test_a_fault_marks_its_line():
    asked = edited(NEW, ("if (i >= n) return;", ""))
    (finding,) = events_of(asked)["check"]["findings"]
    assert "out of bounds" in finding["text"] or "out-of-bounds" in finding["kind"]
    assert finding["lines"] == [line_of(asked["text"], "static_cast<float>(x[i])")]


def test_a_race_in_headers_marks_the_lines_that_call_them():
    """K is overwritten while other warps still read it."""
    text = template_of(FLASH)
    barrier = "    __syncthreads();\n    if (tile - (STAGES - 1)"
    asked = edited(FLASH, (barrier, "\n    if (tile - (STAGES - 1)"))
    asked["params"] = {**FLASH["params"], "block": 64}
    (finding,) = events_of(asked)["check"]["findings"]
    assert finding["kind"] == "race"
    reads, writes = line_of(text, "multiply_qk<"), line_of(text, "copy_tile<KTile")
    assert finding["lines"] == [writes, reads]


def test_wrong_numbers_are_a_finding():
    check = events_of(edited(NEW, ("factor * static", "2.f * factor * static")))["check"]
    assert check["findings"][0]["kind"] == "wrong numbers" and check["error"]["ratio"] > 1


HOSTILE = (
    "${''.__class__.__mro__[1].__subclasses__()}",
    "${dtype.__class__}",
    "${cycler.__init__.__globals__.os.system('touch @file@')}",
    "${lipsum.__globals__['os'].popen('touch @file@').read()}",
    "${self.__init__.__globals__}",
    "${().__class__.__base__.__subclasses__()}",
    "${'%c' % 0x110000}",
    "${range(999999999)}",
    "//% for i in range(999999999)\n//% endfor",
    "//% set x = namespace.__init__.__globals__",
    "//% import 'os'",
    "//% include '/etc/passwd'",
    "//% extends 'x'",
    "//% do x",
    "${dtype.format_map({}).__class__}",
    "${'{0.__class__.__mro__}'.format(1).__len__.__self__}",
)


@pytest.mark.parametrize("hostile", HOSTILE)
def test_a_hostile_template_is_refused_where_it_stands(hostile, tmp_path):
    mark = tmp_path / "ran"
    line = hostile.replace("@file@", str(mark))
    asked = edited(NEW, ("using elem_t", f"{line}\nusing elem_t"))
    found = events_of(asked)
    (error,) = found["errors"]
    assert error["stage"] == "source" and not mark.exists()
    assert error["marks"][0]["line"] == line_of(asked["text"], line.split("\n")[0])


@pytest.mark.parametrize("include", ['#include "../../secret.cuh"', '  # include "a/../b"'])
def test_no_include_leaves_the_folders_of_sources(include):
    with pytest.raises(ParameterError, match="line 2: an #include"):
        check_text(f"\n{include}")


def test_no_include_is_a_path():
    asked = edited(NEW, ("using elem_t", '#include "/etc/passwd"\nusing elem_t'))
    assert "no path" in events_of(asked)["errors"][0]["text"]


@pytest.mark.parametrize(
    "asked",
    [
        None,
        [],
        {},
        {"a": 1},
        {"a": {"kernel": "attention.flash"}},
        {"a": {"kernel": 1, "arch": "sm_90a"}},
        {"a": {"kernel": "nothing", "arch": "sm_90a"}},
        {"a": {**NEW, "arch": "compute_90a"}},
        {"a": {**NEW, "arch": "sm_1"}},
        {"a": {**NEW, "params": {"dtype": "fp32; //% x"}}},
        {"a": {**NEW, "params": {"dtype": ["fp32"]}}},
        {"a": {**NEW, "text": 1}},
        {"a": {**NEW, "text": "x" * (MOST_TEXT + 1)}},
        {"a": {**NEW}, "b": {**NEW, "text": "x" * (1 << 20)}},
    ],
)
def test_requests_that_make_no_sense_are_typed_errors(asked):
    with pytest.raises(ParameterError):
        variants(asked)


def test_every_kernel_is_offered_with_variants_that_are_legal():
    offered = {one["kernel"]: one for one in catalog.kernels()}
    assert {"attention.flash", "reduce.blocks", "new_kernel.plain"} <= offered.keys()
    first = offered["attention.flash_sm90"]["first"]
    assert first["sm_80"] is None and first["sm_90a"]["dtype"] == "fp16"
    legal = catalog.legal(find("attention.flash"), variants({"a": FLASH})[0].params, "sm_90a")
    assert any(legal["block"]) and legal.keys() == FLASH["params"].keys()


def test_a_variant_near_what_is_wanted():
    spec = find("rms_norm.rows")
    found = catalog.nearest(spec, {"dtype": "bf16", "tile": "x", "other": 1}, "sm_90a")
    assert found and found["dtype"] == "bf16" and spec.why_not(found) is None
    assert catalog.nearest(spec, None, "sm_75") == next(spec.variants(target("sm_75").arch))
    assert catalog.nearest(find("attention.flash_sm90"), {}, "sm_80") is None
    both = {"head_dim": 256, "block": 128}  # which do not go together
    found = catalog.nearest(find("attention.flash"), both, "sm_80")
    assert found and found["head_dim"] == 256 and found["block"] != 128


def test_a_fragment_of_an_unknown_form_is_left_out():
    text = Ptx(events_of(NEW)["ptx"]["text"])
    assert fragments.found(text, "x") == []


def test_times_are_of_this_gpu_alone(monkeypatch):
    monkeypatch.setattr(timing, "device_target", lambda device: target("sm_80"))
    with pytest.raises(DeviceError, match="which is sm_80: choose that target"):
        timing.times(variants({"a": NEW})[0])
