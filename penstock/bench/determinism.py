"""`penstock bench determinism`: what batch-invariant results cost; both engines in one process, alternating.

Decoding alone and in a batch, and a prompt alone: the three places where the usual engine changes its kernels with the
number of tokens. The deterministic side is also checked: a request must get the same result in
the batch as alone, log-probabilities to the last bit.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.bench.engine import BenchError
from penstock.engine.config import EngineConfig
from penstock.engine.core import Engine
from penstock.engine.request import Delta, Request, SamplingParams

if TYPE_CHECKING:
    from rich.console import Console

COLUMNS = ("workload", "usual tok/s", "deterministic tok/s", "cost", "same bits, usual", "deterministic")


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    batch: int
    input_len: int
    output_len: int

    @property
    def tokens(self) -> int:
        """What is counted: generated tokens, or those of the prompt where only one is generated."""
        return self.batch * (self.output_len if self.output_len > 1 else self.input_len)


CASES = (Case("decode, alone", 1, 64, 64), Case("decode, 16 at once", 16, 64, 64), Case("prompt of 1024", 1, 1024, 1))


def run(engine: Engine, case: Case, tag: str, vocab_size: int) -> tuple[float, dict[str, list[float]]]:
    """Seconds, and the log-probabilities of every request."""
    rng = random.Random(case.name.partition(",")[0])  # the first request of a batch is the one that runs alone
    for index in range(case.batch):
        prompt = [rng.randrange(vocab_size) for _ in range(case.input_len)]
        params = SamplingParams(max_tokens=case.output_len, temperature=0.0, logprobs=0)
        engine.submit(Request(f"{tag}/{index}", prompt, params, cache_salt=tag))
    deltas: list[Delta] = []
    begin = time.perf_counter()
    while engine.has_work:
        output = engine.step()
        deltas += output.deltas if output is not None else []
    seconds = time.perf_counter() - begin
    scores: dict[str, list[float]] = {}
    for delta in deltas:
        if delta.finish_reason == "error":
            raise BenchError(f"request {delta.request_id} failed: {delta.error}")
        kept = scores.setdefault(delta.request_id.rpartition("/")[2], [])
        kept += [score.logprob for score in delta.logprobs or ()]
    return seconds, scores


def main(
    config: EngineConfig, *, checkpoint: object | None, rounds: int, json_file: Path | None, console: Console
) -> None:
    from penstock.bench import report

    with console.status("loading both engines"):
        engines = [
            Engine.load(dataclasses.replace(config, deterministic=fixed), checkpoint=checkpoint)
            for fixed in (False, True)
        ]
    info = engines[0].info
    console.print(f"[bold]{info.model}[/bold] on {info.device}, {info.dtype}: {report.machine_line()}")
    table = report.table(f"Deterministic mode, median of {rounds} turns each", *COLUMNS)
    results = []
    alone: list[list[float]] = [[], []]
    for case in CASES:
        seconds: list[list[float]] = [[], []]
        same = [True, True]
        with console.status(case.name):
            for round_ in range(rounds + 1):  # the first turn warms up
                for side, engine in enumerate(engines):
                    took, scores = run(engine, case, f"{case.name}-{round_}", info.vocab_size)
                    if round_:
                        seconds[side].append(took)
                    if case.output_len > 1:
                        alone[side] = alone[side] or scores["0"]
                        same[side] &= scores["0"] == alone[side]
        if not same[1]:
            raise BenchError(f"{case.name}: deterministic mode gave a request other bits than alone")
        rates = [case.tokens / statistics.median(side) for side in seconds]
        results.append(
            {
                "workload": case.name,
                "usual_tps": rates[0],
                "deterministic_tps": rates[1],
                "cost": rates[0] / rates[1],
                "usual_same_bits": same[0],
            }
        )
        shown = ["yes" if equal else "no" for equal in same] if case.output_len > 1 else ["–", "–"]
        table.add_row(
            case.name, report.number(rates[0]), report.number(rates[1]), f"{rates[0] / rates[1]:.2f}x", *shown
        )
    console.print(table)
    if json_file is not None:
        report.write_json(json_file, "determinism", dataclasses.asdict(config) | {"rounds": rounds}, results)
