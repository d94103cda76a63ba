"""Runs a case on the GPU: cubin by NVRTC, launch by CuPy, tensor maps by the driver."""

from __future__ import annotations

import ctypes
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tests.golden.case import ENTRY, Case, Map, three
from tests.golden.compile import GPU, compile_kernel

# CUtensorMapDataType, CUtensorMapSwizzle: values of the driver's enumerations.
_DTYPES = {"u8": 0, "u16": 1, "u32": 2, "s32": 3, "f16": 6, "f32": 7, "f64": 8, "bf16": 9}
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
_L2_PROMOTION_NONE, _INTERLEAVE_NONE = 0, 0


def run_on_gpu(case: Case) -> dict[str, np.ndarray]:
    """The case's outputs by name; RuntimeError when two launches disagree."""
    first, second = _launch(case), _launch(case)
    for name, array in first.items():
        if array.tobytes() != second[name].tobytes():
            raise RuntimeError(f"{name} differs between two launches: no golden can be made of it")
    return first


def _launch(case: Case) -> dict[str, np.ndarray]:
    import cupy

    arrays = {name: cupy.asarray(array) for name, array in case.make_arrays().items()}
    function = _function(case.source)
    if case.shared > 48 * 1024:
        function.max_dynamic_shared_size_bytes = case.shared
    maps = [encode(one, arrays[one.array].data.ptr) for one in case.maps]
    function(three(case.grid), three(case.block), (*arrays.values(), *maps), shared_mem=case.shared)
    cupy.cuda.runtime.deviceSynchronize()
    return {name: cupy.asnumpy(arrays[name]) for name in case.outputs}


@cache
def _function(source: str) -> Any:
    import cupy

    cubin = compile_kernel(source, GPU)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "golden.cubin"
        path.write_bytes(cubin)
        return cupy.RawModule(path=str(path)).get_function(ENTRY)


def encode(spec: Map, address: int) -> np.ndarray:
    """The 128 bytes of a CUtensorMap, as an array of one element that CuPy passes by value."""
    rank = len(spec.dims)
    storage = np.zeros(128 + 64, np.uint8)
    start = -storage.ctypes.data % 64  # the driver wants 64-byte alignment
    encoded = storage[start : start + 128]
    driver = ctypes.CDLL("libcuda.so.1")
    status = driver.cuTensorMapEncodeTiled(
        ctypes.c_void_p(encoded.ctypes.data),
        ctypes.c_int(_DTYPES[spec.dtype]),
        ctypes.c_uint32(rank),
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*spec.dims),
        (ctypes.c_uint64 * max(rank - 1, 1))(*spec.strides),
        (ctypes.c_uint32 * rank)(*spec.box),
        (ctypes.c_uint32 * rank)(*(spec.element_strides or (1,) * rank)),
        ctypes.c_int(_INTERLEAVE_NONE),
        ctypes.c_int(_SWIZZLES[spec.swizzle]),
        ctypes.c_int(_L2_PROMOTION_NONE),
        ctypes.c_int(1 if spec.fill == "nan" else 0),
    )
    if status:
        raise RuntimeError(f"cuTensorMapEncodeTiled: error {status} for {spec}")
    return encoded.copy().view("V128")


def describe_gpu() -> dict[str, str]:
    """Name of the GPU and version of its driver."""
    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties(0)
    number = cupy.cuda.runtime.driverGetVersion()
    return {
        "gpu": properties["name"].decode(),
        "compute_capability": f"{properties['major']}.{properties['minor']}",
        "cuda_driver": f"{number // 1000}.{number % 1000 // 10}",
        "cupy": cupy.__version__,
    }
