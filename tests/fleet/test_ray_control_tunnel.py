"""The control socket of gateways on other nodes: the same bytes, in order, through actor calls."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from penstock.fleet.ray.control_tunnel import ControlEnds, ControlTunnel


class Calls:
    """Actor calls without actors: a call is a task, as it is in an actor with an event loop."""

    def __init__(self, ends: ControlEnds) -> None:
        self.control_open = Call(ends.open)
        self.control_send = Call(ends.send)
        self.control_receive = Call(ends.receive)
        self.control_close = Call(ends.close)


class Call:
    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def remote(self, *arguments: Any) -> Awaitable[Any]:
        async def run() -> Any:
            result = self._function(*arguments)
            return await result if asyncio.iscoroutine(result) else result

        return asyncio.ensure_future(run())


async def test_lines_pass_both_ways_and_a_lost_host_is_disconnected(tmp_path: Path) -> None:
    got: list[bytes] = []
    over = asyncio.Event()

    async def control(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"topology\n")
        while line := await reader.readline():
            got.append(line)
            writer.write(b"done " + line)
        writer.close()
        over.set()

    server = await asyncio.start_unix_server(control, tmp_path / "real")
    ends = ControlEnds(tmp_path / "real")
    tunnel = ControlTunnel(tmp_path / "control", Calls(ends), "host")
    await tunnel.start()
    reader, writer = await asyncio.open_unix_connection(tmp_path / "control")
    assert await reader.readline() == b"topology\n"
    for number in range(200):
        writer.write(b"%d\n" % number)
    assert [await reader.readline() for _ in range(200)] == [b"done %d\n" % number for number in range(200)]
    assert len(got) == 200
    ends.close_of("another")
    assert not over.is_set()
    ends.close_of("host")
    await asyncio.wait_for(over.wait(), 60)
    assert await reader.read() == b""
    writer.close()
    await tunnel.close()
    server.close()
