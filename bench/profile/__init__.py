"""`fkjit profile`: one launch of each implementation under Nsight Compute (docs/PROFILING.md)."""
