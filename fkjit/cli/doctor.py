"""`fkjit doctor`: what this machine has to compile and run kernels with, and what does not fit.

Every finding is taken on its own; one that cannot be taken says why instead. Nothing here raises.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from importlib import metadata
from pathlib import Path
from typing import Any

from fkjit import __version__
from fkjit.arch import choose_target
from fkjit.cli.disassemble import disassembler
from fkjit.errors import FkjitError
from fkjit.jit import toolchain
from fkjit.runtime.gpus import driver_version, gpus
from fkjit.settings import Settings, from_environment, settings, unknown_variables

# Findings are plain data that JSON can hold: {"cuda": {"cupy": …}, …, "problems": [texts]}.
Report = dict[str, Any]


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
        if message not in problems:
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
    writable = stats.directory is not None and _writable(stats.directory)
    if not writable:
        problems.append(
            f"cache: {stats.directory or 'no directory'} cannot be written, so every process "
            f"compiles anew; set {Settings.variable('cache_dir')} to a directory that can"
        )
    for bundle in stats.bundles:
        if not bundle.exists():
            variable = Settings.variable("bundle_path")
            problems.append(f"cache: bundle {bundle} does not exist; correct {variable}")
    return {
        "directory": _text(stats.directory),
        "writable": writable,
        "entries": stats.entries,
        "bytes": stats.bytes,
        "max_bytes": stats.max_bytes,
        "quarantined": stats.quarantined_files,
        "bundles": [str(bundle) for bundle in stats.bundles],
    }


def _writable(folder: Path) -> bool:
    """Whether a file could be made in `folder`, or in the first parent that exists."""
    existing = next((p for p in (folder, *folder.parents) if p.exists()), folder)
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)


def _kernels(problems: list[str]) -> Report:
    """What is registered; a user's folder that is not there is its error."""
    from fkjit import ops, user_kernels
    from fkjit.spec import registered

    ops.load()
    problems += [f"kernels: {failure}" for failure in user_kernels.failures()]
    return {"registered": [spec.id for spec in registered()]}


def _settings(problems: list[str], environ: Mapping[str, str]) -> Report:
    unknown = unknown_variables(environ)
    known = ", ".join(Settings.variable(field.name) for field in fields(Settings))
    for name in unknown:
        problems.append(f"settings: {name} means nothing; the variables are {known}")
    chosen = settings() if environ is os.environ else from_environment(environ)
    if chosen.target:
        try:
            info = toolchain.nvrtc_info()
            choose_target(None, info.supported, info.version, chosen.target)
        except FkjitError as error:
            problems.append(f"settings: {error}")
    return {
        "unknown": unknown,
        "values": {
            Settings.variable(field.name): {
                "value": _plain(getattr(chosen, field.name)),
                "set": Settings.variable(field.name) in environ,
            }
            for field in fields(Settings)
        },
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
