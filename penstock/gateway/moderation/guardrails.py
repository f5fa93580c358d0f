"""Guardrails: the configured rules for what may go into a model and come out of it, per tenant and tier.

Patterns that demand labels look at all that a model would read before it is decided which one gets it. Patterns that
refuse or redact apply in the order of the configuration, each to what the ones before it left; then moderation models
check the rest, if the request's demand permits that they see it. Input is refused with 400 or rewritten before a model
sees it; output is filtered as it streams, and a refused answer ends where the match begins, or with the last window
that passed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from time import thread_time
from typing import Any

from penstock.config.guardrails import GuardrailConfig
from penstock.errors import ConfigError
from penstock.gateway.app.data_rules import withheld
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.generation.base import Generation
from penstock.gateway.generation.permissions import Permissions
from penstock.gateway.moderation.moderators import ModerationBackends, moderator
from penstock.gateway.moderation.rule import ModerationRule, Stage, Verdict
from penstock.gateway.moderation.stream import ModeratedStream
from penstock.identity import Caller
from penstock.identity.labels import Requirement, demand_of
from penstock.protocol.errors import ContentBlocked, DataRuleForbids, ServiceUnavailable
from penstock.telemetry.metrics import Metrics
from penstock.text.pattern_filter import (
    INLINE_S,
    LONGEST_PATTERN,
    WHOLE_S,
    WHOLE_S_PER_CHARACTER,
    Deadline,
    StreamFilter,
    TextPattern,
    TooSlow,
)

log = logging.getLogger(__name__)

INLINE_CHARACTERS = 4096
"""Input up to this size is checked on the event loop."""
_NO_TEXT = frozenset(("role", "type", "id", "tool_call_id"))
"""Keys of a message whose values are not the client's text."""


@dataclass(frozen=True, slots=True)
class PatternRule:
    """A guardrail of the kind `patterns`, compiled."""

    name: str
    config: GuardrailConfig
    patterns: tuple[TextPattern, ...]

    @property
    def replacement(self) -> str | None:
        return self.config.replacement if self.config.action == "redact" else None

    def applies(self, caller: Caller) -> bool:
        return _applies(self.config, caller)


@dataclass(frozen=True, slots=True)
class Judgement:
    """What one rule says about a text."""

    rule: str
    score: float
    """Between 0 and 1; of patterns one of the two."""
    matches: bool
    refused: bool
    """Whether it would be refused: a rule that redacts does not."""


class OutputGuard:
    """The pattern rules over the text of one choice."""

    __slots__ = ("_filters", "_noted")

    def __init__(self, rules: Sequence[PatternRule], noted: Callable[[PatternRule, int], None]) -> None:
        self._noted = noted
        self._filters = [(rule, StreamFilter(pattern, rule.replacement)) for rule in rules for pattern in rule.patterns]

    def push(self, text: str, *, final: bool) -> tuple[str, bool]:
        """Text that may be shown now, and whether the rest was refused."""
        refused = False
        for rule, stream in self._filters:
            before = stream.hits
            text, ended = stream.push(text, final=final)
            if stream.hits > before:
                self._noted(rule, stream.hits - before)
            if ended:  # the text before the match still passes the other rules, and is the end
                final = refused = True
        return text, refused


