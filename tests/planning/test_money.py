"""The month's bill, dollars per million tokens, an API's invoice and the break-even, against figures by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.planning.catalogue import ApiPrice, Prices
from penstock.planning.money import (
    DAYS_PER_MONTH,
    GpuBill,
    Overheads,
    PriceMix,
    api_bill,
    api_request,
    break_even,
    gpu_bill,
    monthly_bill,
    token_prices,
)
from penstock.planning.workload import Workload

PRICES = Prices(on_demand=2.5, reserved=1.5, spot=1.0)
TEXTBOOK = Workload(users=100_000, requests_per_user=10, input_tokens=2_000, output_tokens=500)
API = ApiPrice(name="an API", input=0.6, cached_input=0.3, output=1.2, source="invented", date="2026-11-16")


def test_eight_gpus_day_and_night() -> None:
    bill = gpu_bill(PRICES, PriceMix(), [8] * 24)
    assert bill == GpuBill(8 * 730, 0, 0, 8 * 730 * 2.5)
    assert bill.hours == 5_840 and bill.dollars == 14_600


def test_a_fleet_that_follows_the_day_pays_for_the_hours_that_run() -> None:
    # 12 hours with 4, 12 hours with 10: 168 GPU hours a day, of 240 with static provisioning
    bill = gpu_bill(PRICES, PriceMix(), [4] * 12 + [10] * 12)
    assert bill.hours == pytest.approx(168 * 730 / 24)


def test_reserved_gpus_are_paid_at_night_too() -> None:
    # 5 of 10 reserved; beyond them nothing at night and 5 by day, a quarter of them spot (0.125 of 0.5)
    mix = PriceMix(on_demand=0.375, reserved=0.5, spot=0.125)
    bill = gpu_bill(PRICES, mix, [4] * 12 + [10] * 12)
    assert bill.reserved_hours == 5 * 730
    assert bill.spot_hours == pytest.approx(5 * 365 / 4)
    assert bill.on_demand_hours == pytest.approx(5 * 365 * 3 / 4)
    assert bill.dollars == pytest.approx(5 * 730 * 1.5 + 5 * 365 * (0.75 * 2.5 + 0.25 * 1.0))


def test_all_reserved_leaves_nothing_to_buy_on_demand() -> None:
    bill = gpu_bill(PRICES, PriceMix(0, 1, 0), [3, 7] * 12)
    assert bill == GpuBill(0, 7 * 730, 0, 7 * 730 * 1.5)


def test_a_price_that_the_catalogue_lacks_is_a_sentence() -> None:
    with pytest.raises(ConfigError, match="no spot price"):
        gpu_bill(replace(PRICES, spot=None), PriceMix(0, 0, 1), [1] * 24)


def test_hardware_without_prices_is_ones_own() -> None:
    assert gpu_bill(Prices(), PriceMix(), [2] * 24) == GpuBill(2 * 730, 0, 0, 0.0)


@pytest.mark.parametrize("shares", [(0.5, 0.2, 0.2), (1.5, -0.5, 0.0), (0.5, 0.5, 0.5), (0.6, 0.6, -0.2)])
def test_shares_must_add_up(shares: tuple[float, float, float]) -> None:
    with pytest.raises(ConfigError, match="add up to 1"):
        PriceMix(*shares)


def test_the_textbook_month() -> None:
    gpus = gpu_bill(PRICES, PriceMix(), [40] * 24)
    bill = monthly_bill(gpus, TEXTBOOK, Overheads(), weight_bytes=141e9)
    assert bill.gpus.dollars == 40 * 730 * 2.5 == 73_000
    assert bill.operations == 40 * 100
    # 1,000,000 x 30.4167 x 500 tokens x 250 bytes = 3,802 GB
    assert bill.egress == pytest.approx(3_802.083 * 0.09, rel=1e-6)
    # weights, and 1,000,000 x 2,500 x 4 bytes x 30 days = 300 GB
    assert bill.storage == pytest.approx((141 + 300) * 0.08)
    assert bill.total == pytest.approx(73_000 + 4_000 + 342.1875 + 35.28, rel=1e-6)


def test_dollars_per_million_tokens() -> None:
    # 60.83 G input and 15.21 G output tokens a month
    prices = token_prices(76_041.67, TEXTBOOK, prefill_share=0.4)
    assert prices.input == pytest.approx(0.5, rel=1e-6)
    assert prices.output == pytest.approx(3.0, rel=1e-6)
    assert prices.all == pytest.approx(1.0, rel=1e-6)


@given(st.floats(0, 1), st.floats(1, 1e7), st.floats(1, 5))
def test_the_prices_of_tokens_add_up_to_the_bill(share: float, total: float, turns: float) -> None:
    work = replace(TEXTBOOK, turns=turns)
    prices = token_prices(total, work, share)
    monthly = work.requests_per_day * DAYS_PER_MONTH / 1e6
    paid = monthly * (work.prompt_tokens * prices.input + work.output_tokens * prices.output)
    assert (
        paid == pytest.approx(total) == pytest.approx(monthly * (work.prompt_tokens + work.output_tokens) * prices.all)
    )


def test_an_api_charges_cached_input_less() -> None:
    # 2,000 x 0.60 + 500 x 1.20 = 1,800 dollars per million requests
    assert api_request(API, TEXTBOOK) == pytest.approx(0.0018)
    assert api_bill(API, TEXTBOOK) == pytest.approx(54_750)
    # half of the input at half the price: 300 dollars less
    half = replace(TEXTBOOK, cache_hit_rate=0.5)
    assert api_request(API, half) == pytest.approx(0.0015)
    assert api_request(replace(API, cached_input=None), half) == pytest.approx(0.0018)


def test_eight_gpus_against_an_api() -> None:
    # 8 x 730 x 2.50 = 14,600 dollars, and 4,000 for people: 18,600 / 30.4167 / 0.0018 = 339,726 requests a day
    fixed = 8 * 730 * 2.5 + 4_000
    found = break_even(lambda requests: fixed, api_request(API, TEXTBOOK))
    assert found == pytest.approx(339_726.03, rel=1e-6)


def test_of_several_crossings_the_last_counts() -> None:
    # A machine for every 100,000 requests: 1,000 dollars plus 300 each, against 0.01 dollars a day for 30.4167 days.
    # One machine is level at 4,274 a day; the second, third ... stay cheaper, as each costs less than it saves.
    steps = [1_000 + 300 * machines for machines in range(1, 1_000)]
    assert break_even(lambda requests: steps[min(int(requests / 100_000), 998)], 0.01) == pytest.approx(
        4_273.97, rel=1e-5
    )
    # A second machine that costs more than it saves: cheaper at 90,000, dearer at 100,001, cheaper for good later.
    costs = [20_000, 35_000]
    found = break_even(lambda requests: costs[requests > 100_000], 0.01)
    assert found == pytest.approx(35_000 / DAYS_PER_MONTH / 0.01, rel=1e-6)


def test_no_break_even_when_each_request_costs_more_than_the_api_takes() -> None:
    assert break_even(lambda requests: 100 + requests, 0.01) is None


def test_free_is_cheaper_from_the_first_request() -> None:
    assert break_even(lambda requests: 0.0, 0.01) == 1


def test_negative_overheads_are_refused() -> None:
    with pytest.raises(ConfigError, match="hourly wage must be 0 or more, not -3"):
        Overheads(hourly_wage=-3)


def test_overheads_may_be_nothing() -> None:
    assert Overheads(hourly_wage=0.0, log_days=0.0).hourly_wage == 0.0
    assert PriceMix() == PriceMix(1.0, 0.0, 0.0)


def test_hours_are_those_of_all_kinds() -> None:
    assert GpuBill(1.0, 20.0, 300.0, 0.0).hours == 321.0
