"""Erasures of what an owner's requests left in an engine's KV caches, carried out on the engine's thread.

Invariant: every one is answered exactly once, when nothing is left, which may be many steps later.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

from penstock.protocol.messages import Erased

log = logging.getLogger("penstock.engine")

NOT_NOW = "the model sleeps; wake it, then erase again"
REVIVING = "a rank of the engine is being started again; erase again when it is there"


class Erasure(Protocol):
    """See `penstock.engine.kv.erasure`."""

    blocks: int

    @property
    def failed(self) -> int: ...

    def advance(self) -> bool: ...


class Erasures:
    """Those that are under way."""

    def __init__(self) -> None:
        self._under_way: list[tuple[Erasure, str, Callable[[Erased], None]]] = []

    @property
    def open(self) -> bool:
        return bool(self._under_way)

    def begin(self, engine: Any, question: str, owner: str, reply: Callable[[Erased], None]) -> None:
        """`engine`: of any kind; one that has no KV cache has nothing to erase."""
        erase = getattr(engine, "erase", None)
        if erase is None:
            reply(Erased(question, error="" if hasattr(engine, "encode") else NOT_NOW))
            return
        if getattr(engine, "reviving", False):  # it can be asked nothing until then
            reply(Erased(question, error=REVIVING))
            return
        try:
            self._under_way.append((erase(owner), question, reply))
        except Exception as error:
            log.exception("KV blocks could not be erased")
            reply(Erased(question, error=f"the engine failed: {type(error).__name__}: {error}"))

    def advance(self) -> None:
        """Answer those that are over."""
        for entry in [entry for entry in self._under_way if entry[0].advance()]:
            self._under_way.remove(entry)
            erasure, question, reply = entry
            log.info("erased %d KV blocks of an owner; %d could not be overwritten", erasure.blocks, erasure.failed)
            reply(Erased(question, erasure.blocks, erasure.failed))
