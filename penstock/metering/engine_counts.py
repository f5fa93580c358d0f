"""Engine request ids of a charge, and usage from an engine's token counts.

A charge is one HTTP request; each of its choices is an engine request. Their ids begin with the charge's id, so that
a gateway that never saw the request can ask an engine about the charge.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from penstock.metering.prices import Usage
from penstock.protocol.messages import Produced

_serial = itertools.count()
_UNCOUNTED = "x"


def engine_id(charge: str, prompt: int, choice: int, *, counted: bool = True) -> str:
    """The charge, the choice's position, and a unique number, since a charge may be retried. `counted`: its tokens are
    charged, and not only a by-product of processing the prompt."""
    return f"{charge}:{prompt}.{choice}.{next(_serial)}{'' if counted else _UNCOUNTED}"


def merged(entries: Iterable[Produced]) -> list[Produced]:
    """One entry per request. A request that moved to another engine has two: the later one includes the tokens of the
    earlier one, the earlier one knows the cached tokens of its start."""
    found: dict[str, Produced] = {}
    for entry in entries:
        other = found.setdefault(entry.request_id, entry)
        if other is not entry:
            running = None in (entry.finish_reason, other.finish_reason)
            last = max(entry, other, key=lambda one: one.tokens)
            cached = min(entry.cached_tokens, other.cached_tokens)
            found[entry.request_id] = Produced(
                entry.request_id,
                last.tokens,
                cached,
                None if running else last.finish_reason,
                entry.resumable or other.resumable,
            )
    return list(found.values())


def usage_of(entries: Sequence[Produced]) -> Usage:
    """The usage of one charge. The first choice of each prompt says how much of it was cached."""
    cached = completion = 0
    for entry in entries:
        place = entry.request_id.partition(":")[2]
        if not place.endswith(_UNCOUNTED):
            completion += entry.tokens
        if place.split(".")[1:2] == ["0"]:
            cached += entry.cached_tokens
    return Usage(0, cached, completion)
