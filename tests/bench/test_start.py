"""`penstock bench start`: the first start on its own, medians of the others, and the engine's phases."""

from __future__ import annotations

import io

from rich.console import Console

from penstock.bench import start
from penstock.bench.served import Running
from penstock.engine.process import age_s


def test_the_first_start_is_shown_on_its_own() -> None:
    runs = [Running("", 0, 30.0 + at, 31.0 + at, {"import": 2.0, "graphs": 5.0 - at}) for at in (0.0, -20.0, -18.0)]
    screen = io.StringIO()
    Console(file=screen, width=120).print(start._table(runs))
    rows = [[cell.strip() for cell in line.strip("│ ").split("│")] for line in screen.getvalue().splitlines()]
    assert ["ready", "30.00", "11.00"] in rows and ["first answer", "31.00", "12.00"] in rows
    assert ["engine: graphs", "5.00", "24.00"] in rows


def test_a_process_knows_its_age() -> None:
    first = age_s()
    assert 0.0 < first <= age_s() < 24 * 3600
