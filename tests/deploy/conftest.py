import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gateway.conftest import serving, text

__all__ = ["serving", "text"]
ROOT = Path(__file__).parents[2]


def bare(**more: str) -> dict[str, str]:
    """An environment in which nothing points to this checkout."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")} | more


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `make wheel` does, from a copy, so that the checkout stays clean; or the one that $PENSTOCK_WHEEL names.
    Compiling the kernels takes minutes, and happens once: they are kept in the user's cache."""
    if given := os.environ.get("PENSTOCK_WHEEL"):
        return Path(given)
    if shutil.which("c++") is None:
        pytest.skip("needs a C++ compiler")
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    shutil.copytree(ROOT / "penstock", source / "penstock", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(target), str(source)]
    subprocess.run(command, env=bare(), check=True)
    (built,) = target.glob("*.whl")
    return built
