"""sd_notify over a real datagram socket: a single gateway or engine tells the service manager that it is ready."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from penstock.supervisor.service_manager import READY, notify
from penstock.supervisor.status import Failed, Listening, StatusPipe


def test_without_a_supervisor_readiness_is_told_to_the_service_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("")  # a name of the kernel's choice, outside the file system
        monkeypatch.setenv("NOTIFY_SOCKET", "@" + manager.getsockname()[1:].decode())
        status = StatusPipe(None)
        status.send(Failed("no"))
        status.send(Listening())
        assert manager.recv(100) == b"READY=1"
        notify(READY, "all well")
        assert manager.recv(100) == b"READY=1\nSTATUS=all well"


def test_a_service_manager_that_is_gone_is_logged_and_no_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    notify(READY)
    assert not caplog.messages
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone"))
    notify(READY)
    assert "cannot tell the service manager READY=1" in caplog.text
