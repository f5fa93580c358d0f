"""A fleet that somebody else runs: what can be broken from outside, on processes of this machine, and who accounts.

The drill gets a tenant and keys of its own through the admin API, so that the usage of these keys is exactly its load;
they are revoked afterwards. Dead processes come back by whoever watches them (`penstock serve`, systemd).
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from penstock.fleet.drills.accounting import Attempt, Balance, Losses, balance_totals
from penstock.fleet.drills.program import DrillError
from penstock.fleet.drills.target import Target, Victim

TENANT = "penstock-drill"
_LOCAL = ("127.0.0.1", "localhost", "::1")
_UP = re.compile(r"^penstock_engine_up{.*} (\S+)$", re.M)
_SETTLED_S = 300.0


@dataclass
class LocalProcess:
    """A process of the fleet on this machine."""

    name: str
    pid: int

    @property
    def running(self) -> bool:
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def start(self) -> None:
        """Whoever watches it does."""


@dataclass
class Running(Target):
    """Use it as an asynchronous context. `url`s: those of gateways, the first on this machine."""

    urls: list[str]
    admin: str
    model: str = ""
    keys: list[str] = field(default_factory=list)
    revoked: str = ""
    engines_up: int = 0
    _key_ids: list[str] = field(default_factory=list)

    async def __aenter__(self) -> Running:
        self._http = httpx.AsyncClient(base_url=self.urls[0], timeout=60, headers=self._headers(), verify=False)
        models = await self._get("/v1/models")
        names = [entry["id"] for entry in models["data"]]
        self.model = self.model or names[0]
        if self.model not in names:
            raise DrillError(f"{self.urls[0]} has no model {self.model}; it has {', '.join(names)}")
        metrics = await self._http.get("/metrics")
        self.engines_up = round(sum(float(value) for value in _UP.findall(metrics.text)))
        if not self.engines_up:
            raise DrillError("no engine is up, or the key has not the scopes `metrics` and `admin`")
        tenants = await self._get("/v1/admin/tenants")
        if TENANT not in [entry["id"] for entry in tenants["data"]]:
            await self._post("/v1/admin/tenants", {"id": TENANT})
        for number in range(3):
            made = await self._post("/v1/admin/keys", {"tenant": TENANT, "name": f"drill {number}"})
            self._key_ids.append(made["id"])
            self.keys.append(made["key"])
        self.revoked = self.keys.pop()
        await self._http.delete(f"/v1/admin/keys/{self._key_ids[-1]}")
        return self

    async def __aexit__(self, *_: object) -> None:
        for id in self._key_ids[:-1]:
            with suppress(httpx.HTTPError):
                await self._http.delete(f"/v1/admin/keys/{id}")
        await self._http.aclose()

    @property
    def model_name(self) -> str:
        return self.model

    @property
    def engines_per_gateway(self) -> int:
        return self.engines_up

    @property
    def deterministic(self) -> bool:
        return False

    @property
    def engine_victims(self) -> Sequence[Victim]:
        return self._victims("engine")

    @property
    def gateway_victims(self) -> Sequence[Victim]:
        return self._victims("gateway")

    def logs(self) -> list[Path]:
        return []

    async def account(self, attempts: Sequence[Attempt], prefix: str, losses: Losses) -> Balance:
        """By the totals of the drill's keys: they must add up to what clients were told."""
        deadline = time.monotonic() + _SETTLED_S
        while True:
            rows = (await self._get("/v1/usage?by=key&since=24h"))["data"]
            mine = [row for row in rows if row["key"] in self._key_ids]
            trial = Losses()
            sums = balance_totals(
                attempts,
                requests=sum(row["requests"] for row in mine),
                prompt=sum(row["prompt_tokens"] for row in mine),
                completion=sum(row["completion_tokens"] for row in mine),
                losses=trial,
            )
            if not trial or time.monotonic() > deadline:  # charges of broken streams are settled a little later
                losses.charges += trial.charges
                return sums
            await asyncio.sleep(1.0)

    def _victims(self, word: str) -> list[Victim]:
        """Processes `penstock WORD` of the server that listens on the first URL's port."""
        parts = urlsplit(self.urls[0])
        if parts.hostname not in _LOCAL:
            raise DrillError(f"{self.urls[0]} is not on this machine: run the drill where its processes are")
        roots = _related(_listeners(parts.port or 80))
        found = [pid for pid in sorted(roots) if word in _command(pid)[1:6] and "penstock" in " ".join(_command(pid))]
        if not found:
            raise DrillError(f"no process `penstock {word}` of the server at {self.urls[0]} is on this machine")
        return [LocalProcess(f"{word} {pid}", pid) for pid in found]

    def _headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.admin}"} if self.admin else {}

    async def _get(self, path: str) -> dict[str, Any]:
        return self._read(await self._http.get(path))

    async def _post(self, path: str, body: dict[str, str]) -> dict[str, Any]:
        return self._read(await self._http.post(path, json=body))

    def _read(self, reply: httpx.Response) -> dict[str, Any]:
        if reply.status_code >= 300:
            raise DrillError(f"{reply.request.url}: {reply.status_code} {reply.text[:300]}")
        found: dict[str, Any] = reply.json()
        return found


def _command(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []


def _listeners(port: int) -> set[int]:
    """Processes that listen on a TCP port."""
    sockets = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        if not Path(table).exists():
            continue
        for line in Path(table).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and int(words[1].rpartition(":")[2], 16) == port:
                sockets.add(f"socket:[{words[9]}]")
    found = set()
    for folder in Path("/proc").glob("[0-9]*/fd"):
        try:
            if any(os.readlink(link) in sockets for link in folder.iterdir()):
                found.add(int(folder.parent.name))
        except OSError:
            continue
    return found


def _related(pids: set[int]) -> set[int]:
    """These, the supervisor above them, and everything that it started."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    family = set(pids)
    for pid in pids:
        if "serve" in _command(parents.get(pid, 0)):
            family.add(parents[pid])
    grown = True
    while grown:
        more = {pid for pid, parent in parents.items() if parent in family} - family
        family |= more
        grown = bool(more)
    return family
