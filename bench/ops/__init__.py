"""One file an operation, each with an `OP` (../op.py); docs/BENCHMARKS.md says how to add one."""
