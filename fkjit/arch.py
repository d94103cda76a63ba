"""Compute capability -> what a GPU can do, and the NVRTC target that makes the most of it.

An `Arch` says what code *compiled for* a target may use and how large a block may be. A `Target` is
what NVRTC is asked for: a cubin (`sm_90a`) or, for a GPU newer than NVRTC, PTX (`compute_90`).
Sources: CUDA C++ Programming Guide, "Compute Capabilities"; PTX ISA, "Target architecture".
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fkjit.errors import ParameterError, ToolchainError

Capability = tuple[int, int]

# capability: (shared memory a block may opt in to, shared memory of an SM, threads of an SM)
_LIMITS: dict[Capability, tuple[int, int, int]] = {
    (7, 5): (65_536, 65_536, 1024),
    (8, 0): (166_912, 167_936, 2048),
    (8, 6): (101_376, 102_400, 1536),
    (8, 7): (166_912, 167_936, 1536),
    (8, 9): (101_376, 102_400, 1536),
    (9, 0): (232_448, 233_472, 2048),
    (10, 0): (232_448, 233_472, 2048),
    (10, 3): (232_448, 233_472, 2048),
    (11, 0): (232_448, 233_472, 1536),
    (12, 0): (101_376, 102_400, 1536),
    (12, 1): (101_376, 102_400, 1536),
}
_UNKNOWN_LIMITS = (101_376, 102_400, 1536)  # every GPU since 8.0 has at least this
_FEATURES_SINCE: dict[Capability, frozenset[str]] = {
    (7, 5): frozenset({"f16_mma", "ldmatrix"}),
    (8, 0): frozenset({"cp_async", "bf16_mma", "tf32_mma"}),
    (8, 9): frozenset({"fp8_mma"}),
    (9, 0): frozenset({"mbarrier", "tma", "cluster"}),
}
_OLDEST: Capability = (7, 5)
_TEGRA = frozenset({(8, 7), (8, 8)})  # their cubins do not run on desktop chips of that major
_FIRST_NVRTC_WITH_F = (12, 9)

# Flops for each byte at which dense bf16 tensor cores and memory take as long, by NVIDIA's data
# sheets: A100, L40S, H100, B200, RTX 5090; T4 in fp16.
BALANCE: dict[Capability, int] = {
    (7, 5): 203,
    (8, 0): 153,
    (8, 9): 420,
    (9, 0): 295,
    (10, 0): 281,
    (12, 0): 117,
}

DEFAULT_ARCHS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a")


@dataclass(frozen=True)
class Arch:
    """What code compiled for one target may use. Sizes in bytes, a `shared_per_block` is opt-in."""

    name: str  # "sm_90a"
    capability: Capability
    shared_per_block: int
    shared_per_sm: int
    registers_per_sm: int
    max_threads_per_sm: int
    features: frozenset[str]
    gpu: str | None = None  # the device's own name, "NVIDIA H200", where there is one to run on


@dataclass(frozen=True)
class Target:
    """What NVRTC is asked for; `arch` has the target's features and the limits of the GPU."""

    name: str  # "sm_90a" or "compute_80"
    kind: str  # "cubin" or "ptx"
    arch: Arch


def _split(call: str, name: str | Capability) -> tuple[Capability, str]:
    """ "sm_90a", "90a", "9.0", (9, 0), "compute_80" -> ((9, 0), "a")."""
    text = f"{name[0]}.{name[1]}" if isinstance(name, tuple) else str(name).strip()
    match = re.fullmatch(r"(?:sm_|compute_)?([0-9]{1,4})\.?([0-9])([af]?)", text)
    if not match:
        raise ParameterError(
            f"{call}: {text[:60]!r} is not an architecture such as sm_90a, compute_80, 9.0 "
            f"(tested: {', '.join(DEFAULT_ARCHS)})"
        )
    capability, suffix = (int(match[1]), int(match[2])), match[3]
    if capability < _OLDEST:
        raise ParameterError(f"{call}: {text!r} is older than sm_75, the oldest fkjit compiles for")
    if capability < ((10, 0) if suffix == "f" else (9, 0)) and suffix:
        since = "sm_90" if suffix == "a" else "sm_100"
        raise ParameterError(
            f"{call}: {text!r} does not exist: targets with {suffix!r} begin at {since}; "
            f"write {_base(capability)}"
        )
    return capability, suffix


def _base(capability: Capability, prefix: str = "sm_", suffix: str = "") -> str:
    return f"{prefix}{capability[0]}{capability[1]}{suffix}"


def _features(capability: Capability, suffix: str) -> frozenset[str]:
    names = {n for since, some in _FEATURES_SINCE.items() if capability >= since for n in some}
    if suffix:
        names.add("setmaxnreg")
    if (capability, suffix) == ((9, 0), "a"):
        names.add("wgmma")
    return frozenset(names)


