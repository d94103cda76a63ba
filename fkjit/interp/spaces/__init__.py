"""The state spaces of a launch: registers, global, shared and local memory, its arguments."""
