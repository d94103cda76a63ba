"""Where threads go and whom they wait for: branches, calls, warps, barriers; printf."""
