"""The turns in the prompt: they fit, they are the newest, and no more are omitted than necessary."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from penstock.conversations.window import fit_turns

SIZES = st.lists(st.integers(1, 50), min_size=1, max_size=60)


def prompt(sizes: list[int], system: int, start: int) -> int:
    return system + sum(sizes[start:])


@given(SIZES, st.integers(0, 60), st.integers(1, 6), st.integers(1, 1500), st.floats(0.1, 1), st.integers(0, 59))
def test_what_is_kept(sizes: list[int], system: int, keep: int, budget: int, share: float, start: int) -> None:
    start = min(start, len(sizes) - 1)
    target = int(budget * share)
    asked: list[int] = []

    def count(first: int) -> int:
        asked.append(first)
        return prompt(sizes, system, first)

    found = fit_turns(len(sizes), start=start, keep=keep, budget=budget, target=target, count=count)

    assert start <= found <= len(sizes) - 1, "the system prompt and the last turn stay, and nothing comes back"
    fits = prompt(sizes, system, found) <= budget
    assert fits or found == len(sizes) - 1, "what is returned fits if anything does"
    if prompt(sizes, system, start) <= budget:
        assert found == start, "nothing moves while everything fits"
        return
    protected = max(start, len(sizes) - keep)
    if found > protected:
        assert prompt(sizes, system, found - 1) > budget, "one of the last turns leaves only when it must"
    elif found < protected:
        assert prompt(sizes, system, found) <= target, "room is made for more than one turn"
        assert found == start + 1 or prompt(sizes, system, found - 1) > target, "but no more than that"
    assert len(asked) <= 2 * len(sizes).bit_length() + 4, "counting is dear"


@given(SIZES, st.integers(0, 20))
def test_a_window_that_slides_moves_seldom(sizes: list[int], system: int) -> None:
    """Turn after turn of a conversation: every prompt fits, and most begin like the one before."""
    budget = system + 200
    start = moves = 0
    for turns in range(1, len(sizes) + 1):
        said = sizes[:turns]
        new = fit_turns(
            turns, start=start, keep=2, budget=budget, target=budget // 2,
            count=lambda first, said=said: prompt(said, system, first),  # type: ignore[misc]
        )  # fmt: skip
        assert prompt(said, system, new) <= budget
        moves += new != start
        start = new
    assume(sum(sizes) > 0)
    assert moves <= 1 + sum(sizes) // 50


def test_an_empty_conversation_fits() -> None:
    assert fit_turns(0, start=0, keep=2, budget=10, target=5, count=lambda _: 99) == 0


@pytest.mark.parametrize(
    ("start", "keep", "budget", "target", "found"),
    [
        (0, 2, 100, 50, 0),
        (0, 2, 99, 50, 5),
        (3, 2, 80, 50, 3),
        (0, 2, 80, 90, 2),
        (0, 2, 95, 95, 1),
        (0, 2, 80, 20, 8),
        (0, 2, 80, 19, 8),
        (0, 4, 40, 15, 6),
        (0, 4, 39, 15, 7),
        (0, 4, 20, 15, 8),
        (0, 4, 15, 15, 9),
        (0, 4, 5, 5, 9),
        (8, 4, 15, 15, 9),
        (0, 0, 80, 5, 9),
    ],
)
def test_ten_turns_of_ten_tokens(start: int, keep: int, budget: int, target: int, found: int) -> None:
    sizes = [10] * 10
    assert found == fit_turns(
        10, start=start, keep=keep, budget=budget, target=target, count=lambda first: prompt(sizes, 0, first)
    )
