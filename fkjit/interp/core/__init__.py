"""What all else speaks of: PTX text as functions, lanes, kinds of accesses, reports of faults."""
