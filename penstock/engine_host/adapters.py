"""An operator's operations on an engine's adapters, carried out on the engine's thread.

Invariant: every operation is answered exactly once; a load is answered when the adapter is ready or has failed, which
may be many steps later.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from penstock.engine.adapters.spec import NO_ADAPTERS, AdapterSpec, AdapterStatus
from penstock.errors import PenstockError
from penstock.protocol.messages import AdapterOperation, AdapterResult, LoadAdapter, PinAdapter, UnloadAdapter

log = logging.getLogger("penstock.engine")


class AdapterControl(Protocol):
    """The part of an engine's adapter pool that operations use."""

    @property
    def revision(self) -> int:
        """Changes when `statuses` has news that gateways should hear soon."""
        ...

    def statuses(self) -> list[AdapterStatus]: ...

    def load(self, spec: AdapterSpec, done: Callable[[AdapterStatus], None]) -> None: ...

    def pin(self, name: str, pinned: bool) -> AdapterStatus: ...


class AdapterHost(Protocol):
    """An engine that may have adapters."""

    @property
    def adapters(self) -> AdapterControl | None: ...

    def unload_adapter(self, name: str) -> None: ...


def operate(host: AdapterHost, operation: AdapterOperation, reply: Callable[[AdapterResult], None]) -> None:
    """Carry out one operation."""
    id = operation.operation

    def loaded(status: AdapterStatus) -> None:
        reply(AdapterResult(id, status, status.error))

    adapters = host.adapters
    if adapters is None:
        reply(AdapterResult(id, error=NO_ADAPTERS))
        return
    try:
        match operation:
            case LoadAdapter(_, spec):
                adapters.load(spec, loaded)
            case UnloadAdapter(_, name):
                host.unload_adapter(name)
                reply(AdapterResult(id))
            case PinAdapter(_, name, pinned):
                reply(AdapterResult(id, adapters.pin(name, pinned)))
    except PenstockError as error:
        reply(AdapterResult(id, error=str(error)))
    except Exception as error:
        log.exception("an operation on adapters failed")
        reply(AdapterResult(id, error=f"the engine failed: {type(error).__name__}: {error}"))


class AdapterNews:
    """What gateways have not been told of adapters: at once when one was added, removed or changed, otherwise every
    `interval_s`."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._told: list[AdapterStatus] = []
        self._revision = -1
        self._at = float("-inf")

    def due(self, adapters: AdapterControl | None, now: float) -> list[AdapterStatus] | None:
        """All of them if gateways are to be told now, else None."""
        if adapters is None or (adapters.revision == self._revision and now - self._at < self._interval_s):
            return None
        found, told = adapters.statuses(), self._told
        self._revision, self._at, self._told = adapters.revision, now, found
        return found if found != told else None
