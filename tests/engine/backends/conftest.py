"""Kernels of the plain C++ set, which most CPUs would not choose, are compiled for slow tests alone: with fewer
optimizations, in half the time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import pytest

from penstock.engine.backends import cpu
from penstock.engine.backends.cpu import build


@pytest.fixture(scope="package", autouse=True)
def quickly_compiled_generic_set() -> Iterator[None]:
    """As it is shipped, it is compiled in test_cpu_shipped.py."""
    if cpu.status().isa == "generic":
        yield
        return
    first, *others = build.instruction_sets()
    assert first.name == "generic"
    quick = replace(first, flags=(*first.flags, "-O1"))
    with mock.patch.dict(build._SETS, {build._machine(): (quick, *others)}):
        yield
