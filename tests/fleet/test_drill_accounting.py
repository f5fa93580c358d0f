"""The accounting of drills: what counts as lost, and the page that says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.cli import drill_page
from penstock.cli.drill import drill
from penstock.errors import ConfigError
from penstock.fleet.drills.accounting import (
    Answer,
    Attempt,
    Balance,
    Losses,
    Row,
    Usage,
    balance,
    balance_totals,
    compare,
)
from penstock.fleet.drills.faults import FAULTS
from penstock.fleet.drills.resources import Followed, Sample, judge
from penstock.fleet.drills.run import Result, longest_pause, throughput
from penstock.metering.prices import Price

PRICE = Price.per_million(1.0, 2.0)


def paid(request: str, prompt: int, completion: int, id: str = "", cached: int = 0, **more: object) -> Row:
    cost = (prompt - cached) * 1000 + cached * 500 + completion * 2000
    return Row(id or request, request, prompt, cached, completion, cost, **more)  # type: ignore[arg-type]


def lost(attempts: list[Attempt], rows: list[Row]) -> tuple[list[str], Balance]:
    losses = Losses()
    sums = balance(attempts, rows, PRICE, losses)
    return losses.charges, sums


def whole(name: str, **more: int) -> Attempt:
    return Attempt(name, 300, 300, Usage(10, 300), sent=more.get("sent", 1), refused=more.get("refused", 0))


def test_a_text_that_breaks_off_or_differs_is_lost() -> None:
    losses = Losses()
    compare(
        [
            Answer("good", "abc", "abc", True),
            Answer("unknown", "abd", None, True),
            Answer("short", "ab", "abc", True),
            Answer("twice", "ababc", "abc", True),
            Answer("never", "ab", "abc", False, "503"),
        ],
        losses,
    )
    assert [line.split()[0] for line in losses.tokens] == ["short", "twice"]
    assert losses.streams == ["never did not end: 503"] and losses
    assert losses.counts() == {"streams": 1, "tokens": 2, "charges": 0, "keys": 0, "conversations": 0, "other": 0}


def test_every_answer_is_charged_once_and_exactly() -> None:
    wrong, sums = lost([whole("a"), whole("b")], [paid("a", 10, 300, cached=4), paid("b", 10, 300)])
    assert wrong == [] and (sums.charges, sums.exact, sums.broken) == (2, 2, 0)
    assert sums.cost_nanos == 2 * 610_000 - 4 * 500


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([], "the ledger has []"),
        ([paid("a", 10, 299)], "the ledger has [(10, 299)]"),
        ([Row("1", "a", 10, 0, 300, 0)], "the client was told"),
        ([paid("a", 10, 300, "1"), paid("a", 10, 300, "2")], "charged 2 times, sent 1 times"),
        ([paid("a", 10, 300, settled_by=None)], "never settled"),
        ([paid("a", 10, 300), paid("z", 1, 1)], "z, which nobody asked for"),
    ],
)
def test_a_charge_that_is_missing_wrong_or_foreign_is_found(rows: list[Row], says: str) -> None:
    wrong, _ = lost([whole("a")], rows)
    assert any(says in line for line in wrong), wrong


def test_an_attempt_that_broke_off_for_good_may_cost_what_was_produced_and_no_more() -> None:
    broken = Attempt("a", 300, 120, None, sent=1)
    wrong, sums = lost([broken, whole("a.1")], [paid("a", 10, 150), paid("a.1", 10, 300)])
    assert wrong == [] and (sums.exact, sums.broken, sums.unclaimed_tokens) == (1, 1, 30)
    assert any("301 tokens charged" in line for line in lost([broken], [paid("a", 10, 301)])[0])
    assert lost([broken], [paid("a", 10, 100)])[0] == ["a: 120 tokens received, 100 charged"]
    broken.abandoned = True  # its gateway died with its engine: what was noted stands
    wrong, sums = lost([broken], [paid("a", 10, 100)])
    assert wrong == [] and sums.uncharged_tokens == 20


def test_a_refused_request_is_free() -> None:
    assert lost([whole("a", sent=2, refused=1)], [Row("1", "a", 10), paid("a", 10, 300, "2")])[0] == []


def test_sums_are_exact_when_nothing_broke_off() -> None:
    losses = Losses()
    told = [whole("a"), whole("b", sent=2, refused=1)]
    assert balance_totals(told, requests=2, prompt=20, completion=600, losses=losses).exact == 2 and not losses
    balance_totals(told, requests=2, prompt=20, completion=601, losses=losses)
    assert "601 charged" in losses.charges[0]
    more = Losses()
    broken = Attempt("c", 300, 50, None, sent=1)
    balance_totals([*told, broken], requests=3, prompt=30, completion=680, losses=more)
    assert not more
    balance_totals([*told, broken], requests=3, prompt=30, completion=640, losses=more)
    assert more


def test_pauses_and_throughput() -> None:
    streams = [[1.0, 1.1, 4.6, 4.7], [1.0, 2.5, 2.6], [0.0, 5.0]]
    assert longest_pause(streams[:2], broken=2.0) == (pytest.approx(3.5), 4.6)
    assert longest_pause([[1.0, 1.2]], broken=1.1) == (0.0, None)
    assert throughput([10.1, 10.2, 11.4], 10.0) == [(0.25, 4.0), (0.75, 0.0), (1.25, 2.0)]


def process(memory: list[float], descriptors: list[int] | None = None, **more: object) -> Followed:
    open_ = descriptors or [20] * len(memory)
    samples = [Sample(float(at), mib, open_[at], 4) for at, mib in enumerate(memory)]
    return Followed("gateway", 1, samples, **more)  # type: ignore[arg-type]


def test_what_grows_after_the_warm_up_is_a_leak() -> None:
    steady = judge(process([100.0 + min(at, 30) + at % 3 for at in range(100)]), 100)
    assert steady is not None and steady.problems == () and abs(steady.growth_mib) < 2
    leaks = judge(process([100.0 + at for at in range(100)]), 100)
    assert leaks is not None and "grew by 6" in leaks.problems[0]
    peak = [100.0] * 100
    peak[60] = 900.0
    assert judge(process(peak), 100).problems == ()  # type: ignore[union-attr]
    opens = judge(process([100.0] * 100, [20 + at for at in range(100)]), 100)
    assert opens is not None and "more file descriptors" in opens.problems[0]
    dead = judge(process([100.0] * 100, zombies=2, gone=True), 100)
    assert dead is not None and len(dead.problems) == 2
    assert judge(process([100.0] * 5), 100) is None


def result(name: str, losses: Losses) -> Result:
    timeline = [(at / 2, 100.0) for at in range(40)]
    return Result(
        name, "an engine <is> killed", 20.0, 5.0, 8.0, 0.2, "engine lost & gone", 1.5, 1.7, 12.0, 30, 2, 1, 9000, 8,
        Balance(38, 37, 1, 5, 1), losses, ["5.0 s: engine-0 killed"], timeline,
    )  # fmt: skip


def test_the_page_shows_what_happened_and_fetches_nothing(tmp_path: Path) -> None:
    good, bad = result("engine", Losses()), result("node", Losses(charges=["x <y> never settled"]))
    page = drill_page.render([good, bad])
    assert "something was lost in: node" in page and "x &lt;y&gt; never settled" in page
    assert page.count("<svg") == 2 and "an engine &lt;is&gt; killed" in page and "engine lost &amp; gone" in page
    assert "http://" not in page.replace("http://www.w3.org", "") and "<script" not in page
    assert "nothing was lost" in drill_page.render([good])
    assert good.as_dict()["passed"] and bad.as_dict()["lost"]["charges"] == 1


def test_the_command_refuses_what_cannot_be() -> None:
    away = ["http://127.0.0.1:1"]
    with pytest.raises(ConfigError, match="there are engine, gateway"):
        drill(["volcano"])
    with pytest.raises(ConfigError, match="add --yes"):
        drill(["engine"], url=away)
    with pytest.raises(ConfigError, match="only on a throw-away fleet"):
        drill(["redis"], url=away, yes=True)
    with pytest.raises(ConfigError, match="--minutes is for"):
        drill(["engine"], minutes=3)
    with pytest.raises(ConfigError, match="--set is for"):
        drill(["engine"], url=away, settings=["a=b"])
    with pytest.raises(ConfigError, match="without --url"):
        drill(["soak"], url=away)


def test_the_drills_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    drill(["list"], output="csv")
    listed = capsys.readouterr().out
    assert all(name in listed for name in FAULTS) and len(FAULTS) == 13
