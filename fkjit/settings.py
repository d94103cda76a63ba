"""The eight FKJIT_* variables, read once into one frozen dataclass (`fkjit doctor` shows them)."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path

from fkjit.arch import target
from fkjit.errors import ParameterError

TRUSTED = "trusted="  # before a path: read it whoever owns it or may write it
_MOST_BYTES = 2.0**63
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


@dataclass(frozen=True)
class Settings:
    """What the environment asked for. The variable of a field is FKJIT_ and its name in capitals;
    `trusted` has none: it is the paths that have `trusted=` before them in the others."""

    cache_dir: Path | None = None  # None: the platform's user cache directory
    cache_size: int = 1 << 30  # bytes the disk cache may take before old entries go
    bundle_path: tuple[Path, ...] = ()  # read-only bundles, looked up after the user's cache
    require_cached: bool = False  # raise NotCachedError instead of compiling
    target: str | None = None  # e.g. "sm_80", "compute_80": forces one NVRTC target
    kernel_path: tuple[Path, ...] = ()  # folders of the user's own kernels
    log: str = "normal"  # quiet | normal (one line a compile)
    interpreter_limit: float = 30.0  # seconds of estimated CPU interpretation that are allowed
    trusted: tuple[str, ...] = ()  # absolute paths

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The fields that have a variable."""
        return tuple(field.name for field in fields(cls) if field.name != "trusted")

    def trusts(self, path: Path) -> bool:
        """Whether `path` is, or is below, one that the user named as trusted."""
        return bool(self.trusted) and any(
            f"{os.path.abspath(path)}{os.sep}".startswith(given.rstrip(os.sep) + os.sep)
            for given in self.trusted
        )

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
    size = float(match[1]) * _UNITS[match[2]] if match else -1.0
    if not 0 <= size < _MOST_BYTES:
        raise ParameterError(
            f"{name}={_short(text)} is not a size such as 512MiB, 1GiB or a byte count below 2^63"
        )
    return int(size)


def _target(name: str, text: str) -> str | None:
    """The name of a target as it is given, if it is one."""
    chosen = text.strip()
    try:
        return chosen if chosen and target(chosen) else None
    except ParameterError as error:
        raise ParameterError(f"{name}={_short(text)}: {error}") from None


def _short(text: str) -> str:
    """As errors show it."""
    return repr(text if len(text) <= 60 else text[:59] + "…")


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
    """The path, with or without `trusted=` before it."""
    try:
        return Path(text.removeprefix(TRUSTED)).expanduser()
    except RuntimeError as error:  # "~name" of nobody, "~" of a user without a home
        raise ParameterError(f"{name}={text!r}: {error} Write the path in full") from error


def _folders(name: str, text: str) -> tuple[Path, ...]:
    return tuple(_folder(name, part) for part in text.split(os.pathsep) if part)


def _trusted(name: str, parts: list[str]) -> tuple[str, ...]:
    """Those of the paths that have `trusted=` before them."""
    paths = [_folder(name, part) for part in parts if part.startswith(TRUSTED)]
    with suppress(OSError):  # a relative one, where the working directory is gone
        return tuple(map(os.path.abspath, paths))
    return ()


def from_environment(environ: Mapping[str, str]) -> Settings:
    """Parse `environ`; a value that makes no sense raises ParameterError naming the variable."""

    def get(field: str) -> tuple[str, str]:
        return Settings.variable(field), environ.get(Settings.variable(field), "")

    cache_dir, size, limit = get("cache_dir"), get("cache_size"), get("interpreter_limit")
    bundle_path = get("bundle_path")
    return Settings(
        cache_dir=_folder(*cache_dir) if cache_dir[1] else None,
        cache_size=_size(*size) if size[1] else Settings.cache_size,
        bundle_path=_folders(*bundle_path),
        require_cached=_flag(*get("require_cached")),
        target=_target(*get("target")),
        kernel_path=_folders(*get("kernel_path")),
        log=_choice(*get("log"), ("normal", "quiet")),
        interpreter_limit=_seconds(*limit) if limit[1] else Settings.interpreter_limit,
        trusted=_trusted(cache_dir[0], [cache_dir[1]])
        + _trusted(bundle_path[0], bundle_path[1].split(os.pathsep)),
    )


@lru_cache(maxsize=1)
def settings() -> Settings:
    """The settings of this process; `settings.cache_clear()` makes the next call read them anew."""
    return from_environment(os.environ)


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """FKJIT_* names in `environ` that mean nothing: most likely a slip of the hand."""
    known = set(map(Settings.variable, Settings.names()))
    return sorted(name for name in environ if name.startswith("FKJIT_") and name not in known)
