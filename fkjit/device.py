"""`fkjit.device.device_target`, where it was documented first: see `fkjit.runtime.device`."""

from fkjit.runtime.device import device_target

__all__ = ["device_target"]
