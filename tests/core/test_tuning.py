"""Files of tuned values, and the choice of attention's tile that reads them."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from bench.attention.cases_attention import problem
from fkjit import ops, tuning
from fkjit.arch import arch
from fkjit.errors import FkjitError, ParameterError, TuningError
from fkjit.jit.build import gpu_target
from fkjit.ops.attention.kernels import FLASH
from fkjit.ops.attention.kernels_sm90 import FLASH_SM90
from fkjit.ops.attention.select import parameters
from fkjit.ops.gemm.kernels import TILED
from fkjit.ops.gemm.kernels_small import GEMV, SKINNY
from fkjit.runtime import device
from fkjit.settings import settings
from fkjit.spec import find, powers_of_two

GPU = "NVIDIA H200 (test)"
H200 = replace(arch("sm_90a"), gpu=GPU)
PROBLEM = problem(4, 16, 4096, 128, True)
DEFAULT = parameters(FLASH_SM90, PROBLEM, None, True, arch("sm_90a"))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The user's folder of this test."""
    monkeypatch.setenv("FKJIT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tuning, "SHIPPED", tmp_path / "shipped")
    settings.cache_clear()
    tuning.forget()
    yield tmp_path / "tuning"
    monkeypatch.undo()
    settings.cache_clear()
    tuning.forget()


def entry(block, spec=FLASH_SM90, given=PROBLEM, where=H200, **more):
    default = parameters(spec, given, None, True, replace(where, gpu=None))
    choice = {"block": block, **({"optimistic": False} if spec is FLASH_SM90 else {})}
    return {**tuning.key(spec, default, given, where), "choice": choice, **more}


def chosen(given=PROBLEM, where=H200, spec=FLASH_SM90):
    return parameters(spec, given, None, True, where)["block"]


def test_without_a_file_the_default_stands(folder):
    assert chosen() == DEFAULT["block"] == 128
    assert tuning.find(FLASH_SM90, DEFAULT, PROBLEM, H200).notes == (
        f"no file of tuned values for {GPU}",
    )
    assert not folder.exists()


def test_a_winner_is_what_the_same_shape_class_gets(folder):
    tuning.store(tuning.user_file(GPU), GPU, [entry((128, 64))])
    assert chosen() == (128, 64)
    same = problem(2, 32, 4000, 128, True)  # 64 heads, 4000 is up to 4096
    assert chosen(same) == (128, 64)
    assert parameters(FLASH_SM90, PROBLEM, (128, 176), True, H200)["block"] == (128, 176)


@pytest.mark.parametrize(
    "given",
    [
        problem(4, 16, 4096, 128, False),
        problem(4, 16, 2048, 128, True),
        problem(4, 16, 4096, 128, True, "fp16"),
        problem(8, 16, 4096, 128, True),
        problem(4, 16, 4096, 128, True, seqlen_q=512),
    ],
    ids=["mask", "length", "dtype", "heads", "queries"],
)
def test_another_class_gets_its_default(folder, given):
    tuning.store(tuning.user_file(GPU), GPU, [entry((128, 64))])
    assert chosen(given) == parameters(FLASH_SM90, given, None, True, arch("sm_90a"))["block"]
    assert chosen(given) != (128, 64)


@pytest.mark.parametrize(
    "where",
    [replace(H200, gpu="NVIDIA H100"), replace(H200, gpu=None), replace(H200, capability=(9, 1))],
    ids=["other GPU", "no GPU", "other capability"],
)
def test_a_winner_is_for_one_gpu_and_capability(folder, where):
    tuning.store(tuning.user_file(GPU), GPU, [entry((128, 64))])
    assert chosen(where=where) == DEFAULT["block"]


def test_very_long_is_one_class():
    first, second = (problem(64, 16, seqlen, 128, True) for seqlen in (16_384, 100_000))
    assert FLASH_SM90.shape_class(first) == FLASH_SM90.shape_class(second)
    assert FLASH_SM90.shape_class(first)["heads"] == 512


def test_a_shape_class_is_whole_numbers_and_flags_unless_the_spec_says_otherwise():
    given = {"n": 1000, "m": 1024, "k": 1, "none": 0, "causal": True, "scale": 0.5, "dtype": "x"}
    expected = {"n": 1024, "m": 1024, "k": 1, "none": 1, "causal": True}
    assert powers_of_two(given) == expected
    assert type(powers_of_two(given)["causal"]) is bool


def test_the_users_file_goes_before_the_shipped_one(folder):
    tuning.store(tuning.SHIPPED / tuning.file_name(GPU), GPU, [entry((128, 64))])
    assert chosen() == (128, 64)
    tuning.store(tuning.user_file(GPU), GPU, [entry((128, 176))])
    assert chosen() == (128, 176)
    other = entry(64, FLASH, problem(1, 16, 64, 128, False))
    tuning.user_file(GPU).unlink()
    tuning.store(tuning.user_file(GPU), GPU, [other])
    found = tuning.find(FLASH_SM90, DEFAULT, PROBLEM, H200)
    assert (
        found.values == {"block": (128, 64), "optimistic": False}
        and found.path == tuning.SHIPPED / found.path.name
    )
    assert found.notes == (f"no entry for this in {tuning.user_file(GPU)}",)


@pytest.mark.parametrize(
    ("choice", "why"),
    [
        ({"block": [96, 32]}, "has no such values"),
        ({"block": True}, "has no such values"),
        ({"tile": 64}, "has no such values"),
        ({"block": 128}, "has no such values"),  # from before `optimistic`
        ({"block": [192, 128], "optimistic": True}, "head_dim"),
        ({"block": [128, 64], "optimistic": True}, "is not compiled with optimistic=True"),
    ],
)
def test_a_stale_entry_is_left_out_and_said(folder, choice, why):
    tuning.store(tuning.user_file(GPU), GPU, [{**entry(128), "choice": choice}])
    assert chosen() == DEFAULT["block"]
    (note,) = tuning.find(FLASH_SM90, DEFAULT, PROBLEM, H200).notes
    assert "stale" in note and str(tuning.user_file(GPU)) in note and why in note


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "null",
        '{"gpu": "x", "entries": []}',
        '{"schema": 2, "gpu": "x", "entries": []}',
        '{"schema": 1, "gpu": "x", "entries": [{"kernel": "k"}]}',
        '{"schema": 1, "gpu": "x", "entries": [3]}',
        '{"schema": 1, "gpu": "x", "entries": '
        '[{"kernel": "k", "capability": "9.0", "fixed": {}, "shape": {}, "choice": 3}]}',
        "\udce4".encode("utf-8", "surrogateescape").decode("latin-1") + "\0",
    ],
)
def test_a_broken_file_is_said_once_and_the_default_stands(folder, text, capfd, monkeypatch):
    monkeypatch.setenv("FKJIT_LOG", "normal")
    settings.cache_clear()
    path = tuning.user_file(GPU)
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert chosen() == chosen() == DEFAULT["block"]
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"fkjit: tuning: {path} is not a file of tuned values (")
    assert line.endswith("; mend or remove it; its tuned values are not used")
    assert str(path) in tuning.find(FLASH_SM90, DEFAULT, PROBLEM, H200).notes[0]
    with pytest.raises(TuningError, match="mend or remove it") as raised:
        tuning.store(path, GPU, [entry(128)])
    assert isinstance(raised.value, FkjitError)
    assert path.read_text() == text  # what is not understood is not overwritten


