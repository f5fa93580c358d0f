"""How many connections this process may hold. Each takes a file descriptor, so the soft limit is raised to the hard one
and connections beyond it are answered with 503."""

from __future__ import annotations

import logging
import resource

MOST_CONNECTIONS = 65536
WANTED_CONNECTIONS = 10_000
KEPT_FILES = 256
"""Descriptors that are reserved for everything else: engines, stores, sinks, logs."""

log = logging.getLogger("penstock.gateway")


def connections() -> int:
    """The number of connections to accept, after raising the limit."""
    files = raise_file_limit()
    room = max(min(MOST_CONNECTIONS, files - KEPT_FILES), 16)
    if room < WANTED_CONNECTIONS:
        log.warning(
            "this process may open only %d files, so it accepts at most %d connections; raise the hard limit "
            "(`ulimit -Hn 65536` before starting, or LimitNOFILE=65536 in its service)",
            files,
            room,
        )
    return room


def raise_file_limit() -> int:
    """Raise the soft limit to the hard one; returns how many descriptors this process may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_CONNECTIONS + KEPT_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted if soft == resource.RLIM_INFINITY else soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError) as error:
        log.warning("the limit on open files stays at %d: %s", soft, error)
        return soft
    return wanted
