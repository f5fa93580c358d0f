"""Gateways and engines of neighbouring releases agree on a version of the protocol."""

from __future__ import annotations

import json
from pathlib import Path

from penstock.protocol.versions import OLDEST_VERSION, PROTOCOL_VERSION, Proposal, answer
from tests.protocol.schema import schema


def test_the_newest_common_version_is_agreed_on() -> None:
    proposal = Proposal()
    assert not proposal.agreed(OLDEST_VERSION) and not proposal.problem, "an older engine answers with its own"
    assert proposal.version == OLDEST_VERSION and proposal.agreed(OLDEST_VERSION)
    proposal.again()
    assert proposal.version == PROTOCOL_VERSION, "another engine may listen there after a restart"
    assert proposal.agreed(answer(proposal.version))


def test_an_engine_answers_with_the_nearest_version_that_it_speaks() -> None:
    assert answer(PROTOCOL_VERSION) == PROTOCOL_VERSION and answer(OLDEST_VERSION) == OLDEST_VERSION
    assert answer(PROTOCOL_VERSION + 5) == PROTOCOL_VERSION and answer(OLDEST_VERSION - 1) == OLDEST_VERSION


def test_outside_the_range_it_is_said_which_side_to_upgrade() -> None:
    proposal = Proposal()
    assert not proposal.agreed(OLDEST_VERSION - 1)
    assert "upgrade it first, one release at a time" in proposal.problem
    assert not proposal.agreed(PROTOCOL_VERSION + 1)
    assert "upgrade this side first" in proposal.problem


def test_messages_of_the_release_before_are_still_understood_and_understand_ours() -> None:
    """The rule of docs/upgrade.md: fields stay as they are, and new ones have defaults."""
    before = json.loads((Path(__file__).parent / f"messages_{OLDEST_VERSION}.json").read_text())
    now = schema()
    for kind, fields in before.items():
        assert fields.items() <= now[kind].items(), f"{kind}: a field was removed or changed"
        added = {name: how for name, how in now[kind].items() if name not in fields}
        assert all(how.startswith("optional") for how in added.values()), f"{kind}: {added} need defaults"
