"""Tells systemd, or whatever else started this process and set $NOTIFY_SOCKET, that it is ready or stopping.

The protocol of sd_notify(3): one datagram of lines. Without the variable nobody asked, and nothing is sent.
"""

from __future__ import annotations

import logging
import os
import socket

log = logging.getLogger("penstock.supervisor")

READY = "READY=1"
STOPPING = "STOPPING=1"


def notify(state: str, status: str = "") -> None:
    """`state`: `READY` or `STOPPING`; `status`: a line for `systemctl status`."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):  # a name that is not in the file system
        address = "\0" + address[1:]
    message = f"{state}\nSTATUS={status}" if status else state
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.sendto(message.encode(), address)
    except OSError as error:
        # The service manager then ends this process after its start timeout: the log must say why.
        log.error("cannot tell the service manager %s over %s: %s", state, os.environ["NOTIFY_SOCKET"], error)
