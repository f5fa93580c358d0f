"""The ledger: exact sums, nothing twice, nothing lost, on both stores."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from penstock.metering import journal as journal_module
from penstock.metering import ledger as ledger_module
from penstock.metering.journal import Journal
from penstock.metering.ledger import Charge, Ledger, LedgerError, Settlement, cost_of, opened, progressed, settled
from penstock.metering.prices import Price, PriceBook, PriceEntry, Usage, dollars
from penstock.metering.reports import rows
from penstock.storage import Database, DatabaseError, Statement, open_database
from tests.gateway.conftest import eventually, until
from tests.services import emptied
from tests.virtual_time import run_in_virtual_time


@pytest.fixture(params=["sqlite", "postgres"])
async def database(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Database]:
    url = f"sqlite:///{tmp_path / 'test.db'}"
    if request.param == "postgres":
        url = request.getfixturevalue("postgres_url")
        await emptied(url)
    opened_database = await open_database(url)
    yield opened_database
    await opened_database.close()


@pytest.fixture
async def ledger(database: Database) -> Ledger:
    ledger = Ledger(database)
    await ledger.prepare()
    return ledger


def charge(id: str, **changes: object) -> Charge:
    values = {
        "id": id, "request_id": f"req-{id}", "gateway": "g1", "opened_at": 1000.0, "tenant": "acme", "user": "ann",
        "key": "psk_1", "feature": "", "model": "tiny", "adapter": "", "tier": "free", "prompt_tokens": 100,
        "percent": 100, "price_input": 1000, "price_cached": 500, "price_output": 2000,
    }  # fmt: skip
    return Charge(**{**values, **changes})  # type: ignore[arg-type]


def end(of: Charge, completion: int = 10, cached: int = 0, at: float = 2000.0) -> Settlement:
    return Settlement(of, at, cached, completion, cost_of(of, cached, completion), "stop")


async def test_a_charge_is_opened_once_and_settled_once(ledger: Ledger) -> None:
    one = charge("a")
    assert await ledger.write([*opened(one), *opened(one)]) == [1, 1, 0, 0]
    assert [entry.charge for entry in await ledger.open_charges()] == [one]
    assert await ledger.write([*settled(end(one)), *settled(end(one, completion=99))]) == [1, 1, 0, 0]
    assert await ledger.write(opened(one)) == [0, 0]  # late: it stays settled
    assert await ledger.open_charges() == []
    (total,) = await ledger.totals()
    assert (total.requests, total.prompt_tokens, total.completion_tokens) == (1, 100, 10)
    assert total.cost_nanos == 100 * 1000 + 10 * 2000


async def test_only_the_settlement_that_stands_is_announced_and_all_can_be_read_again(ledger: Ledger) -> None:
    told: list[Settlement] = []
    journals = [Journal(ledger, announce=told.append) for _ in range(2)]
    for journal in journals:
        journal.start()
    ends = [end(charge("a")), end(charge("b"), at=2001.0), end(charge("a"), completion=99, at=2002.0)]
    assert await journals[0].open(charge("a")) and await journals[0].open(charge("b"))
    for journal, one in zip(
        (*journals, journals[1]), ends, strict=True
    ):  # the last by a gateway that was taken for dead
        assert await journal.settle(one)
    assert told == ends[:2]
    for journal in journals:
        await journal.close()
    [again] = [page async for page in ledger.settled_since(0.0, 3000.0)]
    assert [(entry.charge_id, entry.request_id, entry.cost_nanos) for entry in again] == [
        (one.charge.id, one.charge.request_id, one.cost_nanos) for one in ends[:2]
    ]


async def test_what_is_open_knows_how_far_it_was(ledger: Ledger) -> None:
    await ledger.write([*opened(charge("a")), *opened(charge("b", gateway="g2", opened_at=5000.0))])
    for count in (7, 9, 8):
        await ledger.write(progressed({"a": (64, count, count - 5), "nobody": (0, 5, 0)}))
    entry = (await ledger.open_charges())[0]
    assert (entry.cached_tokens, entry.completion_tokens, entry.reasoning_tokens) == (64, 9, 4)


async def test_reasoning_tokens_are_summed_beside_completion_tokens(ledger: Ledger) -> None:
    thought = msgspec.structs.replace(end(charge("a")), reasoning_tokens=7)
    await ledger.write([*opened(charge("a")), *opened(charge("b")), *settled(thought), *settled(end(charge("b")))])
    (total,) = await ledger.totals(["tenant"])
    assert (total.completion_tokens, total.reasoning_tokens) == (20, 7)
    assert total.plus(total).reasoning_tokens == 14
    assert rows(["tenant"], [total])[0]["reasoning_tokens"] == 7
    [page] = [page async for page in ledger.settled_since(0.0, 3000.0)]
    assert [entry.reasoning_tokens for entry in page] == [7, 0]


def settled_before(settlement: Settlement) -> Statement:
    """As versions wrote it that did not know reasoning tokens."""
    (sql, values), *_ = settled(settlement)
    return sql.replace(", reasoning_tokens)", ")").replace("(?, ", "(", 1), values[:-1]


async def test_a_ledger_of_the_version_before_gains_reasoning_tokens_and_still_takes_its_writes(
    database: Database,
) -> None:
    """As in a rolling upgrade: an old gateway goes on writing after the new one has changed the tables."""
    await database.migrate("ledger", ledger_module._VERSIONS[:-1])
    one, two = end(charge("a")), end(charge("b"))
    await database.transact([*opened(charge("a")), *opened(charge("b")), *opened(charge("c")), settled_before(one)])
    ledger = Ledger(database)
    await ledger.prepare()
    await ledger.prepare()
    await database.transact([settled_before(two)])
    await ledger.write(settled(msgspec.structs.replace(end(charge("c")), reasoning_tokens=3)))
    (total,) = await ledger.totals()
    assert (total.requests, total.completion_tokens, total.reasoning_tokens) == (3, 30, 3)


async def test_only_the_charges_of_dead_gateways_are_abandoned(ledger: Ledger) -> None:
    await ledger.write(
        [*opened(charge("a")), *opened(charge("b", gateway="g2")), *opened(charge("c", opened_at=5000.0))]
    )
    await ledger.beat("g1", 3000.0)
    await ledger.beat("g2", 4000.0)
    abandoned = await ledger.open_charges(abandoned_since=3500.0)
    assert [entry.charge.id for entry in abandoned] == ["a"]
    await ledger.leave("g2")
    assert {entry.charge.id for entry in await ledger.open_charges(abandoned_since=3500.0)} == {"a", "b"}


async def test_usage_by_any_dimension(ledger: Ledger) -> None:
    charges = [
        charge("a"),
        charge("b", user="bob", feature="search"),
        charge("c", tenant="other", adapter="french"),
        charge("d", tenant="other", model="big"),
    ]
    await ledger.write(
        [part for index, one in enumerate(charges) for part in settled(end(one, at=86400.0 * (index + 1)))]
    )
    by_tenant = await ledger.totals(["tenant"])
    assert {total.group: total.requests for total in by_tenant} == {("acme",): 2, ("other",): 2}
    assert len(await ledger.totals(["tenant", "user", "feature", "model", "adapter"])) == 4
    assert [total.group for total in await ledger.totals(["user"], tenant="acme")] != []
    assert {total.group[0] for total in await ledger.totals(["user"], tenant="acme")} == {"ann", "bob"}
    assert {total.group for total in await ledger.totals(["day"], since=86400.0 * 2, until=86400.0 * 4)} == {
        (86400 * 2,),
        (86400 * 3,),
    }
    with pytest.raises(LedgerError, match="not by password"):
        await ledger.totals(["password"])  # type: ignore[list-item]


class Unreliable(Ledger):
    away = False
    transactions = 0

    async def write(self, statements: list[Statement]) -> list[int]:  # type: ignore[override]
        self.transactions += 1
        if self.away:
            raise DatabaseError("gone")
        return await super().write(statements)


async def test_many_entries_share_a_transaction_and_wait_for_a_store_that_is_away(
    ledger: Ledger, database: Database
) -> None:
    unreliable = Unreliable(database)
    journal = Journal(unreliable)
    journal.start()
    charges = [charge(f"c{index}") for index in range(300)]
    await asyncio.gather(*(journal.open(one) for one in charges))
    assert unreliable.transactions < 100
    unreliable.away = True
    waiting = [journal.settle(end(one)) for one in charges]
    journal.note("c0", 0, 5)
    await eventually(lambda: not journal.store_up)
    assert not any(future.done() for future in waiting) and journal.lag_s > 0
    unreliable.away = False
    await asyncio.gather(*waiting)
    await journal.close()
    (total,) = await ledger.totals()
    assert total.requests == 300 and await ledger.open_charges() == []


class Forgetful(Ledger):
    """Writes, but its answer is lost, when `mute`."""

    mute = False
    statements: list[str] = []  # noqa: RUF012

    async def write(self, statements: list[Statement]) -> list[int]:  # type: ignore[override]
        self.statements = [text for text, _ in statements]
        counts = await super().write(statements)
        if self.mute:
            raise DatabaseError("gone")
        return counts


async def test_a_short_answer_is_never_listed_as_open_and_one_that_may_be_is_taken_off(database: Database) -> None:
    ledger = Forgetful(database)
    await ledger.prepare()
    journal = Journal(ledger)
    journal.start()
    short = charge("short")
    await asyncio.gather(journal.open(short), journal.settle(end(short)))
    assert len(ledger.statements) == 2 and not any("charges_progress" in text for text in ledger.statements)
    ledger.mute = True
    doubtful = charge("doubtful")
    journal.open(doubtful)
    journal.hurry()
    found = await until(ledger.open_charges, bool)
    assert [entry.charge.id for entry in found] == ["doubtful"]
    settled = journal.settle(end(doubtful))
    ledger.mute = False
    assert await settled
    await journal.close()
    assert await ledger.open_charges() == []
    (total,) = await ledger.totals()
    assert total.requests == 2


class Interrupted(Ledger):
    """Loses what it has just been told, as PostgreSQL does when it is killed before it flushed."""

    lost = 0
    written: list[str] = []  # noqa: RUF012

    @property
    def interruptions(self) -> int:
        return self.lost

    async def write(self, statements: list[Statement]) -> list[int]:  # type: ignore[override]
        self.written += [text for text, _ in statements]
        return [1] * len(statements)


async def test_the_beginning_of_a_charge_is_written_at_once_where_few_begin(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "GATHER_S", 3600.0)
    now = 0.0
    journal = Journal(ledger, lambda: now, patience_s=3600.0)
    journal.start()
    async with asyncio.timeout(30):
        for number in range(6):  # one request after the other: none of them waits for others to gather
            now += journal_module.FEW_S / (journal_module.FEW - 1)
            one = charge(f"lone-{number}")
            waits = journal.open(one)
            now += 2 * journal_module.QUICK_S
            assert await waits
            assert await journal.settle(end(one))
    many = [journal.open(charge(f"many-{number}")) for number in range(journal_module.FEW)]
    now += journal_module.QUICK_S
    journal._gathered()
    assert not journal._wake.is_set() and not any(future.done() for future in many), "these are written together"
    journal.hurry()
    assert all(await asyncio.gather(*many))
    await journal.close()


async def test_what_a_killed_database_may_have_forgotten_is_written_again(database: Database) -> None:
    ledger = Interrupted(database)
    journal = Journal(ledger)
    journal.start()
    one = charge("one")
    await asyncio.gather(journal.open(one), journal.settle(end(one)))
    told, ledger.written = ledger.written, []
    journal.hurry()
    await asyncio.sleep(0)
    assert told and not ledger.written, "nothing was lost"
    ledger.lost += 1
    journal.hurry()
    await eventually(lambda: len(ledger.written) > 0)
    assert {text for text in told if "charges_" in text} <= set(ledger.written)
    await journal.close()


class Slow(Ledger):
    """Remembers which count was safe since when; a transaction takes 50 ms."""

    def __init__(self) -> None:
        self.safe: list[tuple[float, int]] = [(0.0, 0)]

    @property
    def problem(self) -> None:
        return None

    @property
    def interruptions(self) -> None:
        return None

    async def write(self, statements: list[Statement]) -> list[int]:  # type: ignore[override]
        counts = [values[2] for text, values in statements if "charges_progress" in text and "VALUES" in text]
        await asyncio.sleep(0.05)
        self.safe += [(asyncio.get_running_loop().time(), int(count)) for count in counts]
        return [0] * len(statements)


@pytest.mark.parametrize("company", [False, True], ids=["alone", "beside others"])
def test_the_noted_count_of_a_stream_is_never_older_than_a_quarter_of_a_second(company: bool) -> None:
    """What is billed when gateway and engine die together. A stream by itself, too: nobody else's entry wakes the
    journal for it."""
    ledger, said = Slow(), []

    async def stream() -> None:
        loop, journal = asyncio.get_running_loop(), Journal(ledger)
        journal.start()
        await journal.open(charge("a"))
        for token in range(1, 301):
            said.append((loop.time(), token))
            journal.note("a", 0, token)
            if company and token % 7 == 0:
                journal.settle(end(charge(f"other-{token}")))
            await asyncio.sleep(0.01)
        await journal.close()

    run_in_virtual_time(stream())
    for at, token in said:
        safe_at = next(when for when, count in ledger.safe if count >= token)
        assert safe_at - at <= 0.25 + 1e-6, f"token {token} was safe only {safe_at - at:.2f} s later"


def test_money_is_exact() -> None:
    price = Price.per_million(0.15, 0.6)
    assert price == Price(150, 75, 600)
    assert price.cost(Usage(1_000_000, 0, 0)) == 150_000_000
    assert price.cost(Usage(100, 40, 10)) == 60 * 150 + 40 * 75 + 10 * 600
    assert price.cost(Usage(100, 40, 10), percent=50) == (60 * 150 + 40 * 75 + 10 * 600) // 2
    assert sum(price.cost(Usage(1, 0, 1)) for _ in range(100_000)) == 75_000_000
    assert (dollars(1_500_000_000), dollars(75), dollars(0), dollars(-20_000_000)) == (
        "1.50", "0.000000075", "0.00", "-0.02",
    )  # fmt: skip


def test_the_most_specific_price_wins() -> None:
    book = PriceBook(
        [
            PriceEntry(Price(1)),
            PriceEntry(Price(2), model="big"),
            PriceEntry(Price(3), model="big", adapter="french"),
            PriceEntry(Price(4), tier="free"),
            PriceEntry(Price(5), model="big", tier="free"),
        ]
    )
    assert book.price("tiny") == Price(1)
    assert book.price("big") == Price(2)
    assert book.price("big", "french", "free") == Price(3)
    assert book.price("tiny", tier="free") == Price(4)
    assert book.price("big", tier="free") == Price(5)
    assert PriceBook([]).price("x") == Price()


def first(charge: Charge) -> Statement:
    """As the first version wrote it."""
    sql, values = opened(charge)[0]
    return sql.replace(", selection, experiment", "").replace(", ?, ?)", ")"), values[:-2]


async def test_a_ledger_of_the_first_version_keeps_its_open_charges(database: Database) -> None:
    await database.migrate("ledger", ledger_module._VERSIONS[:1])
    done, left = charge("done"), charge("left")
    await database.transact([first(done), first(left), settled_before(end(done))])
    await database.execute("INSERT INTO charges_progress (id, cached_tokens, completion_tokens) VALUES ('done', 0, 9)")
    ledger = Ledger(database)
    await ledger.prepare()
    assert [entry.charge.id for entry in await ledger.open_charges()] == ["left"]
    assert (await ledger.totals())[0].requests == 1
