"""`response_format` as a grammar that an engine can enforce.

Grammars are checked in a thread of their own, one at a time, and cached, so that neither the event loop nor tokenizing
waits for a large schema. A grammar that cannot be enforced is a 400; no request ever runs without the constraint it
asked for.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from penstock.engine.grammar.interface import GrammarError
from penstock.gateway.generation.schemas import (
    ChoiceFormat,
    GrammarFormat,
    JsonObjectFormat,
    JsonSchemaFormat,
    RegexFormat,
    ResponseFormat,
    TextFormat,
)
from penstock.protocol.errors import InvalidRequest, Overloaded
from penstock.telemetry.metrics import Metrics
from penstock.text import grammars
from penstock.text.grammars import Grammar

CHECK_S = 5.0
"""A grammar that takes longer to check is refused. The library has limits too, so the thread ends soon as well."""
_CACHED = 256
_WAITING = 64
"""Grammars that may wait to be checked."""

encode = msgspec.json.Encoder().encode


class GrammarCache:
    """Checks grammars and caches those that passed."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._known: OrderedDict[bytes, str] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._waiting = 0

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def source(self, key: bytes, build: Callable[[], Grammar], param: str) -> str:
        """The source of the grammar that `build` makes; `key` names it. A 400 about `param` when it cannot be used."""
        known = self._known.get(key)
        if known is not None:
            self._known.move_to_end(key)
            self._metrics.grammar("known")
            return known
        if self._waiting >= _WAITING:
            raise Overloaded(f"{self._waiting} new grammars already wait to be checked; try again shortly.")
        self._waiting += 1
        try:
            loop = asyncio.get_running_loop()
            work = loop.run_in_executor(self._thread, lambda: grammars.check(build()))
            source = await asyncio.wait_for(work, CHECK_S)
        except GrammarError as error:
            self._metrics.grammar("refused")
            raise InvalidRequest(
                f"`{param}` cannot be enforced: {error}", param=param, code="unsupported_grammar"
            ) from error
        except TimeoutError:
            self._metrics.grammar("refused")
            raise InvalidRequest(
                f"`{param}` is too complex: it was not compiled within {CHECK_S:g} s.",
                param=param,
                code="unsupported_grammar",
            ) from None
        finally:
            self._waiting -= 1
        self._metrics.grammar("compiled")
        self._known[key] = source
        if len(self._known) > _CACHED:
            self._known.popitem(last=False)
        return source

    async def response_format(self, wanted: ResponseFormat | None) -> str:
        """The grammar of a response format; empty for plain text."""
        if wanted is None or isinstance(wanted, TextFormat):
            return ""
        return await self.source(encode(wanted), lambda: grammar_of(wanted), param_of(wanted))


def grammar_of(wanted: ResponseFormat) -> Grammar:
    match wanted:
        case JsonObjectFormat():
            return grammars.json_object()
        case JsonSchemaFormat(json_schema):
            return grammars.json_schema(json_schema.schema)
        case RegexFormat(regex):
            return grammars.regex(regex)
        case ChoiceFormat(choice):
            return grammars.choice(choice)
        case GrammarFormat(grammar):
            return grammars.lark(grammar)
        case TextFormat():
            raise AssertionError("plain text has no grammar")


def param_of(wanted: ResponseFormat) -> str:
    """The parameter that holds the grammar."""
    if isinstance(wanted, JsonSchemaFormat):
        return "response_format.json_schema.schema"
    return "response_format"
