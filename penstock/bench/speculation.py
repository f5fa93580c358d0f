"""`penstock bench speculation`: the same requests with and without, alternating in one engine.

Texts that repeat (code being edited, a quote from a document) at low batch, where speculation should gain, ordinary
text and code to go on with, and random prompts in a full batch, where it must not lose. Turns alternate, medians are
compared. Every turn must give the same tokens: a faster engine that writes something else is an error, not a result.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from penstock.bench import shapes
from penstock.bench.engine import BenchError
from penstock.bench.library_texts import held_out
from penstock.bench.speculation_texts import CODE_EDIT, QUOTE
from penstock.engine.config import EngineConfig
from penstock.engine.core import Engine
from penstock.engine.loading.random_checkpoint import RandomCheckpoint
from penstock.engine.request import Request, SamplingParams
from penstock.engine.sequence import Sequence
from penstock.engine.speculative.gain import Acceptance
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

Encode = Callable[[str], list[int]]
COLUMNS = ("workload", "batch", "plain tok/s", "speculating tok/s", "ratio", "accepted", "tokens/step", "same text")


@dataclass(frozen=True, slots=True)
class Scenario:
    """Prompts that run at once."""

    name: str
    prompts: list[list[int]]
    exact: bool = False
    """Whether the texts must be equal: in batches the number of rows may decide between two equally likely tokens."""


@dataclass(frozen=True, slots=True)
class Turn:
    seconds: float
    tokens: dict[str, list[int]]
    counted: int
    """Tokens that came in `seconds`: those after every request had its first."""
    steps: int
    drafts: int
    """Times that draft tokens of a sequence were verified."""
    drafted: int
    accepted: int

    @property
    def rate(self) -> float:
        return self.counted / self.seconds


def scenarios(encode: Encode | None, vocab_size: int, only: Collection[str] = ()) -> list[Scenario]:
    """The workloads named in `only`, or all; without a tokenizer only random ones."""
    rng = random.Random(0)

    def noise(count: int) -> list[list[int]]:
        return [[rng.randrange(vocab_size) for _ in range(128)] for _ in range(count)]

    found: list[Scenario] = []
    if encode is not None:
        for name, text in (("code-edit", CODE_EDIT), ("quote", QUOTE)):
            ids = encode(text)
            found += [Scenario(name, [ids], exact=True), Scenario(name, [ids[index:] for index in range(4)])]
        for name, prompts in zip(("text", "code"), held_out(encode), strict=True):
            found += [Scenario(name, prompts[:1]), Scenario(name, prompts[:8])]
    else:
        found += [Scenario("random", noise(count)) for count in (1, 4, 8)]
    found += [Scenario("random", noise(count)) for count in (16, 64)]
    unknown = set(only) - {scenario.name for scenario in found}
    if unknown:
        known = ", ".join(dict.fromkeys(scenario.name for scenario in found))
        raise ConfigError(f"no workload is called {', '.join(sorted(unknown))}; there are {known}")
    return [scenario for scenario in found if not only or scenario.name in only]


def decisive(shape: str, device: torch.device, dtype: torch.dtype) -> RandomCheckpoint:
    """Random weights that write the same text whatever the batch. Ordinary ones decide by a hair: in a step of another
    size sums round differently, the text soon is another one, and what was known to come never comes."""
    return RandomCheckpoint(shapes.named(shape), device=device, dtype=dtype, embedding_scale=1024.0)


class Replay:
    """A proposer for random weights: drafts what the model is known to write, each token right with a given
    chance. Shows what speculation yields at that acceptance. Like any proposer it learns its acceptance from
    results; it is not told."""

    def __init__(self, texts: dict[str, list[int]], acceptance: float, depth: int) -> None:
        self.texts = texts
        self.acceptance = acceptance
        self.depth = depth
        self._seen = Acceptance(acceptance, decay=0.98, weight=8.0)
        self._rng = random.Random(0)

    def outlook(self, seq: Sequence) -> tuple[float, int]:
        return self._seen.chance, self.depth if _name(seq.id) in self.texts else 0

    def seconds(self, sequences: int) -> float:
        return 0.0

    def propose(self, depths: dict[Sequence, int]) -> dict[Sequence, list[int]]:
        return {seq: self._draft(seq, depth) for seq, depth in depths.items()}

    def learn(self, seq: Sequence, drafts: tuple[int, ...], tokens: list[int]) -> None:
        if drafts:
            held = len(tokens) - 1
            self._seen.observe(held, min(held + 1, len(drafts)))

    def forget(self, seq: Sequence) -> None:
        """Nothing is kept."""

    def forget_caches(self) -> None:
        """Nor anything computed."""

    def _draft(self, seq: Sequence, depth: int) -> list[int]:
        at = len(seq.tokens) - seq.prompt_len
        known = self.texts[_name(seq.id)][at : at + depth]
        return [token if self._rng.random() < self.acceptance else 0 for token in known]


def _name(request_id: str) -> str:
    return request_id.rpartition("/")[2]


def run(engine: Engine, scenario: Scenario, tag: str, output_len: int, temperature: float) -> Turn:
    """All prompts at once; time and tokens after their first one."""
    before = engine.load_snapshot()
    for index, prompt in enumerate(scenario.prompts):
        params = SamplingParams(max_tokens=output_len, temperature=temperature, seed=index)
        engine.submit(Request(f"{tag}/{index}", prompt, params, cache_salt=tag))
    tokens: dict[str, list[int]] = {}
    begin, steps, early = time.perf_counter(), engine.steps, 0
    prefilling = True
    while engine.has_work:
        output = engine.step()
        for delta in output.deltas if output is not None else ():
            if delta.finish_reason == "error":
                raise BenchError(f"request {delta.request_id} failed: {delta.error}")
            tokens.setdefault(_name(delta.request_id), []).extend(delta.tokens)
        if prefilling and len(tokens) == len(scenario.prompts):  # prompts are not what is compared
            prefilling = False
            begin, steps, early = time.perf_counter(), engine.steps, sum(map(len, tokens.values()))
    load = engine.load_snapshot()
    return Turn(
        time.perf_counter() - begin,
        tokens,
        sum(map(len, tokens.values())) - early,
        max(engine.steps - steps, 1),
        load.drafts - before.drafts,
        load.draft_tokens - before.draft_tokens,
        load.accepted_tokens - before.accepted_tokens,
    )


def measure(
    engine: Engine, scenario: Scenario, *, rounds: int, output_len: int, temperature: float, acceptance: float | None
) -> tuple[list[Turn], list[Turn]]:
    """Turns without and with; one of each first, unmeasured, in which step costs are learned."""
    speculation = engine.speculation
    assert speculation is not None
    plain: list[Turn] = []
    speculating: list[Turn] = []
    for round_ in range(rounds + 1):
        engine.speculation = None
        plain.append(run(engine, scenario, f"{scenario.name}-plain-{round_}", output_len, temperature))
        engine.speculation = speculation
        if acceptance is not None:
            speculation.proposer = Replay(plain[-1].tokens, acceptance, speculation.depth)
        speculation.pause()
        speculating.append(run(engine, scenario, f"{scenario.name}-spec-{round_}", output_len, temperature))
        if scenario.exact and speculating[-1].tokens != plain[0].tokens:
            raise BenchError(f"{scenario.name}: with speculation the text is another one")
    return plain[1:], speculating[1:]


def main(
    config: EngineConfig,
    encode: Encode | None,
    *,
    checkpoint: object | None = None,
    rounds: int,
    output_len: int,
    temperature: float,
    acceptance: float | None,
    only: Collection[str] = (),
    json_file: Path | None,
    console: Console,
) -> None:
    from penstock.bench import report  # with rich, which a bare GPU machine may lack; `measure` needs none

    with console.status("loading"):
        engine = Engine.load(config, checkpoint=checkpoint)
    info = engine.info
    console.print(f"[bold]{info.model}[/bold] on {info.device}, {info.dtype}: {report.machine_line()}")
    how = config.speculation if acceptance is None else f"draft tokens right with a chance of {acceptance:.0%}"
    table = report.table(f"Speculation ({how}), depth {config.speculation_depth}, {output_len} tokens each", *COLUMNS)
    results = []
    for scenario in scenarios(encode, info.vocab_size, only):
        with console.status(f"{scenario.name}, batch {len(scenario.prompts)}"):
            plain, speculating = measure(
                engine,
                scenario,
                rounds=rounds,
                output_len=output_len,
                temperature=temperature,
                acceptance=acceptance,
            )
        rates = [statistics.median(turn.rate for turn in turns) for turns in (plain, speculating)]
        drafted, accepted = sum(turn.drafted for turn in speculating), sum(turn.accepted for turn in speculating)
        per_step = sum(turn.counted for turn in speculating) / sum(turn.steps for turn in speculating)
        same = statistics.mean(
            a.tokens[name] == b.tokens[name] for a, b in zip(plain, speculating, strict=True) for name in a.tokens
        )
        share = accepted / drafted if drafted else None
        row = {
            "workload": scenario.name,
            "batch": len(scenario.prompts),
            "plain_tps": rates[0],
            "speculating_tps": rates[1],
            "ratio": rates[1] / rates[0],
            "acceptance": share,
            "drafted": drafted,
            "tokens_per_step": per_step,
            "same_text": same,
        }
        results.append(row)
        table.add_row(
            scenario.name,
            str(len(scenario.prompts)),
            report.number(rates[0]),
            report.number(rates[1]),
            report.number(rates[1] / rates[0], 2),
            f"{report.share(share)} of {drafted:,}" if drafted else "none drafted",
            report.number(per_step, 2),
            report.share(same),
        )
    console.print(table)
    if json_file is not None:
        facts = {"rounds": rounds, "output_len": output_len, "temperature": temperature, "acceptance": acceptance}
        report.write_json(json_file, "speculation", facts | dataclasses.asdict(config), results)
