"""printf and assert of kernels: `vprintf` and `__assertfail`."""

from __future__ import annotations

import re
import struct
import sys

import numpy as np

from fkjit.interp.core.lanes import Group
from fkjit.interp.core.ptx import Instruction, Mem
from fkjit.interp.machine.decode import Decoder
from fkjit.interp.machine.opcodes import Step, opcode
from fkjit.interp.memory.locate import Locator
from fkjit.interp.spaces.arena import GLOBAL_WINDOW
from fkjit.interp.spaces.local import LOCAL_WINDOW
from fkjit.interp.spaces.shared import SHARED_WINDOW

_SPEC = re.compile(r"%([-+ #0]*)(\*|\d+)?(?:\.(\*|\d+)?)?(hh|h|ll|l|j|z|t|L)?([a-zA-Z%])|%")
_LONG = ("l", "ll", "j", "z", "t")


class _Reader:
    """Reads what generic addresses of one thread point to."""

    def __init__(self, d: Decoder, ins: Instruction) -> None:
        self.machine, self.ins = d.machine, ins

    def bytes_at(self, address: int, size: int, lane: int) -> bytes:
        """`size` bytes; raises SanitizerError where they are not the thread's to read."""
        memory, group = self.machine.memory, self._only(lane)
        if address >= GLOBAL_WINDOW:
            at = memory.globals.index(self._each(address, size), 1, group, self.ins, False)
            return memory.globals.raw[at].tobytes()
        if LOCAL_WINDOW <= address < 2 * LOCAL_WINDOW:
            at = memory.local.index(
                self._each(address - LOCAL_WINDOW, size), 1, group, self.ins, False
            )
            return memory.local.raw[at].tobytes()
        if SHARED_WINDOW <= address < LOCAL_WINDOW:
            offsets = self._each(address - SHARED_WINDOW, size)
            at = memory.shared.index(offsets, 1, group, self.ins, False)
            return memory.shared.raw[at].tobytes()
        detail = f"the address {address:#x} points nowhere"
        raise self.machine.reporter.fault("bad string", detail, self.ins, group.lanes)

    def _each(self, address: int, size: int) -> np.ndarray:
        return np.arange(address, address + size, dtype=np.uint64)

    def _only(self, lane: int) -> Group:
        mask = np.zeros(self.machine.layout.lanes, bool)
        mask[lane] = True
        return Group(mask, -1)

    def string(self, address: int, lane: int) -> str:
        """Text up to its zero byte."""
        if address == 0:
            return "(null)"
        arena = self.machine.memory.globals
        place = arena.place_of(address, address + 1, False)
        if place is not None:
            text = arena.contents(place)[address - place.address :].tobytes()
            return text.split(b"\0")[0].decode(errors="replace")
        found = bytearray()
        while not found.endswith(b"\0"):
            found += self.bytes_at(address + len(found), 1, lane)
        return found[:-1].decode(errors="replace")


class _Arguments:
    """The values after the format, each aligned to its size, as C passes them."""

    def __init__(self, reader: _Reader, address: int, lane: int) -> None:
        self.reader, self.address, self.lane = reader, address, lane

    def next(self, code: str) -> int | float:
        """The next value, by its `struct` code."""
        size = struct.calcsize(code)
        self.address = -(-self.address // size) * size
        raw = self.reader.bytes_at(self.address, size, self.lane)
        self.address += size
        return struct.unpack(f"<{code}", raw)[0]


def _text(reader: _Reader, form: str, values: _Arguments) -> str:
    """The format with its values, as C's printf writes it."""

    def one(match: re.Match[str]) -> str:
        flags, width, precision, length, kind = match.groups()
        if kind is None or kind == "%":
            return "%"
        if width == "*":
            width = str(int(values.next("i")))
        if precision == "*":
            precision = str(int(values.next("i")))
        dot = "." in match[0]
        shown = f"%{flags}{width or ''}{'.' if dot else ''}{precision or ('0' if dot else '')}"
        return _value(reader, values, shown, length, kind) or match[0]

    return _SPEC.sub(one, form)


_NARROW = {"hh": 8, "h": 16}


def _value(
    reader: _Reader, values: _Arguments, shown: str, length: str | None, kind: str
) -> str | None:
    """One value, or None for a conversion that printf does not know."""
    if kind in "di":
        value = int(values.next("q" if length in _LONG else "i"))
        return (shown + "d") % _narrowed(value, length, True)
    if kind in "uxXo":
        value = int(values.next("Q" if length in _LONG else "I"))
        return (shown + ("d" if kind == "u" else kind)) % _narrowed(value, length, False)
    if kind in "eEfFgG":
        return (shown + kind) % values.next("d")
    if kind in "aA":
        return float(values.next("d")).hex()
    if kind == "c":
        return (shown + "s") % chr(int(values.next("i")) & 0xFF)
    if kind == "s":
        return (shown + "s") % reader.string(int(values.next("Q")), values.lane)
    if kind == "p":
        return (shown + "s") % f"{int(values.next('Q')):#x}"
    return None


def _narrowed(value: int, length: str | None, signed: bool) -> int:
    bits = _NARROW.get(length or "", 64)
    low = value & ((1 << bits) - 1) if bits < 64 else value
    return low - (1 << bits) if signed and bits < 64 and low >> (bits - 1) else low


def _pointers(d: Decoder, ins: Instruction, count: int, width: int = 8) -> list[Locator]:
    found = []
    for arg in ins.args[:count]:
        assert isinstance(arg, Mem)
        found.append(Locator(d, ins, arg, width, False))
    return found


def _fetch(locator: Locator, group: Group) -> list[int]:
    found = locator.locate(group)
    shift = locator.width.bit_length() - 1
    return found.views[locator.width][found.position >> shift].tolist()


@opcode("%printf")
def printf(d: Decoder, ins: Instruction) -> Step:
    """%printf format, values, result: text goes to sys.stdout, lane after lane."""
    form, values = _pointers(d, ins, 2)
    result = Locator(d, ins, ins.args[2], 4, True) if len(ins.args) > 2 else None
    reader = _Reader(d, ins)

    def run(group: Group) -> None:
        rows = zip(group.lanes.tolist(), _fetch(form, group), _fetch(values, group), strict=True)
        texts = [
            _text(reader, reader.string(text, lane), _Arguments(reader, at, lane))
            for lane, text, at in rows
        ]
        sys.stdout.write("".join(texts))
        if result is not None:
            found = result.locate(group)
            found.views[4][found.position >> 2] = [len(text) for text in texts]
            d.machine.memory.local.written(found.position, 4)

    return run


@opcode("%assertfail")
def assertfail(d: Decoder, ins: Instruction) -> Step:
    """%assertfail message, file, line, function, bytes of a character: a fault."""
    message, file, function = (_pointers(d, ins, 4)[at] for at in (0, 1, 3))
    line = Locator(d, ins, ins.args[2], 4, False)
    reader = _Reader(d, ins)

    def run(group: Group) -> None:
        lane = int(group.lanes[0])
        what, where, who = (
            reader.string(_fetch(locator, group)[0], lane) for locator in (message, file, function)
        )
        detail = f"{what}, at {where}:{_fetch(line, group)[0]} in {who}"
        raise d.machine.reporter.fault("assertion failed", detail, ins, group.lanes)

    return run
