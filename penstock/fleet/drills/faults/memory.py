"""Memory that runs out: a gateway may allocate hardly more than it has while large requests arrive, and an engine that
the kernel has killed for its memory cannot start again until there is some."""

from __future__ import annotations

import asyncio
import resource
from collections import Counter
from pathlib import Path

import httpx

from penstock.fleet.drills.run import Fault, Stage
from penstock.fleet.drills.target import Target, Victim
from penstock.fleet.drills.throwaway import ThrowAway

SPARE = 8 << 20
"""Bytes that the gateway may still allocate."""
ENGINE = 192 << 20
"""Bytes for an engine that starts: not enough for its libraries."""
LARGE, MANY = 3 << 20, 16
_ENDS_S = 300.0


async def memory(fleet: ThrowAway, stage: Stage) -> None:
    engine = fleet.engines[0]
    engine.kill()
    mark = engine.log.stat().st_size
    engine.start(memory=ENGINE)
    stage.broken(f"{engine.name} killed, as the kernel does; started again with {ENGINE >> 20} MiB")
    await _starve(fleet, stage)
    assert engine.process is not None
    try:
        code = await asyncio.wait_for(asyncio.to_thread(engine.process.wait), _ENDS_S)
    except TimeoutError:
        stage.wrong(f"{engine.name} neither starts nor ends without memory")
        engine.kill()
        code = 0
    said = engine.log.read_text(errors="replace")[mark:].strip()
    stage.notes.append(f"{engine.name} ended with {code}: {said.splitlines()[-1][:200] if said else 'no word'}")
    engine.start()
    stage.healed("there is memory again")


async def outside(fleet: Target, stage: Stage) -> None:
    stage.broken("a gateway gets hardly more memory")
    await _starve(fleet, stage)
    stage.healed("there is memory again")


async def _starve(fleet: Target, stage: Stage) -> None:
    """Large requests to a gateway that cannot allocate; it may refuse them or die, and is started again then."""
    gateway = fleet.gateway_victims[0]
    limit = resource.prlimit(gateway.pid, resource.RLIMIT_AS)
    resource.prlimit(gateway.pid, resource.RLIMIT_AS, (_address_space(gateway) + SPARE, limit[1]))
    stage.broken(f"{gateway.name} may allocate {SPARE >> 20} MiB more (RLIMIT_AS), and {MANY} large requests arrive")
    body = {"model": fleet.model_name, "messages": [{"role": "user", "content": "large " * (LARGE // 6)}]}
    headers = {"authorization": f"Bearer {fleet.keys[0]}"}
    async with httpx.AsyncClient(timeout=60, verify=False) as http:

        async def send() -> str:
            try:
                reply = await http.post(f"{fleet.urls[0]}/v1/chat/completions", json=body, headers=headers)
                return str(reply.status_code)
            except httpx.HTTPError as error:
                return type(error).__name__

        answers = Counter(await asyncio.gather(*(send() for _ in range(MANY))))
    stage.notes.append("the large requests got: " + ", ".join(f"{count} x {got}" for got, count in answers.items()))
    if answers["200"]:
        stage.wrong(f"{answers['200']} requests that are too long were answered")
    if gateway.running:
        resource.prlimit(gateway.pid, resource.RLIMIT_AS, limit)
    else:
        stage.notes.append(f"{gateway.name} died of it")
        gateway.start()


def _address_space(program: Victim) -> int:
    """Bytes it has now."""
    pages = int(Path(f"/proc/{program.pid}/statm").read_text().split()[0])
    return pages * resource.getpagesize()


FAULTS = (Fault("memory", "a gateway and an engine run out of memory", memory, outside=outside),)
