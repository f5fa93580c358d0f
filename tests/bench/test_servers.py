"""Several servers in turn: the real gateway with a tiny engine under two names, and what is made of the figures."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path

from rich.console import Console
from typer.testing import CliRunner

from penstock.bench import servers
from penstock.bench.commands.app import app
from penstock.bench.goodput import AtRate, Objectives, Served
from penstock.bench.servers import Highest, RateSearch, Run, ServersBenchSettings
from penstock.bench.stats import Percentiles
from penstock.engine.core import Engine
from penstock.text import TextModel
from tests.bench.test_serve import engine, server, text  # noqa: F401

BOTH = (("ours", "http://a"), ("theirs", "http://b"))


def all_alike(seconds: float) -> Percentiles:
    return Percentiles(*[seconds] * 5)


def test_gaps_are_an_objective_of_their_own() -> None:
    quick, slow = (Served(0.0, 0.1, 1.0, 0.01, slow_gap=gap) for gap in (0.02, 0.2))
    objectives = Objectives(ttft=0.5, gap=0.03)
    assert objectives.met([quick, slow]) == 1
    assert str(objectives) == "TTFT 500 ms, gap p99 30 ms"
    assert objectives.met_by(Served(0.0, 0.1, 0.1, None)), "a single piece of text has no gaps"


def test_ratios_say_how_many_times_better_the_first_server_is() -> None:
    shown = Console(file=(page := io.StringIO()), width=200)
    runs = {
        "ours": [Run(tps, all_alike(0.020), all_alike(0.004)) for tps in (90.0, 300.0, 310.0)],
        "theirs": [Run(tps, all_alike(0.050), None, failed) for tps, failed in ((200.0, 0), (200.0, 0), (10.0, 1))],
    }
    servers._show_turns({"b1": runs}, ServersBenchSettings(BOTH), shown)
    ours, theirs = (line for line in page.getvalue().splitlines() if "│ b1" in line)
    assert [cell.strip() for cell in ours.split("│")][3:7] == ["300.0", "1.00", "20.0", "1.00"]
    assert [cell.strip() for cell in theirs.split("│")][3:11] == [
        "200.0",
        "1.50",
        "50.0",
        "2.50",
        "50.0",
        "–",
        "–",
        "1",
    ]


def test_the_highest_rate_of_a_server_that_keeps_none_has_no_ratio() -> None:
    shown = Console(file=(page := io.StringIO()), width=200)
    kept, lost = (AtRate(rate, share, all_alike(0.1), all_alike(0.01), 5.0) for rate, share in ((8.0, 1.0), (4.0, 0.5)))
    highest = {"ours": Highest(8.0, [kept]), "half": Highest(4.0, [lost]), "none": Highest(0.0, [lost])}
    servers._show_highest(highest, RateSearch(4.0, 9.0, 2, 20, 0.5, 0.03), shown)
    rows = [[cell.strip() for cell in line.split("│")] for line in page.getvalue().splitlines() if line[:1] == "│"]
    assert [row[2:5] for row in rows] == [["8.0", "1.00", "100%"], ["4.0", "2.00", "50%"], ["below 4", "–", "50%"]]


async def test_servers_in_turn_and_the_rate_that_keeps_objectives(
    engine: Engine,  # noqa: F811
    text: TextModel,  # noqa: F811
    tmp_path: Path,
) -> None:
    file = tmp_path / "servers.json"
    options = ["-w", "ttft128", "--repeat", "2", "--goodput", "--lengths", "c1", "--requests", "2", "--runs", "2"]
    objectives = ["--slo-ttft", "1e9", "--slo-gap", "1e9", "--low", "50", "--high", "150"]
    async with server(engine, text) as url:
        both = ["--server", f"ours={url}", "--server", f"theirs={url}", "--vocab-size", str(text.vocab_size)]
        command = ["servers", *both, *options, *objectives, "--json", str(file)]
        result = await asyncio.to_thread(CliRunner().invoke, app, command)
    assert result.exit_code == 0, result.output
    document = json.loads(file.read_text())["results"]
    assert "came from its prefix cache" in result.output, "the second name is the same server"
    runs = document["turns"]["ttft128"]
    assert [len(runs[name]) for name in ("ours", "theirs")] == [2, 2]
    assert all(run["tokens_per_s"] > 0 and run["ttft"]["p50"] > 0 for of_it in runs.values() for run in of_it)
    for found in document["goodput"].values():
        assert (found["rate"], [run["rate"] for run in found["runs"]]) == (100.0, [50.0, 100.0])


async def test_objectives_that_nothing_keeps(engine: Engine, text: TextModel) -> None:  # noqa: F811
    options = ["--goodput", "--lengths", "c1", "--requests", "2", "--runs", "3", "--slo-ttft", "1", "--slo-gap", "1"]
    async with server(engine, text) as url:
        command = ["servers", "--server", f"only={url}", "--vocab-size", str(text.vocab_size), *options, "--low", "50",
                   "--high", "60"]  # fmt: skip
        result = await asyncio.to_thread(CliRunner().invoke, app, command)
    assert result.exit_code == 0, result.output
    assert "below 50" in result.output


async def test_prompts_are_those_of_a_seed_and_new_without_one(engine: Engine, text: TextModel) -> None:  # noqa: F811
    async with server(engine, text) as url:
        command = ["servers", "--server", f"only={url}", "--vocab-size", str(text.vocab_size), "-w", "ttft128"]

        async def cached(*more: str) -> bool:
            result = await asyncio.to_thread(CliRunner().invoke, app, [*command, "--repeat", "1", *more])
            assert result.exit_code == 0, result.output
            return "prefix cache" in result.output

        assert [await cached("--seed", "5"), await cached("--seed", "5")] == [False, True]
        assert [await cached(), await cached()] == [False, False]


def test_servers_are_named() -> None:
    for given in (["--server", "http://a"], ["--server", "a=http://a", "--server", "a=http://b"]):
        assert CliRunner().invoke(app, ["servers", *given]).exit_code == 2
