"""`python -m bench` in a checkout is `fkjit bench`."""

import sys

from .command import command

sys.exit(command())
