"""Which tests run in one worker, and which of them first.

Tests of a file share its fixtures, and those of a folder in `TOGETHER` what takes seconds to
import or to start; a kernel's part of the sweep shares its compiles. Workers take one group after
the other, the dearest first, so that none of those is what the others wait for in the end.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from xdist.scheduler import LoadScopeScheduling

SWEEP = "tests/core/test_sweep.py"
TOGETHER = ("tests/models", "tests/distributed", "tests/twins")
WITH_MODELS = (  # import transformers' models, too
    "tests/twins/test_twins_moe_layer.py", "tests/bench/test_bench_train.py",
    "tests/core/test_examples.py",
)  # fmt: skip
FIRST = (
    "tests/models",
    "tests/attention/test_paged_prefill.py",
    "tests/twins",
    "tests/core/test_packaging.py",
    "tests/bench/test_tune.py",
    "tests/attention/backward/test_attention_feature_gradients.py",
    "tests/attention/test_quantized_attention.py",
    "tests/cli/test_cli.py",
    "tests/core/test_site.py",
    "tests/bench/test_report.py",
    "tests/distributed",
    "tests/op/test_jax.py",
    "tests/op/test_operators.py",
    "tests/interp/test_golden.py",
    "tests/cli/test_demo.py",
    "tests/cli/test_warm.py",
)


def group_of(nodeid: str) -> str:
    """The name of a test's group: its kernel in the sweep, its folder, or its file. On a GPU each
    test is one: what many cores compile ahead is what takes time there."""
    file, _, name = nodeid.partition("::")
    if file.endswith("_gpu.py"):
        return nodeid
    if file in WITH_MODELS:
        return "tests/models"
    if file == SWEEP and "[" in name:
        return f"{SWEEP} {name.partition('[')[2].partition('-')[0].rstrip(']')}"
    return next((folder for folder in TOGETHER if file.startswith(f"{folder}/")), file)


def _turn(group: str) -> int:
    if group in FIRST:
        return FIRST.index(group)
    return len(FIRST) + (not group.startswith(SWEEP))


class DearestFirst(LoadScopeScheduling):
    """xdist's scheduler of whole groups, with ours, in our order."""

    _is_sorted = False

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)

    def _assign_work_unit(self, node: Any) -> None:
        if not self._is_sorted:
            groups = sorted(self.workqueue, key=_turn)
            self.workqueue = OrderedDict((group, self.workqueue[group]) for group in groups)
            self._is_sorted = True
        super()._assign_work_unit(node)
