"""What the kernels are compiled with: CuPy, NVRTC, the CUDA headers, and whether they fit together.

Everything that does not fit becomes a ToolchainError with versions, paths and the command that
mends it. Importing this module imports neither CuPy nor NVRTC.
"""

from __future__ import annotations

import os
import re
import stat
import struct
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any

from fkjit.arch import Target
from fkjit.errors import ToolchainError
from fkjit.jit import signals

Version = tuple[int, int]

_CUPY_NAMES = ("cupy", "cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x", "cupy-cuda14x")
_HEADERS = ("cuda_fp16.h", "cuda_bf16.h", "cuda_fp8.h")  # what our kernels include of the toolkit
_HEADER_FILES = tuple(f for h in _HEADERS for f in (h, h + "pp"))  # each has its .hpp beside it
# The driver's refusals that mean "compiled by something that does not fit", with their numbers.
_DOES_NOT_FIT = {
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION": 222,
    "CUDA_ERROR_NO_BINARY_FOR_GPU": 209,
    "CUDA_ERROR_INVALID_PTX": 218,
    "CUDA_ERROR_JIT_COMPILER_NOT_FOUND": 221,
}


@dataclass(frozen=True)
class NvrtcInfo:
    """The NVRTC in use. `build` tells two builds of one version apart and has no path in it."""

    version: Version
    library: Path | None  # None where the platform does not tell; it is loaded all the same
    build: str
    supported: tuple[int, ...]  # (75, 80, 86, …)
    cupy: str

    @property
    def soname(self) -> str:
        """What the dynamic linker knows the library by."""
        return f"libnvrtc.so.{self.version[0]}"


def dotted(version: Version) -> str:
    """(13, 0) -> "13.0"."""
    return f"{version[0]}.{version[1]}"


def installed_cupys() -> dict[str, str]:
    """Every installed distribution that provides `cupy`, with its version."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in _CUPY_NAMES:
        with suppress(PackageNotFoundError), signals.held():
            found[name] = version(name)
    return found


@lru_cache(maxsize=1)
def check_one_cupy() -> None:
    """ToolchainError when two CuPys are installed: they overwrite each other's files."""
    found = installed_cupys()
    if len(found) > 1:
        listed = ", ".join(f"{name} {version}" for name, version in found.items())
        keep = max(found, key=lambda name: (name.startswith("cupy-cuda"), name))
        raise ToolchainError(
            f"two CuPys are installed ({listed}) and overwrite each other's files in "
            f"{_site_of(keep)}: pip uninstall -y {' '.join(found)} && pip install {keep}"
        )


def _site_of(name: str) -> str:
    from importlib.metadata import distribution

    return str(distribution(name).locate_file("cupy"))


def cupy_cuda() -> Any:
    """`cupy.cuda`. Whatever may be the first to import CuPy calls this."""
    _find_folder()
    with signals.held():
        return import_module("cupy.cuda")


def _find_folder() -> None:
    """Make CuPy importable where ~/.cupy cannot be: it makes that folder on import, or fails.

    Another folder is put into CUPY_CACHE_DIR, unless the user has set that.
    """
    if "CUPY_CACHE_DIR" in os.environ or "cupy" in sys.modules:
        return
    usual = Path(os.path.expanduser("~"), ".cupy", "kernel_cache")  # CuPy's own default
    with suppress(OSError):
        if usual.is_absolute():  # "~" stays "~" for a user without a home
            usual.mkdir(parents=True, exist_ok=True)
            if os.access(usual, os.W_OK | os.X_OK):
                return
    with suppress(OSError):  # no temporary folder either: CuPy's import says what it lacks
        os.environ["CUPY_CACHE_DIR"] = _private_folder()


def _private_folder() -> str:
    """A folder for CuPy among the temporary ones that nobody else can put kernels into."""
    user = os.getuid() if hasattr(os, "getuid") else 0
    folder = Path(tempfile.gettempdir(), f"fkjit-cupy-{user}")
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return tempfile.mkdtemp(prefix="fkjit-cupy-")
    ours = stat.S_ISDIR(found.st_mode) and found.st_uid == user and not found.st_mode & 0o022
    return str(folder) if ours else tempfile.mkdtemp(prefix="fkjit-cupy-")


@lru_cache(maxsize=1)
def nvrtc_module() -> Any:
    """CuPy's binding of NVRTC, loaded; ToolchainError without CuPy or without the library."""
    try:
        nvrtc: Any = cupy_cuda().nvrtc
    except ImportError as error:
        check_one_cupy()
        found = ", ".join(f"{n} {v}" for n, v in installed_cupys().items())
        state = f"CuPy ({found}) cannot be imported" if found else "CuPy is not installed"
        raise ToolchainError(
            f"{state}: {error}; pip install 'fkjit[cuda13]' "
            "('fkjit[cuda12]' for a driver before 580)"
        ) from error
    except OSError as error:  # the folder of its cache
        raise ToolchainError(
            f"CuPy cannot be imported: {error}; set CUPY_CACHE_DIR to a folder it can write"
        ) from error
    try:
        nvrtc.getVersion()
    except Exception as error:  # RuntimeError or ImportError, by CuPy version: no library found
        check_one_cupy()
        cupy = ", ".join(f"{n} {v}" for n, v in installed_cupys().items())
        raise ToolchainError(
            f"{cupy or 'CuPy'} finds no NVRTC library ({_first_line(error)}): "
            f"pip install 'fkjit[cuda{12 if 'cuda12x' in cupy else 13}]'"
        ) from error
    return nvrtc


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _package(part: str, major: int) -> str:
    """The pip package of a toolkit part: NVIDIA dropped the -cu suffix with CUDA 13."""
    return f"nvidia-cuda-{part}" + (f"-cu{major}" if major < 13 else "")


