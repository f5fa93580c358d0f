"""What a weight format costs in quality: perplexity on a fixed text, and the distance from the dense form.

Every form is scored on the same windows of token ids through `prompt_logprobs`, the way a client would. Perplexity
alone hides opposite errors, so the distributions are compared position by position as well.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from penstock.bench import report
from penstock.bench.engine import BenchError
from penstock.engine.config import ActivationForm, EngineConfig, KVDType, WeightForm
from penstock.engine.request import Request, SamplingParams, TokenLogprob
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.bench.engine import Steppable

WINDOW = 512
"""Tokens of one request: a position sees at most this much before it."""
_COMPARED = 16
"""Most likely tokens of the reference that the divergence distinguishes; all others count as one."""
_LISTED = 128
"""Most likely tokens fetched of each form; a token beyond them is taken to be as likely as the last listed."""
LIMIT = 0.01
"""The loss of perplexity that a default may have."""


@dataclass(frozen=True, slots=True)
class Scores:
    """A model's log-probabilities of the text, position by position."""

    positions: list[TokenLogprob]

    @property
    def perplexity(self) -> float:
        return math.exp(-sum(position.logprob for position in self.positions) / len(self.positions))


@dataclass(frozen=True, slots=True)
class Distance:
    """How far scores are from a reference's."""

    loss: float
    """Perplexity over the reference's, minus 1."""
    difference: float
    """Mean |difference| of the text's log-probabilities, in nats."""
    divergence: float
    """Mean Kullback-Leibler divergence from the reference, in nats."""
    agreement: float
    """Share of positions with the same most likely token."""


def sample_text() -> str:
    """The text shipped with Penstock: English prose, letters, minutes, Python, C and SQL."""
    return (resources.files("penstock.bench") / "data" / "perplexity.txt").read_text(encoding="utf-8")


def windows(ids: Sequence[int], length: int = WINDOW) -> list[list[int]]:
    """Consecutive pieces; a last one that is too short is left out."""
    pieces = [list(ids[at : at + length]) for at in range(0, len(ids), length)]
    return [piece for piece in pieces if len(piece) >= min(length // 4, len(ids))]


def score(engine: Steppable, pieces: Sequence[Sequence[int]]) -> Scores:
    """Run every piece as a prompt; the first token of each has nothing before it and is not scored."""
    positions: list[TokenLogprob] = []
    for index, piece in enumerate(pieces):
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=_LISTED)
        engine.submit(Request(f"perplexity-{index}", list(piece), params))
        while engine.has_work:
            output = engine.step()
            for delta in output.deltas if output is not None else ():
                if delta.error is not None:
                    raise BenchError(f"the text cannot be scored: {delta.error}")
                positions.extend(entry for entry in delta.prompt_logprobs or () if entry is not None)
    if not positions:
        raise BenchError("the text is too short to be scored")
    return Scores(positions)


def distance(scores: Scores, reference: Scores) -> Distance:
    """Both must be scores of the same pieces."""
    pairs = list(zip(scores.positions, reference.positions, strict=True))
    return Distance(
        loss=scores.perplexity / reference.perplexity - 1,
        difference=sum(abs(mine.logprob - theirs.logprob) for mine, theirs in pairs) / len(pairs),
        divergence=sum(_divergence(mine, theirs) for mine, theirs in pairs) / len(pairs),
        agreement=sum(mine.top_ids[0] == theirs.top_ids[0] for mine, theirs in pairs) / len(pairs),
    )


def _divergence(mine: TokenLogprob, theirs: TokenLogprob) -> float:
    listed = dict(zip(mine.top_ids, mine.top_logprobs, strict=True))
    beyond = mine.top_logprobs[-1]
    total, left, left_mine = 0.0, 1.0, 1.0
    for token, logprob in zip(theirs.top_ids[:_COMPARED], theirs.top_logprobs, strict=False):
        other = listed.get(token, beyond)
        total += math.exp(logprob) * (logprob - other)
        left -= math.exp(logprob)
        left_mine -= math.exp(other)
    if left > 1e-6 and left_mine > 1e-6:
        total += left * math.log(left / left_mine)
    return max(0.0, total)


@dataclass(frozen=True, slots=True)
class Form:
    """Weights, with activations and KV cache where they are chosen too: `int4`, `int8/int16`, `dense:int8`. Without a
    choice the cache is full, except that `auto` is what would be served."""

    weights: WeightForm
    activations: ActivationForm = "auto"
    kv_dtype: KVDType = "full"

    @classmethod
    def parse(cls, text: str) -> Form:
        matrices, _, kv_dtype = text.partition(":")
        weights, _, activations = matrices.partition("/")
        chosen = (weights, activations or "auto", kv_dtype or ("auto" if weights == "auto" else "full"))
        kinds = (WeightForm, ActivationForm, KVDType)
        if any(name not in get_args(kind) for name, kind in zip(chosen, kinds, strict=True)):
            raise ConfigError(
                f"form {text!r} is not WEIGHTS[/ACTIVATIONS][:KV] with weights of {', '.join(get_args(WeightForm))}; "
                f"activations of {', '.join(get_args(ActivationForm))}; KV cache of {', '.join(get_args(KVDType))}"
            )
        return cls(*chosen)  # type: ignore[arg-type]

    def __str__(self) -> str:
        matrices = self.weights if self.activations == "auto" else f"{self.weights}/{self.activations}"
        return matrices if self == Form.parse(matrices) else f"{matrices}:{self.kv_dtype}"


def main(
    config: EngineConfig, encode: Callable[[str], list[int]], forms: Sequence[Form], text: str | None,
    json_file: Path | None, console: Console,
) -> None:  # fmt: skip
    """Score the dense form, then each of `forms`, and print them side by side."""
    from penstock.engine.core import Engine

    pieces = windows(encode(text if text is not None else sample_text()))
    config = dataclasses.replace(config, prefix_cache=False, max_running=1, max_model_len=WINDOW + 1, kv_memory=None)

    def scores_of(form: Form) -> Scores:
        with console.status(f"{form}: scoring {sum(map(len, pieces)):,} tokens"):
            chosen = dataclasses.replace(
                config, weights=form.weights, activations=form.activations, kv_dtype=form.kv_dtype
            )
            return score(Engine.load(chosen), pieces)

    reference = scores_of(Form("dense"))
    console.print(f"[bold]{config.name}[/bold], {len(reference.positions):,} positions: {report.machine_line()}")
    rows = report.table(
        "Perplexity against the dense form",
        "form", "perplexity", "loss", "mean |log-prob difference|", "divergence", "same first choice",
    )  # fmt: skip
    rows.add_row("dense", report.number(reference.perplexity, 3), *["–"] * 4)
    results = [{"form": "dense", "perplexity": reference.perplexity}]
    for form in forms:
        scores = scores_of(form)
        far = distance(scores, reference)
        rows.add_row(
            str(form), report.number(scores.perplexity, 3), f"{far.loss:+.2%}", f"{far.difference:.4f}",
            f"{far.divergence:.5f}", f"{far.agreement:.1%}",
        )  # fmt: skip
        results.append({"form": str(form), "perplexity": scores.perplexity} | dataclasses.asdict(far))
    console.print(rows)
    console.print(f"A default form may lose {LIMIT:.0%}. Differences and divergence in nats.", style="dim")
    if json_file is not None:
        report.write_json(json_file, "perplexity", dataclasses.asdict(config), results)
