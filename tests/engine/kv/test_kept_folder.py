"""Folders of kept blocks: what another user or a bad moment left there is neither used nor deleted."""

from __future__ import annotations

import os
import stat
import threading
import time
from pathlib import Path

import pytest

from penstock.engine.kv import kept_folder
from penstock.engine.kv.kept_folder import Identity, claim, erase, sweep
from penstock.engine.kv.own_file import open_own

OLD = 1.0
MINE = Identity("org/model", ("weights: 1", "block size: 16"))
OTHER_WEIGHTS = Identity("org/model", ("weights: 2", "block size: 16"))


def age(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        os.utime(path, (OLD, OLD))


def test_only_slots_are_deleted(tmp_path: Path) -> None:
    claim(tmp_path, OTHER_WEIGHTS).close()
    folder = tmp_path / "kv-cache" / OTHER_WEIGHTS.folder
    notes = folder / "notes"
    notes.mkdir()
    (notes / "rank0.text").write_text("of somebody")
    held = claim(tmp_path, OTHER_WEIGHTS)
    age(folder)
    sweep(tmp_path, MINE)
    assert (folder / "0").is_dir() and notes.is_dir(), "in use"
    held.close()
    sweep(tmp_path, MINE)
    assert not (folder / "0").exists() and notes.is_dir()


def test_folders_that_are_elsewhere_are_left_alone(tmp_path: Path) -> None:
    """A link in a folder that others may write to must not lead to the deletion of what it points to."""
    home, disk = tmp_path / "home", tmp_path / "disk"
    slot = home / "somebody" / "0"
    slot.mkdir(parents=True)
    (home / "somebody" / "identity").write_text(OTHER_WEIGHTS.text)
    age(home)
    disk.mkdir()
    (disk / "kv-cache").symlink_to(home)
    sweep(disk, MINE)
    sweep(disk, MINE, for_space=True)
    assert slot.is_dir()
    with pytest.raises(PermissionError, match="delete it"):
        claim(disk, MINE)
    (disk / "kv-cache").unlink()
    (disk / "kv-cache").mkdir()
    (disk / "kv-cache" / "model-1").symlink_to(home / "somebody")
    sweep(disk, MINE)
    assert slot.is_dir()


def test_models_whose_names_look_alike_are_apart(tmp_path: Path) -> None:
    alike = Identity("org-model", ("weights: 2", "block size: 16"))
    claim(tmp_path, alike).close()
    sweep(tmp_path, MINE)
    assert (tmp_path / "kv-cache" / alike.folder / "0").is_dir()


@pytest.mark.parametrize("text", ["", "\xff\xfe", "weights: "])
def test_a_damaged_description_deletes_nothing(tmp_path: Path, text: str) -> None:
    claim(tmp_path, OTHER_WEIGHTS).close()
    folder = tmp_path / "kv-cache" / OTHER_WEIGHTS.folder
    (folder / "identity").write_text(text, encoding="latin-1")
    sweep(tmp_path, MINE)
    assert (folder / "0").is_dir()
    claim(tmp_path, OTHER_WEIGHTS).close()
    assert (folder / "identity").read_text() == OTHER_WEIGHTS.text, "until it is written again"


def test_a_slot_is_not_deleted_while_it_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look for locks and the deletion, an engine that starts might make one."""
    claim(tmp_path, OTHER_WEIGHTS).close()
    folder = tmp_path / "kv-cache" / OTHER_WEIGHTS.folder
    (folder / "0" / "rank0.lock").unlink()  # its engine was killed when it had just made the folder
    rmtree, slots = kept_folder.shutil.rmtree, list[kept_folder.KeptSlot]()

    def meanwhile(*args: object, **options: object) -> None:
        thread.start()
        time.sleep(0.2)
        rmtree(*args, **options)  # type: ignore[arg-type]

    thread = threading.Thread(target=lambda: slots.append(claim(tmp_path, OTHER_WEIGHTS)))
    monkeypatch.setattr(kept_folder.shutil, "rmtree", meanwhile)
    monkeypatch.setattr(kept_folder, "_sweep_folder", lambda *_: kept_folder._delete(folder / "0"))
    sweep(tmp_path, MINE)
    thread.join()
    assert (folder / "0" / "rank0.lock").exists()
    slots[0].close()


@pytest.mark.parametrize("locked", [True, False])
def test_an_engine_may_start_while_files_are_erased(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locked: bool
) -> None:
    """That may take minutes. It takes another slot."""
    claim(tmp_path, MINE).close()
    folder = tmp_path / "kv-cache" / MINE.folder / "0"
    (folder / "rank0.blocks.index").touch()
    if not locked:
        (folder / "rank0.lock").unlink()
    taken: list[int] = []

    def meanwhile(*_: object) -> int:
        slot = claim(tmp_path, MINE)
        taken.append(slot.number)
        slot.close()
        return 7

    monkeypatch.setattr(kept_folder, "LOCK_S", 0.2)
    monkeypatch.setattr(kept_folder, "erase_owned", meanwhile)
    found = erase(tmp_path, "acme")
    assert (found.blocks, found.busy, taken) == (7, [], [1])


def test_planted_files_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "target"
    target.write_text("of somebody")
    (tmp_path / "link").symlink_to(target)
    os.link(target, tmp_path / "second name")
    os.mkfifo(tmp_path / "fifo")
    for planted in ("link", "second name", "fifo"):
        with pytest.raises(PermissionError, match="delete it"):
            open_own(tmp_path / planted)
    assert target.read_text() == "of somebody"
    loose = tmp_path / "loose"
    loose.touch(0o666)
    loose.chmod(0o666)
    os.close(open_own(loose))
    assert stat.S_IMODE(loose.stat().st_mode) == 0o600
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(PermissionError, match="not a file of this user"):
        open_own(loose)
