"""A program that a drill starts, kills and starts again. Its output is kept, and it ends with the drill."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from penstock.errors import PenstockError

_TAIL = 2000


class DrillError(PenstockError):
    """The drill itself cannot be held: something is missing, or does not start."""


@dataclass
class Program:
    """`group`: leads the process group that this one belongs to; by default it has a group of its own.

    It must be started from the main thread: the kernel ends it with the thread that started it."""

    name: str
    command: Sequence[str]
    folder: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    user: str | None = None
    group: Program | None = None
    process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    @property
    def pid(self) -> int:
        if self.process is None:
            raise DrillError(f"{self.name} is not running")
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self, memory: int | None = None) -> None:
        """`memory`: bytes of address space that it may have."""
        setpriv, prlimit = shutil.which("setpriv"), shutil.which("prlimit")
        command = [*([setpriv, "--pdeathsig", "KILL", "--"] if setpriv else []), *self.command]
        if memory is not None:
            if prlimit is None:
                raise DrillError("a limit on memory needs the program prlimit: apt-get install util-linux")
            command = [prlimit, f"--as={memory}", "--", *command]
        group = self.group.pid if self.group is not None and self.group.running else 0
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self.environment},
                process_group=group,
                user=self.user,
                extra_groups=None if self.user is None else [],
            )

    def signal(self, number: int) -> None:
        if self.running:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL to this process alone."""
        self.signal(signal.SIGKILL)
        if self.process is not None:
            self.process.wait()

    def kill_group(self) -> None:
        """SIGKILL to everything that it started, and to itself."""
        if self.process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stop(self, within: float = 30.0) -> None:
        """SIGTERM, and SIGKILL to the whole group if that is not enough."""
        if self.process is None:
            return
        self.signal(signal.SIGTERM)
        try:
            self.process.wait(within)
        except subprocess.TimeoutExpired:
            self.kill_group()

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-_TAIL:] if self.log.exists() else ""
