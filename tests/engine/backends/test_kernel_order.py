"""Kernels on CUDA start while their predecessors end; each waits before it may return (see `kernels/common.py`)."""

from __future__ import annotations

import ast
from pathlib import Path

import penstock.engine.backends.cuda as cuda

ROOT = Path(cuda.__file__).parent
WAIT = {"wait_for_inputs", "gdc_wait"}
"""The second is what kernels in Gluon call."""
WEIGHTS = {"weight", "shared", "words", "exponents", "scale", "bias", "norm", "q_norm", "k_norm", "cos_sin", "conv",
           "decay", "dt_bias", "skip", "columns", "taps", "rates", "offsets", "logarithms"}  # fmt: skip
STEP = {"positions", "slots", "rows", "context", "first", "last", "reads", "writes", "starts"}
ADAPTERS = {"bank", "a", "b", "ranks", "delta_ranks", "tile_ranks", "tile_slots", "tile_tokens", "held"}
"""Constants, and tables that are made by launches that nothing overtakes."""
EARLIER = {"ring", "k_cache", "v_cache"}
"""What earlier steps left; of caches addresses only."""
GUESSES = {("_down_kernel", "chosen")}


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


def test_no_kernel_reads_what_its_step_writes_before_it_waits() -> None:
    """By the names of pointers in loads, and in calls of other functions, above the first wait."""
    functions = [
        (path.name, node)
        for path in sorted(ROOT.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    ]
    waits = {node.name: [line for line, called in calls(node) if called in WAIT] for _, node in functions}
    helpers = {node.name for _, node in functions if not waits[node.name]}
    found = 0
    for path, function in functions:
        lines = [line for line, called in calls(function) if called in WAIT]
        if not lines or not any(each.arg.endswith("_ptr") for each in function.args.args):
            continue
        for call in (node for node in ast.walk(function) if isinstance(node, ast.Call) and node.lineno < min(lines)):
            name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            if name != "load" and name not in helpers:
                continue
            read = {
                n.id.removesuffix("_ptr")
                for a in call.args
                for n in ast.walk(a)
                if isinstance(n, ast.Name) and n.id.endswith("_ptr")
            }
            found += len(read)
            early = (
                read - WEIGHTS - STEP - ADAPTERS - EARLIER - {it for kernel, it in GUESSES if kernel == function.name}
            )
            assert not early, f"{path}:{call.lineno}: {function.name} reads {early} before it waits"
    assert found > 40
