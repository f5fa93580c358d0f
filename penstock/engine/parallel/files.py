"""Files of KV blocks, or states, on several ranks: each has its part of every one of them, at the same places.

Where ranks have sequences of their own, a cache has the files of its shard only, on the ranks of all stages. Rank 0
decides about everything, also about caches of which it has no part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from penstock.engine.kv.block_file import BlockFile
from penstock.engine.kv.block_hash import DIGEST_SIZE
from penstock.engine.kv.block_index import Entry, new_epoch
from penstock.errors import ReplicaLost

if TYPE_CHECKING:
    from penstock.engine.parallel.launch import Ranks

_ANSWER_S = 60.0
Listed = tuple[int, bytes, npt.NDArray[np.int64]]
"""An epoch, the names of blocks end to end, and their places."""


class LeadFiles:
    """The `BlockStore` of several ranks. One file leads: what is not found there is not found."""

    def __init__(
        self, own: Sequence[BlockFile], ranks: Ranks, others: Sequence[int], kind: str, *, leads: bool = True
    ) -> None:
        """`own`: files in this process. `others`: the ranks that have one too. `kind`: what lies in the files. `leads`:
        whether it is the first of `own` that leads; else that of the first of the others."""
        self._own = list(own)
        self._ranks = ranks
        self._others = list(others)
        self._kind = kind
        self._leads = leads

    def write(self, pairs: list[tuple[int, int]], names: Sequence[bytes] = ()) -> list[Future[list[bool]]]:
        return [*self._call("write", pairs, names), *(file.write(pairs, names) for file in self._own)]

    def read(self, pairs: list[tuple[int, int]]) -> list[Future[list[bool]]]:
        return [*self._call("read", pairs), *(file.read(pairs) for file in self._own)]

    def erase(self, places: Sequence[int]) -> list[Future[list[bool]]]:
        return [*self._call("erase", list(places)), *(file.erase(places) for file in self._own)]

    def found(self) -> list[Entry]:
        """What the file that leads has, as far as all others have it too."""
        own, others = self._own, self._others
        if self._leads:
            listed = list_file(own[0])
            own = own[1:]
        else:
            listed = _await(self._ranks.call_some(others[:1], f"list_{self._kind}"))[0]
            others = others[1:]
        epoch, names, places = listed
        everywhere = np.ones(len(places), np.bool_)
        for answer in _await(self._ranks.call_some(others, f"confirm_{self._kind}", *listed)):
            everywhere &= answer
        for file in own:
            everywhere &= file.confirm(epoch, names, places)
        return [
            Entry(names[at * DIGEST_SIZE : (at + 1) * DIGEST_SIZE], place)
            for at, (place, kept) in enumerate(zip(places.tolist(), everywhere.tolist(), strict=True))
            if kept
        ]

    def forget(self) -> None:
        """For good in the file that leads; the others follow."""
        epoch = new_epoch()
        for file in self._own:
            file.forget(epoch)
        answers = self._call("forget", epoch)
        if not self._leads:
            _await(answers[:1])

    def reorder(self, places: Sequence[int]) -> None:
        if not self._leads:
            self._ranks.call_some(self._others[:1], f"reorder_{self._kind}", list(places))
        elif self._own[0].index is not None:
            self._own[0].index.reorder(places)

    def close(self) -> None:
        for file in self._own:
            file.close()

    def _call(self, name: str, *args: Any) -> list[Future[Any]]:
        return self._ranks.call_some(self._others, f"{name}_{self._kind}", *args)


def lead_files(own: BlockFile, ranks: Ranks, cache: int, kind: str, rows: Sequence[BlockFile] = ()) -> LeadFiles:
    """The files of a cache, of which rank 0 has `own` if it is the first; of the only one where all ranks share it.
    `rows`: further files of that cache in this process."""
    place = ranks.place
    if not place.data:
        return LeadFiles([own, *rows], ranks, range(1, place.world), kind)
    others = [rank for rank in range(cache, place.world, place.tensor) if rank]
    return LeadFiles([*rows] if cache else [own, *rows], ranks, others, kind, leads=cache == 0)


def list_file(file: BlockFile) -> Listed:
    """What is in a file from before, the least recently used first."""
    if file.index is None:
        return 0, b"", np.zeros(0, np.int64)
    entries = file.index.entries()
    places = np.array([place for _, place in entries], np.int64)
    return file.index.epoch, b"".join(name for name, _ in entries), places


def file_handlers(file: BlockFile, kind: str) -> dict[str, Callable[..., Any]]:
    """A worker rank's answers to calls about its file."""

    def reorder(places: list[int]) -> None:
        if file.index is not None:
            with suppress(OSError):
                file.index.reorder(places)

    calls: dict[str, Callable[..., Any]] = {
        "write": file.write,
        "read": file.read,
        "erase": file.erase,
        "list": lambda: list_file(file),
        "confirm": file.confirm,
        "forget": file.forget,
        "reorder": reorder,
    }
    return {f"{name}_{kind}": handler for name, handler in calls.items()}


def _await(answers: Sequence[Future[Any]]) -> list[Any]:
    try:
        return [answer.result(_ANSWER_S) for answer in answers]
    except TimeoutError as error:
        raise ReplicaLost(f"a rank did not say within {_ANSWER_S:g} s what it has on disk") from error
