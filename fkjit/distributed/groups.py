"""A process group or DeviceMesh as a rank among a number of ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

from fkjit.errors import ArgumentTypeError, DeviceError, ParameterError


class Group(NamedTuple):
    """Ranks that work together. timeout: seconds that one waits for the others, None: the process
    group's own time-out."""

    call: str
    process_group: Any
    rank: int
    size: int
    timeout: float | None = None

    @property
    def next(self) -> int:
        return (self.rank + 1) % self.size

    def world_rank(self, rank: int) -> int:
        """Of the whole world, as torch.distributed's messages name it."""
        return _distributed(self.call).get_global_rank(self.process_group, rank % self.size)


def group_of(call: str, given: Any = None, timeout: float | None = None) -> Group:
    """The group of a ProcessGroup, a DeviceMesh of one dimension, or, for None, of all ranks.

    ArgumentTypeError for anything else, ParameterError for a mesh of more dimensions, a time-out
    that is none, and a group that this rank is not in; DeviceError before init_process_group.
    """
    dist = _distributed(call)
    if timeout is not None and not (isinstance(timeout, int | float) and timeout > 0):
        raise ParameterError(f"{call}: timeout={timeout!r}; allowed: seconds above 0, or None")
    if is_mesh(given):
        if given.ndim != 1:
            raise ParameterError(
                f"{call}: group is a DeviceMesh of {given.ndim} dimensions; allowed: one, as "
                "mesh['name'] gives it"
            )
        given = given.get_group()
    elif given is None:
        given = dist.group.WORLD
    elif not isinstance(given, dist.ProcessGroup):
        raise ArgumentTypeError(
            f"{call}: group is a {type(given).__qualname__}; allowed: a ProcessGroup, a DeviceMesh "
            "or None"
        )
    rank = dist.get_rank(given)
    if rank < 0:
        raise ParameterError(f"{call}: rank {dist.get_rank()} of the world is not in the group")
    return Group(call, given, rank, dist.get_world_size(given), timeout)


def is_mesh(given: Any) -> bool:
    return hasattr(given, "get_group") and hasattr(given, "ndim")


def _distributed(call: str) -> Any:
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available():
        raise DeviceError(f"{call}: torch.distributed is not there; install a torch that has it")
    if not torch.distributed.is_initialized():
        raise DeviceError(f"{call}: call torch.distributed.init_process_group first")
    return torch.distributed


def check_tensors(call: str, **given: Any) -> None:
    """ArgumentTypeError for what is no torch tensor, None apart; DeviceError for mixed devices."""
    torch, devices = sys.modules["torch"], {}
    for name, x in given.items():
        if x is None:
            continue
        if not isinstance(x, torch.Tensor):
            raise ArgumentTypeError(
                f"{call}: {name} is a {type(x).__qualname__}; allowed: a torch tensor"
            )
        devices.setdefault(x.device, name)
    if len(devices) > 1:
        found = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise DeviceError(f"{call}: {found}; allowed: all on this rank's device")


def eager(call: Callable[..., Any]) -> Callable[..., Any]:
    """The call, at which torch.compile ends a graph and goes on behind it: messages between ranks
    are no operators."""

    untraced: list[Callable[..., Any]] = []

    @wraps(call)
    def outside(*args: Any, **named: Any) -> Any:
        dynamo = sys.modules.get("torch._dynamo")  # importing it takes a second
        if dynamo is None:
            return call(*args, **named)
        if not untraced:
            untraced.append(dynamo.disable(call))
        return untraced[0](*args, **named)

    outside._torchdynamo_disable = True  # type: ignore[attr-defined]
    outside._torchdynamo_disable_msg = "fkjit.distributed sends messages"  # type: ignore[attr-defined]
    return outside
