"""Prices to the nanodollar, and which entry applies."""

from __future__ import annotations

from penstock.metering.prices import Price, PriceBook, PriceEntry, Usage, dollars


def test_a_price_per_million_tokens_is_a_thousandth_per_token() -> None:
    assert Price.per_million(1.5, 6.0) == Price(1500, 750, 6000, 50)
    assert Price.per_million(1.5, 6.0, cached=0.0, batch_percent=30) == Price(1500, 0, 6000, 30)
    assert Price.per_million(0.0005, 0.0015) == Price(0, 0, 2)


def test_cost_counts_cached_tokens_at_their_price_and_rounds_down() -> None:
    price = Price(100, 10, 1000)
    assert price.cost(Usage(50, 20, 3)) == 30 * 100 + 20 * 10 + 3 * 1000
    assert price.cost(Usage()) == 0
    assert Price(1, 1, 1).cost(Usage(3), percent=50) == 1
    assert Price(1, 1, 1).cost(Usage(2), percent=50) == 1
    assert price.cost(Usage(1, 0, 1), percent=200) == 2200
    assert price.recalled() == Price(10, 10, 10)


def test_the_most_specific_entry_wins() -> None:
    prices = {name: Price(number + 1) for number, name in enumerate(("any", "tier", "model", "both", "adapter"))}
    book = PriceBook(
        [
            PriceEntry(prices["any"]),
            PriceEntry(prices["tier"], tier="gold"),
            PriceEntry(prices["model"], model="m"),
            PriceEntry(prices["both"], model="m", tier="gold"),
            PriceEntry(prices["adapter"], adapter="a"),
        ]
    )
    assert book.price("m", "a", "gold") == prices["adapter"]
    assert book.price("m", "", "gold") == prices["both"]
    assert book.price("m", "b", "silver") == prices["model"]
    assert book.price("n", "", "gold") == prices["tier"]
    assert book.price("n") == prices["any"]
    late = PriceEntry(Price(99), model="n")
    book.add(late)
    assert book.price("n") == Price(99)
    book.add(PriceEntry(Price(77), model="n"))
    assert book.price("n") == Price(99), "what was there first stays"
    book.remove(late)
    assert book.price("n") == Price(77)
    assert PriceBook([]).price("m") == Price()


def test_batches_and_batch_tiers_pay_their_percentage() -> None:
    book, price = PriceBook([], batch_tiers=("cheap",)), Price(batch_percent=30)
    assert book.percent(price, "gold", batch=False) == 100
    assert book.percent(price, "gold", batch=True) == book.percent(price, "cheap", batch=False) == 30
    assert Price() == Price(0, 0, 0, 50)


def test_dollars_are_exact_text() -> None:
    assert dollars(0) == "0.00"
    assert dollars(1_000_000_000) == "1.00" and dollars(1_500_000_000) == "1.50"
    assert dollars(123) == "0.000000123" and dollars(-1_230_000_000) == "-1.23"
    assert dollars(1) == "0.000000001" and dollars(-1) == "-0.000000001"
