"""Bugs planted in the kernel of decoding show: as races, memory faults or wrong numbers."""

from __future__ import annotations

from fkjit.ops.attention.decode.kernels import SHIPPED
from tests.core.mutations import Bug
from tests.core.test_mutations import check_found, each_planted, outcome

K, D = "kernels_cu/attention/decode.cu", "templates/attention/decode/"
SYNC = "__syncthreads();"
ONE = {"kernel": "attention_decode.split",
       "params": {"dtype": "fp16", "storage": "same", "head_dim": 64, "rows": 16}}  # fmt: skip
FOUR = {"kernel": ONE["kernel"], "params": {**ONE["params"], "rows": 64}}
CODES = {"kernel": ONE["kernel"], "params": {**ONE["params"], "storage": "int8"}}
FORM = {"kernel": "decode_form.split",
        "params": {**ONE["params"], "dtype": "bf16", "form": SHIPPED[1]}}  # fmt: skip
AHEAD = {"kernel": ONE["kernel"],
         "params": {**ONE["params"], "head_dim": 128, "tile": (8, 16, 2, 1)}}  # fmt: skip
CUT_FORM = {"window": (500, 0), "blocks": 4}
CUT = {"lengths": [33, 0, 300], "longest": 300, "table_width": 19, "num_pages": 59, "blocks": 4}
SEVERAL = {**CUT, "blocks": 1}
GOES_ON = {"lengths": [70, 70, 33], "blocks": 7}  # the last block of a head has another one to do

BUGS = (
    Bug("no barrier before Q is read", K, SYNC, "", by="race", **ONE),
    Bug("no barrier before the groups are merged", K, SYNC, "", nth=1, by="race", **ONE),
    Bug("no barrier before the parts are said to be there", K, SYNC, "", nth=2, by="race", **ONE),
    Bug("the next keys over parts that are being added up", K, SYNC, "", nth=3, by="race",
        problem=GOES_ON, **FOUR),
    Bug("no wait for the step", K, "cp_async_wait<STAGES - 2>();", "", by="race", **ONE),
    Bug("a wait too lax by one", K, "cp_async_wait<STAGES - 2>();", "cp_async_wait<STAGES - 1>();",
        by="race", **ONE),
    Bug("the group does not wait for its warps", K, "group_sync<GROUP_WARPS>();\n      if", "if",
        by="race", **FOUR),
    Bug("the ring is one step short", D + "segment_keys.cuh",
        "step % STAGES * STAGE_BYTES;\n    copy_step",
        "step % (STAGES - 1) * STAGE_BYTES;\n    copy_step", by="race", **FOUR),
    Bug("outputs over the ring of slow warps", K, "group_sync<GROUP_WARPS>();\n    const bool more",
        "const bool more", by="race", **FOUR),
    Bug("outputs where the next keys come", K, "OUTPUTS = AHEAD_STEPS * STAGE_BYTES",
        "OUTPUTS = 0", by="race", problem=SEVERAL, **AHEAD),
    Bug("the next queries are the last ones", K, "ask(tile_of(next));\n    }", "ask(tile);\n    }",
        by="numbers", problem=SEVERAL, **AHEAD),
    Bug("parts are counted without order", "templates/ptx/atomic.cuh", "atom.acq_rel",
        "atom.relaxed", nth=1, by="race", **ONE),
    Bug("a page too far in the table", D + "segment_keys.cuh", "at < end ? pages.page(at)",
        "at < end + 64 ? pages.page(at)", by="memory", **ONE),
    Bug("a sequence too many", D + "schedule.cuh", "number < all.batch", "number <= all.batch",
        by="memory", **ONE),
    Bug("the first part left out", D + "merge.cuh", "first = 0; first < count",
        "first = 1; first < count", by="numbers", **ONE),
    Bug("one warp's output left out", D + "merge.cuh", "for (int i = 0; i < GROUPS; ++i) {",
        "for (int i = 1; i < GROUPS; ++i) {", by="numbers", **ONE),
    Bug("new tokens see the newest", K, "causal ? seqlen_q - 1 : 0", "0", by="numbers", **FOUR),
    Bug("queries in another order than codes", D + "rows.cuh",
        "PERMUTED ? permuted_word(chunk, word) : make_int2(chunk, word)", "make_int2(chunk, word)",
        by="numbers", **CODES),
    Bug("all of a crew have the first head", K, "split, crew.member());", "split, 0);",
        by="race", **ONE),
    Bug("a crew's heads share their slots", D + "schedule.cuh",
        "return number * crew.size + crew.member();", "return number * crew.size;", by="race",
        problem=CUT, **ONE),
    Bug("every part has the sink", K, "SINKS && segment.unit == segment.head_begin && group == 0",
        "SINKS && group == 0", by="numbers", problem=CUT_FORM, **FORM),
    Bug("every group has the sink", K, "SINKS && segment.unit == segment.head_begin && group == 0",
        "SINKS && segment.unit == segment.head_begin", by="numbers", **FORM),
    Bug("a window that begins a step late", D + "schedule.cuh", "/ ROUND * ROUND;",
        "/ ROUND * ROUND + ROUND;", by="numbers", **FORM),
    Bug("codes without their scale", K, "(SCALED ? k_scale[kv_head] : 1.f)", "1.f", by="numbers",
        **CODES),
)  # fmt: skip


@each_planted(BUGS)
def test_a_planted_bug_is_found(bug, monkeypatch):
    check_found(bug, monkeypatch)


def test_without_it_nothing_is_said(monkeypatch):
    for kernel in (ONE, FOUR, CODES):
        bug = next(bug for bug in BUGS if bug.params == kernel["params"] and not bug.problem)
        assert outcome(bug, monkeypatch, plant=False) == ""
