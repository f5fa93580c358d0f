"""The drill behind `test_spike.py`: ten times the traffic for a minute, at a real gateway with two replicas, over HTTP.

The engines are the real scheduler with steps that take modelled time (`penstock.testing.timed_engine`); gateway, keys,
queue and HTTP are the real ones, in this process. Requests arrive at random times at the given rate, whether or not
earlier ones have been answered, and are not retried. Four tenants: one premium, two standard of which one sends most,
one free.

`problems` are: a premium tenant whose time to first token is above its limit at the 95th percentile; a refused request
without 429 or 503, a reason and a `Retry-After`; a `Retry-After` that for more than 15% of them is not within 30% (and
the rounding to whole seconds) of when the last request that its tenant had waiting at that moment began; a request that
hangs; and anything that is not as before ten seconds after the burst. A `Retry-After` that reaches beyond the end of
the burst is not judged: nobody can predict that end.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from penstock.bench.gateway.harness import free_port
from penstock.bench.stats import percentile
from penstock.bench.wire import Connection, StatusError, Target, WireError
from penstock.config.routing import AdmissionConfig
from penstock.config.schema import TierConfig
from penstock.gateway.process.gateway import Gateway
from penstock.gateway.process.main import serve
from penstock.gateway.process.settings import GatewaySettings, ModelSettings
from penstock.routing.registry import ModelRegistry, ServedModel
from penstock.routing.replicas import ReplicaSet
from penstock.testing.in_process_backend import InProcessBackend
from penstock.testing.timed_engine import Speed, TimedEngine
from penstock.text import load_text
from penstock.text.byte_tokenizer import write_tokenizer

TENANTS = {"bank": ("premium", 0.15), "shop": ("standard", 0.55), "blog": ("standard", 0.2), "anon": ("free", 0.1)}
"""Tier and share of the traffic."""
TIERS = (
    TierConfig(name="premium", priority=0, weight=4.0),
    TierConfig(name="standard", priority=1, weight=2.0),
    TierConfig(name="free", priority=1, weight=1.0),
)
HUNG_S = 60.0
HONEST = 0.85
"""The share of refused requests whose `Retry-After` must be right. The rest is chance: what is left for a tier depends
on how many requests of a higher one arrive in the next seconds, and in the first seconds little has been measured."""


@dataclass(frozen=True)
class Spike:
    rate: float = 6.0
    """Requests per second before and after."""
    factor: float = 10.0
    before: float = 15.0
    burst: float = 60.0
    after: float = 30.0
    settle: float = 10.0
    """Seconds after the burst by which all is as before."""
    slots: int = 8
    tokens: int = 40
    step: float = 0.022
    wait: float = 6.0
    limit: float = 2.0
    """What the premium tenant's time to first token must stay below."""
    seed: int = 1

    @property
    def end(self) -> float:
        return self.before + self.burst

    def arrivals(self) -> list[tuple[float, str, int]]:
        """When, who, how many tokens."""
        rng = random.Random(self.seed)
        at, made = 0.0, []
        while at < self.end + self.after:
            busy = self.before <= at < self.end
            at += rng.expovariate(self.rate * (self.factor if busy else 1.0))
            tenant = rng.choices(list(TENANTS), [share for _, share in TENANTS.values()])[0]
            made.append((at, tenant, max(4, round(self.tokens * rng.uniform(0.5, 1.5)))))
        return made


@dataclass
class Record:
    at: float
    tenant: str
    status: int = 0
    reason: str = ""
    retry_after: float | None = None
    ttft: float | None = None
    error: str = ""


async def drill(spike: Spike) -> tuple[list[Record], list[TimedEngine]]:
    logging.getLogger("penstock").setLevel(logging.ERROR)
    engines = [
        TimedEngine(
            max_running=spike.slots,
            num_blocks=1024,
            vocab_size=260,
            speed=Speed(step_s=spike.step, prefill_token_s=20e-6),
        )
        for _ in range(2)
    ]
    with tempfile.TemporaryDirectory(prefix="penstock-spike-") as folder:
        write_tokenizer(Path(folder), context_length=8192)
        backend = ReplicaSet("m", [InProcessBackend(e, name=str(i)) for i, e in enumerate(engines)])
        registry = ModelRegistry([ServedModel("m", load_text(Path(folder)), backend)])
        settings = GatewaySettings(
            models=(ModelSettings("m", ""),),
            port=free_port(),
            store_url=f"sqlite:///{folder}/state.db",
            default_tier="free",
            tiers=TIERS,
            admission=AdmissionConfig(wait_s=spike.wait, ahead=1),
            log_level="error",
        )
        stop = asyncio.Event()
        listening: asyncio.Future[Gateway] = asyncio.get_running_loop().create_future()
        server = asyncio.create_task(serve(settings, registry, stop, listening.set_result))
        await asyncio.wait((server, listening), return_when=asyncio.FIRST_COMPLETED)
        try:
            if server.done():
                server.result()
            keys = await _keys(f"http://127.0.0.1:{settings.port}")
            targets = {t: Target.parse(f"http://127.0.0.1:{settings.port}", key) for t, key in keys.items()}
            records = await _traffic(spike, targets)
            await asyncio.sleep(0.2)
        finally:
            stop.set()
            await server
    return records, engines


