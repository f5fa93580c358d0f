"""`penstock bench replica-policies`: replica policies on one workload in simulated time.

Conversations of several turns, a system prompt per tenant, few tenants with most of the traffic, four replicas. The
engines are the real scheduler and the real KV blocks with modelled step times (`penstock.testing.timed_engine`); the
policies and their view of replicas (`penstock.routing`) are those of the gateway, and as old as there: a replica is
seen as of its last finished step, corrected by what was sent since. Every policy gets the same conversations. Hit rate:
prompt tokens found in a prefix cache. Throughput: output tokens per second of the run; a conversation goes on when its
last answer has come, so slower answers make less of it. It shows what a policy is worth where prefixes repeat, not
where nothing does (`--turns 1 --system 1` shows that).
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from penstock.bench import report
from penstock.bench.charts import bars
from penstock.bench.stats import percentiles
from penstock.engine.request import EngineLoad, Request, SamplingParams
from penstock.routing.meter import ReplicaMeter
from penstock.routing.policies import POLICIES, make_policy
from penstock.routing.policy import ReplicaPolicy, ReplicaRequest
from penstock.testing.timed_engine import TimedEngine

WORST = ("round_robin", "random")
EXPECTED_OUTPUT = 128


@dataclass(frozen=True)
class ConversationWorkload:
    seed: int = 1
    rate: float = 12.0
    """New conversations per second."""
    seconds: float = 120.0
    tenants: int = 12
    skew: float = 1.1
    """Exponent of Zipf's law over tenants."""
    system: int = 800
    turns: int = 5
    question: int = 80
    answer: int = 120
    think_s: float = 3.0
    replicas: int = 4
    blocks: int = 4096


@dataclass
class Conversation:
    tenant: int
    session: str
    tokens: list[int]
    """The prompt of its next turn."""
    questions: deque[tuple[list[int], int, float]]
    """What follows: the next question, the length of the answer before it, the pause before it."""
    answer: int


@dataclass
class Outcome:
    ttft: list[float] = field(default_factory=list)
    output_tokens: int = 0
    queried: int = 0
    hits: int = 0
    finished: int = 0

    def figures(self, seconds: float) -> dict[str, float]:
        ttft = percentiles(self.ttft)
        assert ttft is not None
        return {
            "hit_rate": self.hits / max(self.queried, 1),
            "ttft_p50_s": ttft.p50,
            "ttft_p99_s": ttft.p99,
            "tokens_per_s": self.output_tokens / seconds,
            "requests": len(self.ttft),
        }


def conversations(work: ConversationWorkload) -> list[tuple[float, Conversation]]:
    rng = random.Random(work.seed)
    weights = [1 / (rank + 1) ** work.skew for rank in range(work.tenants)]
    systems = [[rng.randrange(50_000) for _ in range(work.system)] for _ in range(work.tenants)]

    def around(mean: int) -> int:
        return max(1, round(mean * rng.uniform(0.5, 1.5)))

    def words(count: int) -> list[int]:
        return [rng.randrange(50_000) for _ in range(count)]

    made: list[tuple[float, Conversation]] = []
    at = 0.0
    while (at := at + rng.expovariate(work.rate)) < work.seconds:
        tenant = rng.choices(range(work.tenants), weights)[0]
        turns = rng.randint(1, 2 * work.turns - 1)
        answers = [around(work.answer) for _ in range(turns)]
        follow = deque(
            (words(around(work.question)), answers[turn], rng.expovariate(1 / work.think_s)) for turn in range(1, turns)
        )
        tokens = systems[tenant] + words(around(work.question))
        made.append((at, Conversation(tenant, f"s{len(made)}", tokens, follow, answers[0])))
    return made


class Replica:
    """One engine with what the gateway knows of it."""

    def __init__(self, name: str, work: ConversationWorkload, clock: Callable[[], float]) -> None:
        self.name = name
        self.engine = TimedEngine(num_blocks=work.blocks, max_model_len=32_768, clock=clock)
        self.meter = ReplicaMeter()
        self.seen = EngineLoad(total_blocks=work.blocks)
        self.busy = False


