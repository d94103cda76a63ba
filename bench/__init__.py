"""The benchmark suite: `fkjit bench`, `python -m bench`; docs/BENCHMARKS.md explains it."""
