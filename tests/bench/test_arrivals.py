"""When requests of a load come: rates, bursts, recorded traces."""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path

import pytest

from penstock.bench import arrivals
from penstock.bench.arrivals import Pattern, Planned
from penstock.errors import PenstockError


def gaps(plan: list[Planned]) -> list[float]:
    return [later.at - earlier.at for earlier, later in itertools.pairwise(plan)]


@pytest.mark.parametrize("pattern", ["poisson", "constant", "burst"])
def test_a_rate_is_kept_on_average(pattern: Pattern) -> None:
    plan = arrivals.at_rate(20.0, pattern, 4000, 100, 10, burst=16)
    assert plan[0].at == 0.0 and all(gap >= 0 for gap in gaps(plan))
    assert len(plan) / plan[-1].at == pytest.approx(20.0, rel=0.06)
    assert {(planned.input_len, planned.output_len) for planned in plan} == {(100, 10)}


def test_how_requests_come_at_a_rate() -> None:
    even = gaps(arrivals.at_rate(10.0, "constant", 50, 1, 1))
    assert even == pytest.approx([0.1] * 49)
    bursts = gaps(arrivals.at_rate(10.0, "burst", 12, 1, 1, burst=4))
    assert bursts == pytest.approx([0, 0, 0, 0.4, 0, 0, 0, 0.4, 0, 0, 0])
    random = gaps(arrivals.at_rate(10.0, "poisson", 4000, 1, 1))
    assert statistics.stdev(random) == pytest.approx(0.1, rel=0.1)  # as large as the mean: nobody waits for anybody
    assert arrivals.at_rate(10.0, "poisson", 9, 1, 1) == arrivals.at_rate(10.0, "poisson", 9, 1, 1)
    assert arrivals.at_rate(10.0, "poisson", 9, 1, 1) != arrivals.at_rate(10.0, "poisson", 9, 1, 1, seed=1)


TRACES = {
    "own.jsonl": '{"at": 3, "input_len": 7, "output_len": 2}\n\n{"at": 4.5, "input_len": 9, "output_len": 1}\n',
    "own.csv": "at,input_len,output_len\n4.5,9,1\n3,7,2\n",
    "lengths.jsonl": '{"timestamp": 3000, "input_length": 7, "output_length": 2, "hash_ids": [1]}\n'
    '{"timestamp": 4500, "input_length": 9, "output_length": 1}\n',
    "dated.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.0000000,7,2\n"
    "2023-11-16 18:17:04.5000000,9,1\n",
}


@pytest.mark.parametrize("name", TRACES)
def test_a_trace_begins_with_its_first_request(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(TRACES[name])
    assert arrivals.from_trace(tmp_path / name, None) == [Planned(0.0, 7, 2), Planned(1.5, 9, 1)]
    assert arrivals.from_trace(tmp_path / name, None, speed=3.0)[1].at == pytest.approx(0.5)
    assert len(arrivals.from_trace(tmp_path / name, 1)) == 1


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "has no requests"),
        ('{"at": 1}', "line 1 .* is not a request"),
        ("not json", "line 1 .* is not a request"),
        ("[]", "line 1 .* is not a request"),
        (
            '{"at": 0, "input_len": 1, "output_len": 1}\n{"at": 0, "input_len": 0, "output_len": 1}',
            "line 2 .* at least 1",
        ),
        ('{"at": NaN, "input_len": 1, "output_len": 1}', "the time a number"),
    ],
)
def test_a_trace_that_is_none_says_where(text: str, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_text(text)
    with pytest.raises(PenstockError, match=complaint):
        arrivals.from_trace(tmp_path / "trace.jsonl", None)


def test_a_trace_that_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(PenstockError, match="cannot be read"):
        arrivals.from_trace(tmp_path / "absent.csv", None)
