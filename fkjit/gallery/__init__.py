"""The gallery: each family of kernels as a ladder, from the plain version to the fastest one.

`ladders/` declares them, a file each; `measured.json` has what was measured of their steps.
"""
