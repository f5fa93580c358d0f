"""The day of a service: rates from users, requests and tokens, the curve of the day, conversations."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.planning.workload import CURVES, Curve, Workload, curve

TEXTBOOK = Workload(users=100_000, requests_per_user=10, input_tokens=2_000, output_tokens=500)


def test_the_textbook_case() -> None:
    # 100,000 x 10 = 1,000,000 requests a day; / 86,400 = 11.574/s; x 3 at peak = 34.722/s
    assert TEXTBOOK.requests_per_day == 1_000_000
    assert TEXTBOOK.average.requests == pytest.approx(11.5741, rel=1e-5)
    assert TEXTBOOK.average.input_tokens == pytest.approx(23_148.15, rel=1e-6)
    assert TEXTBOOK.average.output_tokens == pytest.approx(5_787.04, rel=1e-6)
    assert TEXTBOOK.peak.requests == pytest.approx(34.7222, rel=1e-5)
    assert TEXTBOOK.peak.input_tokens == pytest.approx(69_444.44, rel=1e-6)
    assert TEXTBOOK.peak.output_tokens == pytest.approx(17_361.11, rel=1e-6)
    assert TEXTBOOK.peak.tokens == pytest.approx(86_805.56, rel=1e-6)
    assert TEXTBOOK.peak.cached_tokens == 0
    assert TEXTBOOK.longest_context == 2_500


@given(
    st.sampled_from(sorted(CURVES)),
    st.floats(1, 1e7),
    st.floats(2, 10),
)
def test_the_hours_add_up_to_the_day_and_the_busiest_reaches_the_peak(name: str, users: float, peak: float) -> None:
    work = Workload(users, 10, 2_000, 500, peak_factor=peak, curve=CURVES[name])
    assert sum(work.hour(hour).requests for hour in range(24)) * 3_600 == pytest.approx(work.requests_per_day)
    assert max(work.hour_peak(hour).requests for hour in range(24)) == pytest.approx(work.peak.requests)


def test_every_named_curve_has_a_mean_of_one_and_a_busiest_hour_below_the_default_peak() -> None:
    for shape in CURVES.values():
        assert sum(shape.hours) == pytest.approx(24)
        assert 1 <= shape.peak < 3


def test_offices_are_busy_by_day_and_consumers_in_the_evening() -> None:
    office, consumer = CURVES["office"].hours, CURVES["consumer"].hours
    # loads over that of the quietest hour, from midnight
    assert [round(hour / min(office)) for hour in office[:12]] == [2, 1, 1, 1, 1, 2, 4, 7, 11, 14, 15, 15]
    assert [round(hour / min(office)) for hour in office[12:]] == [12, 13, 15, 15, 14, 12, 9, 6, 5, 4, 3, 2]
    assert [round(2 * hour / min(consumer)) for hour in consumer[:12]] == [5, 3, 2, 2, 2, 3, 4, 6, 8, 9, 9, 10]
    assert [round(2 * hour / min(consumer)) for hour in consumer[12:]] == [
        11,
        11,
        10,
        10,
        11,
        12,
        13,
        15,
        16,
        15,
        12,
        8,
    ]
    assert set(CURVES["flat"].hours) == {1}


def test_a_conversation_sends_its_history_again_and_finds_it_in_the_cache() -> None:
    chat = replace(TEXTBOOK, input_tokens=100, output_tokens=200, turns=5)
    # before the five turns: 0, 300, 600, 900, 1200 tokens; 600 on average
    assert chat.history_tokens == 600
    assert chat.prompt_tokens == 700
    assert chat.hit_rate == pytest.approx(600 / 700)
    assert chat.average.computed_tokens == pytest.approx(chat.average.requests * 100)
    assert chat.longest_context == 1_500


def test_a_given_hit_rate_replaces_that_of_the_histories() -> None:
    chat = replace(TEXTBOOK, turns=3, cache_hit_rate=0.25)
    assert chat.cached_tokens == pytest.approx(0.25 * chat.prompt_tokens)


def test_a_shared_prefix_is_found_by_the_first_request_of_every_conversation() -> None:
    assert replace(TEXTBOOK, shared_prefix=500).cached_tokens == pytest.approx(500)
    # of four requests one finds the prefix of 60 tokens alone, the others a history that begins with it
    chat = replace(TEXTBOOK, input_tokens=100, output_tokens=200, turns=4, shared_prefix=60)
    assert chat.cached_tokens == pytest.approx((60 + 300 + 600 + 900) / 4)


def test_curves_by_name_and_by_24_numbers() -> None:
    assert curve("office").peak == pytest.approx(15 * 24 / 184)
    own = curve(",".join(["1"] * 12 + ["3"] * 12))
    assert own.name == "custom" and own.hours[0] == 0.5 and own.peak == 1.5


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ofice", "did you mean office"),
        ("zzz", "known: flat, office, consumer"),
        ("1,2,3", "3 values; give 24"),
        ("a,b", "24 numbers separated by commas"),
        (",".join(["0"] * 24), "not all 0"),
        (",".join(["-1"] * 24), "0 or more"),
        (",".join(["1"] * 23 + ["-1"]), "0 or more"),
        (",".join(["1"] * 23 + ["nan"]), "0 or more"),
    ],
)
def test_a_bad_curve_is_a_sentence(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        curve(text)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"users": -5}, "users must be more than 0, not -5"),
        ({"users": 0}, "more than 0"),
        ({"requests_per_user": float("nan")}, "more than 0, not nan"),
        ({"input_tokens": 0}, "input tokens must be 1 or more"),
        ({"output_tokens": 0.5}, "output tokens must be 1 or more"),
        ({"turns": 0}, "turns of a conversation must be 1 or more"),
        ({"cache_hit_rate": 1.0}, "from 0 to below 1, not 1"),
        ({"cache_hit_rate": -0.1}, "from 0 to below 1"),
        ({"shared_prefix": 2_000}, "fewer than the 2000 of the input, not 2000"),
        ({"shared_prefix": -1}, "must be 0 or more tokens"),
        ({"peak_factor": 1.5}, "below the busiest hour of the curve consumer"),
        ({"peak_factor": 0.5, "curve": Curve.of("flat", [1] * 24)}, "peak factor must be 1 or more"),
    ],
)
def test_bad_numbers_are_a_sentence(change: dict[str, float], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        replace(TEXTBOOK, **change)  # type: ignore[arg-type]
