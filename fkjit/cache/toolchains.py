"""What compiled the entries of a cache, out of the entries themselves or a bundle's manifest.

A key has the compiler and the toolkit's headers in it. Where nothing is to be compiled they need
not be installed: what the entries were made with says what to look for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

Version = tuple[int, int]


class Toolchain(NamedTuple):
    """The fields of a key that say what compiled an entry, and what it compiles for."""

    nvrtc: str  # "13.0 <build>"
    cuda_headers: str
    archs: tuple[int, ...]  # it knows: (75, 80, …)
    targets: tuple[str, ...] = ()  # there are entries for: ("sm_90a", …)

    @property
    def version(self) -> Version:
        """(13, 0). ValueError if it is none of ours."""
        major, minor = self.nvrtc.partition(" ")[0].split(".")
        return int(major), int(minor)

    def to_dict(self) -> dict[str, Any]:
        """As a manifest has it."""
        return self._asdict()

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Toolchain:
        """The inverse, of anything: ValueError, TypeError or KeyError if it is none."""
        targets = tuple(str(name) for name in values.get("targets", ()))
        archs = tuple(int(number) for number in values.get("archs", ()))
        made = Toolchain(str(values["nvrtc"]), str(values["cuda_headers"]), archs, targets)
        _ = made.version
        return made


def gather(entries: Iterable[Mapping[str, Any]]) -> list[Toolchain]:
    """Those of entries' metadata, the newest first; entries that tell none are left out."""
    found: dict[tuple[str, str], tuple[set[int], set[str]]] = {}
    for meta in entries:
        fields, target = meta.get("fields", {}), str(meta.get("target", ""))
        if not {"nvrtc", "cuda_headers"} <= fields.keys():
            continue
        known = found.setdefault((fields["nvrtc"], fields["cuda_headers"]), (set(), set()))
        known[0].update(meta.get("archs") or _number(target))
        known[1].add(target)
    made = []
    for (nvrtc, headers), (archs, targets) in sorted(found.items()):
        values = {"archs": sorted(archs), "targets": sorted(targets)}
        try:
            made.append(Toolchain.from_dict({"nvrtc": nvrtc, "cuda_headers": headers, **values}))
        except ValueError:
            continue
    return newest_first(made)


def merged(toolchains: Iterable[Toolchain]) -> list[Toolchain]:
    """Of several layers, each once."""
    found: dict[tuple[str, str], Toolchain] = {}
    for one in toolchains:
        known = found.setdefault(one[:2], one)
        archs, targets = {*known.archs, *one.archs}, {*known.targets, *one.targets}
        found[one[:2]] = Toolchain(*one[:2], tuple(sorted(archs)), tuple(sorted(targets)))
    return newest_first(found.values())


def newest_first(toolchains: Iterable[Toolchain]) -> list[Toolchain]:
    """In the order in which they are tried."""
    return sorted(toolchains, key=lambda one: (one.version, one), reverse=True)


def _number(target: str) -> list[int]:
    """90 of sm_90a."""
    digits = "".join(char for char in target.rpartition("_")[2] if char.isdigit())
    return [int(digits)] if digits else []
