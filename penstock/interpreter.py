"""How this program starts Python: never with the working directory on the module path.

`python -m` looks for modules in the working directory first, so a stray `redis.py` there would be run in place of the
library. Every child process is started with `python -P`, and `python -m penstock` takes the directory off its own path
before it imports anything else.
"""

from __future__ import annotations

import os
import sys


def python(*arguments: str) -> list[str]:
    """The command that runs this interpreter with `arguments`, on a safe path."""
    return [sys.executable, "-P", *arguments]


def module(name: str, *arguments: str) -> list[str]:
    """The command that runs a module."""
    return python("-m", name, *arguments)


def leave_working_directory() -> None:
    """Take the working directory off the module path, where `python -m` has put it. A checkout that is not installed
    stays importable, here and in children, but last: what is installed goes before its files."""
    if sys.flags.safe_path or not sys.path or os.path.realpath(sys.path[0] or ".") != os.path.realpath("."):
        return
    del sys.path[0]
    if not any(finder.find_spec("penstock", None) for finder in sys.meta_path):
        root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        sys.path.append(root)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), root)))
