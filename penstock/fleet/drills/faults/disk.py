"""A disk that is full, and one that is slow."""

from __future__ import annotations

import os
import resource
from contextlib import suppress

from penstock.fleet.drills.run import Fault, Stage
from penstock.fleet.drills.target import Target
from penstock.fleet.drills.throwaway import ThrowAway

FULL_S = 6.0
SLOW_S = 8.0
SYNC_S = 0.3
_CHUNK = 1 << 16


async def full(fleet: ThrowAway, stage: Stage) -> None:
    """The file system of the database. Where none could be made for the drill, as from outside."""
    if not fleet.mounted:
        await cannot_write(fleet, stage)
        return
    balloon = fleet.disk / "balloon"
    _fill(balloon)
    stage.broken("the file system of the database is full")
    await stage.hold(FULL_S)
    balloon.unlink()
    stage.healed("there is space again")


async def cannot_write(fleet: Target, stage: Stage) -> None:
    """Gateways cannot make any file longer. A database elsewhere does not notice."""
    pids = [gateway.pid for gateway in fleet.gateway_victims]
    limits = {pid: resource.prlimit(pid, resource.RLIMIT_FSIZE) for pid in pids}
    for pid, (_, most) in limits.items():
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (1, most))
    stage.broken("gateways can write no file beyond its first byte (RLIMIT_FSIZE)")
    await stage.hold(FULL_S)
    for pid, limit in limits.items():
        resource.prlimit(pid, resource.RLIMIT_FSIZE, limit)
    stage.healed("there is space again")


def _fill(balloon: os.PathLike[str]) -> None:
    """To the last byte."""
    file = os.open(balloon, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        for size in (_CHUNK, 512, 1):
            with suppress(OSError):
                while os.write(file, bytes(size)):
                    pass
    finally:
        os.close(file)


async def slow(fleet: ThrowAway, stage: Stage) -> None:
    assert fleet.shim is not None
    fleet.shim.set("postgres", sync_s=SYNC_S)
    stage.broken(f"every sync of PostgreSQL to the disk takes {SYNC_S * 1000:.0f} ms longer")
    await stage.hold(SLOW_S)
    fleet.shim.set("postgres")
    stage.healed("the disk is fast again")


FAULTS = (
    Fault("disk-full", "the disk of the database is full", full, "file", outside=cannot_write),
    Fault("disk-slow", "the disk of the database is slow", slow),
)
