"""Opening the files of blocks that outlive the engine (`disk_persistent`), on every rank.

Invariant: all ranks open the same slot, or none has a file. Whatever is wrong with the folder or the disk, the engine
starts: without blocks on disk, and with a line in the log that says so.
"""

from __future__ import annotations

import errno
import logging
import platform
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from penstock import __version__
from penstock.engine.backends.select import pick_dtype
from penstock.engine.config import EngineConfig
from penstock.engine.kv.block_file import BlockFile
from penstock.engine.kv.cache import CacheShape, StateBlocks, without_rows
from penstock.engine.kv.format import CALIBRATION, fingerprint, weight_files
from penstock.engine.kv.kept_folder import MOST_SLOTS, Identity, KeptSlot, claim, sweep
from penstock.engine.kv.mover import BlockMover
from penstock.engine.startup.part import Part
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.engine.parallel.member import Member

_FORMAT = 1
"""Grows when blocks of the same weights and settings hold something else, or elsewhere."""
_NO_SLOT = -1

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KeptFiles:
    """A rank's files of blocks and of states, and the lock on them."""

    slot: KeptSlot
    blocks: BlockFile
    states: BlockFile | None
    rows: tuple[BlockFile, ...] = ()
    """By cache: what a drafter reads of its tokens."""


def open_kept(
    config: EngineConfig,
    part: Part,
    blocks: tuple[int, BlockMover],
    states: tuple[int, BlockMover] | None,
    member: Member | None = None,
    before: str = "",
    rows: Sequence[BlockMover] = (),
) -> KeptFiles | None:
    """`blocks`, `states`: how many places, and who owns the slots. `before`: `mark_weights`, before they were read.
    `rows`: who owns the slots of what a drafter reads, of each cache. None where it is not possible."""
    rank = 0 if member is None else member.place.rank
    folder, identity = config.disk_folder, identify(config, part)
    if rank == 0 or config.machine(rank) != config.machine(0):
        sweep(folder, identity)
    slot: KeptSlot | None = None
    opened: KeptFiles | None = None
    try:
        if rank == 0:
            slot = _try_claim(folder, identity, before)
        number = _NO_SLOT if slot is None else slot.number
        if member is not None:  # rank 0 decides
            number = member.least(number if rank == 0 else MOST_SLOTS, "slots on disk")
        if number == _NO_SLOT:
            return None
        if slot is None:
            _check_weights(identity, before)
            slot = claim(folder, identity, rank, number)
        opening = partial(_open_files, folder, identity, slot, part, blocks, states, rows)
        opened = _making_room(folder, identity, opening)
    except OSError as error:
        _complain(folder, error)
    finally:
        if opened is None and slot is not None:
            slot.close()
    if member is None:
        return opened
    everywhere = 0
    try:
        everywhere = member.least(int(opened is not None), "files on disk")
    finally:
        if not everywhere and opened is not None:
            _close(opened)
    if not everywhere and opened is not None:
        log.error("disk_persistent: another rank cannot use its folder; the engine goes on without blocks on disk")
    return opened if everywhere else None


def identify(config: EngineConfig, part: Part) -> Identity:
    """What blocks depend on, whichever rank has them."""
    model = Path(config.model)
    code = sorted(model.glob("*.py")) if model.is_dir() else []
    modelling = blake2b(b"\0".join(file.read_bytes() for file in code), digest_size=8).hexdigest() if code else "own"
    if part.model.by_transformers:
        modelling += f", transformers {_installed('transformers')}"
    drafts = "none"
    if config.draft_model:
        drafts = f"{config.speculation} {fingerprint(Path(config.draft_model))}"
    elif config.speculation != "off":
        drafts = config.speculation
    lines = (
        f"weights: {_stored(model)}",
        f"penstock: {__version__}, format {_FORMAT}, calibration {CALIBRATION}",
        f"form of weights: {config.weights}, activations {config.activations}",
        f"dtype: {str(pick_dtype(config.dtype, part.kv.device)).removeprefix('torch.')}",
        f"KV dtype: {str(part.kv_dtype).removeprefix('torch.')}",
        *(["attention of prompts in FP8"] if config.fp8_attention else []),
        f"block size: {config.block_size}",
        f"window: {config.max_model_len or part.model.max_positions}",
        f"device: {part.backend.product or platform.machine()}",
        f"devices: {config.tensor_parallel} x {config.pipeline_parallel}"
        f"{', experts whole' if config.expert_parallel else ''}"
        f"{', attention by sequences' if config.attention_parallel == 'data' else ''}",
        f"deterministic: {config.deterministic}",
        f"modelling code: {modelling}",
        f"draft model: {drafts}",
    )
    return Identity(config.name or model.name, lines)