class Simulation:
    """The workload under one policy."""

    def __init__(self, work: ConversationWorkload, policy: ReplicaPolicy) -> None:
        self.work = work
        self.policy = policy
        self.now = 0.0
        self.replicas = [Replica(str(index), work, lambda: self.now) for index in range(work.replicas)]
        self.outcome = Outcome()
        self._serial = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._sent: dict[str, tuple[float, Conversation]] = {}

    def run(self) -> Outcome:
        for at, conversation in conversations(self.work):
            self._later(at, lambda conversation=conversation: self._send(conversation))  # type: ignore[misc]
        while self._events and self._events[0][0] <= self.work.seconds:
            self.now, _, event = heapq.heappop(self._events)
            event()
        for replica in self.replicas:
            load = replica.engine.load_snapshot()
            self.outcome.queried += load.prefix_query_tokens
            self.outcome.hits += load.prefix_hit_tokens
        return self.outcome

    def _later(self, at: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at, next(self._serial), event))

    def _send(self, conversation: Conversation) -> None:
        request = Request(
            f"r{next(self._serial)}",
            list(conversation.tokens),
            SamplingParams(max_tokens=conversation.answer),
            cache_salt=f"t{conversation.tenant}",
        )
        asked = ReplicaRequest.of(
            request,
            16,
            expected_output=EXPECTED_OUTPUT,
            wants_blocks=self.policy.wants_blocks,
            session=conversation.session,
            tenant=request.cache_salt,
        )
        views = [r.meter.view(r.name, r.seen, r.engine.info, self.now) for r in self.replicas]
        replica = self.replicas[self.policy.choose(asked, views)]
        replica.meter.sent(request.request_id, len(request.prompt), EXPECTED_OUTPUT, self.now)
        self._sent[request.request_id] = (self.now, conversation)
        replica.engine.submit(request)
        if not replica.busy:
            self._step(replica)

    def _step(self, replica: Replica) -> None:
        seconds = replica.engine.begin()
        replica.busy = seconds is not None
        if seconds is not None:
            self._later(self.now + seconds, lambda: self._stepped(replica))

    def _stepped(self, replica: Replica) -> None:
        output = replica.engine.end()
        if output is not None:
            replica.seen = output.load
            for delta in output.deltas:
                replica.meter.received(delta, self.now)
                sent_at, conversation = self._sent[delta.request_id]
                self.outcome.output_tokens += len(delta.tokens)
                if delta.cached_tokens is not None:
                    self.outcome.ttft.append(self.now - sent_at)
                conversation.tokens += delta.tokens
                if delta.finish_reason is not None:
                    self._ended(delta.request_id, conversation)
        self._step(replica)

    def _ended(self, request_id: str, conversation: Conversation) -> None:
        del self._sent[request_id]
        self.outcome.finished += 1
        if conversation.questions:
            question, answer, pause = conversation.questions.popleft()
            conversation.tokens += question
            conversation.answer = answer
            self._later(self.now + pause, lambda: self._send(conversation))


def compare(work: ConversationWorkload, policies: Iterable[str] = POLICIES) -> dict[str, dict[str, float]]:
    return {name: Simulation(work, make_policy(name)).run().figures(work.seconds) for name in policies}


def panels(results: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    titles = {
        "hit_rate": ("prefix hits, %", 100.0),
        "ttft_p50_s": ("TTFT p50, ms", 1000.0),
        "ttft_p99_s": ("TTFT p99, s", 1.0),
        "tokens_per_s": ("output tokens/s, thousands", 0.001),
    }
    return {
        title: {name: figures[key] * scale for name, figures in results.items()}
        for key, (title, scale) in titles.items()
    }


def show(console: Console, work: ConversationWorkload, results: dict[str, Any]) -> None:
    table = report.table(
        f"{work.replicas} replicas, {work.rate:g} conversations/s, {work.tenants} tenants, {work.seconds:g} s",
        "policy", "prefix hits", "TTFT p50", "TTFT p99", "output tokens/s", "requests", "p99 x ours", "tokens / ours",
    )  # fmt: skip
    ours = results["predicted"]
    for name, figures in results.items():
        table.add_row(
            name,
            report.share(figures["hit_rate"]),
            f"{figures['ttft_p50_s'] * 1000:,.0f} ms",
            f"{figures['ttft_p99_s'] * 1000:,.0f} ms",
            report.number(figures["tokens_per_s"], 0),
            report.number(figures["requests"], 0),
            f"{figures['ttft_p99_s'] / ours['ttft_p99_s']:.2f}",
            f"{figures['tokens_per_s'] / ours['tokens_per_s']:.2f}",
        )
    console.print(table)


def main(work: ConversationWorkload, chart_file: Path | None, json_file: Path | None, console: Console) -> bool:
    """Simulates, prints, and says whether the default policy is better than the simple ones in every respect."""
    results = compare(work)
    show(console, work, results)
    if chart_file is not None:
        title = f"Replica policies, {work.replicas} replicas, {work.rate:g} new conversations/s"
        report.write_text(chart_file, bars(title, panels(results)))
    if json_file is not None:
        report.write_json(json_file, "replica-policies", dataclasses.asdict(work), results)
    worse = [name for name in WORST if not _better(results["predicted"], results[name])]
    if worse and work.turns > 1:
        console.print(f"predicted is not better than {' and '.join(worse)} in every respect", style="red")
    return not worse or work.turns == 1


def _better(ours: dict[str, float], theirs: dict[str, float]) -> bool:
    higher = all(ours[figure] > theirs[figure] for figure in ("hit_rate", "tokens_per_s"))
    return higher and all(ours[figure] < theirs[figure] for figure in ("ttft_p50_s", "ttft_p99_s"))
