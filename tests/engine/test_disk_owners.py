"""Whose blocks a persistent disk holds: tenants find only their own, and what an owner left can be erased (R-ENG-4)."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.cli.kv import app as kv_commands
from penstock.engine.adapters.spec import AdapterSpec
from penstock.engine.core import Engine
from penstock.engine.kv import block_index
from penstock.engine.kv.block_hash import owner_tag
from penstock.engine.kv.kept_folder import erase
from penstock.engine.request import Request
from tests.engine.adapters.files import write_adapter
from tests.engine.harness import collect, drain, greedy
from tests.engine.persistent import BLOCK, answers, converse, files, kill, settle, start, text, wait, write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[int]]:
    return answers(folder)


def test_tenants_find_only_their_own(folder: Path, tmp_path: Path, expected: dict[str, list[int]]) -> None:
    engine = start(folder, tmp_path)
    assert converse(engine, expected, "one") == [0] * 4
    engine.close()
    engine = start(folder, tmp_path)
    assert converse(engine, expected, "two", range(2)) == [0] * 2
    settle(engine)  # what still waits to be written takes room that restored blocks need
    assert converse(engine, expected, "one") == [96] * 4
    engine.close()


def test_what_an_owner_left_can_be_erased(folder: Path, tmp_path: Path, expected: dict[str, list[int]]) -> None:
    engine = start(folder, tmp_path, num_blocks=100, host_memory=40 * BLOCK)
    salts = ("acme", "acme\0divided", "other")
    for number, salt in enumerate(salts):
        converse(engine, expected, salt, range(number, number + 1))
    settle(engine)
    disk = engine.scheduler.allocator.pool.host.disk  # type: ignore[union-attr]
    assert disk is not None
    (file,) = files(tmp_path, "rank0.blocks")
    acme = [disk._places[name] for name in disk.names if name.startswith(owner_tag("acme"))]
    content = [at_place(file, place) for place in acme]
    assert len(acme) == 12 and all(map(any, content))
    erasure = engine.erase("acme")
    assert erasure.blocks == 12
    wait(erasure.advance)
    assert erasure.failed == 0 and not any(any(at_place(file, place)) for place in acme)
    assert [converse(engine, expected, salts[at], range(at, at + 1)) for at in (2, 0)] == [[96], [0]]
    again = engine.erase("acme")
    assert again.blocks == 6
    wait(again.advance)
    assert engine.erase("nobody").advance()
    kill(engine)
    engine = start(folder, tmp_path)
    found = []
    for at, salt in enumerate(salts):
        found += converse(engine, expected, salt, range(at, at + 1))
        settle(engine)
    assert found == [0, 0, 96]
    engine.close()


def test_callers_without_a_key_are_erased_with_the_default_tenant(
    folder: Path, tmp_path: Path, expected: dict[str, list[int]]
) -> None:
    engine = start(folder, tmp_path)
    for number, salt in enumerate(("default", "", "acme")):
        converse(engine, expected, salt, range(number, number + 1))
    settle(engine)
    engine.close()
    said = CliRunner().invoke(kv_commands, ["erase", "--tenant", "default", "--files", str(tmp_path)])
    assert said.output == "12 blocks erased\n", said.output
    assert erase(tmp_path, "acme").blocks == 6


def test_an_owner_can_be_erased_in_files_that_no_engine_uses(
    folder: Path, tmp_path: Path, expected: dict[str, list[int]]
) -> None:
    engine = start(folder, tmp_path)
    for number, salt in enumerate(("acme", "other")):
        converse(engine, expected, salt, range(number, number + 1))
    settle(engine)
    (file,) = files(tmp_path, "rank0.blocks")
    assert erase(tmp_path, "acme").busy == [file.parent], "its engine must be told"
    before = file.read_bytes()
    engine.close()
    found = erase(tmp_path, "acme")
    assert (found.blocks, found.busy) == (6, []) and erase(tmp_path, "acme").blocks == 0
    after = file.read_bytes()
    gone = [at for at in range(0, len(after), BLOCK) if after[at : at + BLOCK] != before[at : at + BLOCK]]
    assert len(gone) == 6 and not any(any(after[at : at + BLOCK]) for at in gone)
    engine = start(folder, tmp_path)
    assert converse(engine, expected, "acme", range(1)) + converse(engine, expected, "other", range(1, 2)) == [0, 96]
    engine.close()
    with pytest.raises(FileNotFoundError, match="kv-cache"):
        erase(tmp_path / "nowhere", "acme")


@pytest.mark.parametrize("reopened", [True, False])
def test_blocks_of_a_release_without_owners_are_not_kept(
    folder: Path, tmp_path: Path, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch, reopened: bool
) -> None:
    """Their names do not say whose they are, so they could never be erased."""
    with monkeypatch.context() as before:
        before.setattr(block_index, "_MAGIC", b"penstock kv 1\n\0\0")
        engine = start(folder, tmp_path)
        converse(engine, expected, "acme", range(1))
        engine.close()
    (file,) = files(tmp_path, "rank0.blocks")
    assert any(file.read_bytes())
    if reopened:
        engine = start(folder, tmp_path)
        assert not any(file.read_bytes()) and file.stat().st_size
        assert converse(engine, expected, "acme", range(1)) == [0]
        engine.close()
    else:
        assert erase(tmp_path, "other").blocks == 6 and not file.read_bytes() and erase(tmp_path, "acme").blocks == 0
    engine = start(folder, tmp_path)
    assert converse(engine, expected, "acme", range(1)) == [96 if reopened else 0]
    engine.close()


def at_place(file: Path, place: int) -> bytes:
    with file.open("rb") as handle:
        handle.seek(place * BLOCK)
        return handle.read(BLOCK)


@pytest.mark.slow
def test_adapters_find_only_their_own(folder: Path, tmp_path: Path, expected: dict[str, list[int]]) -> None:
    adapter = AdapterSpec("a", str(write_adapter(tmp_path / "adapter", folder)))

    def ask(engine: Engine, name: str) -> tuple[list[int], int]:
        request = greedy("0", text(0), 5)
        engine.submit(Request("0", request.prompt, request.params, adapter=name))
        deltas = drain(engine)
        return collect(deltas)["0"], next(delta.cached_tokens for delta in deltas if delta.tokens)

    engine = start(folder, tmp_path / "disk", adapters=(adapter,))
    said, cached = ask(engine, "a")
    assert not cached
    engine.close()
    engine = start(folder, tmp_path / "disk", adapters=(adapter,))
    assert ask(engine, "") == (expected["0"], 0)
    assert ask(engine, "a") == (said, 96)
    engine.close()
