"""Search terms of a question for full-text search."""

from __future__ import annotations

import re

MOST_TERMS = 32
_WORD = re.compile(r"[^\W_]+")
_COMMON = """
    a about above after again all also am an and any are as at be because been before being below between both
    but by can cannot could did do does doing down during each few for from further had has have having he her
    here hers him his how i if in into is it its itself just let me might more most must my no nor not now of
    off on once one only or other our out over own please same shall she should so some such than that the their
    them then there these they this those through to too under until up us use used using very want was way we
    were what when where whether which while who whom whose why will with without would you your
"""
STOP_WORDS = frozenset(_COMMON.split())


def words(text: str) -> list[str]:
    """Words in lower case; underscores and dots separate them, as in the indexes."""
    return [word.lower() for word in _WORD.findall(text)]


def search_terms(query: str) -> list[str]:
    """Distinct words worth searching for, in order; stop words only where there is nothing else."""
    found = list(dict.fromkeys(words(query)))
    telling = [word for word in found if word not in STOP_WORDS]
    return (telling or found)[:MOST_TERMS]
