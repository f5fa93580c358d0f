"""Allow-lists: names and patterns, layers that only take away, owners (R-GW-9)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.identity.access import (
    ANY,
    KINDS,
    UNLIMITED,
    Access,
    AllowList,
    AllowListChange,
)

NAMES = st.text("ab.-*", min_size=1, max_size=6)
LISTS = st.builds(AllowList, *[st.none() | st.lists(NAMES, max_size=3).map(tuple) for _ in KINDS])


def test_without_lists_everything_without_another_owner_is_allowed() -> None:
    for kind in KINDS:
        assert ANY.allows(kind, "x") and Access("acme").allows(kind, "x", "acme")
        assert not ANY.allows(kind, "x", "acme") and not Access("rival").allows(kind, "x", "acme")


def test_an_empty_list_allows_nothing() -> None:
    access = Access.of("acme", own=AllowList(models=(), tools=()))
    assert not access.allows("model", "x") and not access.allows("tool", "x")
    assert access.allows("collection", "x")


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        ("*", "anything", True), ("a*", "a", True), ("a*", "b", False), ("*z", "az", True), ("a*z", "az", True),
        ("a*z", "a", False), ("a*b*c", "a-b-b-c", True), ("a*b*c", "a-c-b", False), ("aa*aa", "aaa", False),
        ("a.b", "axb", False), ("a[b]*", "a[b]c", True), ("A*", "a", False), ("**", "x", True), ("?", "x", False),
    ],
)  # fmt: skip
def test_patterns(pattern: str, name: str, matches: bool) -> None:
    assert Access.of("acme", own=AllowList(models=(pattern,))).allows("model", name) is matches


def test_a_model_is_found_under_any_of_its_names() -> None:
    access = Access.of("acme", own=AllowList(models=("gpt-*",)))
    assert access.allows("model", "small", aliases=("gpt-4o",)) and not access.allows("model", "small")


def test_adapters_and_remotes_without_a_list_follow_that_of_models() -> None:
    access = Access.of("acme", own=AllowList(models=("small",)))
    assert not access.allows("remote", "far") and not access.allows("adapter", "sql")
    assert access.allows("adapter", "sql", "acme"), "its own"
    access = Access.of("acme", own=AllowList(models=("small",), remotes=("far",), adapters=("sql",)))
    assert access.allows("remote", "far") and access.allows("adapter", "sql")
    assert not access.allows("adapter", "other", "acme"), "a list of its own holds for its own too"


def test_only_the_tenants_own_list_opens_what_others_own_and_only_by_its_name() -> None:
    named, pattern = AllowList(adapters=("sql",)), AllowList(adapters=("*",))
    assert Access.of("rival", own=named).allows("adapter", "sql", "acme")
    assert not Access.of("rival", own=pattern).allows("adapter", "sql", "acme")
    assert not Access.of("rival", tier=named).allows("adapter", "sql", "acme")
    assert not Access.of("rival", key=named).allows("adapter", "sql", "acme")
    assert not Access.of("rival", own=named, key=AllowList(adapters=())).allows("adapter", "sql", "acme")


def test_parts_of_a_tool_server() -> None:
    access = Access.of("acme", own=AllowList(tools=("weather", "notes.read", "mail.*")))
    assert access.allows_part("tool", "weather") and access.allows_part("tool", "notes")
    assert access.allows_part("tool", "mail") and not access.allows_part("tool", "note")
    assert not access.allows_part("tool", "other") and ANY.allows_part("tool", "other")


@given(LISTS, LISTS, LISTS, NAMES, st.sampled_from(KINDS), st.sampled_from(["", "acme", "rival"]))
def test_a_layer_can_only_take_away(
    tier: AllowList, own: AllowList, key: AllowList, name: str, kind: Any, owner: str
) -> None:
    allowed = Access.of("acme", tier, own, key).allows(kind, name, owner)
    for wider in (Access.of("acme", tier, own), Access.of("acme", UNLIMITED, own, key)):
        assert not allowed or wider.allows(kind, name, owner)


@given(LISTS)
def test_lists_are_stored_as_they_are(lists: AllowList) -> None:
    assert AllowList.read(lists.stored()) == lists


def test_a_change_leaves_what_it_does_not_name() -> None:
    lists = AllowList(models=("a",), tools=("b",))
    assert lists.changed(None) is not None
    change = msgspec.json.decode(b'{"tools": null, "remotes": []}', type=AllowListChange)
    assert lists.changed(change) == AllowList(models=("a",), remotes=())
