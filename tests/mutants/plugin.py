"""A pytest plugin that puts one faulty module in the place of the real one, for the tests of one process.

`install` must run before anything imports the module: the working tree is never touched, so a run that is killed leaves
nothing behind.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from hypothesis import Phase, settings


class _FaultyModule(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, name: str, path: Path, source: str) -> None:
        self._name = name
        self._path = path
        self._source = source

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        return importlib.util.spec_from_file_location(fullname, self._path, loader=self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self._source, str(self._path), "exec"), module.__dict__)


def install(name: str, path: Path, source: str) -> None:
    """From now on, `name` is imported from `source`."""
    assert name not in sys.modules, f"{name} was imported before its fault was installed"
    sys.meta_path.insert(0, _FaultyModule(name, path, source))


def pytest_configure() -> None:
    """Property tests as always, but repeatable, and without the search for a smaller example once one has failed."""
    phases = (Phase.explicit, Phase.generate)
    settings.register_profile("mutants", database=None, derandomize=True, phases=phases, deadline=None)
    settings.load_profile("mutants")
