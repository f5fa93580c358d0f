"""Worker ranks as threads: the same code over the same sockets and collectives, without seconds of importing torch."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

from penstock.engine.core import Engine
from penstock.engine.parallel import launch, rank
from penstock.engine.parallel.child import connection_pair
from penstock.engine.parallel.handle import RankHandle
from penstock.engine.parallel.layout import Place
from tests.engine.harness import make_engine


class ThreadProcess:
    """The part of `subprocess.Popen` that `launch` uses."""

    stdin = None
    pid = 0
    linger_s = 0.0
    """How long it takes to exit after a failure."""

    def __init__(self, connection: Connection, link: Connection | None = None) -> None:
        self.returncode: int | None = None
        self._thread = threading.Thread(target=self._run, args=(connection, link), daemon=True)
        self._thread.start()

    def _run(self, connection: Connection, link: Connection | None) -> None:
        with connection, link or nullcontext():
            code = rank.run(connection, link)
        if code:
            time.sleep(self.linger_s)
        self.returncode = code

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise subprocess.TimeoutExpired("rank", timeout or 0.0)
        return self.returncode

    def kill(self) -> None:
        """A thread cannot be killed: it must leave by itself when its connection is closed."""
        self._thread.join(100.0)
        assert not self._thread.is_alive(), "the rank did not leave by itself"


def _spawn(place: Place, link: Connection | None = None) -> RankHandle:
    ours, theirs = connection_pair()
    process: Any = ThreadProcess(theirs, link)
    return RankHandle(place, process, ours)


@contextmanager
def threaded_engine(folder: Path, tensor: int, pipeline: int, **settings: Any) -> Iterator[Engine]:
    """An engine of `tensor` x `pipeline` ranks."""
    with patch.object(launch, "_spawn", _spawn):
        engine = make_engine(folder, threads=1, tensor_parallel=tensor, pipeline_parallel=pipeline, **settings)
    try:
        yield engine
    finally:
        engine.close()
