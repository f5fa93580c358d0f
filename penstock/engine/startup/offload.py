"""The second tier of the KV cache: its slots in host memory, on every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.engine.config import EngineConfig
from penstock.engine.kv.mover import BlockMover
from penstock.engine.startup.memory import count_host_blocks
from penstock.engine.startup.part import Part

if TYPE_CHECKING:
    from penstock.engine.parallel.member import Member


def open_host_pool(config: EngineConfig, part: Part, member: Member | None = None) -> tuple[int, BlockMover | None]:
    """Slots for blocks that leave this rank's cache, and what makes the copies. All ranks have as many: those of the
    rank whose blocks are largest."""
    if config.host_memory == 0:
        return 0, None
    slots = count_host_blocks(config, part.kv.shape)
    if member is None:
        return slots, part.backend.block_mover(part.kv, slots)
    slots = member.least(slots)
    mover = part.backend.block_mover(part.kv, slots)
    member.least(slots)  # a rank that cannot have that memory says so before anything runs
    return slots, mover
