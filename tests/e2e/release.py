"""The release before this one, from the repository's own history: its engines and gateways run beside this one's."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

import pytest

LAST_RELEASE = "9d481e39b96e73e5d56baac3d812be1afc7bd9cc"
"""The commit of the release before this one; with a new release, that of the one that was current."""
HERE = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Tree:
    """The code of one release."""

    name: str
    path: Path

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        environ = {**os.environ, "PYTHONPATH": str(self.path), "OMP_NUM_THREADS": "1"}
        return subprocess.Popen((sys.executable, "-m", "penstock", *arguments), cwd=self.path, env=environ)


def this_release() -> Tree:
    return Tree("new", HERE)


def last_release(folder: Path) -> Tree:
    """Unpacked into `folder`; the test is skipped where the history does not reach so far back."""
    packed = subprocess.run(("git", "archive", LAST_RELEASE, "penstock"), cwd=HERE, capture_output=True)
    if packed.returncode:
        pytest.skip(f"the last release ({LAST_RELEASE[:8]}) is not in this clone: {packed.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return Tree("old", folder)
