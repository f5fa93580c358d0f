"""A clock that jumps and a disk that is slow, for the programs of a throw-away fleet alone: a small preloaded library,
compiled on the spot, that reads two numbers from a file."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

from penstock.fleet.drills.program import DrillError

_SOURCE = Path(__file__).with_name("fault_shim.c")


class Shim:
    """One control file per kind of program, so that clocks can differ between machines."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._library = folder / "fault_shim.so"
        compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        if compiler is None:
            raise DrillError("a clock jump and a slow disk need a C compiler: apt-get install gcc libc6-dev")
        command = [compiler, "-O1", "-shared", "-fPIC", "-o", str(self._library), str(_SOURCE), "-ldl"]
        made = subprocess.run(command, capture_output=True, text=True)
        if made.returncode:
            raise DrillError(f"{_SOURCE.name} does not compile: {made.stderr[-500:]}")
        self._library.chmod(0o755)

    def environment(self, kind: str) -> dict[str, str]:
        """For programs of this kind."""
        self._write(kind, 0, 0)
        return {"LD_PRELOAD": str(self._library), "PENSTOCK_FAULT_FILE": str(self._file(kind))}

    def set(self, kind: str, *, clock_s: float = 0.0, sync_s: float = 0.0) -> None:
        """`clock_s`: how far ahead the clock is; `sync_s`: how much longer a sync takes."""
        self._write(kind, round(clock_s * 1e9), round(sync_s * 1e6))

    def _file(self, kind: str) -> Path:
        return self._folder / f"{kind}.fault"

    def _write(self, kind: str, nanos: int, micros: int) -> None:
        file = self._file(kind)
        if not file.exists():
            file.write_bytes(bytes(16))
            file.chmod(0o644)
        with file.open("r+b") as control:  # in place: it is mapped
            control.write(struct.pack("=qq", nanos, micros))
