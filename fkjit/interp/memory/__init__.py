"""Instructions on memory: where an address leads, loads, stores, atomics, fences."""
