"""`python -m penstock.bench`: the bench commands without the rest of the command line."""

from penstock.bench.commands.app import app

app(prog_name="penstock bench")
