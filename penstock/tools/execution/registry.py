"""All tool servers, and the functions that a request may offer its model.

A tenant may use the servers that name it, and those that name nobody, as far as its access allows. Servers from the
configuration are fixed; those in the store are read again on use after `fresh_s`, so that all gateways soon agree.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.config.context import ToolServerConfig
from penstock.engine.grammar.interface import GrammarError
from penstock.errors import ConfigError
from penstock.identity.access import Access
from penstock.identity.labels import Demand, Requirement
from penstock.storage import DatabaseError
from penstock.text import grammars
from penstock.tools.execution.addresses import Addresses
from penstock.tools.execution.base import Function, Outcome, ToolError, ToolServer
from penstock.tools.execution.specs import ToolSpec, ToolSpecStore, of_config, server_of

log = logging.getLogger(__name__)

MOST_OFFERS = 128


@dataclass(frozen=True, slots=True)
class Offer:
    """A function offered to the model in a request."""

    name: str
    """Its name for the model: the function's own, prefixed with the server's name in case of a clash."""
    server: str
    function: Function
    strict: bool
    """Whether the schema can be enforced by a grammar."""

    @property
    def full_name(self) -> str:
        return f"{self.server}.{self.function.name}"


@dataclass(slots=True)
class _Registered:
    spec: ToolSpec
    server: ToolServer
    stored: bool

    def open_to(self, access: Access) -> bool:
        """Whether the server exists for a caller: all of it, or some of its functions."""
        if self.spec.tenants and access.tenant not in self.spec.tenants:
            return False
        return access.allows_part("tool", self.spec.name)

    def allows(self, function: str) -> bool:
        return not self.spec.allow or function in self.spec.allow

    async def functions(self, access: Access) -> tuple[Function, ...]:
        """Those that exist for a caller."""
        return tuple(
            function
            for function in await self.server.functions()
            if self.allows(function.name)
            and access.allows("tool", f"{self.spec.name}.{function.name}", aliases=(self.spec.name,))
        )


class ToolRegistry:
    """One per gateway process."""

    def __init__(
        self,
        servers: Sequence[ToolServerConfig] = (),
        store: ToolSpecStore | None = None,
        *,
        networks: Sequence[str] = (),
        fresh_s: float = 5.0,
    ) -> None:
        """`networks`: private networks that tools may reach."""
        self.store = store
        self.addresses = Addresses(networks)
        self._fresh_s = fresh_s
        self._read_at = float("-inf")
        self._reading = asyncio.Lock()
        self._strict: dict[int, tuple[Function, bool]] = {}
        """By identity of the function's description: whether its schema can be enforced."""
        self._servers: dict[str, _Registered] = {}
        for entry in servers:
            if entry.name in self._servers:
                raise ConfigError(f"tool_servers: the name {entry.name} is used twice")
            spec = of_config(entry)
            self._servers[entry.name] = _Registered(spec, server_of(entry, spec, self.addresses), stored=False)

    async def close(self) -> None:
        await asyncio.gather(*(entry.server.close() for entry in self._servers.values()))

    async def specs(self) -> list[tuple[ToolSpec, bool]]:
        """All servers, each with whether it can be removed."""
        await self._refresh()
        return [(entry.spec, entry.stored) for entry in self._servers.values()]

    async def available(self, access: Access) -> dict[str, tuple[Function, ...]]:
        """The functions that a caller may use, by server; an unreachable server has none."""
        await self._refresh()
        found = {name: entry for name, entry in self._servers.items() if entry.open_to(access)}
        lists = await asyncio.gather(*(entry.functions(access) for entry in found.values()), return_exceptions=True)
        for name, given in zip(found, lists, strict=True):
            if isinstance(given, BaseException):
                log.warning("functions of a tool server cannot be listed", extra={"server": name, "why": str(given)})
        shown = {
            name: () if isinstance(given, BaseException) else given for name, given in zip(found, lists, strict=True)
        }
        return {name: given for name, given in shown.items() if given or access.allows("tool", name)}

    async def offers(self, access: Access, wanted: Sequence[str]) -> dict[str, Offer]:
        """The functions that a request names (`server`, `server.function` or `*`), by their names for the model."""
        await self._refresh()
        chosen: dict[tuple[str, str], Function] = {}
        for name in wanted:
            for server, function in await self._named(access, name):
                chosen[server, function.name] = function
        if len(chosen) > MOST_OFFERS:
            raise ToolError(f"{len(chosen)} functions are offered; the maximum is {MOST_OFFERS}")
        names = [function for _, function in chosen]
        offers: dict[str, Offer] = {}
        for (server, called), function in chosen.items():
            plain = called if names.count(called) == 1 else f"{server}.{called}"
            offers[plain[:64]] = Offer(plain[:64], server, function, await self._enforceable(function))
        return offers

    def unmet(self, server: str, demand: Demand) -> list[Requirement]:
        """What of a demand a tool server does not meet; empty: it may get data of the request."""
        entry = self._servers.get(server)
        return list(demand.requirements) if entry is None else demand.unmet(entry.spec.tool_labels)

    async def call(self, offer: Offer, arguments: dict[str, Any]) -> Outcome:
        entry = self._servers.get(offer.server)
        if entry is None or not entry.allows(offer.function.name):
            return Outcome("Error: this tool is no longer there.", ok=False)
        try:
            return await entry.server.call(offer.function.name, arguments)
        except ToolError as error:
            return Outcome(f"Error: {error}.", ok=False)
        except Exception:  # an unexpected failure of one tool must not end the request
            log.exception("tool call failed", extra={"tool": offer.full_name})
            return Outcome("Error: the tool failed.", ok=False)

    async def register(self, spec: ToolSpec) -> tuple[Function, ...]:
        """Stores a server and returns its functions. `ToolError`, without storing it, when it cannot be used."""
        known = self._servers.get(spec.name)
        if known is not None and not known.stored:
            raise ToolError(f"the configuration has a tool server `{spec.name}`")
        server = spec.server(self.addresses)
        try:
            functions = await server.functions()
            unknown = [name for name in spec.allow if name not in {function.name for function in functions}]
            if unknown:
                raise ToolError(f"there is no function {', '.join(unknown[:5])}")
        finally:
            await server.close()
        assert self.store is not None
        await self.store.put(spec, time.time())
        await self._refresh(now=True)
        return tuple(function for function in functions if not spec.allow or function.name in spec.allow)

    async def remove(self, name: str) -> bool:
        assert self.store is not None
        removed = await self.store.delete(name)
        await self._refresh(now=True)
        return removed

    async def _named(self, access: Access, name: str) -> Iterable[tuple[str, Function]]:
        if name == "*":
            available = await self.available(access)
            return [(server, function) for server, functions in available.items() for function in functions]
        server, _, wanted = name.partition(".")
        entry = self._servers.get(server)
        if entry is None or not entry.open_to(access):
            raise ToolError(f"there is no tool server `{server[:64]}`")
        functions = await entry.functions(access)
        found = [(server, function) for function in functions if wanted in ("", function.name)]
        if not functions and not access.allows("tool", server):
            raise ToolError(f"there is no tool server `{server[:64]}`")
        if not found:
            raise ToolError(f"`{server}` has no function `{wanted[:64]}`")
        return found

    async def _enforceable(self, function: Function) -> bool:
        known = self._strict.get(id(function))
        if known is not None and known[0] is function:
            return known[1]

        def check() -> bool:
            try:
                grammars.check(grammars.json_schema(function.parameters or {}))
            except GrammarError as error:
                log.info("schema of a tool cannot be enforced", extra={"tool": function.name, "why": str(error)})
                return False
            return True

        strict = await asyncio.to_thread(check)
        if len(self._strict) > 8 * MOST_OFFERS:
            self._strict.clear()
        self._strict[id(function)] = (function, strict)
        return strict

    async def _refresh(self, *, now: bool = False) -> None:
        if self.store is None:
            return
        async with self._reading:
            if not now and time.monotonic() - self._read_at < self._fresh_s:
                return
            try:
                specs = {spec.name: spec for spec in await self.store.all()}
            except DatabaseError as error:
                log.warning("tool servers cannot be read from the store", extra={"why": str(error)})
                return
            self._read_at = time.monotonic()
            gone = [name for name, entry in self._servers.items() if entry.stored and specs.get(name) != entry.spec]
            for name in gone:
                await self._servers.pop(name).server.close()
            for name, spec in specs.items():
                if name not in self._servers:
                    try:
                        self._servers[name] = _Registered(spec, spec.server(self.addresses), stored=True)
                    except (ToolError, ConfigError) as error:
                        log.warning("tool server cannot be used", extra={"server": name, "why": str(error)})
