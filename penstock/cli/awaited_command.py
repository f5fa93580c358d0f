"""The engine process that waits for its command line (`supervisor.early_engine`): it imports meanwhile.

Invariant: once it has its command line, it is an engine process like any other, also in what the system shows of it.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import select
import sys
import time

from penstock.engine.process import EXIT_ORPHANED, count_wait, end_with_parent

_IMPORTS = (
    "penstock.cli.app",
    "penstock.cli.engine",
    "penstock.cli.terminal",
    "penstock.config",
    "penstock.supervisor.status",
    "penstock.sources.adapters",
    "penstock.engine_host.process",
)
_PATIENCE_S = 1.0
"""A supervisor that takes longer downloads a model, or resolves names: so long that PyTorch can be imported."""


def await_command() -> None:
    """Return when `sys.argv` is the command line of an engine."""
    from penstock.engine_host.head_start import begin_libraries

    end_with_parent()
    begin_libraries()
    for name in _IMPORTS:
        importlib.import_module(name)
    began = time.monotonic()
    if not select.select([0], [], [], _PATIENCE_S)[0]:
        importlib.import_module("penstock.engine.core")
    words: list[str] = json.loads(_read_line())
    count_wait(time.monotonic() - began)
    show_command(words)
    sys.argv = [sys.argv[0], *words[words.index("engine") :]]


def _read_line() -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        piece = os.read(0, 65536)
        if not piece:
            os._exit(EXIT_ORPHANED)
        line += piece
    return line


def show_command(words: list[str]) -> None:
    """Have the system show this command line in place of the one the process was started with, if there is room.
    Nothing is written where the system's account of that place is not right to the byte."""
    try:
        with open("/proc/self/stat") as stat:
            fields = stat.read().rpartition(")")[2].split()
        begin, end = int(fields[45]), int(fields[46])
        with open("/proc/self/cmdline", "rb") as file:
            before = file.read()
    except (OSError, ValueError, IndexError):
        return
    shown = b"\0".join(map(os.fsencode, words)) + b"\0"
    own = b"\0".join(map(os.fsencode, sys.orig_argv)) + b"\0"
    if begin and before == own and len(shown) <= len(own) == end - begin:
        ctypes.memmove(begin, shown.ljust(len(own), b"\0"), len(own))
