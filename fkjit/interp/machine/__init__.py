"""The machine as instructions see it, and how they are decoded into steps on its arrays."""
