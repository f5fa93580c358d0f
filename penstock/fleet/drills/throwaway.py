"""A throw-away fleet: two gateways, three engines, Redis and PostgreSQL as processes of this machine, in one folder.

Layouts: `split`, gateways and engines apart, with a relay in front of every engine; `file`, the same with SQLite in
place of PostgreSQL, on a small file system of its own where that can be made; `machines`, two `penstock serve` with a
gateway and an engine each, which share Redis and PostgreSQL.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx
import yaml

from penstock.fleet.drills.accounting import Attempt, Balance, Losses, balance
from penstock.fleet.drills.ledger import charges, create_keys
from penstock.fleet.drills.model import write_model
from penstock.fleet.drills.program import DrillError, Program
from penstock.fleet.drills.relay import Relay
from penstock.fleet.drills.services import answers, free_port, postgres, postgres_url, redis
from penstock.fleet.drills.shim import Shim
from penstock.fleet.drills.target import Target, Victim
from penstock.interpreter import module
from penstock.metering.prices import Price

Layout = Literal["split", "file", "machines"]
GATEWAYS, ENGINES = 2, 3
NAME = "tiny"
DISK = "48m"
"""Size of the file system of the layout `file`."""
INPUT_PRICE, OUTPUT_PRICE = 1.0, 2.0
_START_S = 600.0


@dataclass
class ThrowAway(Target):
    """Use it as an asynchronous context. `model`: a checkpoint in place of the tiny one; `settings`: more of
    `penstock.yaml`, merged over what the drills need."""

    layout: Layout = "split"
    model: Path | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    faults: bool = True
    """Whether clocks and disks can be tampered with: needs a compiler."""
    kv_memory: str = "128MiB"
    """Of every engine."""
    encoders: bool = False
    """Whether machines have the default encoders."""
    tell: Callable[[str], None] = lambda what: None
    gateways: list[Program] = field(default_factory=list)
    engines: list[Program] = field(default_factory=list)
    machines: list[Program] = field(default_factory=list)
    relays: list[Relay] = field(default_factory=list)
    urls: list[str] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    """Of two tenants."""
    batch_key: str = ""
    """Of one of them, for batches alone."""
    revoked: str = ""
    admin: str = ""
    shim: Shim | None = None
    redis: Program | None = None
    postgres: Program | None = None
    mounted: bool = False

    async def __aenter__(self) -> ThrowAway:
        self.folder = Path(tempfile.mkdtemp(prefix="penstock-drill-"))
        self.folder.chmod(0o755)  # PostgreSQL runs as another user
        self.disk = self.folder / "disk"
        self.disk.mkdir()
        try:
            await self._start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def model_name(self) -> str:
        return NAME

    @property
    def engines_per_gateway(self) -> int:
        return 1 if self.layout == "machines" else ENGINES

    @property
    def store(self) -> str:
        return self._store

    @property
    def engine_victims(self) -> Sequence[Victim]:
        return self.engines

    @property
    def gateway_victims(self) -> Sequence[Victim]:
        return self.gateways

    async def account(self, attempts: Sequence[Attempt], prefix: str, losses: Losses) -> Balance:
        """Charge by charge."""
        rows = await charges(self._store, prefix)
        return balance(attempts, rows, Price.per_million(INPUT_PRICE, OUTPUT_PRICE), losses)

    def programs(self) -> list[Program]:
        """Everything that a supervisor would watch, without Redis and PostgreSQL."""
        return [*self.gateways, *self.engines, *self.machines]

    def logs(self) -> list[Path]:
        return [program.log for program in self.programs()]

    async def close(self) -> None:
        for relay in self.relays:
            await relay.close()
        services = [service for service in (self.redis, self.postgres) if service is not None]
        for program in [*self.programs(), *services]:
            program.kill_group()
        if self.mounted:
            await asyncio.to_thread(subprocess.run, ["umount", "-l", str(self.disk)], check=False)
        shutil.rmtree(self.folder, ignore_errors=True)

    async def ready(self, url: str, within: float = _START_S) -> None:
        deadline = time.monotonic() + within
        async with httpx.AsyncClient(timeout=5) as http:
            while True:
                try:
                    if (await http.get(f"{url}/health/ready")).status_code == 200:
                        return
                except httpx.HTTPError:
                    pass
                for program in self.programs():
                    if not program.running:
                        raise DrillError(f"{program.name} ended: {program.tail()}")
                if time.monotonic() > deadline:
                    raise DrillError(f"{url} did not become ready within {within:.0f} s: {self.programs()[0].tail()}")
                await asyncio.sleep(0.2)

    async def start_service(self, service: Program, port: int) -> None:
        """Starts Redis or PostgreSQL and waits until it listens; after a kill that may take more than one try."""
        deadline = time.monotonic() + 60
        while not answers(port):
            if not service.running:
                service.start()
            if time.monotonic() > deadline:
                raise DrillError(f"{service.name} does not start: {service.tail()}")
            await asyncio.sleep(0.2)

    async def restart_redis(self) -> None:
        assert self.redis is not None
        await self.start_service(self.redis, self._redis_port)

    async def restart_postgres(self) -> None:
        assert self.postgres is not None
        await self.start_service(self.postgres, self._postgres_port)

    async def _start(self) -> None:
        if self.faults:
            self.shim = Shim(self.folder)
        self.tell("starting Redis and PostgreSQL")
        self._redis_port, self._postgres_port = free_port(), free_port()
        self.redis = redis(self.folder, self._redis_port)
        await self.restart_redis()
        if self.layout == "file":
            self._mount()
            self._store = f"sqlite:///{self.disk / 'penstock.db'}"
        else:
            self.postgres = postgres(self.folder, self._postgres_port, self._environment("postgres"))
            await self.restart_postgres()
            self._store = postgres_url(self._postgres_port)
            await self._database_up()
        made = await create_keys(self._store)
        self.keys, self.batch_key, self.revoked, self.admin = made.clients, made.batches, made.revoked, made.admin
        self.tell("writing the model")
        source = self.model
        if source is None:
            source = self.folder / "model"
            await asyncio.to_thread(write_model, source)
        self.source = source
        self.tell("starting engines and gateways")
        if self.layout == "machines":
            self._serve()
        else:
            await self._split()
        await asyncio.gather(*(self.ready(url) for url in self.urls))

    async def _database_up(self) -> None:
        """It listens before it takes queries."""
        from penstock.storage import DatabaseError, open_database

        for _ in range(100):
            try:
                await (await open_database(self._store)).close()
                return
            except DatabaseError:
                await asyncio.sleep(0.2)

    def _mount(self) -> None:
        if os.geteuid() == 0:
            command = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "penstock-drill", str(self.disk)]
            self.mounted = subprocess.run(command, capture_output=True).returncode == 0

    def _environment(self, kind: str) -> dict[str, str]:
        threads = {"OMP_NUM_THREADS": "1"}
        return threads if self.shim is None else {**threads, **self.shim.environment(kind)}

    def _config(self, name: str, source: Path, **more: Any) -> Path:
        url = f"redis://127.0.0.1:{self._redis_port}"
        model = {"name": NAME, "source": str(source), "input_price": INPUT_PRICE, "output_price": OUTPUT_PRICE}
        model |= {
            "deterministic": True,
            "threads": 1,
            "kv_memory": self.kv_memory,
            "max_running": 64,
            "max_model_len": 2048,
        }
        config: dict[str, Any] = {
            "models": [model],
            **({} if self.encoders else {"encoders": []}),
            "store": {"url": self._store, "gateway_timeout_s": 3},
            "counters": {"url": url},
            "admission": {"url": url},
            "limits": [{"per": "tenant", "requests_per_minute": 1_000_000}],
            "server": {"drain_s": 10, "engine_wait_s": 60, **more.pop("server", {})},
            "resilience": {"resume_s": 120, "stall_s": 5},
            "logging": {"format": "json"},
            **more,
        }
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(merged(config, self.settings)))
        return path

    def _penstock(self, name: str, kind: str, *arguments: str) -> Program:
        command = module("penstock", *arguments)
        state = {"PENSTOCK_STATE": str(self.folder / "state")}
        return Program(name, command, self.folder, {**self._environment(kind), **state})

    async def _split(self) -> None:
        ports = [(free_port(), free_port()) for _ in range(ENGINES)]
        for number, (port, relayed) in enumerate(ports):
            own = self.source if number else self.copy_of_model()
            config = self._config(f"engine-{number}", own)
            endpoint = f"tcp://127.0.0.1:{port}"
            engine = self._penstock(f"engine-{number}", "engines", "engine", NAME, "-e", endpoint, "-c", str(config))
            if number == ENGINES - 1:
                engine.group = self.engines[-1]  # the last two are one machine
            engine.start()
            self.engines.append(engine)
            self.relays.append(Relay(relayed, port))
            await self.relays[-1].start()
        config = self._config("gateway", self.source)
        endpoints = [word for _, relayed in ports for word in ("-e", f"{NAME}=tcp://127.0.0.1:{relayed}")]
        for number in range(GATEWAYS):
            port = free_port()
            options = ["gateway", *endpoints, "-c", str(config), "--port", str(port)]
            gateway = self._penstock(f"gateway-{number}", f"gateway-{number}", *options)
            gateway.start()
            self.gateways.append(gateway)
            self.urls.append(f"http://127.0.0.1:{port}")

    def copy_of_model(self) -> Path:
        """The copy that the first engine reads: what a drill damages must not be everybody's."""
        copy = self.folder / "copy" / self.source.name
        copy.parent.mkdir(exist_ok=True)
        if self.source.is_dir():
            shutil.copytree(self.source, copy, dirs_exist_ok=True)
        else:
            shutil.copyfile(self.source, copy)
        return copy

    def _serve(self) -> None:
        for number in range(GATEWAYS):
            port = free_port()
            config = self._config(f"machine-{number}", self.source, server={"port": port})
            machine = self._penstock(f"machine-{number}", "machines", "serve", "-c", str(config))
            machine.start()
            self.machines.append(machine)
            self.urls.append(f"http://127.0.0.1:{port}")


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over` wins; tables are merged."""
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        result[key] = merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result
