"""`with fkjit.sanitize():` chooses what is checked: where it holds, and what each choice finds."""

from __future__ import annotations

import asyncio
import re
import threading
from dataclasses import replace

import numpy as np
import pytest

import fkjit
from fkjit import ops
from fkjit.arch import target
from fkjit.cpu.run import carve_outs, interpret
from fkjit.errors import DeviceError, ParameterError, RenderError, SanitizerError
from fkjit.interp import Checks
from fkjit.jit.build import build, interpreter_target, quiet
from fkjit.jit.render import load
from fkjit.paths import kernels_dir
from fkjit.runtime import interop
from fkjit.runtime.device import launch_on_device
from fkjit.sanitizer import current, in_force
from fkjit.spec import KernelSpec, find, registered

RNG = np.random.default_rng(3)
CONFLICT = """
__global__ void column(float* y) {
  __shared__ float s[32 * 32];
  s[threadIdx.x * 32] = y[threadIdx.x];
  __syncthreads();
  y[threadIdx.x] = s[(threadIdx.x ^ 1) * 32];
}"""
BEYOND = "__global__ void beyond(float* y) { y[threadIdx.x + 1] = 1; }"


def floats(*shape: int, dtype: str = "f4") -> np.ndarray:
    return RNG.standard_normal(shape).astype(dtype)


def qkv() -> list[np.ndarray]:
    return [floats(1, 2, 33, 32, dtype="f2") for _ in range(3)]


@pytest.mark.parametrize(
    ("options", "checks"),
    [
        ({}, Checks(True, True, False)),
        ({"race": False}, Checks(True, False, False)),
        ({"mem": False, "race": False}, Checks(False, False, False)),
        ({"race": False, "banks": True}, Checks(True, False, True)),
        ({"race": False, "banks": 2}, Checks(True, False, True, 2.0)),
    ],
)
def test_what_a_block_asks_of_the_interpreter(options, checks):
    assert current() is None and in_force().checks == Checks(mem=True)
    with fkjit.sanitize(**options) as inside:
        assert in_force() is current() is inside and inside.checks == checks
        with fkjit.sanitize(mem=False, race=False) as deeper:
            assert in_force() is deeper
        assert in_force() is inside
    assert current() is None


def test_an_error_leaves_the_block():
    with pytest.raises(SanitizerError), fkjit.sanitize(race=False):
        fkjit.launch_cpu(BEYOND, 1, 8, [floats(8)])
    assert current() is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mem": 1}, "sanitize: mem=1 is not True or False"),
        ({"race": None}, "sanitize: race=None is not True or False"),
        ({"mem": False}, "sanitize: mem=False with race=True: .*pass race=False as well"),
        ({"banks": 0.5}, "sanitize: banks=0.5 is not True, False, or a number from 1 on"),
        ({"banks": "all"}, "sanitize: banks='all' is not True, False"),
        ({"banks": float("nan")}, "sanitize: banks=nan is not True"),
    ],
)
def test_options_that_make_no_sense(options, message):
    with pytest.raises(ParameterError, match=message):
        fkjit.sanitize(**options)


def test_other_threads_and_tasks_have_blocks_of_their_own():
    seen = {}

    def elsewhere():
        seen["thread"] = current()

    async def task(name, options):
        with fkjit.sanitize(**options) as mine:
            await asyncio.sleep(0)
            seen[name] = (current() is mine, current().race)

    async def both():
        await asyncio.gather(task("one", {}), task("other", {"race": False}))
        seen["after"] = current()

    with fkjit.sanitize():
        worker = threading.Thread(target=elsewhere)
        worker.start()
        worker.join()
    asyncio.run(both())
    assert seen == {"thread": None, "one": (True, True), "other": (True, False), "after": None}


def test_it_holds_for_launch_cpu_unless_the_call_says_otherwise():
    y = floats(9)[:8]
    with fkjit.sanitize(mem=False, race=False):
        fkjit.launch_cpu(BEYOND, 1, 7, [y])  # in bounds
        with pytest.raises(SanitizerError):
            fkjit.launch_cpu(BEYOND, 1, 8, [y], mem=True)
    with fkjit.sanitize(race=False, banks=True) as found:
        stats = fkjit.launch_cpu(CONFLICT, 1, 32, [floats(32)])
        fkjit.launch_cpu(CONFLICT, 1, 32, [floats(32)])
    assert {line.ratio for line in stats.banks} == {32.0}
    assert [(r.kernel, r.location, r.accesses, r.wavefronts, r.ideal) for r in found.reports] == [
        ("column", "<source>:4", 2, 64, 2),
        ("column", "<source>:6", 2, 64, 2),
    ]
    with pytest.raises(SanitizerError, match="bank conflicts: 32 wavefronts where 1 would do"):
        fkjit.launch_cpu(CONFLICT, 1, 32, [floats(32)], race=False, banks=31.5)


def test_attention_is_free_of_bank_conflicts_and_gated():
    with quiet(), fkjit.sanitize(race=False, banks=1) as found:
        fkjit.attention(*qkv(), causal=True)
    (kernel,) = {line.kernel for line in found.reports}
    assert kernel.startswith("attention.flash fp16 head_dim=32")
    assert len(found.reports) >= 4 and all(line.ratio == 1.0 for line in found.reports)
    with quiet(), pytest.raises(SanitizerError) as caught, fkjit.sanitize(race=False, banks=1.5):
        fkjit.attention(*qkv(), impl="tiled")
    assert caught.value.location.startswith("kernels_cu/attention/tiled.cu:")


