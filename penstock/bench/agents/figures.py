"""The figures of a run of conversations: times of first and of later turns, turn by turn, what caches gave, and
whether that was enough."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.bench import stats
from penstock.bench.agents.load import Answered, Tally


@dataclass(frozen=True, slots=True)
class Goals:
    """What later turns should reach; None: nothing is asked for."""

    cached: float | None = None
    """Least share from the cache of the tokens that the turn before had read or generated."""
    ttft_ms: float | None = None
    """Most of the median time to the first token."""

    def verdicts(self, results: dict[str, Any]) -> list[Verdict]:
        found = []
        if self.cached is not None:
            cached = results["cached_share_of_history"]
            shown = "not known" if cached is None else f"{cached:.1%}"
            what = f"{shown} of the history from the cache, goal at least {self.cached:.1%}"
            found.append(Verdict(what, cached is not None and cached >= self.cached))
        if self.ttft_ms is not None:
            ttft = results["latency_s"]["TTFT, later turns"]
            shown = "none" if ttft is None else f"{1e3 * ttft['p50']:.1f} ms"
            what = f"TTFT p50 of later turns {shown}, goal at most {self.ttft_ms:g} ms"
            found.append(Verdict(what, ttft is not None and 1e3 * ttft["p50"] <= self.ttft_ms))
        return found


@dataclass(frozen=True, slots=True)
class Verdict:
    what: str
    met: bool

    def __str__(self) -> str:
        return f"{'met' if self.met else 'MISSED'}: {self.what}"


def figures(tally: Tally, turns: int) -> dict[str, Any]:
    """Latencies in seconds; a share is None where the server does not say how many tokens were cached."""
    answered = tally.turns
    first = [turn for turn in answered if turn.turn == 0]
    later = [turn for turn in answered if turn.turn > 0]
    prompt_tokens = sum(turn.prompt_tokens for turn in answered)
    output_tokens = sum(turn.output_tokens for turn in answered)
    latencies = {
        "TTFT, first turns": stats.percentiles(turn.ttft for turn in first),
        "TTFT, later turns": stats.percentiles(turn.ttft for turn in later),
        "ITL": stats.percentiles(tally.gaps),
        "E2E": stats.percentiles(turn.end - turn.sent for turn in answered),
    }
    return {
        "seconds": tally.seconds,
        "succeeded": len(answered),
        "failed": sum(tally.errors.values()),
        "lost": tally.lost,
        "unsent": tally.unsent,
        "errors": dict(tally.errors),
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "output_tps": output_tokens / tally.seconds,
        "prompt_tps": prompt_tokens / tally.seconds,
        "in_flight": sum(turn.end - turn.sent for turn in answered) / tally.seconds,
        "cached_tokens": _sum(turn.cached_tokens for turn in answered),
        "cached_share": _share(answered, prompt_tokens),
        "history_share": sum(turn.history_tokens for turn in answered) / max(1, prompt_tokens),
        "cached_share_of_history": _share(later, sum(turn.history_tokens for turn in later)),
        "first_turns_cached_share": _share(first, sum(turn.prompt_tokens for turn in first)),
        "latency_s": {label: values.as_dict() if values else None for label, values in latencies.items()},
        "turns": [_one_turn(number, [turn for turn in answered if turn.turn == number]) for number in range(turns)],
    }


def _one_turn(number: int, answered: Sequence[Answered]) -> dict[str, Any]:
    ttft = stats.percentiles(turn.ttft for turn in answered)
    prompt_tokens = sum(turn.prompt_tokens for turn in answered)
    return {
        "turn": number + 1,
        "succeeded": len(answered),
        "prompt_tokens": prompt_tokens / len(answered) if answered else None,
        "ttft_s": ttft.as_dict() if ttft else None,
        "cached_share": _share(answered, prompt_tokens),
        "history_share": sum(turn.history_tokens for turn in answered) / max(1, prompt_tokens),
    }


def _share(turns: Sequence[Answered], of_tokens: int) -> float | None:
    cached = _sum(turn.cached_tokens for turn in turns)
    return None if cached is None or not of_tokens else cached / of_tokens


def _sum(counts: Iterable[int | None]) -> int | None:
    """None if no server said anything."""
    known = [count for count in counts if count is not None]
    return sum(known) if known else None
