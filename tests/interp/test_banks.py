"""Wavefronts of shared memory: counted by hand, and of kernels whose conflicts are known."""

from __future__ import annotations

import numpy as np
import pytest

from fkjit.errors import SanitizerError
from fkjit.interp import Arg, Checks, run
from fkjit.interp.spaces.banks import wavefronts
from tests.interp.interp_kit import compile_ptx, line_of

NAME = "kernels_cu/test/banks.cu"
LANES = np.arange(32)
RNG = np.random.default_rng(4)


@pytest.mark.parametrize(
    ("positions", "width", "lanes", "expected"),
    [
        (4 * LANES, 4, LANES, (1, 1, 1)),  # a word a bank
        (8 * LANES, 4, LANES, (1, 2, 1)),  # every other bank, two words each
        (128 * LANES, 4, LANES, (1, 32, 1)),  # all in bank 0
        (132 * LANES, 4, LANES, (1, 1, 1)),  # the same, padded by a word
        (0 * LANES + 64, 4, LANES, (1, 1, 1)),  # one word for all: broadcast
        (128 * (LANES // 8), 4, LANES, (1, 4, 1)),  # four words of bank 0
        (LANES, 1, LANES, (1, 1, 1)),  # four lanes a word
        (128 * (LANES // 4) + LANES % 4, 1, LANES, (1, 8, 1)),
        (2 * LANES, 2, LANES, (1, 1, 1)),
        (64 * LANES, 2, LANES, (1, 16, 1)),  # banks 0 and 16
        (8 * LANES, 8, LANES, (1, 2, 2)),  # two half warps of 128 bytes
        (16 * LANES, 8, LANES, (1, 4, 2)),  # lanes 0 and 8 of a half meet
        (16 * LANES, 16, LANES, (1, 4, 4)),  # four quarters of 128 bytes
        (32 * LANES, 16, LANES, (1, 8, 4)),
        (128 * LANES, 16, LANES, (1, 32, 4)),
        (144 * LANES, 16, LANES, (1, 4, 4)),
        (4 * LANES[:3], 4, LANES[:3], (1, 1, 1)),  # few lanes
        (16 * LANES[:8], 16, LANES[:8], (1, 1, 1)),  # ldmatrix.x1: one phase
        (16 * LANES[4:12], 16, LANES[4:12], (1, 2, 2)),  # lanes of two phases
        (np.tile(4 * LANES, 2), 4, np.arange(64), (2, 2, 2)),  # two warps do not meet
        (np.append(4 * LANES, 128 * LANES), 4, np.arange(64), (2, 33, 2)),
    ],
)
def test_by_hand(positions, width, lanes, expected) -> None:
    assert wavefronts(positions, width, lanes) == expected


def test_atomics_on_one_word_take_turns() -> None:
    assert wavefronts(0 * LANES, 4, LANES, atomic=True) == (1, 32, 1)
    assert wavefronts(4 * (LANES // 2), 4, LANES, atomic=True) == (1, 2, 1)


@pytest.mark.parametrize("width", [1, 2, 4, 8, 16])
def test_against_the_definition(width) -> None:
    for _ in range(20):
        lanes = np.flatnonzero(RNG.random(96) < 0.7)
        positions = width * RNG.integers(0, 300, lanes.size)
        total = ideal = 0
        for warp in range(3):
            for phase in np.array_split(np.arange(32 * warp, 32 * warp + 32), max(1, width // 4)):
                banks: dict[int, set[int]] = {}
                for at in positions[np.isin(lanes, phase)].tolist():
                    for word in {byte // 4 for byte in range(at, at + width)}:
                        banks.setdefault(word % 32, set()).add(word)
                total += max(map(len, banks.values()), default=0)
                ideal += bool(banks)
        assert wavefronts(positions, width, lanes) == (np.unique(lanes // 32).size, total, ideal)


TRANSPOSE = """
extern "C" __global__ void k(const float* x, float* y) {
  __shared__ float tile[32][32 + PAD];
  for (int i = threadIdx.y; i < 32; i += 4) tile[i][threadIdx.x] = x[32 * i + threadIdx.x];  // IN
  __syncthreads();
  for (int i = threadIdx.y; i < 32; i += 4) y[32 * i + threadIdx.x] = tile[threadIdx.x][i];  // OUT
}"""


@pytest.mark.parametrize(("pad", "ratio"), [(0, 32.0), (1, 1.0), (2, 2.0)])
def test_a_transpose(pad: int, ratio: float) -> None:
    source = TRANSPOSE.replace("PAD", str(pad))
    x, y = RNG.standard_normal((32, 32), dtype="f4"), np.zeros((32, 32), "f4")
    arguments = [Arg("x", x), Arg("y", y, True)]
    for _ in range(2):  # the second launch, of the same machine, starts at zero
        stats = run(compile_ptx(source, name=NAME), "k", 2, (32, 4), arguments,
                    checks=Checks(banks=True))  # fmt: skip
        np.testing.assert_array_equal(y, x.T)
        lines = {line.location: line for line in stats.banks}
        assert len(lines) == 2
        stored, loaded = (lines[f"{NAME}:{line_of(source, m)}"] for m in ("// IN", "// OUT"))
        assert (stored.instruction, loaded.instruction) == ("st.shared.f32", "ld.shared.f32")
        assert stored.accesses == loaded.accesses == loaded.ideal == 2 * 32
        assert stored.ratio == 1.0 and loaded.ratio == ratio
        assert stats.banks[0].ratio == ratio


def test_the_gate() -> None:
    source = TRANSPOSE.replace("PAD", "2")
    x, y = RNG.standard_normal((32, 32), dtype="f4"), np.zeros((32, 32), "f4")
    ptx = compile_ptx(source, name=NAME)

    def with_limit(limit: float | None) -> None:
        checks = Checks(banks=True, bank_limit=limit)
        run(ptx, "k", 1, (32, 4), [Arg("x", x), Arg("y", y, True)], checks=checks, title="turn")

    with pytest.raises(SanitizerError) as caught:
        with_limit(1.99)
    error = caught.value
    assert error.kind == "bank conflicts" and error.kernel == "turn" and error.hint
    assert error.location == f"{NAME}:{line_of(source, '// OUT')}"
    for part in (error.location, "2 times", "limit 1.99", "ld.shared.f32", "hint: "):
        assert part in str(error)
    assert not y.any()
    with_limit(2.0)
    np.testing.assert_array_equal(y, x.T)


@pytest.mark.parametrize(("pitch", "ratio"), [(128, 8.0), (144, 1.0)])
def test_ldmatrix(pitch: int, ratio: float) -> None:
    source = f"""
    extern "C" __global__ void k(unsigned* y) {{
      __shared__ __align__(16) unsigned s[{pitch * 8}];
      for (int i = threadIdx.x; i < {pitch * 8}; i += 32) s[i] = i;
      __syncthreads();
      unsigned a, b, c, d, p = (unsigned)__cvta_generic_to_shared(s) + threadIdx.x * {pitch};
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%0, %1, %2, %3}}, [%4];"
                   : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(p));  // BUG
      y[threadIdx.x] = a + b + c + d;
    }}"""
    y = np.zeros(32, "u4")
    stats = run(compile_ptx(source, name=NAME), "k", 1, 32, [Arg("y", y, True)],
                checks=Checks(mem=False, banks=True))  # fmt: skip
    (line,) = [line for line in stats.banks if line.instruction.startswith("ldmatrix")]
    assert (line.accesses, line.ideal, line.ratio) == (1, 4, ratio)


def test_nothing_is_counted_unasked_or_without_shared_memory() -> None:
    source = 'extern "C" __global__ void k(float* y) { y[threadIdx.x] = 1; }'
    arguments = [Arg("y", np.zeros(32, "f4"), True)]
    assert run(compile_ptx(source), "k", 1, 32, arguments).banks == ()
    assert run(compile_ptx(source), "k", 1, 32, arguments, checks=Checks(banks=True)).banks == ()
