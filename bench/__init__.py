"""Measurements: `python -m bench.attention`, `bench.host`, `bench.first_call`; see NOTES.md."""
