"""`penstock bench hostile` as a script."""

import sys

from penstock.bench.commands.app import app

if __name__ == "__main__":
    app(["hostile", *sys.argv[1:]], prog_name="penstock bench")
