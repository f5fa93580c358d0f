"""The tools of drills, each by itself: the relay that cuts a network, the clock that jumps, processes, logs, ledger."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.fleet.drills.ledger import charges, create_keys, settled_tokens
from penstock.fleet.drills.probe import Logs
from penstock.fleet.drills.program import DrillError, Program
from penstock.fleet.drills.relay import Relay
from penstock.fleet.drills.resources import Processes
from penstock.fleet.drills.shim import Shim
from penstock.fleet.drills.throwaway import merged
from penstock.metering.ledger import Ledger
from penstock.storage import open_database
from tests.ports import free_port


async def test_a_cut_network_says_nothing_and_delivers_when_it_is_mended() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            writer.write(data.upper())
        writer.close()

    behind = await asyncio.start_server(echo, "127.0.0.1", 0)
    relay = Relay(free_port(), behind.sockets[0].getsockname()[1])
    await relay.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
    writer.write(b"one")
    assert await reader.readexactly(3) == b"ONE"
    relay.cut()
    writer.write(b"two")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reader.readexactly(3), 0.1)
    relay.mend()
    assert await reader.readexactly(3) == b"TWO"
    relay.delay_s, begun = 0.1, time.monotonic()
    writer.write(b"slow")
    assert await reader.readexactly(4) == b"SLOW" and time.monotonic() - begun >= 0.2, "there and back"
    writer.close()
    assert await reader.read() == b""
    await relay.close()
    behind.close()


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_clocks_jump_and_syncs_are_slow_for_one_kind_of_program_alone(tmp_path: Path) -> None:
    shim = Shim(tmp_path)
    environments = {kind: {**os.environ, **shim.environment(kind)} for kind in ("one", "other")}
    shim.set("one", clock_s=3600, sync_s=0.2)
    code = (
        "import os, time; wall, began = time.time(), time.monotonic(); "
        f"os.fsync(os.open({str(tmp_path)!r}, os.O_RDONLY)); print(wall, time.monotonic() - began)"
    )
    said = {}
    for kind, environment in environments.items():
        command = [sys.executable, "-S", "-E", "-c", code]
        words = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()
        said[kind] = (float(words[0]) - time.time(), float(words[1]))
    assert 3500 < said["one"][0] < 3700 and said["one"][1] >= 0.2
    assert abs(said["other"][0]) < 60


def test_a_program_is_killed_and_started_again_and_seen_from_outside(tmp_path: Path) -> None:
    program = Program("sleeper", ["sleep", "60"], tmp_path)
    with pytest.raises(DrillError, match="not running"):
        _ = program.pid
    program.start()
    first, processes = program.pid, Processes()
    processes.sample(0.0, [("sleeper", first)])
    assert processes.followed[first].samples[0].memory_mib > 0
    program.kill()
    assert not program.running
    processes.sample(1.0, [("sleeper", first)])
    program.start()
    assert program.running and program.pid != first
    program.stop()
    assert program.process is not None and program.process.returncode in (-signal.SIGTERM, 128 + signal.SIGTERM)


def test_warnings_are_found_in_logs_as_they_are_written(tmp_path: Path) -> None:
    log = tmp_path / "gateway.log"
    log.write_text('{"level": "info", "message": "fine"}\nplain text\n{"level": "warning", "mess')
    logs = Logs(lambda: [log, tmp_path / "absent.log"])
    logs.look()
    assert logs.warnings == []
    with log.open("a") as more:
        more.write('age": "engine lost"}\n')
    logs.look()
    (found,) = logs.warnings
    assert found[1] == "gateway: engine lost" and logs.first_after(found[0]) == found
    assert logs.first_after(found[0] + 1) is None


async def test_the_ledger_of_a_fleet_is_read_by_request(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path / 'store.db'}"
    database = await open_database(store)
    await Ledger(database).prepare()
    await database.close()
    keys = await create_keys(store)
    assert len({*keys.clients, keys.batches, keys.revoked, keys.admin}) == 5
    assert await charges(store, "drill", within=1) == [] and await settled_tokens(store, keys.batches) == 0


def test_settings_are_merged_over_those_of_the_fleet() -> None:
    assert merged({"a": {"b": 1, "c": 2}, "d": [1]}, {"a": {"b": 3}, "d": []}) == {"a": {"b": 3, "c": 2}, "d": []}
