"""What stands against a model for one request: its window, its cost, the caller's budget, the wait for a first token.

A route asks this before it settles on one of its models. Estimates are cheap; tokens are counted exactly only where an
estimate comes near a limit and the tokenizer is known.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from penstock.gateway.accounting.admission import Admissions
from penstock.gateway.accounting.cost_limit import max_cost, too_expensive
from penstock.gateway.accounting.quotas import Quotas
from penstock.gateway.accounting.targets import ttft_target
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.generation.question import Question
from penstock.gateway.generation.sources import SourceSearch
from penstock.gateway.generation.tokenization import MOST_COUNTED, Tokenization
from penstock.gateway.generation.tokenized_model import TokenizedModel, remote_text
from penstock.metering.prices import Usage
from penstock.routing.policies import Predicted
from penstock.routing.policy import ReplicaRequest
from penstock.routing.registry import ModelRegistry, ServedModel
from penstock.routing.remotes import RemoteModel
from penstock.routing.replicas import ReplicaSet
from penstock.routing.selection.prompts import Size
from penstock.routing.selection.representation import word_count
from penstock.routing.selection.selector import RouteRules, Selection, constrained

BYTES_PER_TOKEN = 4
"""Of UTF-8: four English letters, two of Cyrillic, four Chinese characters in three tokens."""
MESSAGE_TOKENS = 4
"""What a chat template adds to a message."""
WORDS_PER_TOKEN = 0.75
USUAL_ANSWER = 512
"""Completion tokens assumed for a request that gives no limit, where the server has no default either."""
NEAR = 4
"""An estimate within this factor of a limit is replaced by a count: a token has one byte at least."""
COUNTED = 1 << 16
"""Characters of each text in which words are counted; the rest is estimated."""


@dataclass(frozen=True, slots=True)
class Reading:
    """How much a model will read for a request."""

    words: int
    """As far as they decide anything."""
    tokens: int
    """An estimate, or the count of one tokenizer."""
    sources: int
    """Tokens of sources among them, by estimate."""


class ModelConstraints:
    """See above."""

    def __init__(
        self,
        registry: ModelRegistry,
        quotas: Quotas,
        admissions: Admissions,
        tokenization: Tokenization,
        sources: SourceSearch,
    ) -> None:
        self._registry = registry
        self._quotas = quotas
        self._admissions = admissions
        self._tokenization = tokenization
        self._sources = sources
        self._predicted = Predicted()

    async def reading(self, exchange: Exchange, rules: RouteRules, question: Question) -> Reading:
        """What the length rule counts."""
        found = 0
        if question.rag is not None:
            found = await self._sources.expected_tokens(exchange.caller, question.rag)
        words = round((found + question.ids) * WORDS_PER_TOKEN)
        for text in question.read:
            if words > rules.long_words or rules.long_tokens is not None:
                break  # more would change nothing
            words += word_count(text[:COUNTED]) + max(len(text) - COUNTED, 0) // 6
        tokens = found + estimated_tokens(question)
        limit = rules.long_tokens
        if limit is not None and limit <= tokens * NEAR <= limit * NEAR**2:
            for name in (rules.small, rules.large):
                if (counted := await self._counted(exchange, name, question, limit)) is not None:
                    tokens = found + counted
                    break
        return Reading(words, tokens, found)

    async def apply(
        self, exchange: Exchange, rules: RouteRules, selection: Selection, question: Question, reading: Reading
    ) -> Selection:
        """The selection, or the other model where something stands against this one; raises where both cost more than
        the request allows."""
        names: dict[Size, str] = {"small": rules.small, "large": rules.large}
        if unable := {size: "unable" for size, name in names.items() if self._unable(name, question)}:
            selection = constrained(rules, selection, unable)
            names = {size: name for size, name in names.items() if size not in unable} or names
        checks: tuple[Callable[[], Awaitable[dict[Size, str]]], ...] = (
            lambda: self._windows(exchange, names, question, reading),
            lambda: self._too_expensive(exchange, names, question, reading),
            lambda: self._over_budget(exchange, rules, names, question, reading),
            lambda: self._too_slow(exchange, rules, selection, names, reading),
        )
        for check in checks:
            problems = await check()
            if problems:
                selection = constrained(rules, selection, problems)
                # What has been ruled out stays so, however fast or cheap it is.
                names = {size: name for size, name in names.items() if size not in problems} or names
        return selection

    def _unable(self, name: str, question: Question) -> bool:
        """Whether the model is refused by what the request asks about tokens that are not known here."""
        remote = self._registry.remote(name)
        return remote is not None and (question.local or (question.ids > 0 and remote.text is None))

    async def _windows(
        self, exchange: Exchange, names: dict[Size, str], question: Question, reading: Reading
    ) -> dict[Size, str]:
        found: dict[Size, str] = {}
        answer = question.max_tokens or 1
        for size, name in names.items():
            window = self._model(name).context_window
            if window is None:
                continue
            tokens = reading.tokens
            if window < (tokens + answer) * NEAR <= window * NEAR**2:
                tokens = await self._tokens(exchange, name, question, reading, window)
            if tokens + answer > window:
                found[size] = "window"
        return found

    async def _too_expensive(
        self, exchange: Exchange, names: dict[Size, str], question: Question, reading: Reading
    ) -> dict[Size, str]:
        most = max_cost(exchange)
        if most is None:
            return {}
        tokens = {size: await self._tokens(exchange, name, question, reading) for size, name in names.items()}
        costs = {size: self._cost(exchange, name, tokens[size], question) for size, name in names.items()}
        if all(cost > most for cost in costs.values()):
            answer = _answer_tokens(question)
            raise too_expensive(most, [(names[size], tokens[size], answer, cost) for size, cost in costs.items()])
        return {size: "cost" for size, cost in costs.items() if cost > most}

    async def _over_budget(
        self, exchange: Exchange, rules: RouteRules, names: dict[Size, str], question: Question, reading: Reading
    ) -> dict[Size, str]:
        """Where both are, the budget itself refuses the request."""
        found: dict[Size, str] = {}
        for size, name in names.items():
            left = await self._quotas.budget_left(exchange, self._registry.base_name(name))
            if left is None:
                continue
            kept = rules.budget_reserve * left.most if size == "large" else 0.0
            tokens = await self._tokens(exchange, name, question, reading)
            if self._cost(exchange, name, tokens, question) > max(left.remaining - kept, 0):
                found[size] = "budget"
        return found

    async def _too_slow(
        self, exchange: Exchange, rules: RouteRules, selection: Selection, names: dict[Size, str], reading: Reading
    ) -> dict[Size, str]:
        asked = ttft_target(exchange)
        target = asked if asked is not None else None if rules.target_ttft_ms is None else rules.target_ttft_ms / 1000
        if target is None or len(names) < 2:
            return {}
        waits = {size: self.wait_s(name, reading.tokens) for size, name in names.items()}
        chosen, best = waits[selection.size], min(waits.values())
        # Where neither is in time, the one that is nearer.
        return {selection.size: "latency"} if chosen > target and best < chosen else {}

    def wait_s(self, name: str, prompt_tokens: int) -> float:
        """The predicted time to the first token of a new request, in seconds."""
        model = self._model(name)
        if isinstance(model, RemoteModel):
            able = [member for member in model.members if member.reachable and member.breaker.allows]
            away = [member.expected_s + (member.server.round_trip.seconds or 0.0) for member in able]
            return min(away, default=math.inf)
        if not model.backend.ready:
            return math.inf
        queued = self._admissions.queue_load(model)[1]
        if not isinstance(model.backend, ReplicaSet):
            return queued
        members = [member for member in model.backend.members if member.backend.ready and member.breaker.allows]
        now = model.backend.clock()
        views = [member.view(now) for member in members]
        costs = self._predicted.costs(ReplicaRequest(prompt_tokens), views)
        return queued + min(costs, default=math.inf)

    def _model(self, name: str) -> ServedModel | RemoteModel:
        remote = self._registry.remote(name)
        return self._registry.route(name).model if remote is None else remote

    def _cost(self, exchange: Exchange, name: str, tokens: int, question: Question) -> int:
        return self._quotas.cost(exchange, self._model(name), Usage(tokens, 0, _answer_tokens(question)))

    async def _tokens(
        self, exchange: Exchange, name: str, question: Question, reading: Reading, limit: int = MOST_COUNTED
    ) -> int:
        """The prompt's tokens for one model: counted where that is possible, with the sources that are expected."""
        counted = await self._counted(exchange, name, question, limit)
        return reading.tokens if counted is None else counted + reading.sources

    async def _counted(self, exchange: Exchange, name: str, question: Question, limit: int) -> int | None:
        """The tokens of a question for one model; None where its tokenizer is not known. Those beyond
        `limit` are not counted."""
        model = self._model(name)
        known: TokenizedModel | None = remote_text(model) if isinstance(model, RemoteModel) else model
        if known is None:
            return None
        text = "\n".join(question.read)
        ids = await self._tokenization.encode(known, text, tenant=exchange.caller.tenant, most=limit + 1)
        return len(ids) + question.ids + MESSAGE_TOKENS * question.messages


def estimated_tokens(question: Question) -> int:
    """Of the prompt, without sources."""
    size = sum(map(_bytes, question.read))
    return -(-size // BYTES_PER_TOKEN) + question.ids + MESSAGE_TOKENS * question.messages


def _bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def _answer_tokens(question: Question) -> int:
    """Completion tokens that are assumed for the cost: as asked, or the server's default, or the usual."""
    each = question.max_tokens or min(question.usual_tokens or USUAL_ANSWER, USUAL_ANSWER)
    return each * question.choices
