"""The ladders, a module each: `LADDER`."""
