"""The pairs of questions that the semantic cache is measured on."""

from __future__ import annotations

from penstock.bench.semantic_cache import load_pairs


def test_the_pairs_come_with_the_package_and_fall_into_two_halves() -> None:
    pairs = load_pairs()
    assert len(pairs) == len({(pair.first, pair.second) for pair in pairs}) > 300
    assert 0.4 < sum(pair.held_out for pair in pairs) / len(pairs) < 0.6
    assert {True, False} == {pair.should_hit for pair in pairs}
