"""What an engine calls the requests behind one charge, and what its counts of them come to.

A charge is one HTTP request; each of its choices is a request of the engine. Their ids begin with the charge's, so that
an engine can be asked about a charge by somebody who never saw the request.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from penstock.metering.prices import Usage
from penstock.protocol.messages import Produced

_serial = itertools.count()
_UNCOUNTED = "x"


def engine_id(charge: str, prompt: int, choice: int, *, counted: bool = True) -> str:
    """The charge, the choice's place in it, and a number, since a charge may be tried again. `counted`: its tokens are
    the client's, and not only a by-product of reading the prompt."""
    return f"{charge}:{prompt}.{choice}.{next(_serial)}{'' if counted else _UNCOUNTED}"


def merged(entries: Iterable[Produced]) -> list[Produced]:
    """One entry for each request. One that went on elsewhere is known in two places: the later one counts what the
    earlier one did too, the earlier one knows what was cached when it began."""
    found: dict[str, Produced] = {}
    for entry in entries:
        other = found.setdefault(entry.request_id, entry)
        if other is not entry:
            running = None in (entry.finish_reason, other.finish_reason)
            last = max(entry, other, key=lambda one: one.tokens)
            cached = min(entry.cached_tokens, other.cached_tokens)
            found[entry.request_id] = Produced(
                entry.request_id, last.tokens, cached, None if running else last.finish_reason
            )
    return list(found.values())


def usage_of(entries: Sequence[Produced]) -> Usage:
    """What was produced for one charge. Of each prompt the first choice says how much of it was cached."""
    cached = completion = 0
    for entry in entries:
        place = entry.request_id.partition(":")[2]
        if not place.endswith(_UNCOUNTED):
            completion += entry.tokens
        if place.split(".")[1:2] == ["0"]:
            cached += entry.cached_tokens
    return Usage(0, cached, completion)
