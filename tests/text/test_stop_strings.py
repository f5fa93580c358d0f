"""A stop string is never shown, not even in part, however the text is cut."""

from __future__ import annotations

import itertools

from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.text import StopStrings

LETTERS = st.text(alphabet="abc", max_size=12)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3)


def expected(text: str, stops: list[str]) -> tuple[str, str | None]:
    """By definition: the first position at which some stop string is complete."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@settings(max_examples=200)
@given(LETTERS, STOPS, st.lists(st.integers(0, 12), max_size=6))
@example("abcd", ["bcd", "c"], [])
@example("aab", ["aab", "ab"], [1, 2])
def test_the_result_does_not_depend_on_the_cuts(text: str, stops: list[str], cuts: list[int]) -> None:
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    watcher = StopStrings(stops)
    shown, matched = "", None
    for start, end in itertools.pairwise(bounds):
        safe, matched = watcher.push(text[start:end])
        shown += safe
        assert expected(text, stops)[0].startswith(shown), "part of a stop string was shown"
        if matched:
            break
    if not matched:
        shown += watcher.flush()
    assert (shown, matched) == expected(text, stops)


def test_every_split_point_of_a_stop_string() -> None:
    text, stop = "Paris.\n\nUser: hi", "\n\nUser:"
    for cut in range(len(text)):
        watcher = StopStrings([stop])
        first, early = watcher.push(text[:cut])
        second, matched = watcher.push(text[cut:])
        assert first + ("" if early else second) == "Paris."
        assert (early or matched) == stop


def test_text_that_cannot_be_a_stop_string_is_not_delayed() -> None:
    watcher = StopStrings(["STOP"])
    assert watcher.push("hello") == ("hello", None)
    assert watcher.push(" ST") == (" ", None)
    assert watcher.push("art") == ("STart", None)
    assert watcher.push(" STO") == (" ", None)
    assert watcher.flush() == "STO"


def test_nothing_is_shown_after_a_match() -> None:
    watcher = StopStrings(["x"])
    assert watcher.push("axb") == ("a", "x")
    assert watcher.push("more") == ("", "x")
    assert watcher.flush() == ""


def test_no_stop_strings() -> None:
    watcher = StopStrings([])
    assert watcher.push("anything") == ("anything", None)
    assert watcher.flush() == ""


def test_what_may_begin_a_stop_string_is_held_back_from_its_first_character() -> None:
    watcher = StopStrings(["abcde"])
    assert watcher.push("abc") == ("", None), "less text than the stop string is long"
    assert watcher.push("x") == ("abcx", None)
    assert watcher.push("xxab") == ("xx", None)
    assert watcher.push("cde") == ("", "abcde")
    watcher = StopStrings(["aabc"])
    assert watcher.push("xaxa") == ("xax", None), "the first candidate is none, a later one is"
    assert StopStrings(["zz", "ab"]).push("xaz") == ("xa", None), "of all stop strings, the one that begins first"
    assert StopStrings(["abz", "bz"]).push("ab") == ("", None)
