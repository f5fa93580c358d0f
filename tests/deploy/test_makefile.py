"""Installing with make. The interpreter here installs nothing: it writes down what it is asked for."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine_host.client import eventually

MAKEFILE = Path(__file__).parents[2] / "Makefile"
INSTALLED = ".venv/.installed-test"

PYTHON = f"""\
#!/bin/bash
case "$*" in
  "-m venv "*) mkdir -p "${{@: -1}}/bin"; cp "$0" "${{@: -1}}/bin/python" ;;
  *" install "*" -r "*) exec '{sys.executable}' wait.py ;;
  *" install "*) echo "${{@: -1}}" >>installs ;;
  -c*) exec '{sys.executable}' "$@" ;;
esac
"""

WAIT = """\
import os, sys, time
try:
    os.close(os.open(f"waiting-{os.getpid()}", os.O_CREAT))
    while os.path.exists("gate"):
        time.sleep(0.01)
except KeyboardInterrupt:
    sys.exit(1)  # as pip does
"""
"""The install of pinned packages, which takes as long as there is a file `gate`."""


@pytest.fixture
def clone(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "with space"
    folder.mkdir()
    shutil.copy(MAKEFILE, folder)
    (folder / "pyproject.toml").touch()
    (folder / "constraints.txt").write_text("numpy==2.0\njinja2==3.1\n")
    (folder / "wait.py").write_text(WAIT)
    (folder / "python3").write_text(PYTHON)
    (folder / "python3").chmod(0o755)
    yield folder
    (folder / "gate").unlink(missing_ok=True)


def make(clone: Path) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if "MAKE" not in name}

    def hear_ctrl_c() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # what a shell started in the background ignores it

    return subprocess.Popen(
        ["make", "PYTHON=./python3", INSTALLED], cwd=clone, env=environment, text=True, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, preexec_fn=hear_ctrl_c,
    )  # fmt: skip


def installs(clone: Path) -> int:
    """How often Penstock itself was installed, which comes last."""
    return (clone / "installs").read_text().splitlines().count(".[test]")


def test_ctrl_c_ends_an_install_and_the_next_one_completes_it(clone: Path) -> None:
    (clone / "gate").touch()
    running = make(clone)
    assert eventually(lambda: len(list(clone.glob("waiting-*"))) == 2)
    os.killpg(running.pid, signal.SIGINT)
    (clone / "gate").unlink()
    said, _ = running.communicate()  # whatever is left of it has ended, too
    assert running.returncode != 0, said
    assert installs(clone) == 0, said

    again = make(clone)
    said, _ = again.communicate()
    assert again.returncode == 0, said
    assert installs(clone) == 1


def test_of_two_makes_one_installs_and_the_other_uses_it(clone: Path) -> None:
    (clone / "gate").touch()
    first = make(clone)
    assert eventually(lambda: len(list(clone.glob("waiting-*"))) == 2)
    second = make(clone)
    assert second.stdout is not None
    assert any(line.startswith("Waiting for another make") for line in second.stdout)
    (clone / "gate").unlink()
    for running in (first, second):
        said, _ = running.communicate()
        assert running.returncode == 0, said
    assert installs(clone) == 1


def test_a_package_whose_install_was_interrupted_is_installed_again(clone: Path) -> None:
    packages = clone / ".venv/lib/python3.11/site-packages"
    for name in ("whole", "half"):
        (packages / f"{name}-1.dist-info").mkdir(parents=True)
        (packages / f"{name}-1.dist-info/METADATA").touch()
    (packages / "whole-1.dist-info/INSTALLER").touch()
    said, _ = make(clone).communicate()
    assert [path.name for path in packages.iterdir()] == ["whole-1.dist-info"], said


def test_an_environment_without_its_interpreter_is_filled_again(clone: Path) -> None:
    make(clone).communicate()
    (clone / ".venv/bin/python").unlink()
    (clone / ".venv/bin/python").symlink_to("gone")
    said, _ = make(clone).communicate()
    assert installs(clone) == 2, said
