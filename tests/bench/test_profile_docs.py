"""The committed profile of the H200, and the guide that is written from it."""

from __future__ import annotations

from pathlib import Path

from bench.profile import metrics, show, store

ROOT = Path(__file__).resolve().parents[2]
COMMITTED = ROOT / "docs" / "profiles" / "nvidia_h200.json"


def test_the_committed_profile_has_every_kernel_that_runs_there():
    found = store.read(COMMITTED)
    assert COMMITTED.name == store.file_name(found["gpu"]) and COMMITTED.stat().st_size < 100_000
    names = {one["candidate"] for entry in found["entries"] for one in entry["candidates"]}
    assert {"fkjit flash", "fkjit tiled", "fkjit naive", "fkjit flash_fp32"} <= names
    ran = {k["kernel"] for e in found["entries"] for c in e["candidates"] for k in c["kernels"]}
    assert {"attention_flash_sm90", "attention_decode", "norm_rows", "kv_append"} <= ran
    for entry in found["entries"]:
        assert entry["flops"] >= 0 and entry["bytes"] > 0
        for one in entry["candidates"]:
            kernel = show.main_kernel(one)
            assert {"tensor", "dram", "l2_hit", "occupancy", "registers", "stalls"} <= set(kernel)


def shown(row: str, kernel: dict) -> str | None:
    """What the guide's tables have of a kernel in this row."""
    scale = {
        "waves": (1, "{:.1f}"),
        "tensor pipe busy": (1, "{:.0f} %"),
        "DRAM throughput": (1, "{:.0f} %"),
        "issue slots used": (1, "{:.0f} %"),
        "warp instructions": (1e-6, "{:.0f} M"),
        "shared wavefronts": (1e-6, "{:.0f} M"),
        "read from DRAM": (2**-20, "{:.0f} MiB"),
    }
    if row not in scale:
        return None
    name = next(metric.name for metric in metrics.METRICS if metric.title == row)
    factor, form = scale[row]
    return form.format(kernel[name] * factor)


def test_the_worked_example_has_the_numbers_of_the_committed_profile():
    guide = (
        (ROOT / "docs" / "PROFILING.md").read_text().split("## Worked example")[1].split("\n## ")[0]
    )
    found = store.read(COMMITTED)["entries"]
    entries = {entry["case"]: entry for entry in found if entry["op"] == "attention"}
    names = {"FlashAttention-2": "sdpa-flash", "cuDNN": "sdpa-cudnn"}
    cases = (
        "bf16 D128 S1024 B4 H16 full",
        "bf16 D128 S4096 B4 H16 full",
        "bf16 D128 S1/4096 B16 H32/8 full",
    )
    blocks = [block.split("\n") for block in guide.split("\n\n") if block.startswith("| ")]
    tables = [[[c.strip() for c in line.strip("|").split("|")] for line in t] for t in blocks]
    compared = 0
    for case, table in zip(cases, tables, strict=True):
        kernels = {c["candidate"]: show.main_kernel(c) for c in entries[case]["candidates"]}
        heads = [names.get(head, f"fkjit {head.strip('`')}") for head in table[0][1:]]
        for row in table[2:]:
            for head, cell in zip(heads, row[1:], strict=True):
                wanted = shown(row[0], kernels[head])
                compared += wanted is not None
                assert wanted in (None, cell), (case, row[0], head)
    assert compared >= 30


def test_the_table_of_the_other_kernels_is_the_committed_profile():
    guide = (ROOT / "docs" / "PROFILING.md").read_text()
    part = guide.split("## The profile of every other kernel")[1].split("\n## ")[0]
    rows = [line for line in part.splitlines() if line.startswith("| `")]
    wanted = []
    for entry in store.read(COMMITTED)["entries"]:
        for one in entry["candidates"]:
            if entry["op"] != "attention":
                wanted += [_row(entry["case"], kernel) for kernel in one["kernels"]]
    assert rows == wanted and len(rows) >= 25


def _row(case: str, kernel: dict) -> str:
    time = kernel["duration"] / 1e3
    shares = f"{kernel['dram']:.0f} % | {kernel['issue']:.0f} %"
    stalls = ", ".join(f"{name} {value:.1f}" for name, value in list(kernel["stalls"].items())[:2])
    length = f"{time:.1f}" if time < 100 else f"{time:.0f}"
    return f"| `{kernel['kernel']}` | {case} | {length} us | {shares} | {stalls} |"
