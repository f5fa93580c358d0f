"""The `penstock` command: one file per subcommand. Each imports its dependencies only when it runs."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point. A `PenstockError` is shown as one red line; any other exception keeps its traceback."""
    from penstock.cli.app import app
    from penstock.errors import PenstockError

    try:
        app()
    except PenstockError as error:
        from penstock.cli.terminal import show_error

        show_error(str(error))
        sys.exit(error.exit_status)
