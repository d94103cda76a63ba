"""Tokens of steps on their way to the host."""

from __future__ import annotations

from typing import Any, NamedTuple

from fkjit.ops.op import torch_ops

_RING = 4  # buffers: two each of the turn that runs and of the one that is read


class Launched(NamedTuple):
    """Tokens of a step on their way to the host."""

    tokens: Any
    event: Any

    def read(self) -> list[int]:
        """The tokens, of the slots in their order. Waits for the step."""
        if self.event is not None:
            self.event.synchronize()
        return self.tokens.tolist()


class Readback:
    """A ring of buffers on the host for up to `size` tokens. A kernel writes there, where pinned
    memory can be seen as an array of the device: between two graphs it takes 3 us less than the
    copy engine."""

    def __init__(self, size: int, device: Any) -> None:
        torch = torch_ops.torch_seen()
        self._on_gpu = device.type == "cuda"
        hosts = [
            torch.zeros(size, dtype=torch.int64, pin_memory=self._on_gpu) for _ in range(_RING)
        ]
        self._ring = [(host, _on_device(host, device) if self._on_gpu else None) for host in hosts]

    def send(self, tokens: Any) -> Launched:
        """Tokens as they are now; nothing waits for them."""
        torch, count = torch_ops.torch_seen(), len(tokens)
        host, seen = self._ring.pop(0)
        self._ring.append((host, seen))
        if seen is None:
            host[:count].copy_(tokens, non_blocking=True)
        else:
            torch.add(tokens, 0, out=seen[:count])
        event = torch.cuda.Event() if self._on_gpu else None
        if event is not None:
            event.record()
        return Launched(host[:count], event)


class _Pinned:
    """Memory of the host, which a GPU sees at the same address."""

    def __init__(self, host: Any) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(host.shape), "typestr": "<i8", "data": (host.data_ptr(), False),
            "version": 2,
        }  # fmt: skip


def _on_device(host: Any, device: Any) -> Any:
    """An array of `device` that is this pinned memory; None where it would be a copy."""
    torch = torch_ops.torch_seen()
    try:
        seen = torch.as_tensor(_Pinned(host), device=device)
    except (RuntimeError, TypeError, ValueError):
        return None
    return seen if seen.data_ptr() == host.data_ptr() else None
