"""Who touches which bank: accesses to shared memory as the interpreter saw them."""

from __future__ import annotations

from typing import Any

import numpy as np

from fkjit.interp.core.accesses import ATOMIC, Observer
from fkjit.interp.core.lanes import WARP
from fkjit.interp.core.ptx import Instruction
from fkjit.interp.machine.machine import Machine
from fkjit.interp.spaces.banks import BANKS, WORD, Banks, wavefronts
from fkjit.playground.listing import Ptx

ROW = BANKS * WORD  # bytes that all banks hold side by side
_TAKES = 16  # accesses of an instruction that are looked at for the worst one


class Watch:
    """An observer of launches: wavefronts of each instruction and, for a picture, the access of one
    warp that needs most of them."""

    def __init__(self) -> None:
        self.banks = Banks()
        self._worst: dict[int, tuple[int, dict[str, Any]]] = {}  # by program counter
        self._taken: dict[int, int] = {}

    def __call__(self, machine: Machine) -> Observer:
        """For `interp.run`: told of every access on this machine."""
        shared, layout = machine.memory.shared, machine.layout

        def see(
            kind: str, is_shared: bool, positions: np.ndarray, width: int, lanes: np.ndarray,
            ins: Instruction,
        ) -> None:  # fmt: skip
            self.banks.see(kind, is_shared, positions, width, lanes, ins)
            if not is_shared or lanes.size == 0 or self._taken.get(ins.pc, 0) >= _TAKES:
                return
            self._taken[ins.pc] = self._taken.get(ins.pc, 0) + 1
            mine = lanes // WARP == lanes[0] // WARP
            at, who = positions[mine], lanes[mine]
            _, most, ideal = wavefronts(at, width, who, kind == ATOMIC)
            if most <= self._worst.get(ins.pc, (0, {}))[0]:
                return
            offsets = at - shared.start[who]
            first = int(offsets.min())
            self._worst[ins.pc] = (
                most,
                {
                    "kind": kind,
                    "width": width,
                    "lanes": (who % WARP).tolist(),
                    "bytes": (offsets - first // ROW * ROW).tolist(),
                    "where": shared.describe(first).removesuffix(")").replace(" (", ", "),
                    "warp": int(layout.thread[who[0]]) // WARP,
                    "wavefronts": most,
                    "ideal": ideal,
                },
            )

        return see

    def lines(self, ptx: Ptx, name: str) -> list[dict[str, Any]]:
        """Each instruction with its counts over all launches, its picture and its lines."""
        found = []
        for pc, (ins, (accesses, fronts, ideal)) in self.banks.counts.items():
            found.append({
                "pc": pc,
                "lines": ptx.template_lines(name, ins.line),
                "place": ins.location.partition(" (")[0],
                "instruction": ".".join(ins.op),
                "accesses": accesses,
                "wavefronts": fronts,
                "ideal": ideal,
                "ratio": fronts / max(ideal, 1),
                "picture": self._worst.get(pc, (0, None))[1],
            })  # fmt: skip
        return sorted(found, key=lambda row: (-row["ratio"], row["pc"]))
