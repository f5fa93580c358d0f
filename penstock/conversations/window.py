"""Decides which turns of a conversation go into the prompt, from token counts alone.

The prompt holds the system prompt and the turns from `start` to the last. While they fit, `start` stays unchanged, so
that successive prompts share their prefix. When they do not, it moves forward to where the prompt fills only `target`
tokens: moving by one turn each time would make every prompt miss the prefix cache. The last `keep` turns stay unless
they do not fit themselves; the last one always stays.
"""

from __future__ import annotations

from collections.abc import Callable


def fit_turns(turns: int, *, start: int, keep: int, budget: int, target: int, count: Callable[[int], int]) -> int:
    """The first of `turns` to keep. `count(s)` is the prompt's length without the turns before `s`; it must not grow
    with `s`. When not even the last turn fits, it is returned anyway: the length check refuses the request later."""
    if turns == 0 or count(start) <= budget:
        return start
    last = turns - 1
    kept = min(last, max(start, turns - keep))
    found = _first(start + 1, kept, lambda s: count(s) <= min(target, budget))
    if found is not None:
        return found
    if count(kept) <= budget:
        return kept
    found = _first(kept + 1, last, lambda s: count(s) <= budget)
    return last if found is None else found


def _first(low: int, high: int, holds: Callable[[int], bool]) -> int | None:
    """The smallest number from `low` to `high` that satisfies the monotonic predicate `holds`, by bisection."""
    if low > high or not holds(high):
        return None
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low
