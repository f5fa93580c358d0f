"""A trained head beside n-grams and beside no drafts, in the same engine, on texts that were held out."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from penstock.bench.library_texts import Corpus
from penstock.bench.soak.engines import verify_everything
from penstock.bench.speculation import Scenario, measure
from penstock.bench.speculation import run as speculate
from penstock.engine.config import EngineConfig
from penstock.engine.core import Engine


def compare(
    corpus: Corpus, model: str, head: Path, *, device: str, output_len: int = 128, rounds: int = 3, depth: int = 5
) -> list[dict[str, Any]]:
    """Speed with n-grams and with the head, each beside none in the same engine, greedy, on what was held out."""
    rows = []
    for form in ("ngram", "eagle3"):
        engine = Engine.load(
            EngineConfig(
                model=model,
                device=device,
                max_running=8,
                max_model_len=2048,
                speculation="ngram" if form == "ngram" else "eagle3",
                speculation_depth=depth,
                draft_model=None if form == "ngram" else str(head),
            )
        )
        both = (("text", corpus.text), ("code", corpus.code))
        for name, prompts in both:
            for batch in (1, 8):
                scenario = Scenario(f"{form}-{name}-{batch}", [prompt.tolist() for prompt in prompts[:batch]])
                plain, with_drafts = measure(
                    engine, scenario, rounds=rounds, output_len=output_len, temperature=0.0, acceptance=None
                )
                rates = [statistics.median(turn.rate for turn in turns) for turns in (plain, with_drafts)]
                drafts, accepted = (sum(getattr(turn, what) for turn in with_drafts) for what in ("drafts", "accepted"))
                same = statistics.mean(
                    a.tokens[key] == b.tokens[key] for a, b in zip(plain, with_drafts, strict=True) for key in a.tokens
                )
                rows.append(
                    {
                        "drafter": form,
                        "workload": name,
                        "batch": batch,
                        "plain_tps": rates[0],
                        "speculating_tps": rates[1],
                        "ratio": rates[1] / rates[0],
                        "accepted_length": 1 + accepted / drafts if drafts else None,
                        "drafts": drafts,
                        "same_text": same,
                    }
                )
        # How good drafts are, whether they pay or not: every one of them is verified.
        assert engine.speculation is not None
        verify_everything(engine.speculation)
        for name, prompts in both:
            scenario = Scenario(name, [prompt.tolist() for prompt in prompts[:8]])
            turn = speculate(engine, scenario, f"{form}-{name}-forced", output_len, 0.0)
            rows.append(
                {
                    "drafter": form,
                    "workload": f"{name}, all verified",
                    "batch": len(scenario.prompts),
                    "plain_tps": None,
                    "speculating_tps": turn.rate,
                    "ratio": None,
                    "accepted_length": 1 + turn.accepted / turn.drafts if turn.drafts else None,
                    "drafts": turn.drafts,
                    "same_text": None,
                }
            )
        engine.close()
        del engine
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """As lines of Markdown."""
    lines = [
        "| drafter | workload | batch | plain tok/s | tok/s | ratio | accepted length | same text |",
        "|" + "---|" * 8,
    ]

    def shown(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    for row in rows:
        cells = (
            row["drafter"],
            row["workload"],
            str(row["batch"]),
            shown(row["plain_tps"], ",.0f"),
            shown(row["speculating_tps"], ",.0f"),
            shown(row["ratio"], ".2f"),
            shown(row["accepted_length"], ".2f") or "none drafted",
            shown(row["same_text"], ".0%"),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
