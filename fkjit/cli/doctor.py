"""`fkjit doctor`: what this machine has to compile and run kernels with, and what does not fit.

Every finding is taken on its own; one that cannot be taken says why instead. Nothing here raises.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from fkjit import __version__
from fkjit.arch import choose_target
from fkjit.cache import trust
from fkjit.errors import FkjitError
from fkjit.jit import toolchain
from fkjit.jit.disassemble import disassembler
from fkjit.runtime.gpus import driver_version, gpus
from fkjit.settings import Settings, from_environment, settings, unknown_variables

# Findings are plain data that JSON can hold: {"cuda": {"cupy": …}, …, "problems": [texts]}.
Report = dict[str, Any]
_COMPILER = ("nvrtc", "headers")  # which nobody needs who must not compile


def diagnose(environ: Mapping[str, str] | None = None) -> Report:
    """All findings. "problems" has what does not fit, each with its fix; "ok" means none."""
    environ = os.environ if environ is None else environ
    problems: list[str] = []
    parts: dict[str, Callable[[list[str]], Any]] = {
        "fkjit": _fkjit,
        "gpu": _gpu,
        "cupy": _cupy,
        "nvrtc": _nvrtc,
        "headers": _headers,
        "disassembler": lambda _: _text(disassembler()),
        "torch": lambda _: _version("torch"),
        "cache": _cache,
        "tuning": _tuning,
        "kernels": _kernels,
        "settings": lambda found: _settings(found, environ),
    }
    report: Report = {name: _take(name, part, problems) for name, part in parts.items()}
    return {**report, "problems": problems, "ok": not problems}


def _take(name: str, part: Callable[[list[str]], Any], problems: list[str]) -> Any:
    """One finding; its exception becomes a problem, whatever it is."""
    try:
        return part(problems)
    except Exception as error:
        message = f"{name}: {str(error) or repr(error)}"
        needed = name not in _COMPILER or not settings().require_cached
        if needed and message not in problems:
            problems.append(message)
        return {"error": str(error) or repr(error)}


def _fkjit(problems: list[str]) -> Report:
    from fkjit.paths import source_root

    return {
        "version": __version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "platform": platform.platform(),
        "package": str(Path(__file__).parent),
        "sources": str(source_root()),
    }


def _gpu(problems: list[str]) -> Report:
    found, why_none = gpus()
    driver = toolchain.driver_cuda_version()
    described = [
        {**asdict(gpu), "capability": toolchain.dotted(gpu.capability), "target": _target(gpu)}
        for gpu in found
    ]
    if why_none and driver_version() and not _hidden():
        fix = "; pip install 'fkjit[cuda12]' in place of cupy-cuda13x, or update the driver"
        problems.append(
            f"gpu: the NVIDIA driver {driver_version()} is here but no GPU can be used: {why_none}"
            + (fix if "InsufficientDriver" in why_none else "")
        )
    return {
        "devices": described,
        "none_because": why_none,
        "driver": driver_version(),
        "driver_cuda": toolchain.dotted(driver) if driver else None,
    }


def _hidden() -> bool:
    """Whether the user hides every GPU on purpose."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1")


def _target(gpu: Any) -> str:
    from fkjit.jit.build import gpu_target

    try:
        return gpu_target(gpu.capability).name
    except Exception as error:
        return f"none: {error}"


def _cupy(problems: list[str]) -> Report:
    installed = toolchain.installed_cupys()
    if len(installed) > 1:
        toolchain.check_one_cupy()  # raises, and says what to do
    return {"installed": installed, "version": next(iter(installed.values()), None)}


def _nvrtc(problems: list[str]) -> Report:
    info = toolchain.nvrtc_info()
    return {
        "version": toolchain.dotted(info.version),
        "library": _text(info.library),
        "build": info.build,
        "targets": [f"sm_{number}" for number in info.supported],
    }


