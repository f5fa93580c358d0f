"""The tiers behind the KV cache: slots in host memory and a file on disk, on every rank."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.engine.config import EngineConfig
from penstock.engine.kv.block_file import BlockFile
from penstock.engine.kv.cache import StateBlocks
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
    """Owns the slots, and makes the copies."""
    states: int = 0
    """Slots of states, for models with recurrent layers."""
    state_mover: BlockMover | None = None
    places: int = 0
    file: BlockFile | None = None
    state_places: int = 0
    state_file: BlockFile | None = None
    slot: KeptSlot | None = None
    """Where the files outlive the engine: the lock on them."""

    def close(self) -> None:
        for file in (self.file, self.state_file, self.slot):
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
    mover = part.backend.block_mover(part.kv, slots)
    state_mover = part.backend.block_mover(StateBlocks(part.kv), states) if recurrent else None
    tiers = Tiers(slots, mover, states, state_mover)
    if places:
        if config.disk_persistent:
            recurring = None if state_mover is None else (state_places, state_mover)
            kept = open_kept(config, part, (places, mover), recurring, member, before)
            if kept is not None:
                tiers = replace(tiers, places=places, file=kept.blocks, slot=kept.slot)
                tiers = replace(tiers, state_places=state_places, state_file=kept.states)
        else:
            folder = config.disk_folder
            file = BlockFile(folder, places, mover)
            try:
                state_file = None if state_mover is None else BlockFile(folder, state_places, state_mover)
            except ConfigError:
                file.close()
                raise
            tiers = replace(tiers, places=places, file=file, state_places=state_places, state_file=state_file)
    if member is not None:
        try:
            member.least(slots, "host slots")  # a rank that cannot have that memory says so before anything runs
        except BaseException:
            tiers.close()
            raise
    return tiers
