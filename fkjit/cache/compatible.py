"""Entries of bundles that another minor version of NVRTC made, where the user accepts them.

A driver loads cubins of every minor version of the CUDA releases that it is for, so such a cubin
runs wherever the one that this NVRTC would make does. PTX is compiled by the driver and must not be
newer than it: entries with PTX are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from fkjit.cache.entry import Entry
from fkjit.cache.file import cache_key
from fkjit.errors import CacheError

if TYPE_CHECKING:
    from fkjit.cache.bundle import Bundle

WORD = Path("compatible")  # among the paths of FKJIT_BUNDLE_PATH: accept these
_TOOLCHAIN = ("nvrtc", "cuda_headers")  # fields that another minor version has otherwise


class Compatible:
    """Entries of some bundles by everything of their keys but the toolchain."""

    def __init__(self, bundles: Sequence[Bundle]) -> None:
        self._bundles = bundles
        self._keys: dict[str, tuple[Bundle, str]] | None = None  # read when something is missing

    def find(self, stored: Mapping[str, str]) -> Entry | None:
        """The entry that differs from the wanted one in NVRTC's minor version at most."""
        wanted = _identity(stored)
        if wanted is None:
            return None
        if self._keys is None:
            self._keys = self._read()
        bundle, key = self._keys.get(wanted, (None, ""))
        with suppress(CacheError):
            if bundle is not None and (found := bundle.read(key)) is not None:
                return Entry(found.image, found.meta, "bundle", bundle.entry_path(key), 0.0)
        return None

    def _read(self) -> dict[str, tuple[Bundle, str]]:
        made: dict[str, tuple[Bundle, str]] = {}
        for bundle in self._bundles:
            with suppress(CacheError):
                for meta, _, _ in bundle.metadata():
                    if (identity := _identity(meta["fields"])) is not None:
                        made.setdefault(identity, (bundle, meta["key"]))
        return made


def _identity(stored: Mapping[str, str]) -> str | None:
    """What compatible entries have in common: all but the toolchain, of which the major version.
    None for PTX."""
    if not stored.get("target", "").startswith("sm_"):
        return None
    rest = {name: value for name, value in stored.items() if name not in _TOOLCHAIN}
    return cache_key({**rest, "nvrtc_major": stored.get("nvrtc", "").partition(".")[0]})