@lru_cache(maxsize=1)
def nvrtc_info() -> NvrtcInfo:
    """Version, library, build and targets of NVRTC; loads the library (about 10 ms) but no GPU."""
    nvrtc = nvrtc_module()
    import cupy

    version: Version = nvrtc.getVersion()
    library = _loaded_library()
    build = (library and _library_build(library)) or _compiler_banner(nvrtc)
    return NvrtcInfo(version, library, build, tuple(nvrtc.getSupportedArchs()), cupy.__version__)


def _loaded_library() -> Path | None:
    """Where libnvrtc was loaded from, as Linux tells it."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    match = re.search(r"\s(/\S.*/libnvrtc\.so[^\n]*)$", maps, re.MULTILINE)
    return Path(match[1]) if match else None


def _library_build(library: Path) -> str | None:
    """What tells this build of the library from others, without reading its 100 MB.

    The GNU build id where there is one (since 12.8 or so). Before, the size with a digest of both
    ends: the addresses of its symbols and sections are there, and move with every build.
    """
    found = _elf_build_id(library)
    if found:
        return found
    try:
        with library.open("rb") as file:
            head = file.read(1 << 16)
            size = file.seek(-min(1 << 16, len(head)), os.SEEK_END) + min(1 << 16, len(head))
            return f"{size} {sha256(head + file.read()).hexdigest()}"
    except OSError:
        return None


def _elf_build_id(library: Path) -> str | None:
    """The GNU build id in an ELF file's notes: 40 hex digits, another one for every build."""
    try:
        with library.open("rb") as file:
            head = file.read(64)
            if head[:5] != b"\x7fELF\x02":
                return None
            (offset,) = struct.unpack_from("<Q", head, 32)
            size, count = struct.unpack_from("<HH", head, 54)
            file.seek(offset)
            table = file.read(size * count)
            for index in range(count):
                kind, _, start, _, _, length = struct.unpack_from("<IIQQQQ", table, index * size)
                if kind == 4:  # PT_NOTE
                    file.seek(start)
                    found = re.search(rb"\x14\0\0\0\x03\0\0\0GNU\0(.{20})", file.read(length), re.S)
                    if found:
                        return found[1].hex()
    except (OSError, struct.error):
        pass
    return None


def _compiler_banner(nvrtc: Any) -> str:
    """The build as NVRTC's own PTX names it, for platforms without ELF (one compile, 40 ms)."""
    program = nvrtc.createProgram("", "empty.cu", [], [])
    try:
        nvrtc.compileProgram(program, [])
        ptx = nvrtc.getPTX(program)
    finally:
        nvrtc.destroyProgram(program)
    text = ptx.decode() if isinstance(ptx, bytes) else ptx
    return " ".join(re.findall(r"CL-\d+|V\d+\.\d+\.\d+", text))


def header_candidates() -> list[Path]:
    """Folders that may hold the toolkit's headers, best first, whether or not they exist."""
    major = nvrtc_info().version[0]
    folders = []
    for package in _nvidia_packages():
        folders += [package / f"cu{major}" / "include"]
        folders += [package / "cuda_runtime" / "include"] if major == 12 else []
    for variable in ("CUDA_PATH", "CUDA_HOME"):
        if os.environ.get(variable):
            folders.append(Path(os.environ[variable]) / "include")
    if os.environ.get("CONDA_PREFIX"):
        targets = Path(os.environ["CONDA_PREFIX"]) / "targets"
        folders += sorted(targets.glob("*-linux/include"))
    folders += [Path(f"/usr/local/cuda-{major}/include"), Path("/usr/local/cuda/include")]
    return folders + _cupy_bundled(major)


def _nvidia_packages() -> list[Path]:
    """Where the `nvidia` namespace package lies (pip's CUDA packages), if anywhere."""
    from importlib.util import find_spec

    spec = find_spec("nvidia")
    return [Path(p) for p in spec.submodule_search_locations or []] if spec else []


def _cupy_bundled(major: int) -> list[Path]:
    """The headers some CuPy wheels carry along."""
    import cupy

    if cupy.__file__ is None:
        return []
    bundled = Path(cupy.__file__).parent / "_core" / "include" / "cupy" / "_cuda"
    return sorted(bundled.glob(f"cuda-{major}*"), reverse=True)