def arch(name: str | Capability) -> Arch:
    """The row of one architecture: "sm_90a", "90a", "9.0", (9, 0) or "compute_80".

    Without the suffix `a` or `f` it has the portable features only. A capability newer than the
    table has the features of the newest row and shared memory every GPU has. ParameterError for
    anything that is not an architecture, or is older than sm_75.
    """
    capability, suffix = _split("arch", name)
    per_block, per_sm, threads = _LIMITS.get(capability, _UNKNOWN_LIMITS)
    return Arch(
        name=_base(capability, suffix=suffix),
        capability=capability,
        shared_per_block=per_block,
        shared_per_sm=per_sm,
        registers_per_sm=65_536,
        max_threads_per_sm=threads,
        features=_features(capability, suffix),
    )


def target(name: str) -> Target:
    """The target called `name`: "sm_…" (or a bare "90a", "9.0") is a cubin, "compute_…" is PTX."""
    capability, suffix = _split("target", name)
    if str(name).strip().startswith("compute_"):
        return Target(_base(capability, "compute_", suffix), "ptx", arch(name))
    return Target(_base(capability, "sm_", suffix), "cubin", arch(name))


def choose_target(
    capability: Capability | None,
    supported: Sequence[int | str],
    nvrtc_version: tuple[int, int],
    forced: str | None = None,
) -> Target:
    """The best target for a GPU of this capability.

    In this order: the architecture-specific `a` of exactly this GPU, a family `f` target (NVRTC
    12.9 and newer), a base cubin of the same major version, PTX of the newest target NVRTC knows
    below the GPU (the driver compiles it). `supported` is NVRTC's own list, e.g. (75, 80, 90);
    `forced` (FKJIT_TARGET) overrules the choice. ToolchainError when NVRTC cannot do it.
    """
    known = sorted({_split("choose_target", str(item))[0] for item in supported if _new(item)})
    if forced:
        return _limited(_check_forced(forced, known, nvrtc_version), capability)
    if capability is None:
        raise ParameterError(
            "choose_target: no GPU is visible and no target was named; set FKJIT_TARGET=sm_80 "
            "(or another) to compile without one"
        )
    return _limited(target(_best_name(capability, known, nvrtc_version)), capability)


def _best_name(capability: Capability, known: list[Capability], nvrtc: tuple[int, int]) -> str:
    if capability in known:
        return _base(capability, suffix="a" if capability >= (9, 0) else "")
    older = [c for c in known if c < capability and c not in _TEGRA]
    siblings = [c for c in older if c[0] == capability[0] and capability not in _TEGRA]
    if siblings:
        family = capability >= (10, 0) and nvrtc >= _FIRST_NVRTC_WITH_F
        return _base(siblings[-1], suffix="f" if family else "")
    if older:
        return _base(older[-1], "compute_")
    raise ToolchainError(
        f"this GPU ({_base(capability)}) is older than everything NVRTC {_dotted(nvrtc)} compiles "
        f"for ({_listed(known)}); {_older_package(nvrtc)}"
    )


def _check_forced(forced: str, known: list[Capability], nvrtc: tuple[int, int]) -> Target:
    """FKJIT_TARGET as a Target, or an error that says why NVRTC cannot compile for it."""
    try:
        chosen = target(forced)
    except ParameterError as error:
        raise ParameterError(f"FKJIT_TARGET={forced!r}: {error}") from None
    if chosen.arch.capability not in known:
        raise ToolchainError(
            f"FKJIT_TARGET={forced!r}: NVRTC {_dotted(nvrtc)} compiles for {_listed(known)} only; "
            "choose one of them, or: pip install --upgrade nvidia-cuda-nvrtc"
            f"{'-cu12' if nvrtc[0] == 12 else ''}"
        )
    if chosen.name.endswith("f") and nvrtc < _FIRST_NVRTC_WITH_F:
        raise ToolchainError(
            f"FKJIT_TARGET={forced!r}: family targets need NVRTC 12.9, this one is "
            f"{_dotted(nvrtc)}: pip install --upgrade nvidia-cuda-nvrtc-cu12"
        )
    return chosen


def _limited(chosen: Target, capability: Capability | None) -> Target:
    """The target with the block limits of the GPU it will run on, where that is another one."""
    if capability is None or capability == chosen.arch.capability or not _new(capability):
        return chosen
    gpu = arch(capability)
    limits = replace(
        chosen.arch,
        shared_per_block=gpu.shared_per_block,
        shared_per_sm=gpu.shared_per_sm,
        max_threads_per_sm=gpu.max_threads_per_sm,
    )
    return replace(chosen, arch=limits)


def _new(item: int | str | Capability) -> bool:
    """Whether fkjit compiles for this one at all (NVRTC 12 still lists sm_50 and sm_70)."""
    if isinstance(item, tuple):
        return item >= _OLDEST
    digits = re.sub(r"\D", "", str(item))
    return bool(digits) and int(digits) >= _OLDEST[0] * 10 + _OLDEST[1]


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _listed(known: list[Capability]) -> str:
    return ", ".join(map(_base, known)) or "nothing fkjit supports"


def _older_package(nvrtc: tuple[int, int]) -> str:
    if nvrtc[0] >= 13:
        return "pip install 'fkjit[cuda12]' in place of cupy-cuda13x"
    return "fkjit needs compute capability 7.5 (Turing) or newer"
