"""Backoff, runtime folders, ports and health checks, one by one."""

import asyncio
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.supervisor.backoff import Backoff
from penstock.supervisor.child import LINE_LIMIT, Child, describe_exit
from penstock.supervisor.health import is_ready, local_url
from penstock.supervisor.heartbeat import Heartbeat
from penstock.supervisor.runtime import RuntimeFolder, sweep
from tests.engine_host.client import eventually
from tests.supervisor.test_supervisor import alive


def test_backoff_doubles_up_to_its_limit_and_forgives_after_good_service() -> None:
    backoff = Backoff(0.5, 30.0, healthy_s=60.0)
    assert [backoff.delay(0.0) for _ in range(8)] == [0.5, 1, 2, 4, 8, 16, 30, 30]
    assert backoff.delay(59.9) == 30
    assert backoff.delay(60.0) == 0.5


def test_silence_is_judged_once_a_process_has_begun_to_beat() -> None:
    now = [0.0]
    heartbeat = Heartbeat(3.0, clock=lambda: now[0])

    def looks(times: int, every: float = 1.0) -> list[bool]:
        seen = []
        for _ in range(times):
            now[0] += every
            seen.append(heartbeat.look())
        return seen

    assert not any(looks(100)), "it is still loading"
    heartbeat.beat()
    assert looks(4) == [False, False, False, True]
    heartbeat.beat()
    assert looks(3) == [False] * 3
    heartbeat.beat()
    assert looks(1, every=3600.0) == [False], "whoever looks was away too"
    heartbeat.beat()
    assert looks(3) == [False] * 3
    never = Heartbeat(0.0, clock=lambda: now[0])
    never.beat()
    now[0] += 1e6
    assert not any(never.look() for _ in range(3))


def test_a_runtime_folder_is_private_and_removed(tmp_path: Path) -> None:
    base = tmp_path / "run"
    with RuntimeFolder(base) as folder:
        assert stat.S_IMODE(base.stat().st_mode) == 0o700
        assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
        assert folder.endpoint(1, 0) == f"ipc://{folder.path}/engine-1-0"
    assert not folder.path.exists()


def test_a_folder_others_can_enter_is_closed_to_them(tmp_path: Path) -> None:
    base = tmp_path / "run"
    base.mkdir(mode=0o777)
    with RuntimeFolder(base):
        assert stat.S_IMODE(base.stat().st_mode) == 0o700


def test_folders_of_dead_servers_are_swept_and_live_ones_stay(tmp_path: Path) -> None:
    script = "import os, sys; from pathlib import Path; from penstock.supervisor.runtime import RuntimeFolder; "
    script += "print(RuntimeFolder(Path(sys.argv[1])).path, flush=True); os.kill(os.getpid(), 9)"
    dead = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True)
    left_behind = Path(dead.stdout.strip())
    assert left_behind.is_dir()
    with RuntimeFolder(tmp_path) as live:
        assert not left_behind.exists()
        assert sweep(tmp_path) == []
        assert live.path.is_dir()


def test_a_base_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    target.mkdir()
    link = tmp_path / "run"
    link.symlink_to(target)
    with pytest.raises(ConfigError, match="not a folder owned by this user"):
        RuntimeFolder(link)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("fe80::1", "http://[fe80::1]:80"),
    ],
)
def test_the_url_shown_can_be_used_on_this_machine(host: str, url: str) -> None:
    assert local_url(host, 80) == url


async def test_readiness_follows_the_status_code() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(status + b"\r\ncontent-length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        status = b"HTTP/1.1 503 Service Unavailable"
        assert not await is_ready("127.0.0.1", port)
        status = b"HTTP/1.1 200 OK"
        assert await is_ready("127.0.0.1", port)
    assert not await is_ready("127.0.0.1", port)


async def test_a_silent_server_is_not_ready() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert not await is_ready("127.0.0.1", server.getsockname()[1], timeout_s=0.2)


async def test_output_is_passed_on_line_by_line_whatever_it_is() -> None:
    script = (
        "import sys; out = sys.stdout.buffer; out.write(b'one\\ntwo\\r\\n' + b'\\xff\\n' + b'x' * 40000 + b'\\nlast')"
    )
    lines: list[str] = []
    child = await Child.spawn(
        "talker", [sys.executable, "-c", script], on_line=lines.append, on_status=lambda status: None
    )
    assert await child.wait() == 0
    assert lines[:3] == ["one", "two", "\ufffd"]
    assert lines[-1] == "last"
    assert sum(len(line) for line in lines[3:-1]) == 40000
    assert LINE_LIMIT < 40000


async def test_a_grandchild_does_not_outlive_the_child() -> None:
    script = "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True)"
    lines: list[str] = []
    child = await Child.spawn(
        "parent", [sys.executable, "-c", script], on_line=lines.append, on_status=lambda status: None
    )
    assert await asyncio.wait_for(child.wait(), 60) == 0
    assert eventually(lambda: not alive(int(lines[0])))


def test_the_end_of_a_process_is_put_in_words() -> None:
    assert describe_exit(-9) == "killed by SIGKILL"
    assert describe_exit(70) == "exit code 70"
