"""`python -m fkjit`: the command `fkjit`."""

from fkjit.cli.app import app

app(prog_name="fkjit")