async def _keys(url: str) -> dict[str, str]:
    keys: dict[str, str] = {}
    async with httpx.AsyncClient(base_url=url, timeout=30) as client:
        for tenant, (tier, _) in TENANTS.items():
            await client.post("/v1/admin/tenants", json={"id": tenant, "tier": tier})
            made = await client.post("/v1/admin/keys", json={"tenant": tenant, "scopes": ["inference", "admin"]})
            keys[tenant] = made.raise_for_status().json()["key"]
            client.headers["authorization"] = f"Bearer {keys[tenant]}"
    return keys


async def _traffic(spike: Spike, targets: dict[str, Target]) -> list[Record]:
    begin = time.monotonic()
    records: list[Record] = []
    idle: dict[str, list[Connection]] = {tenant: [] for tenant in targets}

    async def ask(record: Record, tokens: int) -> None:
        pool = idle[record.tenant]
        connection = pool.pop() if pool else Connection(targets[record.tenant])
        body = json.dumps(
            {"model": "m", "prompt": f"{record.at:.6f} " * 6, "max_tokens": tokens, "ignore_eos": True, "stream": True}
        ).encode()
        sent = time.monotonic()
        try:
            async with asyncio.timeout(HUNG_S):
                async for _ in connection.events("/v1/completions", body):
                    if record.ttft is None:
                        record.status, record.ttft = 200, time.monotonic() - sent
        except StatusError as error:
            record.status = error.status
            record.reason = error.headers.get(b"x-penstock-reason", b"").decode()
            told = error.headers.get(b"retry-after")
            record.retry_after = None if told is None else float(told)
        except (WireError, TimeoutError) as error:
            record.error = repr(error)
        pool.append(connection)

    async with asyncio.TaskGroup() as group:
        for at, tenant, tokens in spike.arrivals():
            await asyncio.sleep(max(0.0, begin + at - time.monotonic()))
            records.append(Record(time.monotonic() - begin, tenant))
            group.create_task(ask(records[-1], tokens))
    for pool in idle.values():
        for connection in pool:
            await connection.close()
    return records


def p95(values: Sequence[float]) -> float:
    return percentile(sorted(values), 0.95) if values else 0.0


def served(records: Sequence[Record], begin: float, end: float, tenant: str = "") -> list[float]:
    return [
        r.ttft for r in records if r.ttft is not None and begin <= r.at < end and (not tenant or r.tenant == tenant)
    ]


def honesty(spike: Spike, records: Sequence[Record]) -> tuple[int, int]:
    """Of how many refused requests the told time can be judged, and how many of those are right."""
    judged = right = 0
    for refused in records:
        if refused.status != 503 or refused.retry_after is None or not spike.before <= refused.at < spike.end:
            continue
        at = refused.at + spike.wait if refused.reason == "queue_timeout" else refused.at
        begins = [r.at + r.ttft for r in records if r.tenant == refused.tenant and r.ttft is not None and r.at <= at]
        truth = max(max(begins, default=at) - at, 0.0)
        if at + max(truth, refused.retry_after) <= spike.end:
            judged += 1
            right += 0.7 * truth <= refused.retry_after <= 1.3 * truth + 1.0
    return judged, right


def problems(spike: Spike, records: Sequence[Record], engines: Sequence[TimedEngine]) -> list[str]:
    found = [f"{r.tenant} at {r.at:.1f} s: {r.error}" for r in records if r.error]
    found += [f"an answer with status {r.status}" for r in records if r.status not in (200, 429, 503) and not r.error]
    for record in records:
        if record.status in (429, 503) and (
            not record.reason or record.retry_after is None or not 1 <= record.retry_after <= 120
        ):
            found.append(f"refused without a reason or a time: {record}")
    premium = p95(served(records, spike.before, spike.end, "bank"))
    if premium > spike.limit:
        found.append(f"premium p95 TTFT was {premium:.2f} s in the burst, above {spike.limit:g} s")
    if not any(r.status == 503 for r in records):
        found.append("nobody was refused, so this was no spike")
    judged, right = honesty(spike, records)
    if judged >= 100 and right < HONEST * judged:
        found.append(f"Retry-After was right for {right} of {judged} only")
    late = [r for r in records if r.at > spike.end + spike.settle]
    if any(r.status != 200 for r in late):
        found.append(f"still refusing {spike.settle:g} s after the burst")
    before = p95(served(records, 0.0, spike.before))
    after = p95(served(records, spike.end + spike.settle, 1e9))
    if after > max(2.0 * before, before + 0.25):
        found.append(f"p95 TTFT is {after:.2f} s after the burst, {before:.2f} s before it")
    for engine in engines:
        if engine.has_work:
            found.append("an engine still has work")
        else:
            engine.scheduler.check_idle()
    return found
