"""Ids of requests: the client's own where it is well-formed, else a new one."""

from __future__ import annotations

import os
import re
import time

_WELL_FORMED = re.compile(rb"[A-Za-z0-9._:\-]{1,128}")


def new_id() -> str:
    """A unique id. It begins with the time, so that the ledger's indexes grow at their end."""
    return f"{time.time_ns() // 1_000_000:012x}{os.urandom(10).hex()}"


def request_id(given: bytes | None) -> str:
    """`given`: the client's header, if it sent one."""
    if given is not None and _WELL_FORMED.fullmatch(given):
        return given.decode()
    return f"req_{new_id()}"
