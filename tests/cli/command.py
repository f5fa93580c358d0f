"""The `penstock` command in this process: a process of its own takes a second to start, three with torch."""

from __future__ import annotations

import io
import logging
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch

from penstock.cli import main


@dataclass(frozen=True, slots=True)
class Outcome:
    returncode: int
    stdout: str
    stderr: str


def penstock(*arguments: str, cwd: Path | str = ".") -> Outcome:
    """What the command prints, and its exit status. For commands that end: nothing here can stop a server."""
    stdout, stderr = io.StringIO(), io.StringIO()
    root = logging.getLogger()
    handlers, level, threads = list(root.handlers), root.level, torch.get_num_threads()
    status: object = 0
    with mock.patch.object(sys, "argv", ["penstock", *arguments]), chdir(cwd):
        with redirect_stdout(stdout), redirect_stderr(stderr):
            try:
                main()
            except SystemExit as end:
                status = end.code or 0
        root.handlers[:] = handlers
        root.setLevel(level)
        torch.set_num_threads(threads)
    return Outcome(status if isinstance(status, int) else 1, stdout.getvalue(), stderr.getvalue())
