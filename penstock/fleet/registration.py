"""An engine process that registers itself: a thread beside the engine's own, with an event loop for the registry.

The engine serves whether the registry answers or not: it is registered as soon as the registry is there.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

import msgspec

import penstock
from penstock.config.encoders import EncoderConfig
from penstock.config.fleet import FleetConfig
from penstock.config.models import ModelConfig
from penstock.config.variants import Variant
from penstock.engine.request import EngineInfo
from penstock.errors import ConfigError, PenstockError
from penstock.fleet.membership import advertised, described, listening, machine_name, open_registry, own_address
from penstock.fleet.records import EngineRecord
from penstock.fleet.redis_registry import RedisRegistry
from penstock.protocol.address import is_loopback
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


class FleetEngine:
    """An engine that a person, or another system than a supervisor, starts on a machine of a fleet."""

    def __init__(
        self, config: FleetConfig, secret: FleetSecret, model: ModelConfig | EncoderConfig, pool: str = ""
    ) -> None:
        self._config = config
        self._secret = secret
        self._model = model
        self._pool = pool
        self._registration: EngineRegistration | None = None

    def endpoint(self, given: str | None) -> str:
        """Where it listens; raises when others could not reach it there, or when this machine is not of the fleet."""
        if given is not None and not given.startswith("tcp://"):
            raise ConfigError(f"{given}: other machines of the fleet cannot reach it; give tcp://HOST:PORT, or nothing")
        address = own_address(self._config)
        if given is not None and is_loopback(given.rpartition(":")[0][6:]) and not is_loopback(address):
            raise ConfigError(
                f"{given}: gateways would look for it at {address}; give tcp://0.0.0.0:PORT, or set fleet.advertise"
            )
        check_fleet(self._config, self._secret)
        return given or listening(self._config)

    @contextmanager
    def serving(self, info: EngineInfo, endpoint: str, key: str) -> Iterator[None]:
        """Registered for as long as the block. `key`: its public key."""
        where = advertised(self._config, endpoint)
        record = EngineRecord(
            machine=machine_name(self._config),
            model=self._model.name,
            replica=where.rpartition(":")[2],
            endpoint=where,
            public_key=key,
            role=info.role,
            pool=self._pool,
            region=self._config.region,
            zone=self._config.zone,
            version=penstock.__version__,
            max_running=info.max_running,
            context_window=info.max_model_len,
            device=info.product or info.device,
            memory=info.weight_bytes + info.kv_bytes,
            startup_s=round(sum(info.startup.values()), 2),
            description=described(self._model),
            encoder=isinstance(self._model, EncoderConfig),
            variant=Variant(self._pool),
        )
        with EngineRegistration(self._config, self._secret, record) as self._registration:
            yield

    def draining(self) -> None:
        if self._registration is not None:
            self._registration.draining()


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
        registry = RedisRegistry(self._config.url, self._config.name, self._secret, lease_s=self._config.lease_s)
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
