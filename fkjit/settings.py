"""The eight FKJIT_* variables, read once into one frozen dataclass (`fkjit doctor` shows them)."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path

from fkjit.errors import ParameterError

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


@dataclass(frozen=True)
class Settings:
    """What the environment asked for; every field's variable is FKJIT_ and its name in capitals."""

    cache_dir: Path | None = None  # None: the platform's user cache directory
    cache_size: int = 1 << 30  # bytes the disk cache may take before old entries go
    bundle_path: tuple[Path, ...] = ()  # read-only bundles, looked up after the user's cache
    require_cached: bool = False  # raise NotCachedError instead of compiling
    target: str | None = None  # e.g. "sm_80", "compute_80": forces one NVRTC target
    kernel_path: tuple[Path, ...] = ()  # folders of the user's own kernels
    log: str = "normal"  # quiet | normal (one line a compile)
    interpreter_limit: float = 30.0  # seconds of estimated CPU interpretation that are allowed

    @staticmethod
    def variable(field: str) -> str:
        """The environment variable of a field: cache_dir -> FKJIT_CACHE_DIR."""
        return "FKJIT_" + field.upper()


def _flag(name: str, text: str) -> bool:
    value = text.strip().lower()
    if value not in ("", "0", "1", "true", "false", "yes", "no", "on", "off"):
        raise ParameterError(f"{name}={text!r} is not one of 0, 1")
    return value in ("1", "true", "yes", "on")


def _size(name: str, text: str) -> int:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]?)i?b?\s*", text.lower())
    if not match:
        raise ParameterError(f"{name}={text!r} is not a size such as 512MiB, 1GiB or a byte count")
    return int(float(match[1]) * _UNITS[match[2]])


def _seconds(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not value > 0:
        raise ParameterError(f"{name}={text!r} is not a number of seconds above 0 (inf: no limit)")
    return value


def _choice(name: str, text: str, allowed: tuple[str, ...]) -> str:
    value = text.strip().lower() or allowed[0]
    if value not in allowed:
        raise ParameterError(f"{name}={text!r} is not one of {', '.join(allowed)}")
    return value


def _folder(name: str, text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError as error:  # "~name" of nobody, "~" of a user without a home
        raise ParameterError(f"{name}={text!r}: {error} Write the path in full") from error


def _folders(name: str, text: str) -> tuple[Path, ...]:
    return tuple(_folder(name, part) for part in text.split(os.pathsep) if part)


def from_environment(environ: Mapping[str, str]) -> Settings:
    """Parse `environ`; a value that makes no sense raises ParameterError naming the variable."""

    def get(field: str) -> tuple[str, str]:
        return Settings.variable(field), environ.get(Settings.variable(field), "")

    cache_dir, size, limit = get("cache_dir"), get("cache_size"), get("interpreter_limit")
    return Settings(
        cache_dir=_folder(*cache_dir) if cache_dir[1] else None,
        cache_size=_size(*size) if size[1] else Settings.cache_size,
        bundle_path=_folders(*get("bundle_path")),
        require_cached=_flag(*get("require_cached")),
        target=get("target")[1].strip() or None,
        kernel_path=_folders(*get("kernel_path")),
        log=_choice(*get("log"), ("normal", "quiet")),
        interpreter_limit=_seconds(*limit) if limit[1] else Settings.interpreter_limit,
    )


@lru_cache(maxsize=1)
def settings() -> Settings:
    """The settings of this process; `settings.cache_clear()` makes the next call read them anew."""
    return from_environment(os.environ)


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """FKJIT_* names in `environ` that mean nothing: most likely a slip of the hand."""
    known = {Settings.variable(field.name) for field in fields(Settings)}
    return sorted(name for name in environ if name.startswith("FKJIT_") and name not in known)
