"""The registry in Redis or Valkey: how the machines of a fleet find each other.

Records are signed with the fleet's secret; one whose signature is wrong is ignored and named in the log. A follower
hears of changes by publish/subscribe and looks every `POLL_S` besides. While Redis is away, everybody goes on with what
was last known. A Redis that comes back empty is filled again by those who published, and meanwhile what was known
before is still believed for one lease.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from penstock.errors import ConfigError, PenstockError
from penstock.fleet import scripts
from penstock.fleet.records import Assignment, LoadRecord, Record, decode, encode, key
from penstock.fleet.registry import Fleet, OutOfTerm, RegistryUnavailable
from penstock.protocol.fleet_secret import FleetSecret
from penstock.storage.redis import RedisCalls, RedisUnavailable, connect

POLL_S = 1.0
"""How often a follower looks without being told of a change."""
RETRY_S = 0.5
"""How often Redis is tried while it is away."""
SLACK_S = 1.0
"""How long a lease that has run out is still honoured: its owner may be on its way back to Redis too."""
MOST = 20_000
LARGEST = 256 * 2**10
"""Bytes of one record."""
SIGNATURE = 32
CONNECTIONS = 4

log = logging.getLogger("penstock.fleet")


class RedisRegistry:
    """One process's connection to the registry of a fleet."""

    def __init__(self, url: str, name: str, secret: FleetSecret, *, lease_s: float = 10.0) -> None:
        self._url = url
        self._name = name
        self._secret = secret
        self._lease_s = lease_s
        self._redis = connect(url, "fleet.url", CONNECTIONS + 1)  # one listens
        self._calls = RedisCalls(CONNECTIONS, lambda: RETRY_S)
        self._keys = [f"{{penstock:fleet:{name}}}:{part}" for part in ("state", "records", "loads", "leases")]
        self._me = uuid.uuid4().hex
        self._own: dict[str, Record] = {}
        """What this process keeps alive."""
        self._leads = ""
        self._id = ""
        """Of the registry's data; another one: Redis has lost what it had."""
        self._version = self._load_version = "0"
        self._blobs: dict[str, tuple[bytes, Record | None]] = {}
        self._loads: dict[str, tuple[bytes, Record | None]] = {}
        self._remembered: dict[str, Record] = {}
        """What was known before Redis lost its data, until `_remember_until`."""
        self._remember_until = 0.0
        self._wishes: list[Record] = []
        """What lasts and is still to be put back."""
        self._controller, self._term = "", 0
        self._fleet: Fleet | None = None
        self._changes = 0
        self._changed = asyncio.Condition()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._complained: set[str] = set()
        self._closed = False
        self.problem = ""
        """Why it did not answer when it last did not."""

    @property
    def fleet(self) -> Fleet:
        """The newest that is known."""
        return self._fleet or Fleet()

    @property
    def available(self) -> bool:
        return self._calls.up

    @property
    def address(self) -> str:
        """Where it is, without its password."""
        return _public(self._url)

    async def check(self) -> None:
        """Raises `ConfigError` when this machine's secret is not the fleet's. Nothing is known while Redis is away."""
        with suppress(RegistryUnavailable):
            await self._read()

    async def publish(self, *records: Record) -> None:
        for record in records:
            if not record.lasting:
                self._own[key(record)] = record
        if self._own:
            self._start("leases", self._renew())
        try:
            await self._write([("" if record.lasting else "leased", record) for record in records])
        except RegistryUnavailable:
            if any(record.lasting for record in records):
                raise

    async def withdraw(self, *records: Record) -> None:
        names = [key(record) for record in records]
        for name in names:
            self._own.pop(name, None)
        try:
            await self._run(scripts.WITHDRAW, *names)
        except RegistryUnavailable:
            if any(record.lasting for record in records):
                raise

    async def follow(self) -> AsyncIterator[Fleet]:
        self._start("follower", self._watch())
        seen = -1
        while not self._closed:
            async with self._changed:
                while not self._closed and (self._fleet is None or self._changes == seen):
                    await self._changed.wait()
                seen, fleet = self._changes, self._fleet
            if fleet is not None and not self._closed:
                yield fleet

    async def lead(self, holder: str) -> int | None:
        try:
            await self._known()
            term = int(await self._run(scripts.LEAD, f"{holder} {self._me}", holder))
        except RegistryUnavailable:
            return None  # nobody can be sure to lead
        self._leads = f"{holder} {self._me}" if term else ""
        return term or None

    async def close(self) -> None:
        self._closed = True
        running = set(self._tasks.values())
        while running:  # a cancellation that meets the driver's own time limit is lost there
            for task in running:
                task.cancel()
            _, running = await asyncio.wait(running, timeout=0.1)
        with suppress(RegistryUnavailable, TimeoutError):
            async with asyncio.timeout(2.0):
                if self._own:
                    await self._run(scripts.WITHDRAW, *self._own)
                if self._leads:
                    await self._run(scripts.RESIGN, self._leads)
        async with self._changed:
            self._changed.notify_all()
        with suppress(Exception):
            await self._redis.aclose()

    def _start(self, name: str, work: Any) -> None:
        if name in self._tasks or self._closed:
            work.close()
        else:
            self._tasks[name] = asyncio.create_task(work, name=f"fleet {name}")

    async def _run(self, script: str, *arguments: str | bytes) -> Any:
        lease = int(1000 * self._lease_s)
        quiet = max(lease // 2, int(3000 * POLL_S))
        common = (self._me, self._mark(), lease, quiet, int(1000 * SLACK_S))
        try:
            return await self._calls.call(
                lambda: self._redis.eval(script, len(self._keys), *self._keys, *common, *arguments)
            )
        except RedisUnavailable as error:
            if error.first:
                self.problem = str(error)
                log.warning(
                    "the fleet's registry does not answer; going on with what was last known",
                    extra={"url": _public(self._url), "why": str(error)},
                )
            raise RegistryUnavailable(f"the fleet's registry does not answer: {error}") from error

    async def _known(self) -> str:
        """The id of the registry's data, whose mark was checked."""
        if not self._id:
            await self._read()
        return self._id

    async def _write(self, records: Iterable[tuple[str, Record]]) -> None:
        """Writes records of these kinds (empty: as they are)."""
        fields: list[str | bytes] = []
        term = 0
        for kind, record in records:
            term = max(term, record.term if isinstance(record, Assignment) else 0)
            if isinstance(record, LoadRecord):
                kind = "load"
            payload = encode(record)
            if len(payload) > LARGEST:
                raise PenstockError(f"{key(record)}: a record of {len(payload)} bytes is too large for the registry")
            fields += [kind or "lasting", key(record), self._sign(payload) + payload]
        for _ in range(3):  # Redis may lose its data in between
            known = await self._known()
            answer = await self._run(scripts.PUBLISH, known, str(term), str(MOST), *fields)
            if answer == b"term":
                raise OutOfTerm("another controller has been elected")
            if answer == b"full":
                raise PenstockError(f"the registry holds {MOST} records already")
            if answer == b"ok":
                return
            self._id = ""
        raise RegistryUnavailable("the registry's data keeps changing")

    async def _renew(self) -> None:
        """Keeps what this process published alive; publishes what is missing."""
        while not self._closed:
            await asyncio.sleep(self._lease_s / 3 if self._calls.up else RETRY_S)
            try:
                missing = await self._run(scripts.RENEW, *self._own) if self._own else []
                names = [name.decode() for name in missing]
                if names:
                    log.info("registering again", extra={"records": names})
                    await self._write([("leased", self._own[name]) for name in names if name in self._own])
            except RegistryUnavailable:
                continue
            except PenstockError as error:
                self._complain("renew", str(error), "this process is not registered in the fleet")

    async def _watch(self) -> None:
        """Reads the fleet whenever it changes, and now and then."""
        while not self._closed:
            try:
                await self._listen()
            except RegistryUnavailable:
                pass
            except PenstockError as error:
                self._complain("watch", str(error), "the fleet cannot be followed")
            except Exception as error:  # a broken subscription, in whatever way the driver says so
                self._complain("watch", f"{type(error).__name__}: {error}", "the subscription to the registry broke")
            await self._forget()
            await asyncio.sleep(RETRY_S)

    async def _listen(self) -> None:
        await self._read()
        client = self._redis.pubsub(ignore_subscribe_messages=True)
        try:
            await client.subscribe(self._keys[0])
            while not self._closed:
                await self._read()
                await client.get_message(timeout=POLL_S)
        finally:
            with suppress(Exception):
                await client.aclose()

    async def _read(self) -> None:
        known = f"{self._id} {self._version}"
        found = await self._run(scripts.READ, known, self._load_version, self._controller)
        data, mark, controller, term, version, load = (bytes(part).decode("latin-1") for part in found[:6])
        if data != self._id:
            await self._check_mark(mark)
            self._restore(data)
        await self._put_back()
        records, loads = found[6], found[7]
        changed = records is not None or loads is not None or self._fleet is None
        if records is not None:
            self._blobs = self._decoded(_pairs(records), self._blobs)
        if loads is not None:
            self._loads = self._decoded(_pairs(loads), self._loads)
        self._version, self._load_version = version, load
        self._controller, self._term = controller, int(term)
        if changed:
            await self._announce()
        else:
            await self._forget()

    def _restore(self, data: str) -> None:
        """Redis has lost its data, or this is the first look: believe what was known, and have what lasts put back."""
        lost = {name: record for name, (_, record) in self._blobs.items() if record is not None}
        first = not self._id
        self._id, self._version, self._load_version = data, "", ""
        if lost and (not first or self._fleet is not None):
            log.warning("the fleet's registry has lost its data; it is filled again", extra={"url": _public(self._url)})
            self._remembered = lost
            self._remember_until = time.monotonic() + self._lease_s + SLACK_S
            # Assignments are the controller's, who may be another by now; without one, machines keep what they run.
            self._wishes = [record for record in lost.values() if record.lasting and not isinstance(record, Assignment)]

    async def _put_back(self) -> None:
        """Tried at every look until it has succeeded."""
        wishes = self._wishes
        if wishes:
            await self._write([("restored", record) for record in wishes])
            if self._wishes is wishes:
                self._wishes = []

    async def _forget(self) -> None:
        if self._remembered and time.monotonic() > self._remember_until and self._calls.up:
            self._remembered = {}
            await self._announce()

    async def _announce(self) -> None:
        found = [record for _, record in (*self._blobs.values(), *self._loads.values()) if record is not None]
        present = {key(record) for record in found}
        found += [record for name, record in self._remembered.items() if name not in present]
        self._fleet = Fleet.of(found, self._controller, self._term)
        async with self._changed:
            self._changes += 1
            self._changed.notify_all()

    def _decoded(
        self, found: Mapping[str, bytes], known: Mapping[str, tuple[bytes, Record | None]]
    ) -> dict[str, tuple[bytes, Record | None]]:
        decoded = {}
        for name, blob in found.items():
            before = known.get(name)
            decoded[name] = before if before is not None and before[0] == blob else (blob, self._open(name, blob))
        return decoded

    def _open(self, name: str, blob: bytes) -> Record | None:
        signature, payload = blob[:SIGNATURE], blob[SIGNATURE:]
        if not self._secret.verify(self._signed(payload), signature):
            self._complain(name, f"{name}: not signed with this fleet's secret; its machine has another one, or none")
            return None
        try:
            record: Record = decode(payload)
        except msgspec.MsgspecError as error:  # of a version that is too new
            self._complain(name, f"{name}: cannot be read: {error}")
            return None
        if key(record) != name:
            self._complain(name, f"{name}: is a record of something else")
            return None
        return record

    def _sign(self, payload: bytes) -> bytes:
        return self._secret.sign(self._signed(payload))

    def _signed(self, payload: bytes) -> bytes:
        return f"{self._name}\0".encode() + payload

    def _mark(self) -> str:
        """Shows the fleet's secret without telling it."""
        return self._sign(b"mark").hex()

    async def _check_mark(self, mark: str) -> None:
        if mark == self._mark():
            return
        if not self._secret.verify(self._signed(b"mark"), bytes.fromhex(mark)):
            raise ConfigError(
                f"the fleet `{self._name}` at {_public(self._url)} has another secret than this machine: copy the "
                "file of fleet.secret_file from a machine of the fleet, or choose another fleet.name"
            )
        # An older secret of this fleet, which others will know no longer once it has been changed everywhere.
        await self._run(scripts.MARK, self._mark())

    def _complain(self, about: str, problem: str, what: str = "a record of the fleet's registry is not used") -> None:
        if (about + problem) not in self._complained and len(self._complained) < 10_000:
            self._complained.add(about + problem)
            log.error(what, extra={"why": problem})


def _pairs(found: list[bytes]) -> dict[str, bytes]:
    return {found[at].decode("utf-8", "replace"): found[at + 1] for at in range(0, len(found), 2)}


def _public(url: str) -> str:
    """Without its password."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"
