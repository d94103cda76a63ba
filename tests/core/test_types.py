"""What type checkers and a REPL see of fkjit."""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec as find_module
from pathlib import Path

import numpy as np
import pytest

import fkjit
from fkjit import ops
from fkjit.errors import DeviceError
from fkjit.ops.attention import typed
from fkjit.spec import find

ROOT = Path(__file__).resolve().parents[2]
USES = """\
import numpy as np
import fkjit

q = np.zeros((1, 2, 16, 64), np.float16)
lse = bool(q.any())
fkjit.attention(q, q, q, causal=True, layout="bshd").astype(np.float32)
fkjit.attention(q, q, q, return_lse=True, impl="flash", window=(64, 0))[0].astype(np.float32)
either = fkjit.attention_decode(q, q, q, return_lse=lse)
fkjit.paged_attention(q[:, :, 0], (q, q), layout="hnd").astype(np.float32)
fkjit.nonsense  # wrong
fkjit.attention(q, q, q, layout="bsdh")  # wrong
fkjit.attention(q, q, q, casual=True)  # wrong
fkjit.attention(q, q, q, return_lse=True).astype  # wrong
fkjit.attention(3, q, q)  # wrong
fkjit.moe_route(q, 2, scoring="softmix")  # wrong
"""
WRONG = {n for n, line in enumerate(USES.splitlines(), 1) if line.endswith("# wrong")}


@pytest.mark.skipif(shutil.which("pyright", path=str(Path(sys.executable).parent)) is None,
                    reason="pyright comes with the extra [dev]")  # fmt: skip
def test_pyright_takes_right_calls_and_refuses_wrong_ones(tmp_path):
    (tmp_path / "uses.py").write_text(USES)
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(ROOT)]}))
    tool = str(Path(sys.executable).parent / "pyright")
    command = [tool, "--outputjson", "--pythonpath", sys.executable, "-p", str(tmp_path)]
    found = json.loads(subprocess.run(command, capture_output=True, text=True).stdout)
    assert {one["range"]["start"]["line"] + 1 for one in found["generalDiagnostics"]} == WRONG


@pytest.mark.skipif(find_module("mypy") is None, reason="mypy comes with the extra [dev]")
def test_mypy_agrees(tmp_path, every_variant):
    if not every_variant:
        pytest.skip("mypy reads NumPy for ten seconds; --every-variant runs it")
    (tmp_path / "uses.py").write_text(USES)
    command = [sys.executable, "-m", "mypy", "--cache-dir", "cache", "uses.py"]
    env = {**os.environ, "MYPYPATH": str(ROOT)}
    out = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env).stdout
    assert {int(n) for n in re.findall(r"(?m)^uses\.py:(\d+): error", out)} == WRONG


@pytest.mark.parametrize(
    ("call", "keywords"),
    [
        ("attention", typed.DenseKeywords),
        ("attention_varlen", typed.VarlenKeywords),
        ("attention_decode", typed.DecodeKeywords),
        ("paged_attention", typed.PagedKeywords),
    ],
)
def test_overloads_have_the_parameters_of_their_calls(call, keywords):
    function = getattr(fkjit, call)
    real = inspect.signature(function).parameters
    named = {n for n, p in real.items() if p.kind is p.KEYWORD_ONLY}
    assert {*keywords.__annotations__, "return_lse"} == named
    if sys.version_info >= (3, 11):
        from typing import get_overloads

        assert len(get_overloads(function)) == 3
        for overload in get_overloads(function):
            plain = list(inspect.signature(overload).parameters)
            assert plain[:-1] == [n for n in real if n not in named] + ["return_lse"]


def test_reprs_are_one_line_without_contents():
    cache = fkjit.PagedKVCache(
        8, page_size=16, num_kv_heads=2, head_dim=64, dtype="fp16", device="cpu", framework="numpy"
    )
    assert repr(cache) == (
        "<PagedKVCache fp16 nhd: 8 pages of 16 tokens, 1 layers, 2 heads of 64; numpy on cpu>"
    )
    ops.load()
    assert repr(find("rope.table")).startswith("<KernelSpec rope.table: dtype, ")
    groups = fkjit.MoeGroups(*[np.zeros((3, 2), np.int32)] * 6)
    assert repr(groups).startswith("MoeGroups(sorted_token_ids=[3, 2], expert_ids=[3, 2], ")
    codes = fkjit.quantize(np.ones((3, 256), np.float32), "int4_group")
    assert repr(codes) == "QuantizedTensor([3, 256], scales=[3, 2], scheme='int4_group')"


def test_a_cache_without_a_gpu_says_what_to_pass(monkeypatch):
    from fkjit.ops.kv import memory

    def missing(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(memory, "import_module", missing)
    with pytest.raises(DeviceError, match="without a GPU pass device='cpu'"):
        fkjit.PagedKVCache(8, num_kv_heads=2, head_dim=64, dtype="fp16")
