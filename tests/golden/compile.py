"""CUDA to PTX or a cubin with NVRTC, for the kernels of the cases. Needs no GPU."""

from __future__ import annotations

GPU = "sm_90a"


def compile_kernel(source: str, target: str) -> bytes:
    """PTX for a compute_… target, a cubin for an sm_… one; RuntimeError with NVRTC's log."""
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(source, "golden.cu", [], [])
    options = [f"--gpu-architecture={target}", "--std=c++17", "-default-device", "--no-cache"]
    try:
        try:
            nvrtc.compileProgram(program, options)
        except Exception as error:  # its message is only a number; the log says what it was
            raise RuntimeError(nvrtc.getProgramLog(program) or str(error)) from error
        if target.startswith("sm_"):
            return mend_cubin(nvrtc.getCUBIN(program))
        ptx = nvrtc.getPTX(program)
        return (ptx if isinstance(ptx, bytes) else ptx.encode()).rstrip(b"\0")
    finally:
        nvrtc.destroyProgram(program)


def nvrtc_version() -> str:
    """As "13.0"."""
    from cupy.cuda import nvrtc

    return "{}.{}".format(*nvrtc.getVersion())


def mend_cubin(image: bytes) -> bytes:
    """The cubin with the last byte that CuPy's getCUBIN drops as if it ended a string.

    The ELF header says how long the file is; the program header table stands last and ends in a
    zero byte. A CuPy that drops nothing is left alone.
    """
    tables = [(32, 54), (40, 58)]  # offsets of: program headers, section headers; size and count
    ends = []
    for offset, shape in tables:
        start = int.from_bytes(image[offset : offset + 8], "little")
        size = int.from_bytes(image[shape : shape + 2], "little")
        count = int.from_bytes(image[shape + 2 : shape + 4], "little")
        ends.append(start + size * count)
    return image + b"\0" if len(image) == max(ends) - 1 else image
