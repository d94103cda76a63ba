"""The table of GPUs, and which NVRTC target is chosen for one."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fkjit.arch import DEFAULT_ARCHS, arch, choose_target, target
from fkjit.errors import ParameterError, ToolchainError

NVRTC_13 = (75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121)
NVRTC_12_6 = (50, 52, 53, 60, 61, 62, 70, 72, 75, 80, 86, 87, 89, 90)


@pytest.mark.parametrize("name", ["sm_90a", "90a", "9.0a", "compute_90a", " sm_90a "])
def test_every_spelling_of_an_architecture_is_the_same_row(name):
    assert arch(name) == arch("sm_90a")


@pytest.mark.parametrize("name", ["sm_120", "120", "12.0", (12, 0), "compute_120"])
def test_two_digit_majors_are_read_right(name):
    assert arch(name).capability == (12, 0)
    assert arch(name).name == "sm_120"


@pytest.mark.parametrize(
    ("name", "per_block"),
    [
        ("sm_75", 65_536),
        ("sm_80", 166_912),
        ("sm_86", 101_376),
        ("sm_87", 166_912),
        ("sm_89", 101_376),
        ("sm_90a", 232_448),
        ("sm_100a", 232_448),
        ("sm_103a", 232_448),
        ("sm_110a", 232_448),
        ("sm_120a", 101_376),
        ("sm_121a", 101_376),
    ],
)
def test_shared_memory_of_a_block(name, per_block):
    row = arch(name)
    assert row.shared_per_block == per_block
    assert row.shared_per_block <= row.shared_per_sm
    assert row.registers_per_sm == 65_536


def test_features_come_with_the_capability_that_brought_them():
    assert arch("sm_75").features == {"f16_mma", "ldmatrix"}
    assert arch("sm_80").features - arch("sm_75").features == {"cp_async", "bf16_mma", "tf32_mma"}
    assert arch("sm_86").features == arch("sm_80").features
    assert arch("sm_89").features - arch("sm_80").features == {"fp8_mma"}
    assert arch("sm_90").features - arch("sm_89").features == {"mbarrier", "tma", "cluster"}


def test_wgmma_exists_on_sm_90a_only_and_setmaxnreg_needs_a_suffix():
    with_wgmma = [n for n in (*DEFAULT_ARCHS, "sm_90", "sm_100f") if "wgmma" in arch(n).features]
    assert with_wgmma == ["sm_90a"]
    assert arch("sm_90a").features - arch("sm_90").features == {"wgmma", "setmaxnreg"}
    assert arch("sm_100f").features - arch("sm_100").features == {"setmaxnreg"}


def test_a_gpu_newer_than_the_table_gets_portable_features_and_little_shared_memory():
    row = arch((14, 2))
    assert row.features == arch("sm_90").features
    assert row.shared_per_block == min(arch(name).shared_per_block for name in DEFAULT_ARCHS[1:])


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("hopper", "'hopper' is not an architecture such as sm_90a"),
        ("sm_", "'sm_' is not an architecture"),
        ("sm_70", "'sm_70' is older than sm_75"),
        ("sm_80a", "begin at sm_90; write sm_80"),
        ("sm_90f", "begin at sm_100; write sm_90"),
    ],
)
def test_what_is_no_architecture_is_refused_with_the_fix(name, part):
    with pytest.raises(ParameterError) as info:
        arch(name)
    assert part in str(info.value)


def test_a_target_is_a_cubin_or_ptx_by_its_name():
    assert (target("sm_80").name, target("sm_80").kind) == ("sm_80", "cubin")
    assert (target("90a").name, target("90a").kind) == ("sm_90a", "cubin")
    assert (target("compute_80").name, target("compute_80").kind) == ("compute_80", "ptx")
    assert target("compute_80").arch == arch("sm_80")


@pytest.mark.parametrize(
    ("capability", "supported", "nvrtc", "expected"),
    [
        ((7, 5), NVRTC_13, (13, 0), "sm_75"),
        ((8, 6), NVRTC_13, (13, 0), "sm_86"),
        ((9, 0), NVRTC_13, (13, 0), "sm_90a"),
        ((9, 0), NVRTC_12_6, (12, 6), "sm_90a"),
        ((10, 0), NVRTC_13, (13, 0), "sm_100a"),
        ((12, 1), NVRTC_13, (13, 0), "sm_121a"),
        ((12, 4), NVRTC_13, (13, 0), "sm_121f"),  # family code of a GPU NVRTC does not know
        ((12, 1), (75, 90, 100, 120), (12, 8), "sm_120"),  # no family targets before 12.9
        ((8, 9), (75, 80, 86, 87), (11, 7), "sm_86"),  # never a Tegra cubin on a desktop GPU
        ((8, 8), (75, 80, 86, 87), (12, 6), "compute_86"),  # nor the other way round
        ((10, 0), NVRTC_12_6, (12, 6), "compute_90"),
        ((13, 0), NVRTC_13, (13, 0), "compute_121"),
        ((9, 0), ("sm_80", "sm_90", "90a"), (12, 6), "sm_90a"),
    ],
)
def test_the_best_target_for_a_gpu(capability, supported, nvrtc, expected):
    assert choose_target(capability, supported, nvrtc).name == expected


def test_code_for_an_older_target_keeps_the_limits_of_the_gpu_it_runs_on():
    chosen = choose_target((12, 0), NVRTC_12_6, (12, 6))
    assert chosen.kind == "ptx"
    assert chosen.arch.features == arch("sm_90").features
    assert chosen.arch.shared_per_block == 101_376
    assert chosen.arch.max_threads_per_sm == 1536


def test_a_forced_target_overrules_the_gpu_and_needs_none():
    assert choose_target((9, 0), NVRTC_13, (13, 0), "sm_80").name == "sm_80"
    assert choose_target((9, 0), NVRTC_13, (13, 0), "compute_80").kind == "ptx"
    assert choose_target(None, NVRTC_13, (13, 0), "sm_120a").name == "sm_120a"
    assert choose_target((8, 6), NVRTC_13, (13, 0), "sm_80").arch.shared_per_block == 101_376


@pytest.mark.parametrize(
    ("forced", "error", "part"),
    [
        ("sm_130", ToolchainError, "FKJIT_TARGET='sm_130': NVRTC 12.6 compiles for sm_75, sm_80"),
        ("sm_100f", ToolchainError, "FKJIT_TARGET='sm_100f': NVRTC 12.6"),
        ("ampere", ParameterError, "FKJIT_TARGET='ampere'"),
    ],
)
def test_a_forced_target_nvrtc_cannot_do_is_refused(forced, error, part):
    with pytest.raises(error) as info:
        choose_target((8, 0), NVRTC_12_6, (12, 6), forced)
    assert part in str(info.value)


def test_family_targets_need_nvrtc_12_9():
    with pytest.raises(ToolchainError, match=r"need NVRTC 12\.9, this one is 12\.8"):
        choose_target(None, (75, 100, 120), (12, 8), "sm_100f")


def test_no_gpu_and_no_target_says_what_to_set():
    with pytest.raises(ParameterError, match="FKJIT_TARGET=sm_80"):
        choose_target(None, NVRTC_13, (13, 0))


def test_a_gpu_older_than_nvrtc_is_told_which_package_still_compiles_for_it():
    with pytest.raises(ToolchainError, match=r"sm_70.*older than everything NVRTC 13.*cuda12"):
        choose_target((7, 0), NVRTC_13, (13, 0))


@settings(deadline=None)
@given(
    capability=st.tuples(st.integers(8, 15), st.integers(0, 9)),
    supported=st.lists(st.sampled_from(NVRTC_13), min_size=1),
    nvrtc=st.sampled_from([(12, 6), (12, 8), (12, 9), (13, 0)]),
)
def test_what_is_chosen_always_runs_on_the_gpu(capability, supported, nvrtc):
    try:
        chosen = choose_target(capability, supported, nvrtc)
    except ToolchainError:
        assert all((n // 10, n % 10) > capability or n in (87, 88) for n in supported)
        return
    made_for = chosen.arch.capability
    assert made_for[0] * 10 + made_for[1] in supported
    if chosen.kind == "ptx":
        assert made_for < capability
    elif chosen.name.endswith("a"):
        assert made_for == capability
    else:
        assert made_for[0] == capability[0] and made_for <= capability
