"""Filters on the metadata of documents."""

from __future__ import annotations

import json
import time

import pytest

from penstock.knowledge.entities import Attribute
from penstock.knowledge.filters import AttributeFilter, Comparison, Compound, Membership, passing

REPORT: dict[str, Attribute] = {"kind": "report", "year": 2024, "score": 0.5, "public": True}


@pytest.mark.parametrize(
    ("wanted", "passes"),
    [
        (Comparison("eq", "kind", "report"), True),
        (Comparison("eq", "kind", "Report"), False),
        (Comparison("eq", "year", 2024.0), True),
        (Comparison("eq", "public", True), True),
        (Comparison("eq", "public", 1), False),
        (Comparison("eq", "year", "2024"), False),
        (Comparison("ne", "year", 2024), False),
        (Comparison("ne", "year", "2024"), True),
        (Comparison("ne", "author", "ann"), True),
        (Comparison("eq", "author", "ann"), False),
        (Comparison("gt", "year", 2023), True),
        (Comparison("gt", "year", 2024), False),
        (Comparison("gte", "year", 2024), True),
        (Comparison("gte", "year", 2025), False),
        (Comparison("lt", "score", 0.5), False),
        (Comparison("lt", "score", 0.75), True),
        (Comparison("lte", "score", 0.25), False),
        (Comparison("lte", "kind", "note"), False),
        (Comparison("lte", "score", 0.5), True),
        (Comparison("lt", "kind", "sheet"), True),
        (Comparison("gt", "kind", 1), False),
        (Comparison("gte", "public", True), False),
        (Comparison("lt", "author", "zoe"), False),
        (Membership.of("in", "year", (2023, 2024)), True),
        (Membership.of("in", "kind", ("sheet",)), False),
        (Membership.of("nin", "kind", ("sheet",)), True),
        (Membership.of("nin", "kind", ("report",)), False),
        (Membership.of("nin", "author", ("ann",)), True),
        (Membership.of("in", "author", ("ann",)), False),
        (Membership.of("in", "public", (1, "True")), False),
        (Membership.of("in", "year", ("2024", 2024.0)), True),
        (Compound("and", (Comparison("eq", "kind", "report"), Comparison("gt", "year", 2030))), False),
        (Compound("or", (Comparison("eq", "kind", "report"), Comparison("gt", "year", 2030))), True),
        (Compound("or", (Compound("and", (Comparison("ne", "kind", "x"),)), Comparison("eq", "year", 1))), True),
    ],
)
def test_a_filter(wanted: AttributeFilter, passes: bool) -> None:
    assert wanted.matches(REPORT) is passes
    assert list(passing([("a", json.dumps(REPORT))], wanted)) == (["a"] if passes else [])


def test_the_largest_filter_over_many_documents_takes_no_time() -> None:
    """Else one request holds the interpreter lock for minutes."""
    names = [Membership.of("in", "kind", [f"{part} {n}" for n in range(256)]) for part in range(99)]
    documents = [(str(number), json.dumps(REPORT)) for number in range(1000)]
    began = time.process_time()
    assert not passing(documents, Compound("or", tuple(names)))
    assert time.process_time() - began < 3.0
