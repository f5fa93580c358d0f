"""Files of blocks that outlive their process: whatever moment it is killed at, a name never leads to another block."""

from __future__ import annotations

import errno
import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.engine.kv.block_file import BlockFile, KeptFile
from penstock.engine.kv.block_hash import NAMING, block_names
from penstock.engine.kv.block_index import BlockIndex
from penstock.engine.kv.cache import CacheShape, KVCache
from penstock.engine.kv.mover import HostBlockMover

PLACES = 9
SHAPE = CacheShape.of_paged_kv(layers=2, kv_heads=1, head_dim=16, block_size=16, dtype=torch.float32)


def test_names_stay_as_long_as_their_number() -> None:
    """Other processes, and those that come later, must arrive at the same names, or know that they cannot."""
    names = [name.hex() for name in block_names(list(range(5)), 2, "acme\0mine", "v1")]
    assert (NAMING, names) == (2, ["c27a50c58cb7f50bfa33ce3142a9eec8", "c27a50c5197d044cbf9c0689b40333d6"])


def make_mover() -> HostBlockMover:
    return HostBlockMover(KVCache(SHAPE, 2, torch.device("cpu")), 2)


def open_file(folder: Path, mover: HostBlockMover, block_format: str = "of tests", places: int = PLACES) -> BlockFile:
    return BlockFile(folder, places, mover, KeptFile(folder / "rank0.blocks", block_format))


def name_of(number: int) -> bytes:
    return number.to_bytes(16, "little")


def fill(mover: HostBlockMover, slot: int, number: int) -> None:
    for piece in mover.memory(slot):
        piece[:] = random.Random(number).randbytes(len(piece))


def is_filled(mover: HostBlockMover, slot: int, number: int) -> bool:
    return all(piece == random.Random(number).randbytes(len(piece)) for piece in mover.memory(slot))


def torn(before: bytes, after: bytes, chance: random.Random) -> bytes:
    """A file of which some sectors were not written, and that perhaps ends early."""
    before = before.ljust(len(after), b"\0")
    sectors = range(0, len(after), 512)
    mixed = b"".join((after if chance.random() < 0.5 else before)[at : at + 512] for at in sectors)
    return mixed if chance.random() < 0.5 else mixed[: chance.randrange(len(mixed) + 1)]


@pytest.mark.parametrize("seed", range(4))
def test_a_name_never_leads_to_another_block(tmp_path: Path, seed: int) -> None:
    chance, mover = random.Random(seed), make_mover()
    right = wrong = 0
    for life in range(12):
        folder = tmp_path / str(life)
        if life:
            shutil.copytree(tmp_path / str(life - 1), folder)
        else:
            folder.mkdir()
        file = open_file(folder, mover)
        assert file.index is not None
        for name, place in file.index.entries():
            read = file.read([(1, place)]).result(100) == [True]
            right, wrong = right + read, wrong + (not read)
            assert not read or is_filled(mover, 1, int.from_bytes(name, "little"))
        paths = [folder / "rank0.blocks", folder / "rank0.blocks.index"]
        for _ in range(chance.randrange(1, 12)):
            number = chance.randrange(40)
            fill(mover, 0, number)
            before = [path.read_bytes() for path in paths]
            assert file.write([(0, chance.randrange(PLACES))], [name_of(number)]).result(100) == [True]
        file.close()
        if life % 2:  # it lost power in the last write
            for path, old in zip(paths, before, strict=True):
                path.write_bytes(torn(old, path.read_bytes(), chance))
    assert right > 20 and wrong > 0


def test_an_epoch_ends_for_good(tmp_path: Path) -> None:
    mover = make_mover()
    file = open_file(tmp_path, mover)
    assert file.index is not None
    fill(mover, 0, 1)
    file.write([(0, 3)], [name_of(1)]).result(100)
    assert file.index.entries() == [(name_of(1), 3)]
    epoch = file.index.epoch
    late = file._writer.submit(file._write_all, [(0, 4)], [name_of(2)], epoch)  # it waits while the epoch ends
    file.forget()
    late.result(100)
    file._write_all([(0, 5)], [name_of(3)], epoch)
    file.write([(0, 6)], [name_of(4)]).result(100)
    assert [name for name, _ in file.index.entries()] == [name_of(4)]
    file.close()
    again = BlockIndex(tmp_path / "rank0.blocks.index", "of tests", PLACES)
    assert again.entries() == [(name_of(4), 6)] and not again.problem
    again.close()
    other = BlockIndex(tmp_path / "rank0.blocks.index", "of others", PLACES)
    assert other.entries() == [] and other.problem
    other.close()


def test_of_what_is_erased_nothing_is_left(tmp_path: Path) -> None:
    mover = make_mover()
    file = open_file(tmp_path, mover)
    fill(mover, 0, 1)
    assert file.write([(0, 3), (0, 4)], [name_of(1), name_of(2)]).result(100) == [True, True]
    file.forget()
    assert file.erase([3, 4]).result(100) == [True, True]
    file.close()
    assert not any((tmp_path / "rank0.blocks").read_bytes()), "blocks"
    assert not any((tmp_path / "rank0.blocks.index").read_bytes()[4096:]), "records of an epoch that is over"


def test_a_rank_whose_disk_fails_has_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is not lost for that, nor is the engine."""
    mover = make_mover()
    file = open_file(tmp_path, mover)
    assert file.index is not None
    fill(mover, 0, 1)
    file.write([(0, 3)], [name_of(1)]).result(100)
    places = np.array([3])
    assert file.confirm(file.index.epoch, name_of(1), places).tolist() == [True]

    def fail(*args: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(os, "pwrite", fail)
        broken.setattr(os, "ftruncate", fail)
        assert file.confirm(12345, name_of(1), places).tolist() == [False]
    assert f"delete {tmp_path / 'rank0.blocks.index'} before the next start" in caplog.text
    file.close()


def test_the_order_of_use_is_remembered(tmp_path: Path) -> None:
    mover = make_mover()
    file = open_file(tmp_path, mover)
    assert file.index is not None
    for number in range(4):
        file.write([(0, number)], [name_of(number)]).result(100)
    file.read([(1, 1)]).result(100)
    assert [place for _, place in file.index.entries()] == [0, 2, 3, 1]
    file.index.reorder([3, 1, 0, 2])
    file.write([(0, 5)], [name_of(3)]).result(100)  # a second time
    file.close()
    file = open_file(tmp_path, mover, places=6)
    assert file.index is not None
    assert [place for _, place in file.index.entries()] == [1, 0, 2, 5]
    file.close()
