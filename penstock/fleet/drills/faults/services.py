"""Redis and PostgreSQL that are killed."""

from __future__ import annotations

from penstock.fleet.drills.run import Fault, Stage
from penstock.fleet.drills.throwaway import ThrowAway

AWAY_S = 6.0


async def redis(fleet: ThrowAway, stage: Stage) -> None:
    assert fleet.redis is not None
    fleet.redis.kill()
    stage.broken("Redis killed; what it knew is gone")
    await stage.hold(AWAY_S)
    await fleet.restart_redis()
    stage.healed("Redis started again, empty")


async def postgres(fleet: ThrowAway, stage: Stage) -> None:
    assert fleet.postgres is not None
    fleet.postgres.kill_group()
    stage.broken("PostgreSQL killed with all its connections")
    await stage.hold(AWAY_S)
    await fleet.restart_postgres()
    stage.healed("PostgreSQL started again")


FAULTS = (
    Fault("redis", "Redis is killed", redis),
    Fault("postgres", "PostgreSQL is killed", postgres),
)