def test_a_file_for_another_gpu_is_neither_used_nor_written_over(folder):
    path = tuning.user_file(GPU)
    tuning.store(path, "NVIDIA H200 test", [entry((128, 64))])  # of the same file name
    assert path == tuning.user_file("NVIDIA H200 test")
    assert chosen() == DEFAULT["block"]
    notes = tuning.find(FLASH_SM90, DEFAULT, PROBLEM, H200).notes
    assert f"{path} is for NVIDIA H200 test" in notes
    with pytest.raises(TuningError, match="is for NVIDIA H200 test, not"):
        tuning.store(path, GPU, [entry(128)])


def test_entries_replace_their_like_and_leave_the_rest(folder):
    path, short = tuning.user_file(GPU), problem(4, 16, 512, 128, True)
    tuning.store(path, GPU, [entry((128, 64), ms=0.5), entry((128, 176), given=short)])
    tuning.store(path, GPU, [entry((128, 176), ms=0.25)])
    assert chosen() == chosen(short) == (128, 176)
    stored = json.loads(path.read_text())
    assert [one.get("ms") for one in stored["entries"]].count(0.25) == 1
    assert len(stored["entries"]) == 2 and stored["gpu"] == GPU
    lines = path.read_text().splitlines()
    assert sum('"kernel"' in line for line in lines) == 2  # one a line, for a person and for diff
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_folder_that_cannot_be_written_is_named(folder):
    folder.parent.joinpath("tuning").write_text("a file where the folder should be")
    with pytest.raises(TuningError, match="cannot be written"):
        tuning.store(tuning.user_file(GPU), GPU, [entry(128)])
    assert chosen() == DEFAULT["block"]


