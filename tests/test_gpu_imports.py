"""What the tests of kernels import: machines with a GPU have what the engine needs, and nothing of gateways."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
GPU = ROOT / "tests" / "gpu"
THERE = {"torch", "triton", "numpy", "safetensors", "tokenizers", "transformers", "pytest", "yaml"}
"""YAML comes with transformers."""


def _optional(node: ast.AST) -> bool:
    """A block whose imports may fail or are for the type checker."""
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.dump(node.test)
    return isinstance(node, ast.Try) and any("ImportError" in ast.dump(handler) for handler in node.handlers)


def _imports(tree: ast.AST, inside_functions: bool) -> Iterator[str]:
    """Modules, and names that may be modules."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None and node.level == 0
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif (
            not _optional(node)
            and (inside_functions or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
            and not isinstance(node, ast.expr)
        ):
            yield from _imports(node, inside_functions)


@cache
def _file(module: str) -> Path | None:
    """Of this repository; a module of the GPU tests is imported by its bare name."""
    path = ROOT.joinpath(*module.split("."))
    found = (path.with_suffix(".py"), path / "__init__.py", GPU / f"{module}.py")
    return next((file for file in found if file.is_file()), None)


@cache
def _needs(file: Path) -> frozenset[str]:
    tree = ast.parse(file.read_text())
    return frozenset(_imports(tree, inside_functions=file.is_relative_to(ROOT / "tests")))


def _missing(*files: Path) -> dict[str, str]:
    """Libraries that `files` need and a machine with a GPU may not have: through which imports."""
    missing: dict[str, str] = {}
    seen, left = set(files), [(file, file.name) for file in files]
    while left:
        at, way = left.pop()
        for module in sorted(_needs(at)):
            top = module.partition(".")[0]
            packages = [".".join(module.split(".")[:n]) for n in range(1, module.count(".") + 2)]
            own = [found for name in packages if (found := _file(name)) is not None]
            if not own and top not in THERE | sys.stdlib_module_names and not (ROOT / top).is_dir():
                missing.setdefault(top, way)
            for found in own:
                if found not in seen:
                    seen.add(found)
                    left.append((found, f"{way} > {found.relative_to(ROOT)}"))
    return missing


def test_they_need_what_the_engine_needs() -> None:
    """Also inside functions, which run.py calls when all modules are there."""
    assert _missing(*sorted(GPU.glob("*.py"))) == {}


def test_a_library_of_the_gateway_is_found_behind_other_modules(tmp_path: Path) -> None:
    file = tmp_path / "case.py"
    file.write_text("from penstock.backends.errors import error_of")
    assert _missing(file)["msgspec"].startswith("case.py > penstock/backends/errors.py")
