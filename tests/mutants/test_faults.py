"""The faults themselves: one line each, in code only; and what is declared about them is still true."""

from __future__ import annotations

import ast

import pytest

from tests.mutants.__main__ import ROOT
from tests.mutants.faults import faults
from tests.mutants.modules import EQUIVALENT, MODULES

SOURCE = '''"""A docstring with 1 < 2 and 3."""

LEAST: int = 3


def room(used: list[int], most: int = 5) -> int | None:
    """No 1."""
    assert most > 0, "not 1"
    if not used and most < LEAST:
        return None
    return max(most - sum(used[1:]), 0)
'''


def test_every_kind_of_expression_gets_its_faults() -> None:
    found = [(fault.line, fault.kind, fault.after) for fault in faults(SOURCE)]
    assert found == [
        (3, "constant", "LEAST: int = (2)"),
        (3, "constant", "LEAST: int = 4"),
        (6, "constant", "def room(used: list[int], most: int = (4)) -> int | None:"),
        (6, "constant", "def room(used: list[int], most: int = 6) -> int | None:"),
        (9, "and/or", "if (not used or most < LEAST):"),
        (9, "comparison turned", "if not used and (most >= LEAST):"),
        (9, "edge moved", "if not used and (most <= LEAST):"),
        (9, "not removed", "if (used) and most < LEAST:"),
        (11, "arithmetic", "return max((most + sum(used[1:])), 0)"),
        (11, "constant", "return max(most - sum(used[(0):]), 0)"),
        (11, "constant", "return max(most - sum(used[1:]), (-1))"),
        (11, "constant", "return max(most - sum(used[1:]), 1)"),
        (11, "constant", "return max(most - sum(used[2:]), 0)"),
        (11, "min for max", "return min(most - sum(used[1:]), 0)"),
        (11, "return changed", "return None"),
        (11, "slice bound", "return max(most - sum(used[1 + 1:]), 0)"),
    ]


@pytest.mark.slow
def test_every_fault_of_every_module_can_be_compiled() -> None:
    for module in MODULES:
        assert all((ROOT / path).exists() for path in module.tests), module
        found = faults((ROOT / module.path).read_text())
        assert len(found) > 10, module
        for fault in found[:: max(1, len(found) // 10)]:
            ast.parse(fault.source)


def test_what_is_declared_equivalent_is_still_there() -> None:
    for path, declared in EQUIVALENT.items():
        known = {(fault.before, fault.after) for fault in faults((ROOT / path).read_text())}
        assert declared.keys() <= known, path