def test_without_a_home_only_writing_is_refused(folder, monkeypatch):
    import platformdirs

    monkeypatch.delenv("FKJIT_CACHE_DIR")
    settings.cache_clear()
    monkeypatch.setattr(platformdirs, "user_data_dir", lambda name: f"~/{name}")
    assert chosen() == DEFAULT["block"]
    with pytest.raises(TuningError, match="FKJIT_CACHE_DIR names a folder"):
        tuning.user_file(GPU)


def test_a_tuned_tile_does_not_hide_that_nothing_is_legal(folder):
    wrong = replace(H200, shared_per_block=1000)
    tuning.store(tuning.user_file(GPU), GPU, [entry((128, 64))])
    with pytest.raises(ParameterError, match="shared memory; sm_90a has 1,000"):
        chosen(where=wrong)


def test_arrays_on_the_cpu_ask_nothing(folder, monkeypatch):
    """The interpreter has no GPU whose winners could count."""
    import numpy as np

    import fkjit

    monkeypatch.setattr(tuning, "find", lambda *given: pytest.fail("looked up"))
    x = np.random.default_rng().standard_normal((1, 1, 16, 32)).astype(np.float16)
    assert np.isfinite(fkjit.attention(x, x, x)).all()


def test_what_a_device_is_compiled_for_knows_its_name(monkeypatch):
    attributes = {75: 9, 76: 0}
    runtime = SimpleNamespace(
        deviceGetAttribute=lambda attribute, index: attributes[attribute],
        getDeviceProperties=lambda index: {"name": b"NVIDIA H200"},
    )
    monkeypatch.setattr(device, "cupy_cuda", lambda: SimpleNamespace(runtime=runtime))
    device.device_target.cache_clear()
    try:
        found = device.device_target(0).arch
    finally:
        device.device_target.cache_clear()
    assert found == replace(arch("sm_90a"), gpu="NVIDIA H200")


# Kernels of which a call takes more variants than are registered.
CALLED = {spec.id: spec for spec in (TILED, GEMV, SKINNY)}


def test_every_shipped_file_is_sound():
    ops.load()
    for path in tuning.SHIPPED.glob("*.json"):
        table = tuning.read(path)
        assert path.name == tuning.file_name(table.gpu)
        for entry in table.entries.values():
            spec = CALLED.get(entry["kernel"]) or find(entry["kernel"])
            here = gpu_target(tuple(map(int, entry["capability"].split(".")))).arch
            values = tuning._declared(spec, entry["choice"])
            assert tuning._why_stale(spec, values, entry["fixed"], here) is None, entry
            assert set(entry["fixed"]) == {p.name for p in spec.params if not p.tunable}
