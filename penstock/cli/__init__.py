"""The `penstock` command: one file per subcommand. Each imports its dependencies only when it runs."""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    """Entry point. A `PenstockError` is shown as one red line, and so is a missing extra; any other exception keeps
    its traceback."""
    open_standard_streams()
    serves = sys.argv[1:2] == ["serve"]
    if serves:
        from penstock.supervisor import early_engine

        early_engine.begin(sys.argv[2:])
    elif sys.argv[1:3] == ["engine", "--await-command"]:
        from penstock.cli.awaited_command import await_command

        await_command()
    elif sys.argv[1:2] == ["engine"] and "--supervised" in sys.argv:
        from penstock.engine_host.head_start import begin_libraries

        begin_libraries()
    from penstock.cli.app import narrowed
    from penstock.errors import EXTRA_OF, PenstockError, needs_extra

    # For completion in shells, the command line is in the environment instead.
    command = sys.argv[1] if len(sys.argv) > 1 and "_PENSTOCK_COMPLETE" not in os.environ else ""
    if os.getpid() == 1 or command == "bench":
        # The first process of a container gets no default action: until a command has its own handler, SIGTERM would
        # do nothing, and `stop` would wait for its whole grace period. A benchmark stops the servers it has started.
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        narrowed(command)()
    except PenstockError as error:
        _end(str(error), error.exit_status)
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module not in EXTRA_OF:
            raise
        _end(f"this command {needs_extra(EXTRA_OF[module])}", PenstockError.exit_status)
    finally:
        if serves:
            early_engine.dismiss()


def open_standard_streams() -> None:
    """Open those that whoever started us has closed, on nothing: a pipe or a database would get their numbers, and what
    is printed would land there."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest number that is free


def _end(message: str, status: int) -> None:
    from penstock.cli.terminal import show_error

    show_error(message)
    sys.exit(status)