def _stored(model: Path) -> str:
    """Of the checkpoint: its content, as far as that is read, and its files. One that was changed in place has another
    time, whichever of its bytes changed."""
    files = weight_files(model)
    if not files:
        raise ConfigError(f"disk_persistent: {model} has no files by which its weights could be known again")
    digest = blake2b(digest_size=8)
    for file in files:
        found = file.stat()
        digest.update(f"{file.name} {found.st_size} {found.st_mtime_ns}\n".encode())
    return f"{fingerprint(model)} {digest.hexdigest()}"


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def mark_weights(config: EngineConfig) -> str:
    """By which it is known whether a checkpoint is still the one that is being read; nothing where nobody asks."""
    if not config.disk_persistent:
        return ""
    try:
        return f"weights: {_stored(Path(config.model))}"
    except (OSError, ConfigError):  # whoever reads it says what is wrong
        return "weights: unknown"


def _check_weights(identity: Identity, before: str) -> None:
    if before and identity.lines[0] != before:
        raise OSError(errno.EBUSY, "the checkpoint changed while it was read; restart the engine")


def _try_claim(folder: Path, identity: Identity, before: str) -> KeptSlot | None:
    try:
        _check_weights(identity, before)
        return claim(folder, identity)
    except OSError as error:
        _complain(folder, error)
        return None


def _complain(folder: Path, error: OSError) -> None:
    why = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        why += "; make room there, or set a smaller disk_memory"
    elif error.errno in (errno.EACCES, errno.EROFS):
        why += "; the user of the engine must be able to write there"
    log.error("disk_persistent: %s cannot be used (%s); the engine goes on without blocks on disk", folder, why)


def _making_room(folder: Path, identity: Identity, open_files: Callable[[], KeptFiles]) -> KeptFiles:
    """Open files; where there is no space for them, blocks that no engine uses go first (`sweep`)."""
    try:
        return open_files()
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        sweep(folder, identity, for_space=True)
        return open_files()


def _open_files(
    folder: Path,
    identity: Identity,
    slot: KeptSlot,
    part: Part,
    blocks: tuple[int, BlockMover],
    states: tuple[int, BlockMover] | None,
    rows: Sequence[BlockMover],
) -> KeptFiles:
    own, every = without_rows(part.kv)
    with ExitStack() as undo:

        def open_one(kind: str, shape: CacheShape, places: int, mover: BlockMover) -> BlockFile:
            kept = slot.file(kind, identity, str(shape))
            file = BlockFile(folder, places, mover, kept)
            undo.callback(file.close)
            if file.index is not None and file.index.problem:
                log.warning("disk_persistent: nothing in %s is used: %s", kept.file, file.index.problem)
            return file

        found = KeptFiles(
            slot,
            open_one("blocks", own.shape, *blocks),
            None if states is None else open_one("states", StateBlocks(part.kv).shape, *states),
            tuple(open_one(f"rows{at}", every.shape, blocks[0], each) for at, each in enumerate(rows)) if every else (),
        )
        undo.pop_all()
        return found


def _close(opened: KeptFiles) -> None:
    for file in (opened.blocks, opened.states, *opened.rows):
        if file is not None:
            file.close()
    opened.slot.close()
