"""`penstock bench overhead` as a script."""

import sys

from penstock.bench.commands.app import app

if __name__ == "__main__":
    app(["overhead", *sys.argv[1:]], prog_name="penstock bench")