def test_unchecked_is_the_same_result():
    q, k, v = qkv()
    expected = fkjit.attention(q, k, v)
    with fkjit.sanitize(mem=False, race=False):
        np.testing.assert_array_equal(fkjit.attention(q, k, v), expected)


def test_arrays_on_a_gpu_are_refused_inside(monkeypatch):
    spec = find("attention.naive")
    message = r"attention: the arrays are on a GPU, where fkjit\.sanitize checks nothing; pass CPU"
    with fkjit.sanitize(), pytest.raises(DeviceError, match=message):
        launch_on_device(spec, {"dtype": "fp16"}, {}, {}, 0, 0)

    real = interop.view
    monkeypatch.setattr(interop, "view", lambda *a: real(*a)._replace(device=0))
    monkeypatch.setattr(interop, "current_stream", lambda view: 0)
    arrays = {"q": floats(1, 1, 1, 1), "lse": None}
    with fkjit.sanitize(), pytest.raises(DeviceError, match=message):
        toy = replace(spec, arguments=lambda params, problem, arrays: {})
        fkjit.launch(toy, {"dtype": "fp16"}, {}, arrays)


# ---------------------------------------------------------------- carve-outs of shared memory

ops.load()
CARVED = [spec for spec in registered() if spec.shared_layout is not None]


@pytest.mark.parametrize("spec", CARVED, ids=[spec.id for spec in CARVED])
def test_the_layout_is_all_of_shared_memory(spec):
    for params in spec.variants():
        layout = spec.shared_layout(params)
        assert len({name for name, _ in layout}) == len(layout) > 1
        assert all(size > 0 for _, size in layout)
        assert spec.shared_bytes(params) == sum(size for _, size in layout)


def test_attention_kernels_declare_theirs():
    ids = ("flash", "flash_sm75", "flash_fp32", "tiled")
    assert {spec.id for spec in CARVED} >= {f"attention.{name}" for name in ids}


def test_guards_stand_between_and_not_around():
    parts, total = carve_outs([("a", 100), ("b", 28), ("c", 4)], 1024)
    assert [(p.name, p.offset, p.size) for p in parts] == [
        ("a", 0, 100), ("b", 1124, 28), ("c", 2176, 4)]  # fmt: skip
    assert total == 2180
    assert carve_outs([("a", 100), ("b", 28)], 0)[1] == 128 and carve_outs([], 1024) == ([], 0)


def test_the_guard_is_part_of_the_key_and_zero_on_gpus():
    spec = find("attention.flash")
    params = next(spec.variants())
    assert spec.template_values(params)["guard"] == 0
    assert load(spec, params).identity() != load(spec, params, 1024).identity()
    with quiet():
        plain = build(spec, params, interpreter_target())
        guarded = build(spec, params, interpreter_target(), guard=1024)
    assert plain.image != guarded.image
    naive = find("attention.naive")
    assert "guard" not in naive.template_values({"dtype": "fp16"}, 1024)


@pytest.mark.parametrize(
    ("kernel", "right", "wrong", "arch", "name"),
    [
        ("flash", "copy_tile<KTile, THREADS",
         "copy_tile<SwizzledTile<BLOCK_K + 8, HEAD_DIM>, THREADS", "compute_80", r"K stage \d"),
        ("flash_sm75", "QCopy::copy(q_tile", "RegisterTile<SwizzledTile<BLOCK_Q + 8, HEAD_DIM>, "
         "THREADS, ALIGNED>::copy(q_tile", "compute_75", "Q"),
        ("flash_fp32", "copy_tile_fp32<BLOCK_Q, HEAD_DIM, QK_PITCH",
         "copy_tile_fp32<BLOCK_Q + 8, HEAD_DIM, QK_PITCH", "compute_80", "Q"),
        ("tiled", "load_tile<BLOCK_K, HEAD_DIM_V, HEAD_DIM_V>",
         "load_tile<BLOCK_K + 16, HEAD_DIM_V, HEAD_DIM_V>", "compute_80", "K or V"),
    ],
)  # fmt: skip
def test_rows_too_many_are_found_before_they_reach_the_next_array(
    kernel, right, wrong, arch, name, tmp_path
):
    spec, to = find(f"attention.{kernel}"), target(arch)
    text = (kernels_dir() / spec.source).read_text()
    assert text.count(right) == 1
    root = tmp_path / "kernels_cu"
    (root / "attention").mkdir(parents=True)
    (root / spec.source).write_text(text.replace(right, wrong))
    broken = replace(spec, root=root)
    params = next(spec.variants(to.arch))
    problem = spec.verification.problems(params, "small")[0]
    arrays = spec.verification.inputs(params, problem, RNG) | spec.verification.outputs(
        params, problem
    )
    with quiet():
        interpret(spec, params, problem, arrays, to)
        with pytest.raises(SanitizerError) as caught:
            interpret(broken, params, problem, arrays, to)
    assert caught.value.kind == "out-of-bounds shared write"
    assert re.search(rf"byte [\d,]+ of {name} \(dynamic shared, ", str(caught.value))


def test_a_template_without_the_guard_is_refused(tmp_path):
    (tmp_path / "two.cu").write_text('extern "C" __global__ void two(float* y) {}\n')
    spec = KernelSpec(
        op="two", name="plain", source="two.cu", entry="two", params=(), root=tmp_path,
        block=lambda params: (1, 1, 1), grid=lambda params, problem: (1, 1, 1),
        shared_layout=lambda params: [("a", 4), ("b", 4)],
    )  # fmt: skip
    with pytest.raises(RenderError, match=r"two\.plain declares a shared_layout, so the template"):
        load(spec, {})
