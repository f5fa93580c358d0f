"""`python -m penstock.bench`: the bench commands without the rest of the command line."""

from penstock.bench.cli import app

app(prog_name="penstock bench")
