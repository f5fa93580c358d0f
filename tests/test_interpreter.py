"""No process of this program imports modules from the working directory."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import penstock
from penstock.interpreter import module

ROOT = Path(penstock.__file__).parent
STRAYS = ("redis", "httpx", "msgspec", "yaml", "zmq", "numpy", "torch", "typer", "rich", "json", "token", "random")


def stray_modules(folder: Path, names: tuple[str, ...] = STRAYS) -> Path:
    """Modules in `folder` that leave a file behind when they are imported, and fail."""
    for name in names:
        mark = f"pathlib.Path({str(folder)!r}, '{name}.imported').touch()"
        (folder / f"{name}.py").write_text(f"import pathlib\n{mark}\nraise SystemExit('stray {name}')\n")
    return folder


def imported(folder: Path) -> list[str]:
    return [path.stem for path in folder.glob("*.imported")]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT.parent), **more}


@pytest.mark.parametrize("command", [[sys.executable, "-m", "penstock"], module("penstock")])
def test_the_command_ignores_modules_of_the_working_directory(command: list[str], tmp_path: Path) -> None:
    stray_modules(tmp_path)
    done = subprocess.run(
        [*command, "--version"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "penstock" in done.stdout and imported(tmp_path) == []


def test_a_checkout_that_is_not_installed_finds_itself_but_last(tmp_path: Path) -> None:
    (tmp_path / "penstock").symlink_to(ROOT, target_is_directory=True)
    code = (
        "import sys, os; from penstock.interpreter import leave_working_directory as leave;"
        "assert sys.path[0] == ''; leave(); print(sys.path[-1], os.environ['PYTHONPATH'])"
    )
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-S", "-c", code]  # without site-packages
    done = subprocess.run(command, cwd=tmp_path, env=clean, capture_output=True, text=True)
    assert done.stdout.split() == [str(tmp_path), str(tmp_path)], done.stderr


def test_every_child_is_started_on_a_safe_path() -> None:
    """Python is started by `penstock.interpreter` alone, or runs a script by its path."""
    bare = re.compile(r"sys\.executable,\s*\"-[mc]\"")
    assert [str(path) for path in ROOT.rglob("*.py") if bare.search(path.read_text())] == []
