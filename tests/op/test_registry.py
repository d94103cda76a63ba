"""The registry: every kernel there is, in one order, whatever was imported first."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from fkjit import ops
from fkjit.spec import find, registered

KERNELS = [
    "vector_add.rows",
    "adamw.rows",
    "scale_gradient.rows",
    "reduce.blocks",
    "reduce.lanes",
    "cross_entropy.rows",
    "cross_entropy.held",
    "layer_norm.rows",
    "rms_norm.rows",
    "layer_norm.wide",
    "rms_norm.wide",
    "layer_norm.backward",
    "rms_norm.backward",
    "layer_norm.backward_staged",
    "rms_norm.backward_staged",
    "layer_norm.backward_wide",
    "rms_norm.backward_wide",
    "layer_norm.weight_parts",
    "rms_norm.weight_parts",
    "layer_norm.sum_parts",
    "rms_norm.sum_parts",
    "rope.fused",
    "rope.table",
    "kv_append.tokens",
    "kv_copy.pages",
    "kv_read.tokens",
    "kv_slots.rows",
    "rope_kv_append.computed",
    "rope_kv_append.tabled",
    "linear.wgmma",
    "linear.gemv",
    "linear.skinny",
    "linear.mma",
    "linear.fma",
    "linear.tiled",
    "linear_backward.activation",
    "linear_flagged.wgmma",
    "grouped_linear.wgmma",
    "grouped_linear.mma",
    "grouped_linear.fma",
    "grouped_linear.stream",
    "grouped_linear.fp8_wgmma",
    "grouped_linear.fp8_wgmma_blocks",
    "grouped_linear.ragged_wgmma",
    "quantize.spans",
    "quantize.amax",
    "dequantize.eights",
    "quantized_linear.gemv",
    "quantized_linear.gemv_sm90",
    "quantized_linear.gemv_digits",
    "quantized_linear.skinny",
    "quantize.made_rows",
    "quantized_linear.wgmma",
    "quantized_linear.mma",
    "quantized_linear.wgmma_blocks",
    "normed_linear.gemv",
    "normed_append.gemv",
    "streamed_linear.stream",
    "streamed_logits.stream",
    "streamed_append.stream",
    "pick_largest.rows",
    "step_begin.rows",
    "decode_step.whole",
    "moe_route.lanes",
    "moe_regroup.grid",
    "moe_route_and_regroup.grid",
    "moe_permute.rows",
    "moe_combine.rows",
    "moe_combine.backward",
    "attention.flash_sm90",
    "attention.flash",
    "attention.flash_sm75",
    "attention.flash_fp32",
    "attention.tiled",
    "attention.naive",
    "attention_form.flash",
    "attention_form.flash_fp32",
    "attention_form.flash_sm90",
    "attention_few.flash_sm90",
    "attention_few.combine",
    "attention_form.mixed_plan",
    "attention_resumed.flash_sm90",
    "attention_resumed.flash",
    "attention_decode.split",
    "decode_form.split",
    "settled_attention.split",
    "merge_states.rows",
    "quantize_attention.channels",
    "quantize_attention.spans",
    "quantize_attention.codes",
    "quantized_attention.flash",
    "quantized_attention.flash_sm90",
    "attention_backward.rows",
    "attention_backward.keys",
    "attention_backward.sums",
    "attention_backward.ordered",
    "attention_backward.dq",
    "attention_backward.queries",
    "attention_backward.keys_fp32",
    "attention_backward.queries_fp32",
    "attention_backward.flash_sm90",
    "attention_backward.flash_wide_sm90",
    "attention_backward_form.keys",
    "attention_backward_form.queries",
    "attention_backward_form.bias",
    "attention_backward_form.heads",
    "attention_backward_form.bias_sum",
    "attention_backward_form.zeros",
    "attention_backward_form.mask",
    "attention_backward_form.flash_sm90",
    "attention_backward_form.flash_wide_sm90",
    "attention_backward_form.slopes_sm90",
]


def test_every_kernel_is_registered_in_this_order():
    ops.load()
    assert [spec.id for spec in registered() if spec.root is None] == KERNELS


def test_every_module_that_registers_kernels_is_loaded():
    folder = ops.__path__[0]
    found = {
        ".".join(path.relative_to(folder).with_suffix("").parts)
        for path in Path(folder).rglob("*.py")
        if "= register(" in path.read_text() or "\n    register(" in path.read_text()
    }
    assert found <= set(ops.KERNELS)


def test_what_was_imported_first_does_not_matter():
    first = [f"fkjit.ops.{name}" for name in reversed(ops.KERNELS)]
    code = (
        f"from importlib import import_module\nfor name in {first}: import_module(name)\n"
        "from fkjit import ops\nfrom fkjit.spec import find, registered\nops.load()\n"
        "print(*[spec.id for spec in registered()])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == KERNELS


def test_a_bare_name_is_the_first_kernel_of_that_op():
    ops.load()
    assert find("attention").id == "attention.flash_sm90"
    assert find("rms_norm").id == "rms_norm.rows"
