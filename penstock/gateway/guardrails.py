"""Guardrails: the configured rules for what may go into a model and come out of it, per tenant and tier.

Rules apply in the order of the configuration, each to what the ones before it left. Input is refused with 400 or
rewritten before a model sees it; output is filtered as it streams, and a refused one ends where the match begins.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.config.schema import GuardrailConfig
from penstock.errors import ConfigError
from penstock.identity import Caller
from penstock.protocol.errors import ContentBlocked
from penstock.telemetry.metrics import Metrics
from penstock.text.filtering import LONGEST_PATTERN, StreamFilter, TextPattern, TooSlow

log = logging.getLogger(__name__)

INLINE_CHARACTERS = 4096
"""Input up to this size is checked on the event loop."""
_NO_TEXT = frozenset(("role", "type", "id", "tool_call_id"))
"""Keys of a message whose values are not the client's own words."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One entry of the configuration, compiled."""

    name: str
    config: GuardrailConfig
    patterns: tuple[TextPattern, ...]

    @property
    def replacement(self) -> str | None:
        return self.config.replacement if self.config.action == "redact" else None

    def applies(self, caller: Caller) -> bool:
        tenants, tiers = self.config.tenants, self.config.tiers
        return not (tenants or tiers) or caller.tenant in tenants or caller.tier in tiers


class OutputGuard:
    """The rules over the text of one choice."""

    __slots__ = ("_filters", "_noted")

    def __init__(self, rules: Sequence[Rule], noted: Callable[[Rule, int], None]) -> None:
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
            if ended:  # what is left of the match passes the other rules, and is all there is
                final = refused = True
        return text, refused


class Guardrails:
    """All rules of a gateway."""

    def __init__(self, configured: Sequence[GuardrailConfig], metrics: Metrics) -> None:
        rules = [_compiled(config) for config in configured]
        self._input = [rule for rule in rules if rule.config.stage != "output"]
        self._output = [rule for rule in rules if rule.config.stage != "input"]
        self._metrics = metrics

    async def messages(self, caller: Caller, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The conversation as a model may see it."""
        rules = [rule for rule in self._input if rule.applies(caller)]
        return await self._checked(rules, messages, "messages") if rules else messages

    async def prompt(self, caller: Caller, text: str) -> str:
        rules = [rule for rule in self._input if rule.applies(caller)]
        return await self._checked(rules, text, "prompt") if rules else text

    def output(self, caller: Caller) -> Callable[[], OutputGuard] | None:
        """Makes what watches a choice; None when nothing has to."""
        rules = [rule for rule in self._output if rule.applies(caller)]
        return (lambda: OutputGuard(rules, self._note_output)) if rules else None

    async def _checked(self, rules: Sequence[Rule], value: Any, param: str) -> Any:
        if _size(value) <= INLINE_CHARACTERS:
            return self._check(rules, value, param)
        return await asyncio.to_thread(self._check, rules, value, param)

    def _check(self, rules: Sequence[Rule], value: Any, param: str) -> Any:
        if isinstance(value, str):
            for rule in rules:
                value = self._apply(rule, value, param)
            return value
        if isinstance(value, dict):
            return {key: item if key in _NO_TEXT else self._check(rules, item, param) for key, item in value.items()}
        if isinstance(value, list):
            return [self._check(rules, item, param) for item in value]
        return value

    def _apply(self, rule: Rule, text: str, param: str) -> str:
        try:
            for pattern in rule.patterns:
                if not pattern.found(text):
                    continue
                if rule.replacement is None:
                    raise self._refused(rule, param)
                self._metrics.guardrail(rule.name, "input", "redact")
                text = pattern.replaced(text, rule.replacement)
        except TooSlow:
            log.warning("guardrail %r takes too long on a request; it is refused", rule.name)
            raise self._refused(rule, param) from None
        return text

    def _refused(self, rule: Rule, param: str) -> ContentBlocked:
        self._metrics.guardrail(rule.name, "input", "refuse")
        return ContentBlocked(f"The request was refused by the rule `{rule.name}` of this server.", param=param)

    def _note_output(self, rule: Rule, times: int) -> None:
        self._metrics.guardrail(rule.name, "output", rule.config.action, times)


def _size(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_size, value.values()))
    return sum(map(_size, value)) if isinstance(value, list) else 0


def _compiled(config: GuardrailConfig) -> Rule:
    try:
        patterns = [TextPattern(source) for source in config.patterns]
        if config.words:
            patterns.insert(0, TextPattern.of_words(config.words))
    except ConfigError as error:
        raise ConfigError(f"guardrails: {config.name}: {error}") from error
    for source in (*config.patterns, *config.words):
        if len(source) > LONGEST_PATTERN:
            raise ConfigError(f"guardrails: {config.name}: a pattern has more than {LONGEST_PATTERN} characters")
    return Rule(config.name, config, tuple(patterns))
