"""Imports: what must stay light, stays light. (`lint-imports` checks that layers point downward.)"""

import subprocess
import sys

import pytest


def imported_by(module: str) -> set[str]:
    """Top-level packages that are loaded after importing `module` in a fresh interpreter."""
    code = f"import sys, {module}; print(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


@pytest.mark.parametrize(
    "module",
    ["penstock.gateway.process.main", "penstock.supervisor.supervisor", "penstock.cli.app", "penstock.bench.serve"],
)
def test_only_engines_import_torch(module: str) -> None:
    loaded = imported_by(module)
    assert "penstock" in loaded
    assert not loaded & {"torch", "triton", "transformers"}


def test_the_command_line_starts_without_the_libraries_that_fetch_models() -> None:
    assert not imported_by("penstock.cli.app, penstock.sources.resolve") & {"huggingface_hub", "obstore"}


def test_the_engine_imports_neither_web_nor_text_libraries() -> None:
    loaded = imported_by("penstock.engine.core")
    assert "torch" in loaded
    assert not loaded & {"fastapi", "httptools", "httpx", "zmq", "msgspec", "tokenizers", "typer", "yaml"}


def test_nothing_needs_transformers() -> None:
    assert "transformers" not in imported_by("penstock.bench.compare")
