"""Matrices of a warp: ldmatrix, mma.sync, wmma."""
