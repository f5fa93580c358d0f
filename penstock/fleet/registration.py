"""An engine process that registers itself: a thread beside the engine's own, with an event loop for the registry.

The engine serves whether the registry answers or not: it is registered as soon as the registry is there.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from types import TracebackType

import msgspec

from penstock.config.fleet import FleetConfig
from penstock.errors import PenstockError
from penstock.fleet.membership import open_registry
from penstock.fleet.records import EngineRecord
from penstock.fleet.redis_registry import RedisRegistry
from penstock.protocol.fleet_secret import FleetSecret

RETRY_S = 5.0
"""How often registering is tried again after it was refused."""
CLOSE_S = 5.0

log = logging.getLogger("penstock.fleet")


def check_fleet(config: FleetConfig, secret: FleetSecret) -> None:
    """Raises when this machine is not of the fleet, before anything is loaded."""

    async def check() -> None:
        registry = await open_registry(config, secret, required=False)
        await registry.close()

    asyncio.run(check())


class EngineRegistration:
    """The record of one engine in the registry, for as long as the block."""

    def __init__(self, config: FleetConfig, secret: FleetSecret, record: EngineRecord) -> None:
        self._config = config
        self._secret = secret
        self._record = record
        self._loop = asyncio.new_event_loop()
        self._changed = asyncio.Event()
        self._over = False
        self._thread = threading.Thread(target=self._run, name="fleet registration", daemon=True)

    def __enter__(self) -> EngineRegistration:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over = True
        self._tell()
        self._thread.join(CLOSE_S)

    def draining(self) -> None:
        """It takes nothing new from now on; safe from a signal handler."""
        self._record = msgspec.structs.replace(self._record, state="draining")
        self._tell()

    def _tell(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._changed.set)
        except RuntimeError:  # it has ended
            return

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._keep())
        except Exception:
            log.exception("the registration in the fleet failed")
        finally:
            self._loop.close()

    async def _keep(self) -> None:
        registry = RedisRegistry(
            self._config.url, self._config.name, self._secret, lease_s=self._config.lease_s
        )
        try:
            while not self._over:
                self._changed.clear()
                await self._publish(registry)
                await self._changed.wait()
        finally:
            await registry.close()

    async def _publish(self, registry: RedisRegistry) -> None:
        while not self._over:
            record = self._record
            try:
                await registry.publish(record)
            except PenstockError as error:
                log.error("the engine is not registered in the fleet", extra={"why": str(error)})
                await asyncio.sleep(RETRY_S)
            else:
                about = {"engine": record.id, "endpoint": record.endpoint, "state": record.state}
                log.info("registered in the fleet" if registry.available else "waiting for the registry", extra=about)
                return
