"""Goldens on disk: a compressed file for each group, with what made them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

DATA = Path(__file__).parent / "data"
Outputs = dict[str, np.ndarray]


@dataclass
class Golden:
    """One group's results: the machine that made them; by case, its digest and its outputs."""

    made_by: dict[str, str] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    outputs: dict[str, Outputs] = field(default_factory=dict)

    def add(self, name: str, digest: str, outputs: Outputs) -> None:
        self.digests[name], self.outputs[name] = digest, outputs


def save(folder: Path, group: str, golden: Golden) -> Path:
    """Write the group's file: the outputs' bytes end to end, and a table of where they are."""
    table: dict[str, object] = {}
    pieces, at = [], 0
    for name in sorted(golden.outputs):
        places = {}
        for output, array in golden.outputs[name].items():
            places[output] = (at, array.dtype.str, array.shape)
            pieces.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
            at += array.nbytes
        table[name] = {"digest": golden.digests[name], "outputs": places}
    index = json.dumps({"made_by": golden.made_by, "cases": table}).encode()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{group}.npz"
    data = np.concatenate(pieces) if pieces else np.zeros(0, np.uint8)
    np.savez_compressed(path, index=np.frombuffer(index, np.uint8), data=data)
    return path


def load(folder: Path, group: str) -> Golden:
    """The group's goldens; FileNotFoundError where there are none."""
    with np.load(folder / f"{group}.npz") as stored:
        index, data = json.loads(stored["index"].tobytes()), stored["data"]
    golden = Golden(index["made_by"])
    for name, entry in index["cases"].items():
        outputs = {}
        for output, (at, dtype, shape) in entry["outputs"].items():
            size = int(np.prod(shape)) * np.dtype(dtype).itemsize
            outputs[output] = data[at : at + size].view(dtype).reshape(shape)
        golden.add(name, entry["digest"], outputs)
    return golden
