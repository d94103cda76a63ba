"""What decides a compiled image: NVRTC's options and the fields of a cache key.

Apart from `compile`, so that a start from a warm cache need not import the compiler's side.
"""

from __future__ import annotations

from fkjit.arch import Target
from fkjit.cache.toolchains import Toolchain
from fkjit.jit.render import Rendered
from fkjit.jit.toolchain import Version, dotted, headers_id, nvrtc_info

SCHEMA = "2"  # part of every cache key: raise it when the same fields mean another image
_FIRST_WITH_CACHE = (12, 9)  # this NVRTC and later keep a cache of their own; a hit empties the log


def options(target: Target, nvrtc_version: Version) -> tuple[str, ...]:
    """The options of one compile, without the -I that only this machine knows.

    CuPy adds -ftz=true to everything it compiles; we do not: subnormals count.
    """
    always = (
        f"--gpu-architecture={target.name}",
        "--std=c++17",
        "-default-device",
        "-lineinfo",
        "--no-source-include",  # else a cuda_fp16.h in the working directory is found first
    )
    report = ("--ptxas-options=-v",) if target.kind == "cubin" else ()
    return always + report + (("--no-cache",) if nvrtc_version >= _FIRST_WITH_CACHE else ())


def installed() -> Toolchain:
    """What would compile here. Costs the loading of NVRTC once a process."""
    info = nvrtc_info()
    return Toolchain(f"{dotted(info.version)} {info.build}", headers_id(), info.supported)


def key_fields(
    spec_id: str, rendered: Rendered, entry: str, target: Target, by: Toolchain | None = None
) -> dict[str, str | bytes]:
    """Everything that decides the image, by name; the cache hashes it. No path is in it.

    The source is there as template, headers and values (see `Rendered.identity`), so nothing is
    rendered for a key, in some 20 microseconds. `by`: what compiles, or compiled, the image
    (default: `installed`).
    """
    by = by or installed()
    return {
        "schema": SCHEMA,
        "kernel": spec_id,
        "entry": entry,
        **rendered.identity(),
        "target": target.name,
        "options": " ".join(options(target, by.version)),
        "nvrtc": by.nvrtc,
        "cuda_headers": by.cuda_headers,
    }
