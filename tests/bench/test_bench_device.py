"""The CUDA device behind the suite, on a stand-in for torch.cuda; what building a variant cost."""

from __future__ import annotations

import contextlib
import types
from pathlib import Path

import numpy as np
import pytest

from bench.core import device as devices
from bench.core import kernels
from bench.core.device import TorchDevice
from fkjit.arch import target
from fkjit.errors import ToolchainError
from fkjit.jit.build import build
from fkjit.runtime import device as loading
from fkjit.spec import find
from tests.core.user_kernel import registered_kernel, write_kernel

CLOCK = 2e9  # cycles a second
FLUSH = 40e-6


class Cuda:
    """What TorchDevice asks of torch.cuda; a clock that kernels move."""

    def __init__(self):
        self.clock, self.slow = 0.0, 3.0  # the first kernels run at low clocks
        self.allocated, self.peak = 1000, 5000
        self.log = []

    def run(self, seconds):
        self.clock += seconds * self.slow
        self.slow = max(1.0, self.slow - 0.5)

    def is_available(self):
        return True

    def current_device(self):
        return 0

    def get_device_properties(self, index):
        return types.SimpleNamespace(name="NVIDIA H200", L2_cache_size=100 << 20)

    def Event(self, enable_timing):
        assert enable_timing
        cuda = self

        class Event:
            def record(self):
                self.at = cuda.clock

            def elapsed_time(self, end):
                return (end.at - self.at) * 1e3

        return Event()

    def synchronize(self):
        self.log.append("synchronize")

    def _sleep(self, cycles):
        assert isinstance(cycles, int)
        self.run(cycles / CLOCK)

    def CUDAGraph(self):
        return types.SimpleNamespace(replay=lambda: self.log.append("replay"))

    @contextlib.contextmanager
    def graph(self, graph):
        self.log.append("capture")
        yield
        self.log.append("captured")

    def mem_get_info(self, index):
        return 70, 100

    def reset_peak_memory_stats(self):
        self.peak = self.allocated

    def memory_allocated(self):
        return self.allocated

    def max_memory_allocated(self):
        return self.peak

    def empty_cache(self):
        raise RuntimeError("captures_underway.empty()")


@pytest.fixture
def cuda(monkeypatch):
    made = Cuda()
    sizes = []

    def empty(count, dtype, device):
        sizes.append(count)
        return types.SimpleNamespace(fill_=lambda value: made.run(FLUSH))

    torch = types.SimpleNamespace(cuda=made, int32=np.int32, empty=empty)
    monkeypatch.setattr(devices, "import_module", lambda name: torch)
    made.sizes = sizes
    return made


def test_delay_and_flush_are_calibrated_at_full_clocks(cuda):
    device = TorchDevice()
    assert cuda.sizes == [2 * (100 << 20) // 4]  # twice the L2 cache, as int32
    assert device.flush_seconds == pytest.approx(FLUSH)
    before = cuda.clock
    device.delay(25e-6)
    assert cuda.clock - before == pytest.approx(25e-6)
    device.delay(0.0)
    device.flush()
    assert cuda.clock - before == pytest.approx(25e-6 + FLUSH)


def test_a_graph_holds_the_copies_and_the_last_result(cuda):
    device = TorchDevice()
    cuda.log.clear()
    results = iter(range(10))
    replay, last = device.capture(lambda: next(results), 3)
    assert last == 2 and cuda.log == ["capture", "captured"]
    replay()
    assert cuda.log[-1] == "replay"


def test_memory_is_read_around_a_call(cuda):
    device = TorchDevice()

    def call():
        cuda.peak = 7000

    assert device.peak_bytes(call) == 6000 and device.free_bytes() == 70
    device.release()  # raises after a capture that failed: only memory is lost


def test_without_torch_or_a_gpu_the_error_says_so(cuda, monkeypatch):
    monkeypatch.setattr(cuda, "is_available", lambda: False)
    with pytest.raises(ToolchainError, match="torch sees no CUDA device here"):
        TorchDevice()

    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(devices, "import_module", missing)
    with pytest.raises(ToolchainError, match="needs torch with CUDA"):
        TorchDevice()


def test_arrays_travel_with_their_values(cuda):
    torch = pytest.importorskip("torch")
    import ml_dtypes

    device = TorchDevice()
    made = []

    class Stand:
        """A tensor whose copy to the device stays here."""

        def __init__(self, tensor):
            self.tensor = tensor

        def cuda(self):
            made.append(self.tensor)
            return self.tensor

    device.torch = types.SimpleNamespace(
        from_numpy=lambda values: Stand(torch.from_numpy(values)), bfloat16=torch.bfloat16
    )
    values = np.random.default_rng(4).standard_normal(9).astype(ml_dtypes.bfloat16)
    assert device.array(values).dtype == torch.bfloat16
    assert np.array_equal(device.array(values).float().numpy(), values.astype(np.float32))
    floats = np.arange(4.0)
    device.array(floats)[0] = 9.0
    assert floats[0] == 0.0  # a copy


def test_an_output_is_spoiled_whatever_its_type(cuda):
    torch = pytest.importorskip("torch")
    for made in (torch.zeros(3, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.int32)):
        TorchDevice().spoil(made)
        assert (made.isnan() | (made == -1)).all()


def test_what_building_cost_is_measured_from_the_disk(tmp_path, monkeypatch):
    with registered_kernel(write_kernel(tmp_path / "kernels")):
        spec, to = find("scale.plain"), target("sm_90a")
        params = {"dtype": "fp16", "threads": 64, "negated": True}
        entry = build(spec, params, to)
        monkeypatch.setattr(loading, "device_target", lambda index: to)
        monkeypatch.setattr(loading, "loaded", lambda *given: types.SimpleNamespace(entry=entry))
        loads = []

        def module(path):
            loads.append(Path(path).read_bytes())
            kernel = types.SimpleNamespace(kernel=object())
            return types.SimpleNamespace(get_function=lambda name: kernel)

        cupy = types.SimpleNamespace(RawModule=module)
        monkeypatch.setattr(kernels, "import_module", lambda name: cupy)
        found = kernels.built(spec, params, 0)
        assert loads == [entry.image]
        assert found["kernel"] == "scale.plain" and found["target"] == "sm_90a"
        assert found["compile_ms"] == 1e3 * entry.meta["compile_seconds"] > 0
        assert 0 < found["load_ms"] < found["compile_ms"] * 100
        assert found["resources"]["registers"] > 0


def test_a_kernel_that_does_not_fit_is_refused_with_the_reason(tmp_path):
    from bench.core.catalog import operations
    from bench.core.op import Refused
    from tests.bench.kit import FakeDevice

    op = operations()["attention"]
    made = kernels.ours(op, "all", False, FakeDevice(), target("sm_90a").arch)
    assert made[0].name == "fkjit" and {"fkjit flash", "fkjit naive"} <= {c.name for c in made}
    old = next(c for c in made if c.name == "fkjit flash_sm75")
    problem = op.sets["default"][0]
    with pytest.raises(Refused, match="is for GPUs without cp_async"):
        old.prepare({**problem, "dtype": "fp16"}, {})
    tiles = kernels.ours(op, "flash", True, FakeDevice(), target("sm_90a").arch)
    names = [candidate.name for candidate in tiles]
    assert "fkjit flash block=128x64" in names and "fkjit flash block=32" in names
    wide = next(c for c in tiles if c.name == "fkjit flash block=128")
    with pytest.raises(Refused, match="more registers"):
        wide.prepare({**problem, "head_dim": 256, "head_dim_v": 256}, {})
