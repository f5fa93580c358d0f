"""`penstock bench structure`: what following a grammar costs, against the same requests without one, alternating.

Every side produces the same number of tokens: the grammar is a list of objects that may not end before. Besides the
whole, the masks alone are timed, since their time is hidden wherever the device works longer than they take.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console

from penstock.bench import report
from penstock.bench.engine import Run
from penstock.bench.workloads import Workload
from penstock.engine.config import EngineConfig
from penstock.engine.core import Engine
from penstock.engine.grammar.constraints import MakeCompiler
from penstock.engine.grammar.interface import GrammarCompiler, words_for
from penstock.engine.request import Request

SHARES = {"free": 0.0, "half": 0.5, "constrained": 1.0}
"""How many of the requests follow the grammar, by name of the side."""


@dataclass(frozen=True, slots=True)
class StructureBenchSettings:
    batch: int = 16
    input_len: int = 32
    output_len: int = 64
    temperature: float = 0.8
    rounds: int = 3

    @property
    def workload(self) -> Workload:
        ends = (self.input_len, self.input_len), (self.output_len, self.output_len)
        return Workload("structure", self.batch, *ends, temperature=self.temperature)


class _Kept:
    """Hands out one compiler, and keeps it to be timed alone."""

    def __init__(self, make: MakeCompiler) -> None:
        self._make = make
        self.compiler: GrammarCompiler | None = None

    def __call__(self, vocab_size: int) -> GrammarCompiler:
        self.compiler = self._make(vocab_size)
        return self.compiler


def main(
    config: EngineConfig,
    make: MakeCompiler,
    grammar: Callable[[int], str],
    settings: StructureBenchSettings,
    json_file: Path | None,
    console: Console,
) -> None:
    """`grammar(n)`: the source of a grammar whose texts have at least `n` tokens."""
    source = grammar(settings.output_len)
    kept = _Kept(make)
    speeds: dict[str, list[float]] = {side: [] for side in SHARES}
    texts: list[list[int]] = []
    with console.status("loading") as status:
        engine = Engine.load(config, grammars=kept)
        for attempt in range(settings.rounds + 1):
            for side, share in SHARES.items():
                status.update(f"round {attempt} of {settings.rounds}: {side}")
                requests = _requests(settings, engine.info.vocab_size, source, share, f"{side}-{attempt}")
                speed = settings.batch * settings.output_len / Run(engine, requests, None)().seconds
                if attempt:  # the first round warms up
                    speeds[side].append(speed)
        status.update("masks alone")
        assert kept.compiler is not None
        texts = _texts(engine, _requests(settings, engine.info.vocab_size, source, 1.0, "masks"))
        mask_us = _mask_us(kept.compiler, source, texts, engine.info.vocab_size)
    _show(engine, settings, speeds, mask_us, console)
    if json_file is not None:
        facts = dataclasses.asdict(settings) | {"model": config.name, "engine": dataclasses.asdict(engine.info)}
        report.write_json(json_file, "structure", facts, {"tokens_per_s": speeds, "mask_us": mask_us})


def _requests(
    settings: StructureBenchSettings, vocab_size: int, grammar: str, share: float, salt: str
) -> list[Request]:
    requests = settings.workload.build(vocab_size, salt=salt)
    followers = round(share * len(requests))
    return [
        dataclasses.replace(request, params=dataclasses.replace(request.params, grammar=grammar))
        if index < followers
        else request
        for index, request in enumerate(requests)
    ]


def _texts(engine: Engine, requests: list[Request]) -> list[list[int]]:
    """What the engine generates for `requests`."""
    for request in requests:
        engine.submit(request)
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    while engine.has_work:
        if (output := engine.step()) is not None:
            for delta in output.deltas:
                tokens[delta.request_id] += delta.tokens
    return list(tokens.values())


def _mask_us(compiler: GrammarCompiler, grammar: str, texts: list[list[int]], vocab_size: int) -> float:
    """Mean time of one mask, computed one after another along the texts."""
    mask = np.zeros((1, words_for(vocab_size)), np.int32)
    fresh = compiler.compile(grammar)
    spent, count = 0.0, 0
    for text in texts:
        matcher = compiler.copy(fresh)
        for token in text:
            begin = time.perf_counter()
            compiler.fill([matcher], mask)
            spent += time.perf_counter() - begin
            count += 1
            matcher.accept(token)
    return spent / count * 1e6


def _show(
    engine: Engine, settings: StructureBenchSettings, speeds: dict[str, list[float]], mask_us: float, console: Console
) -> None:
    info = engine.info
    console.print(f"[bold]{info.model}[/bold] on {info.device}, {info.dtype}: {report.machine_line()}")
    title = f"Batch of {settings.batch}, {settings.input_len} in / {settings.output_len} out, alternating"
    columns = ("output tok/s", "median", "of free", *(f"round {turn + 1}" for turn in range(settings.rounds)))
    rows = report.table(title, *columns)
    free = statistics.median(speeds["free"])
    for side, values in speeds.items():
        median = statistics.median(values)
        rows.add_row(side, report.number(median), f"{median / free:.2f}x", *map(report.number, values))
    console.print(rows)
    extra = 1e6 / statistics.median(speeds["constrained"]) - 1e6 / free
    console.print(f"A constrained token takes {extra:+,.1f} us; its mask alone takes {mask_us:,.1f} us of one core.")
