"""`fkjit tune`: which values of a kernel's free parameters are the fastest on this GPU."""
