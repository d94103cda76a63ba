"""Asynchronous copies: cp.async, bulk and tensor copies, the mbarriers they arrive at."""