def _headers(problems: list[str]) -> Report:
    folder = toolchain.header_dirs()[0]
    version = toolchain.runtime_version(folder)
    nvrtc = toolchain.nvrtc_info().version
    if version is not None and version != nvrtc:
        package = "nvidia-cuda-runtime" + (f"-cu{nvrtc[0]}" if nvrtc[0] < 13 else "")
        problems.append(
            f"headers: of CUDA {toolchain.dotted(version)}, NVRTC is {toolchain.dotted(nvrtc)}; "
            f"usually harmless, mended by: pip install '{package}=={toolchain.dotted(nvrtc)}.*'"
        )
    return {"folder": str(folder), "version": version and toolchain.dotted(version)}


def _cache(problems: list[str]) -> Report:
    from fkjit.cache.lookup import default_cache

    stats = default_cache().stats()
    if stats.quarantined_files:
        problems.append(
            f"cache: {stats.quarantined_files} bad entries were set aside in "
            f"{stats.directory}/quarantine; a failing disk? `fkjit cache clear` removes them"
        )
    if stats.distrust:
        problems.append(f"cache: {stats.distrust}")
    writable = stats.directory is not None and _writable(stats.directory)
    if not writable:
        problems.append(
            f"cache: {stats.directory or 'no directory'} cannot be written, so every process "
            f"compiles anew; set {Settings.variable('cache_dir')} to a directory that can"
        )
    problems += [f"cache: {fault}" for fault in map(_bundle_fault, stats.bundles) if fault]
    return {
        "directory": _text(stats.directory),
        "trusted": stats.distrust is None,
        "writable": writable,
        "entries": stats.entries,
        "bytes": stats.bytes,
        "max_bytes": stats.max_bytes,
        "quarantined": stats.quarantined_files,
        "bundles": [str(bundle) for bundle in stats.bundles],
    }


def _bundle_fault(path: Path) -> str | None:
    """Why a bundle of FKJIT_BUNDLE_PATH is of no use, None if it is."""
    from fkjit.cache.bundle import open_bundle

    if not os.path.exists(path):
        variable = Settings.variable("bundle_path")
        return f"bundle {path} does not exist, or is out of reach; correct {variable}"
    try:
        trust.require(path)
        open_bundle(path).keys()
    except FkjitError as error:
        return f"bundle {error}"
    return None


def _tuning(problems: list[str]) -> Report:
    """Where tuned values are, and why files of them are not read."""
    from fkjit import tuning

    folder = tuning.user_folder()
    files = sorted(folder.glob("*.json")) if folder is not None and folder.is_dir() else []
    for path in files:
        try:
            tuning.read(path)
        except FkjitError as error:
            problems.append(str(error))
    return {"folder": _text(folder), "files": [path.name for path in files]}


def _writable(folder: Path) -> bool:
    """Whether a file could be made in `folder`, or in the first parent that exists."""
    existing = next((p for p in (folder, *folder.parents) if os.path.exists(p)), folder)
    return os.path.isdir(existing) and os.access(existing, os.W_OK | os.X_OK)


def _kernels(problems: list[str]) -> Report:
    """What is registered; a user's folder that is not there is its error."""
    from fkjit import ops, user_kernels
    from fkjit.spec import registered

    ops.load()
    problems += [f"kernels: {failure}" for failure in user_kernels.failures()]
    return {"registered": [spec.id for spec in registered()]}


def _settings(problems: list[str], environ: Mapping[str, str]) -> Report:
    unknown = unknown_variables(environ)
    known = ", ".join(map(Settings.variable, Settings.names()))
    for name in unknown:
        problems.append(f"settings: {name} means nothing; the variables are {known}")
    chosen = settings() if environ is os.environ else from_environment(environ)
    if chosen.target and not chosen.require_cached:
        try:
            info = toolchain.nvrtc_info()
            choose_target(None, info.supported, info.version, chosen.target)
        except FkjitError as error:
            problems.append(f"settings: {error}")
    return {
        "unknown": unknown,
        "values": {
            Settings.variable(name): {
                "value": _plain(getattr(chosen, name)),
                "set": Settings.variable(name) in environ,
            }
            for name in Settings.names()
        },
        "trusted": list(chosen.trusted),
    }


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
