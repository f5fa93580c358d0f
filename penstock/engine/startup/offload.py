"""The tiers behind the KV cache: slots in host memory and a file on disk, on every rank."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.engine.config import EngineConfig
from penstock.engine.kv.block_file import BlockFile
from penstock.engine.kv.block_numbers import CacheMover, Numbering, OwnMover
from penstock.engine.kv.cache import StateBlocks, without_rows
from penstock.engine.kv.kept_folder import KeptSlot
from penstock.engine.kv.mover import BlockMover
from penstock.engine.startup.kept_files import open_kept
from penstock.engine.startup.memory import count_disk_places, count_host_blocks
from penstock.engine.startup.part import Part
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.engine.parallel.member import Member


@dataclass(frozen=True, slots=True)
class Tiers:
    """What one rank has behind its cache."""

    slots: int
    mover: BlockMover
    """Owns the slots, and makes the copies. Where ranks have sequences of their own, it is told of those of all."""
    states: int = 0
    """Slots of states, for models with recurrent layers."""
    state_mover: BlockMover | None = None
    places: int = 0
    file: BlockFile | None = None
    state_places: int = 0
    state_file: BlockFile | None = None
    row_files: tuple[BlockFile, ...] = ()
    """On rank 0: by cache, what a drafter reads of its tokens, where there are several caches."""
    slot: KeptSlot | None = None
    """Where the files outlive the engine: the lock on them."""

    def close(self) -> None:
        for file in (self.file, self.state_file, *self.row_files, self.slot):
            if file is not None:
                file.close()


def check_tiers(config: EngineConfig) -> None:
    """Refuse settings that cannot go together, before weights are read."""
    if config.disk_memory and not config.host_memory:
        raise ConfigError("disk_memory is for blocks that leave host memory; set host_memory too")
    if config.disk_memory and not config.disk_path:
        raise ConfigError("disk_memory needs disk_path, a folder for it on a fast disk")
    if config.disk_persistent and not config.disk_memory:
        raise ConfigError("disk_persistent keeps what is in disk_memory; set that, disk_path and host_memory too")


def open_tiers(config: EngineConfig, part: Part, member: Member | None = None, before: str = "") -> Tiers | None:
    """Memory for blocks that leave this rank's cache; None where none is configured. All ranks have room for as many
    blocks: as many as the rank whose parts are largest. `before`: `mark_weights`, before they were read."""
    if config.host_memory == 0:
        return None
    recurrent = part.model.recurrent or not part.kv.shape.blocks_suffice
    slots, states = count_host_blocks(config, part.kv.shape, recurrent)
    places, state_places = count_disk_places(config, part.kv.shape, recurrent)
    if member is not None:
        slots, places = member.least(slots, "host slots"), member.least(places, "disk places")
        states = member.least(states, "host slots of states")
        state_places = member.least(state_places, "disk places of states")
    own, every = without_rows(part.kv)
    mover = part.backend.block_mover(own, slots)
    state_mover = part.backend.block_mover(StateBlocks(part.kv), states) if recurrent else None
    tiers, rows = Tiers(slots, mover, states, state_mover), list[BlockMover]()
    if member is not None and member.place.data:
        place, numbers = member.place, Numbering(own.num_blocks, slots)
        of_rows = None if every is None else part.backend.block_mover(every, place.tensor * slots)
        if of_rows is not None:
            rows = [CacheMover(of_rows, numbers, cache) for cache in range(place.tensor)]
        tiers = replace(tiers, mover=OwnMover(mover, numbers, place.shard, of_rows))
        if state_mover is not None:
            numbers = Numbering(part.kv.num_states, states)
            tiers = replace(tiers, state_mover=OwnMover(state_mover, numbers, place.shard))
    if places:
        if config.disk_persistent:
            recurring = None if state_mover is None else (state_places, state_mover)
            kept = open_kept(config, part, (places, mover), recurring, member, before, rows)
            if kept is not None:
                tiers = replace(tiers, places=places, file=kept.blocks, slot=kept.slot, row_files=kept.rows)
                tiers = replace(tiers, state_places=state_places, state_file=kept.states)
        else:
            with ExitStack() as undo:

                def opened(count: int, owner: BlockMover) -> BlockFile:
                    file = BlockFile(config.disk_folder, count, owner)
                    undo.callback(file.close)
                    return file

                tiers = replace(tiers, places=places, file=opened(places, mover), state_places=state_places)
                if state_mover is not None:
                    tiers = replace(tiers, state_file=opened(state_places, state_mover))
                tiers = replace(tiers, row_files=tuple(opened(places, each) for each in rows))
                undo.pop_all()
    if member is not None:
        try:
            member.least(slots, "host slots")  # a rank that cannot have that memory says so before anything runs
        except BaseException:
            tiers.close()
            raise
    return tiers
