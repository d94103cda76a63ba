"""What orders accesses to memory, and the accesses that nothing orders."""