class Guardrails:
    """All rules of a gateway. Without any it does nothing."""

    def __init__(
        self,
        configured: Sequence[GuardrailConfig],
        metrics: Metrics,
        backends: ModerationBackends,
        permissions: Permissions,
    ) -> None:
        self._permissions = permissions
        compiled = [_compiled(config) for config in configured if config.kind == "patterns"]
        self._marks = [
            (rule, demand_of(rule.config.require, f"guardrail {rule.name}"))
            for rule in compiled
            if rule.config.action == "require"
        ]
        rules = [rule for rule in compiled if rule.config.action != "require"]
        self._input = [rule for rule in rules if rule.config.stage != "output"]
        self._output = [rule for rule in rules if rule.config.stage != "input"]
        self._patterns = compiled
        self._configured = {config.name: config for config in configured}
        self._metrics = metrics
        self._moderations = [
            ModerationRule(config, moderator(config, backends), metrics)
            for config in configured
            if config.kind == "model"
        ]
        self.checks_input = bool(self._input or self._marks) or any(
            rule.config.stage != "output" for rule in self._moderations
        )

    async def close(self) -> None:
        for moderation in self._moderations:
            await moderation.close()

    async def mark(self, exchange: Exchange, texts: Callable[[], Sequence[str]]) -> None:
        """Narrow the demand of a request that matches a pattern."""
        open_marks = [
            (rule, demand)
            for rule, demand in self._marks
            if rule.applies(exchange.caller) and not set(demand.requirements) <= set(exchange.demand.requirements)
        ]
        if not open_marks:
            return
        found = list(texts())
        for rule, demand in open_marks:
            if await self._any(rule, found):
                exchange.demand = exchange.demand.narrowed(demand)
                exchange.decide("marked", "guardrail", rule.name, exchange.demand.why(demand.requirements))
                self._metrics.guardrail(rule.name, "input", "require")

    async def _any(self, rule: PatternRule, texts: Sequence[str]) -> bool:
        size = sum(map(len, texts))
        if size <= INLINE_CHARACTERS:
            try:
                deadline = Deadline(INLINE_S, thread_time)
                return any(pattern.found(text, deadline) for text in texts for pattern in rule.patterns)
            except TooSlow:
                pass  # on a thread it may take longer
        deadline = Deadline(WHOLE_S + WHOLE_S_PER_CHARACTER * size)
        try:
            return await asyncio.to_thread(
                lambda: any(pattern.found(text, deadline) for text in texts for pattern in rule.patterns)
            )
        except TooSlow:
            return True  # what could not be checked is treated as a match

    async def messages(self, exchange: Exchange, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The conversation as a model may see it."""
        if not self.checks_input:
            return messages
        await self.mark(exchange, lambda: list(_texts(messages)))
        rules = [rule for rule in self._input if rule.applies(exchange.caller)]
        messages = await self._checked(rules, messages, "messages") if rules else messages
        await self._moderate(exchange, messages, "messages")
        return messages

    async def prompt(self, exchange: Exchange, text: str) -> str:
        """Text as a model may see it."""
        if not self.checks_input:
            return text
        await self.mark(exchange, lambda: [text])
        rules = [rule for rule in self._input if rule.applies(exchange.caller)]
        text = await self._checked(rules, text, "prompt") if rules else text
        await self._moderate(exchange, [text], "prompt")
        return text

    def judges(self, exchange: Exchange) -> list[str]:
        """The names of the rules that apply to the caller, for prompts or for answers. A rule whose model the caller
        may not use is none of them."""
        hidden = {rule.config.name for rule in self._moderations if not self._permits(rule, exchange)}
        return [
            name
            for name, config in self._configured.items()
            if _applies(config, exchange.caller) and name not in hidden
        ]

    async def judgement(self, exchange: Exchange, text: str, names: Collection[str]) -> list[Judgement]:
        """What each of the named rules says about a text; raises one of `FAILURES` when a moderator fails."""
        await self.mark(exchange, lambda: [text])
        found = []
        for rule in self._patterns:
            if rule.name in names:
                matches = await self._matches(rule, text)
                refuses = rule.config.action == "refuse"
                found.append(Judgement(rule.name, float(matches), matches, matches and refuses))
        for moderation in self._moderations:
            if moderation.config.name in names:
                if unmet := moderation.unmet(exchange.demand):
                    raise _forbidden(exchange, moderation, unmet)
                score = await moderation.probability(exchange, text)
                flagged = score >= moderation.threshold
                found.append(Judgement(moderation.config.name, score, flagged, flagged))
        return found

    async def _matches(self, rule: PatternRule, text: str) -> bool:
        deadline = Deadline(WHOLE_S + WHOLE_S_PER_CHARACTER * len(text))
        try:
            return await asyncio.to_thread(lambda: any(pattern.found(text, deadline) for pattern in rule.patterns))
        except TooSlow:
            return True  # as for prompts: what takes too long is refused

    async def problem(self) -> str | None:
        """Why every request is refused at the moment; None: they are not."""
        failing = [moderation.config.name for moderation in self._moderations if moderation.refuses_all]
        return f"the model of the guardrail `{failing[0]}` does not answer" if failing else None

    def guards(self, exchange: Exchange) -> bool:
        """Whether text is held back from this caller, so that neither tokens nor probabilities may be shown."""
        return any(rule.applies(exchange.caller) for rule in self._output)

    def watch(self, exchange: Exchange, generation: Generation) -> None:
        """Filter what the generation says."""
        if not self._output and not self._moderations:
            return
        rules = [rule for rule in self._output if rule.applies(exchange.caller)]
        if rules:
            generation.guard(lambda: OutputGuard(rules, self._note_output))
        asked = self._asked(exchange, "output")
        if not asked:
            return

        async def check(text: str) -> bool:
            verdicts = await asyncio.gather(*(self._verdict(each, exchange, [text], "output") for each in asked))
            return all(verdict == "passed" for verdict in verdicts)

        window = min(moderation.config.window for moderation in asked)
        generation.moderated = ModeratedStream(generation, check, window)

    def _asked(self, exchange: Exchange, stage: Stage) -> list[ModerationRule]:
        """The moderation rules that check a request. One whose model may not see it counts as one that fails."""
        found = []
        for moderation in self._moderations:
            if moderation.config.stage not in (stage, "both") or not _applies(moderation.config, exchange.caller):
                continue
            if not (unmet := moderation.unmet(exchange.demand)):
                found.append(moderation)
            elif moderation.config.on_error == "refuse":
                raise _forbidden(exchange, moderation, unmet)
            else:
                withheld(exchange, "moderator", moderation.config.name, unmet)
        return found

    async def _verdict(
        self, moderation: ModerationRule, exchange: Exchange, texts: Sequence[str], stage: Stage
    ) -> Verdict:
        """A text never reaches a model that its sender may not use: such a rule cannot be checked."""
        if self._permits(moderation, exchange):
            return await moderation.verdict(exchange, texts, stage)
        return moderation.unchecked(stage)

    def _permits(self, moderation: ModerationRule, exchange: Exchange) -> bool:
        config = moderation.config
        return bool(config.url) or config.for_all_callers or self._permissions.exists(exchange.caller, config.model)

    async def _moderate(self, exchange: Exchange, values: Sequence[Any], param: str) -> None:
        """Have the moderation models check each of `values`, messages or prompts; raises when one does not pass."""
        asked = self._asked(exchange, "input")
        if not asked:
            return
        texts = ["\n".join(_texts(value)) for value in values]
        for moderation in asked:
            verdict = await self._verdict(moderation, exchange, texts, "input")
            if verdict == "flagged":
                raise _blocked(moderation.config.name, param)
            if verdict == "failed":
                raise ServiceUnavailable(
                    f"The rule `{moderation.config.name}` of this server could not be checked; try again.",
                    code="moderation_unavailable",
                )

    async def _checked(self, rules: Sequence[PatternRule], value: Any, param: str) -> Any:
        size = _size(value)
        if size <= INLINE_CHARACTERS:
            try:
                return self._check(rules, value, param, Deadline(INLINE_S, thread_time))
            except TooSlow:
                pass  # on a thread it may take longer
        deadline = Deadline(WHOLE_S + WHOLE_S_PER_CHARACTER * size * len(rules))
        try:
            return await asyncio.to_thread(self._check, rules, value, param, deadline)
        except TooSlow as error:
            (rule,) = error.args
            log.warning("guardrail %r takes too long on a request; it is refused", rule.name)
            raise self._refused(rule, param) from None

    def _check(self, rules: Sequence[PatternRule], value: Any, param: str, deadline: Deadline) -> Any:
        """`value` as the rules leave it; raises `TooSlow` with the rule that takes too long."""
        if isinstance(value, str):
            for rule in rules:
                try:
                    value = self._apply(rule, value, param, deadline)
                except TooSlow:
                    raise TooSlow(rule) from None
            return value
        if isinstance(value, dict):
            return {
                key: item if key in _NO_TEXT else self._check(rules, item, param, deadline)
                for key, item in value.items()
            }
        if isinstance(value, list):
            return [self._check(rules, item, param, deadline) for item in value]
        return value

    def _apply(self, rule: PatternRule, text: str, param: str, deadline: Deadline) -> str:
        for pattern in rule.patterns:
            if not pattern.found(text, deadline):
                continue
            if rule.replacement is None:
                raise self._refused(rule, param)
            text = pattern.replaced(text, rule.replacement, deadline)
            self._metrics.guardrail(rule.name, "input", "redact")
        return text

    def _refused(self, rule: PatternRule, param: str) -> ContentBlocked:
        self._metrics.guardrail(rule.name, "input", "refuse")
        return _blocked(rule.name, param)

    def _note_output(self, rule: PatternRule, times: int) -> None:
        self._metrics.guardrail(rule.name, "output", rule.config.action, times)


def _applies(config: GuardrailConfig, caller: Caller) -> bool:
    tenants, tiers = config.tenants, config.tiers
    return not (tenants or tiers) or caller.tenant in tenants or caller.tier in tiers


def _forbidden(exchange: Exchange, moderation: ModerationRule, unmet: Sequence[Requirement]) -> DataRuleForbids:
    name, why = moderation.config.name, exchange.demand.why(unmet)
    exchange.decide("refused", "moderator", name, why)
    return DataRuleForbids(f"The model of the rule `{name}`, which must check this request, may not get it: {why}.")


def _blocked(rule: str, param: str) -> ContentBlocked:
    return ContentBlocked(f"The request was refused by the rule `{rule}` of this server.", param=param)


def _texts(value: Any) -> Iterator[str]:
    """The texts of a message, its calls included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            if key not in _NO_TEXT:
                yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def _size(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_size, value.values()))
    return sum(map(_size, value)) if isinstance(value, list) else 0


def _compiled(config: GuardrailConfig) -> PatternRule:
    try:
        patterns = [TextPattern(source) for source in config.patterns]
        if config.words:
            patterns.insert(0, TextPattern.of_words(config.words))
    except ConfigError as error:
        raise ConfigError(f"guardrails: {config.name}: {error}") from error
    for source in (*config.patterns, *config.words):
        if len(source) > LONGEST_PATTERN:
            raise ConfigError(f"guardrails: {config.name}: a pattern has more than {LONGEST_PATTERN} characters")
    return PatternRule(config.name, config, tuple(patterns))
