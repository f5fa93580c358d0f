"""How well the watermark is found: answers of a model with and without it, and text that other people wrote.

False positives are counted on the model's own answers without a watermark and on passages of prose, each tested with
many keys; true positives on watermarked answers cut to several lengths. What is detected is the text, tokenized again,
as a detector gets it, not the tokens that were generated.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.bench import report
from penstock.bench.engine import BenchError
from penstock.bench.perplexity import sample_text
from penstock.engine.config import EngineConfig
from penstock.engine.core import Engine
from penstock.engine.request import Request, SamplingParams
from penstock.engine.watermark import KEY_BYTES
from penstock.text.loader import load_text
from penstock.text.text_model import TextModel
from penstock.text.watermark import THRESHOLD, detect

if TYPE_CHECKING:
    from rich.console import Console

LENGTHS = (25, 50, 75, 100, 150, 200, 250)
"""Tokens of a text that is detected."""
LEVELS = (0.05, 0.01, THRESHOLD)
SUBJECTS = (
    "the history of bridges", "a walk in the rain", "how bread is baked", "the life of bees", "a small harbour town",
    "learning to swim", "the first railways", "why leaves change colour", "a letter to a friend", "keeping a diary",
    "how clocks work", "the moons of Jupiter", "a garden in winter", "the price of salt", "an old library", "sailing",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Settings:
    texts: int
    tokens: int
    temperature: float
    top_p: float
    keys: int


def generated(engine: Engine, text: TextModel, settings: Settings, key: bytes) -> list[list[int]]:
    """Token ids of answers; `key` empty: without a watermark."""
    answers: dict[str, list[int]] = {}
    for number in range(settings.texts):
        subject = SUBJECTS[number % len(SUBJECTS)]
        prompt = text.encode_chat([{"role": "user", "content": f"Write a long essay about {subject}."}])
        params = SamplingParams(
            max_tokens=settings.tokens,
            temperature=settings.temperature,
            top_p=settings.top_p,
            seed=number * 7919 + 1,
            stop_token_ids=text.eos_token_ids,
            min_tokens=settings.tokens,
            watermark=key,
        )
        engine.submit(Request(f"{number}-{key.hex()[:8]}", prompt, params))
    while engine.has_work:
        output = engine.step()
        for delta in output.deltas if output is not None else ():
            if delta.finish_reason == "error":
                raise BenchError(f"request {delta.request_id} failed: {delta.error}")
            answers.setdefault(delta.request_id, []).extend(delta.tokens)
    return list(answers.values())


def again(text: TextModel, tokens: Sequence[int]) -> list[int]:
    """The tokens that a detector makes of the text of others."""
    return text.encode(text.decode(tokens, skip_special=True), special=False, add_special_tokens=False)


def passages(text: TextModel, prose: Iterable[Path], length: int) -> Iterator[list[int]]:
    """Pieces of text that people wrote: files, and the sample that comes with this program."""
    found = [sample_text()]
    for path in prose:
        files = sorted((*path.rglob("*.md"), *path.rglob("*.txt"))) if path.is_dir() else [path]
        found += [file.read_text(encoding="utf-8", errors="replace") for file in files]
    for whole in found:
        ids = text.encode(whole, special=False, add_special_tokens=False)
        yield from (ids[at : at + length] for at in range(0, len(ids) - length + 1, length))


def rates(p_values: Sequence[float]) -> list[float]:
    return [sum(p <= level for p in p_values) / max(len(p_values), 1) for level in LEVELS]


def main(
    config: EngineConfig, settings: Settings, *, prose: Sequence[Path], json_file: Path | None, console: Console
) -> None:
    rng = random.Random(20_250)
    key, others = rng.randbytes(KEY_BYTES), [rng.randbytes(KEY_BYTES) for _ in range(settings.keys)]
    text = load_text(config.model)
    with console.status("loading the engine"):
        engine = Engine.load(config)
    console.print(f"[bold]{engine.info.model}[/bold] on {engine.info.device}: {report.machine_line()}")
    with console.status(f"generating {2 * settings.texts} answers of {settings.tokens} tokens"):
        marked = [again(text, one) for one in generated(engine, text, settings, key)]
        plain = [again(text, one) for one in generated(engine, text, settings, b"")]
    results: list[dict[str, Any]] = []
    levels = [f"p ≤ {level:g}" for level in LEVELS]
    title = (
        f"Share of texts that are called watermarked (temperature {settings.temperature:g}, top_p {settings.top_p:g})"
    )
    table = report.table(title, "texts", "tokens", "tests", *levels)

    def row(kind: str, length: int, p_values: list[float]) -> None:
        found = rates(p_values)
        results.append(
            {"texts": kind, "tokens": length, "tests": len(p_values), **dict(zip(levels, found, strict=True))}
        )
        table.add_row(kind, str(length), str(len(p_values)), *(f"{share:.2%}" for share in found))

    with console.status("looking for watermarks"):
        for length in LENGTHS:
            if length <= settings.tokens:
                row("watermarked", length, [detect(one[:length], [key]).p_value for one in marked])
        own = [detect(one[:200], [each]).p_value for one in plain for each in (key, *others)]
        row("answers without", 200, own)
        wrong = [detect(one[:200], [each]).p_value for one in marked for each in others]
        row("another key's", 200, wrong)
        pieces = list(passages(text, prose, 200))
        row("prose", 200, [detect(piece, [each]).p_value for piece in pieces for each in others])
    console.print(table)
    if json_file is not None:
        facts = dataclasses.asdict(config) | dataclasses.asdict(settings)
        report.write_json(json_file, "watermark", facts, results)
