"""Kernels on CUDA start while their predecessors end; each waits before it may return (see `kernels/common.py`)."""

from __future__ import annotations

import ast
from pathlib import Path

import penstock.engine.backends.cuda as cuda

ROOT = Path(cuda.__file__).parent
WAIT = {"wait_for_inputs", "gdc_wait"}
"""The second is what kernels in Gluon call."""


def calls(node: ast.AST) -> list[tuple[int, str]]:
    return [(n.lineno, n.func.id) for n in ast.walk(node) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]


def test_every_kernel_waits_before_it_returns() -> None:
    functions: dict[str, list[ast.FunctionDef]] = {}
    launched: set[tuple[Path, str]] = set()
    for path in sorted(ROOT.rglob("*.py")):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                functions.setdefault(node.name, []).append(node)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "launch":
                kernel, in_order = node.args[0], any(k.arg == "in_order" for k in node.keywords)
                if isinstance(kernel, ast.Name) and not in_order:
                    launched.add((path, kernel.id))
    assert len(launched) > 40
    waiting = {name for name, found in functions.items() for f in found if WAIT & {called for _, called in calls(f)}}
    for path, name in sorted(launched):
        own = [f for f in functions.get(name, []) if f.name == name]
        assert own, f"{path.name}: {name}"
        for function in own:
            waits = [line for line, called in calls(function) if called in WAIT | waiting - {name}]
            returns = [n.lineno for n in ast.walk(function) if isinstance(n, ast.Return)]
            assert waits, f"{path.name}: {name} does not wait for its inputs; launch it with in_order=True"
            assert not returns or min(waits) < min(returns), f"{path.name}: {name} returns before it waits"
