"""Reading all tests, which every worker does before its first. After a fresh checkout there is no bytecode: the first
worker writes it, and the others wait for it instead of compiling the same.
"""

from __future__ import annotations

import fcntl
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

__all__ = [
    "pytest_collection",
    "pytest_configure_node",
    "pytest_xdist_setupnodes",
]

FRESH = pytest.StashKey[bool]()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    folders = (Path(arg.partition("::")[0]) for arg in config.args)
    folders = (path if path.is_dir() else path.parent for path in folders)
    read = any(next(folder.rglob("__pycache__/test_*pytest*.pyc"), None) for folder in folders)
    config.stash[FRESH] = not read and not sys.dont_write_bytecode
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if config.stash[FRESH] and reporter is not None:
        reporter.write_line("reading all tests; the first time this takes a minute")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["fresh"] = node.config.stash[FRESH]


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    if not getattr(session.config, "workerinput", {}).get("fresh"):
        return (yield)
    with open(__file__) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # another is the first
            fcntl.flock(file, fcntl.LOCK_SH)
        return (yield)
