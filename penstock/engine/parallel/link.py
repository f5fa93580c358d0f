"""Tensors between ranks on different machines: messages over a connection that someone else encrypts and routes.

Every rank of an engine that spans machines has one connection for this, to a switch on its own machine (`engine_host`);
a message says which rank it is for. Messages from one rank arrive in order; those that nobody has asked for yet wait
here, so that the connection is always read and no two ranks block each other by sending at the same time.

Where ranks outlive one that is lost (`rank_restarts`), the switch sends `interruption` to all of them: whoever waits is
told. After that nothing is received until the rank has met the others again, as the next generation.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import deque
from collections.abc import Collection
from multiprocessing.connection import Connection

HEADER = struct.Struct("<iii")
"""Before each message: the rank it is for, the rank it is from, and the group it belongs to."""
_INTERRUPTED = -1
"""In place of a group."""
_GENERATION = struct.Struct("<i")


def interruption(rank: int, generation: int) -> bytes:
    """Tells `rank` that one of its generation is gone."""
    return HEADER.pack(rank, rank, _INTERRUPTED) + _GENERATION.pack(generation)


class Link:
    """One rank's messages to and from the others."""

    def __init__(self, connection: Connection, rank: int, generation: int = 0) -> None:
        self.rank = rank
        self.generation = generation
        self._interrupted = -1
        """The last generation that was."""
        self._connection = connection
        self._sends = threading.Lock()
        self._arrived = threading.Condition()
        self._messages: dict[tuple[int, int], deque[bytes]] = {}
        self._lost = False
        threading.Thread(target=self._read, name=f"link of rank {rank}", daemon=True).start()

    def send(self, to: int, group: int, data: bytes) -> None:
        with self._sends:
            self._connection.send_bytes(HEADER.pack(to, self.rank, group) + data)

    def receive(self, source: int, group: int, timeout_s: float) -> bytes:
        """The next message of `source`; TimeoutError when none comes in time, ConnectionError when none ever will."""
        key = source, group
        deadline = time.monotonic() + timeout_s
        with self._arrived:
            while not self._messages.get(key):
                if self._lost:
                    raise ConnectionError("the link to the other machines is closed")
                if self._interrupted >= self.generation:
                    raise ConnectionError("another rank is gone")
                left = deadline - time.monotonic()
                if left <= 0 or (not self._arrived.wait(left) and not self._messages.get(key)):
                    raise TimeoutError(f"rank {source} has sent nothing for {timeout_s:g} s")
            return self._messages[key].popleft()

    def renew(self, generation: int, groups: Collection[int]) -> None:
        """All ranks are there again. What came for the groups of the generation before is forgotten."""
        with self._arrived:
            self.generation = generation
            for key in [key for key in self._messages if key[1] in groups]:
                del self._messages[key]

    def close(self) -> None:
        self._connection.close()

    def _read(self) -> None:
        try:
            while True:
                message = self._connection.recv_bytes()
                _, source, group = HEADER.unpack_from(message)
                with self._arrived:
                    if group == _INTERRUPTED:
                        (generation,) = _GENERATION.unpack_from(message, HEADER.size)
                        self._interrupted = max(self._interrupted, generation)
                    else:
                        self._messages.setdefault((source, group), deque()).append(message[HEADER.size :])
                    self._arrived.notify_all()
        except (EOFError, OSError, TypeError):  # closed by the switch, or here (which makes its handle None)
            with self._arrived:
                self._lost = True
                self._arrived.notify_all()
