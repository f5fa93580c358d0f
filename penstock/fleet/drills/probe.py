"""What a fleet says of itself while it is broken: whether all of it is up, and its first warning."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

EVERY_S = 0.25
_UP = re.compile(r"^penstock_engine_up{.*} (\S+)$", re.M)
_NOT_READY = re.compile(r'"problem":\s*"([^"]+)"')


@dataclass(frozen=True, slots=True)
class Seen:
    """One look at all gateways."""

    at: float
    full: bool
    problem: str = ""


@dataclass
class Probe:
    """Looks at every gateway four times a second. Full: each is ready and has all its engines up."""

    urls: Sequence[str]
    key: str
    engines: int
    """Engines that every gateway should have."""
    looks: list[Seen] = field(default_factory=list)

    async def run(self) -> None:
        async with httpx.AsyncClient(timeout=5, verify=False) as http:
            while True:
                found = await asyncio.gather(*(self._gateway(http, url) for url in self.urls))
                problem = next((words for words in found if words), "")
                self.looks.append(Seen(time.monotonic(), not problem, problem))
                await asyncio.sleep(EVERY_S)

    async def _gateway(self, http: httpx.AsyncClient, url: str) -> str:
        """What is wrong at one gateway; empty when all is well."""
        try:
            ready = await http.get(f"{url}/health/ready")
            if ready.status_code != 200:
                return f"{url}/health/ready: {ready.status_code} {' '.join(_NOT_READY.findall(ready.text))[:160]}"
            metrics = await http.get(f"{url}/metrics", headers={"authorization": f"Bearer {self.key}"})
        except httpx.HTTPError as error:
            return f"{url}: {type(error).__name__}"
        up = sum(float(value) for value in _UP.findall(metrics.text))
        return "" if up >= self.engines else f"{url}: {up:g} of {self.engines} engines up"

    async def until(self, full: bool, since: float, within: float) -> Seen | None:
        """The first look after `since` that is full (or is not)."""
        deadline = time.monotonic() + within
        while time.monotonic() < deadline:
            for look in self.looks:
                if look.at > since and look.full is full:
                    return look
            await asyncio.sleep(EVERY_S / 2)
        return None


@dataclass
class Logs:
    """Warnings and errors in the logs of gateways and engines, as soon as they are written."""

    files: Callable[[], Sequence[Path]]
    warnings: list[tuple[float, str]] = field(default_factory=list)
    _read: dict[Path, int] = field(default_factory=dict)

    async def run(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(EVERY_S / 2)

    def look(self) -> None:
        for file in self.files():
            if not file.exists():
                continue
            with file.open("rb") as log:
                log.seek(self._read.get(file, 0))
                data = log.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._read[file] = self._read.get(file, 0) + len(whole)
            for line in whole.splitlines():
                if words := _warning(line):
                    self.warnings.append((time.monotonic(), f"{file.stem}: {words}"))

    def first_after(self, at: float) -> tuple[float, str] | None:
        return next((entry for entry in self.warnings if entry[0] >= at), None)


def _warning(line: bytes) -> str:
    """The message of a JSON log line of level warning or higher."""
    if not line.startswith(b"{"):
        return ""
    try:
        record = json.loads(line)
    except ValueError:
        return ""
    level = str(record.get("level", "")).lower()
    if level not in ("warning", "error", "critical"):
        return ""
    return str(record.get("message") or record.get("event") or record.get("msg") or "")[:200]
