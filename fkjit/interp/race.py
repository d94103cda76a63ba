"""Who knows of what: races are accesses to one byte, one of them a write, that nothing orders.

`Machine.race` is a `Race` where races are looked for, else None: code that orders threads or acts
on memory asynchronously tells it so.
"""

from __future__ import annotations

READ, WRITE, ATOMIC = "read", "write", "atomic"


class Race:
    """Happens-before between the threads and engines of a launch."""