def runtime_version(folder: Path) -> Version | None:
    """The CUDA version whose headers lie in `folder`, or None."""
    try:
        with (folder / "cuda_runtime_api.h").open(errors="replace") as file:
            text = file.read(1 << 16)  # of 600 KB; the number stands in the first ten
    except OSError:
        return None
    match = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", text)
    return (int(match[1]) // 1000, int(match[1]) % 1000 // 10) if match else None


@lru_cache(maxsize=1)
def header_dirs() -> list[Path]:
    """The folder of the toolkit's headers: the first with every header we use, of NVRTC's major.

    The pip package nvidia-cuda-runtime alone has them all. ToolchainError names what was looked at.
    """
    info = nvrtc_info()
    looked = []
    for folder in dict.fromkeys(header_candidates()):
        missing = [name for name in _HEADERS if not (folder / name).is_file()]
        version = runtime_version(folder)
        if not missing and (version is None or version[0] == info.version[0]):
            return [folder]
        why = f"lacks {', '.join(missing)}" if missing else f"is of CUDA {version and version[0]}"
        looked.append(f"  {folder}: {why if folder.is_dir() else 'not there'}")
    raise ToolchainError(
        f"NVRTC {dotted(info.version)} ({info.library}) needs {', '.join(_HEADERS)} of CUDA "
        f"{info.version[0]} and found them nowhere:\n" + "\n".join(looked) + "\n"
        f"  pip install '{_package('runtime', info.version[0])}=={dotted(info.version)}.*', "
        "or set CUDA_PATH to a toolkit of that version"
    )


@lru_cache(maxsize=1)
def headers_id() -> str:
    """What the toolkit's headers contribute to a compile, as a digest without any path.

    The contents of the six files our kernels include are hashed (0.9 MB, about 2 ms). What else a
    kernel includes of the toolkit NVRTC has built in, or the entry names it (`includes.py`).
    """
    digest = sha256()
    for name, content in toolkit_headers().items():
        digest.update(f"{name} {len(content)} ".encode() + content)
    version = runtime_version(header_dirs()[0])
    return f"{dotted(version) if version else '?'} {digest.hexdigest()}"


@lru_cache(maxsize=1)
def toolkit_headers() -> dict[str, bytes]:
    """The files of the toolkit that our kernels include, as they are in the key and in a compile;
    empty where a toolkit has no such file."""
    folder = header_dirs()[0]
    paths = {name: folder / name for name in _HEADER_FILES}
    return {name: path.read_bytes() if path.is_file() else b"" for name, path in paths.items()}


def check_target(target: Target) -> None:
    """ToolchainError when NVRTC cannot compile for `target`, or two CuPys are installed."""
    check_one_cupy()
    info = nvrtc_info()
    major, minor = target.arch.capability
    if major * 10 + minor in info.supported:
        return
    known = ", ".join(f"sm_{number}" for number in info.supported)
    raise ToolchainError(
        f"NVRTC {dotted(info.version)} ({info.library}) cannot compile for {target.name} (it knows "
        f"{known}): pip install --upgrade {_package('nvrtc', info.version[0])}, or choose another "
        "with FKJIT_TARGET"
    )


def explain_load_failure(
    error: BaseException, target: Target, nvrtc_version: Version | str | None = None
) -> ToolchainError | None:
    """The ToolchainError behind a driver's refusal to load an image; None if it is something else.

    `error` is what `cupy.RawModule(path=…)` raised, `nvrtc_version` what made the image (the NVRTC
    of this process if left out).
    """
    text = str(error)
    name = next((n for n in _DOES_NOT_FIT if n in text), None)
    if name is None:
        return None
    if nvrtc_version is None:
        nvrtc_version = nvrtc_info().version
    made = nvrtc_version if isinstance(nvrtc_version, str) else dotted(nvrtc_version)
    driver = driver_cuda_version()
    known = dotted(driver) if driver else "unknown"
    return ToolchainError(
        f"the driver (CUDA {known}) refused {target.name} made by "
        f"NVRTC {made}: {name}. {_mend(target, driver, int(made.split('.')[0]))}"
    )


def _mend(target: Target, driver: Version | None, made_major: int) -> str:
    if target.kind == "cubin":
        return (
            f"{target.name} code does not run on this GPU: unset FKJIT_TARGET, or update the driver"
        )
    if driver is None:
        return "Update the NVIDIA driver"
    major = driver[0]
    swap = f"cupy-cuda{major}x " if major != made_major else ""
    older = f"pip install {swap}'{_package('nvrtc', major)}<={dotted(driver)}.999'"
    return f"PTX must not be newer than the driver: update the driver, or {older}"


def driver_cuda_version() -> Version | None:
    """The newest CUDA the installed driver knows, e.g. (13, 0); None without a driver."""
    try:
        number = int(cupy_cuda().runtime.driverGetVersion())
    except Exception:  # no CuPy, no driver: both are ordinary on a machine that only compiles
        return None
    return (number // 1000, number % 1000 // 10) if number else None
