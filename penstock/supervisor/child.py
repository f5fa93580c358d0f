"""One child process: its output by lines, its status messages, its exit.

Invariant: output is read as long as the child lives, so it never blocks on a full pipe; the length of a line is
bounded. Children run in their own sessions, so that Ctrl-C reaches only the supervisor, which drains them in order.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

import msgspec

from penstock import children
from penstock.supervisor.status import Status, decode_status

LINE_LIMIT = 16384
STATUS_FD = "{status}"
"""Placeholder for the number of the status file descriptor in a command."""

POLL_S = 0.1
"""How often to ask whether a process has ended, where the system does not say when."""

log = logging.getLogger("penstock.supervisor")


class Process(Protocol):
    """What the supervisor needs of a process, wherever it runs."""

    name: str

    @property
    def alive(self) -> bool: ...

    async def wait(self) -> int:
        """Waits for the exit; returns the exit status (negative: a signal)."""

    def terminate(self) -> None:
        """Asks it to finish its requests and exit."""

    def kill(self) -> None: ...

    def describe(self, code: int) -> str:
        """How it ended, for operators."""


class Child:
    """A running process on this machine: `spawn` starts it, `wait` waits for its exit."""

    def __init__(
        self, name: str, process: asyncio.subprocess.Process | _Adopted, readers: list[asyncio.Task[None]]
    ) -> None:
        self.name = name
        self.pid = process.pid
        self._process = process
        self._readers = readers

    @classmethod
    async def spawn(
        cls,
        name: str,
        command: Sequence[str],
        *,
        on_line: Callable[[str], None],
        on_status: Callable[[Status], None],
    ) -> Child:
        readable, writable = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *(str(writable) if part == STATUS_FD else part for part in command),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                pass_fds=(writable,),
                start_new_session=True,
            )
        except BaseException:
            os.close(readable)
            raise
        finally:
            os.close(writable)
        return await cls._of(name, process, readable, on_line, on_status)

    @classmethod
    async def adopt(
        cls,
        name: str,
        process: subprocess.Popen[bytes],
        readable: int,
        *,
        on_line: Callable[[str], None],
        on_status: Callable[[Status], None],
    ) -> Child:
        """A process that was started before there was an event loop; `readable`: its status messages."""
        adopted = _Adopted(process)
        try:
            await adopted.read_output()
        except BaseException:
            process.kill()
            os.close(readable)
            raise
        return await cls._of(name, adopted, readable, on_line, on_status)

    @classmethod
    async def _of(
        cls,
        name: str,
        process: asyncio.subprocess.Process | _Adopted,
        readable: int,
        on_line: Callable[[str], None],
        on_status: Callable[[Status], None],
    ) -> Child:
        assert process.stdout is not None
        status = asyncio.StreamReader()
        try:
            await asyncio.get_running_loop().connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(status), os.fdopen(readable, "rb", buffering=0)
            )
        except BaseException:
            process.kill()
            raise

        def on_status_line(line: str) -> None:
            try:
                on_status(decode_status(line.encode()))
            except msgspec.MsgspecError as error:
                log.warning("unreadable status message from a child", extra={"child": name, "why": str(error)})

        readers = [
            asyncio.create_task(_read_lines(process.stdout, on_line), name=f"{name} output"),
            asyncio.create_task(_read_lines(status, on_status_line), name=f"{name} status"),
        ]
        return cls(name, process, readers)

    async def wait(self) -> int:
        """Waits for the exit; returns the exit status (negative: a signal) after all output was passed on."""
        waiting = asyncio.create_task(self._process.wait(), name=f"{self.name} wait")
        try:
            # Some Python versions also wait for the pipes to close, which a grandchild may hold open.
            while self._process.returncode is None:
                await asyncio.wait([waiting], timeout=1.0)
        finally:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        code = self._process.returncode
        # Its own children must not outlive it or keep its port.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        _, pending = await asyncio.wait(self._readers, timeout=1.0)
        if pending:  # also when this process stood still meanwhile: then the output is there, and still unread
            _, pending = await asyncio.wait(pending, timeout=0.1)
        for task in pending:
            task.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        return code

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def describe(self, code: int) -> str:
        return describe_exit(code)

    def kill(self) -> None:
        """Kills the child and its descendants: it leads its own session."""
        if self.alive:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if isinstance(self._process, _Adopted):
            with suppress(ProcessLookupError):
                self._process.send_signal(number)
        else:
            children.send(self._process, number)


class _Adopted:
    """A process that the event loop did not start, as `Child` needs it."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.pid = process.pid
        self._process = process
        self.stdout: asyncio.StreamReader | None = None

    async def read_output(self) -> None:
        """Begin to read what it prints."""
        self.stdout = reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), self._process.stdout
        )

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    async def wait(self) -> int:
        ended, loop = asyncio.Event(), asyncio.get_running_loop()
        try:
            descriptor = os.pidfd_open(self.pid)
        except (AttributeError, OSError):  # an old system, one that forbids it, or too many open files
            while self._process.poll() is None:  # noqa: ASYNC110 - nothing says when
                await asyncio.sleep(POLL_S)
        else:
            loop.add_reader(descriptor, ended.set)
            try:
                await ended.wait()
            finally:
                loop.remove_reader(descriptor)
                os.close(descriptor)
        return self._process.wait()

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()


async def _read_lines(stream: asyncio.StreamReader, on_line: Callable[[str], None]) -> None:
    rest = b""
    while chunk := await stream.read(65536):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            _pass_on(line, on_line)
        if len(rest) > LINE_LIMIT:
            _pass_on(rest, on_line)
            rest = b""
    if rest:
        _pass_on(rest, on_line)


def _pass_on(line: bytes, on_line: Callable[[str], None]) -> None:
    try:
        on_line(line.decode(errors="replace").rstrip("\r"))
    except Exception:  # nobody may stop reading: the child would block once its pipe is full
        log.exception("a line of a child could not be handled")


def describe_exit(code: int) -> str:
    """`exit code 70`, or `killed by SIGKILL`."""
    if code < 0:
        with suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"
