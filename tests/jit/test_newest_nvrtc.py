"""The newest NVRTC of CUDA 13, which `fkjit[cuda13]` brings: a sample of variants, without spills.

All other tests compile with the version of tests/constraints.txt, whose registers they expect.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fkjit.jit.toolchain import dotted, nvrtc_info

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = Path(sys.prefix, "nvrtc-newest", "nvidia", "cu13", "lib", "libnvrtc.so.13")
# Of each way to compute: the widest of what calls take.
COMPILE = """
import json
from fkjit.arch import target
from fkjit.jit.build import build, quiet
from fkjit.spec import find
from fkjit.ops import load
load()
for name, wanted in (
    ("attention.flash_sm90", {"head_dim": 128, "dtype": "bf16"}),
    ("linear.wgmma", {"block": (128, 256)}),
    ("rms_norm.rows", {}),
):
    spec, to = find(name), target("sm_90a")
    params = next(p for p in spec.variants(to.arch) if wanted.items() <= p.items())
    with quiet():
        meta = build(spec, params, to).meta
    print(json.dumps([name, meta["nvrtc"], meta["problems"], meta["resources"]["registers"]]))
"""


@pytest.mark.skipif(not LIBRARY.exists(), reason="`make test` puts it there for CUDA 13")
def test_a_sample_compiles_without_spills(tmp_path):
    more = {"LD_PRELOAD": str(LIBRARY), "LD_LIBRARY_PATH": str(LIBRARY.parent)}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        env={**os.environ, "PYTHONPATH": str(ROOT), "FKJIT_CACHE_DIR": str(tmp_path), **more},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 3
    for name, version, problems, registers in rows:
        assert version.startswith("13.") and version != dotted(nvrtc_info().version)
        assert problems == [] and registers <= 255, name
