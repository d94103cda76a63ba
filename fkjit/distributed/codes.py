"""Rows as e4m3 codes with an fp32 scale for every 128 columns, for messages of half the bytes."""

from __future__ import annotations

import sys
from typing import Any

_COLUMNS = 128  # that share a scale
_MOST = 448.0  # of e4m3


class E4m3:
    """Rows of bytes: a row's codes, then its scales. Rounded to nearest; zeros stay zeros."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.pieces = -(-columns // _COLUMNS)

    def encode(self, x: Any) -> Any:
        torch, room = sys.modules["torch"], self.pieces * _COLUMNS - self.columns
        values = torch.nn.functional.pad(x.float(), (0, room)).unflatten(1, (self.pieces, _COLUMNS))
        scales = values.abs().amax(-1) / _MOST
        safe = scales.where(scales > 0, torch.ones_like(scales))
        codes = (values / safe.unsqueeze(-1)).to(torch.float8_e4m3fn).view(torch.uint8)
        # Codes of whole pieces: scales then begin where fp32 may begin.
        return torch.cat([codes.flatten(1), scales.view(torch.uint8)], 1)

    def decode(self, rows: Any, dtype: Any) -> Any:
        torch, whole = sys.modules["torch"], self.pieces * _COLUMNS
        codes, scales = rows[:, :whole].view(torch.float8_e4m3fn), rows[:, whole:]
        scales = scales.contiguous().view(torch.float32).unsqueeze(-1)
        values = codes.float().unflatten(1, (self.pieces, _COLUMNS)) * scales
        return values.flatten(1)[:, : self.columns].to(dtype).contiguous()
