"""`response_format` as a grammar that an engine can enforce.

Grammars come from clients, so they are checked for size first and compiled in a sandbox, tenants taking turns, while
neither the event loop nor tokenizing waits. What passed is cached. A grammar that cannot be enforced is a 400; no
request ever runs without the constraint it asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

import msgspec

from penstock.engine.grammar.compile_queue import CompileQueue, Job, QueueFull
from penstock.engine.grammar.interface import GrammarError, GrammarTooComplex
from penstock.engine.grammar.sandbox import GrammarSandbox, SandboxUnavailable
from penstock.gateway.app.exchange import ClientDisconnected, Exchange
from penstock.gateway.generation.schemas import (
    ChoiceFormat,
    GrammarFormat,
    JsonObjectFormat,
    JsonSchemaFormat,
    RegexFormat,
    ResponseFormat,
    StructuralTagFormat,
    TextFormat,
)
from penstock.protocol.errors import InvalidRequest, Overloaded
from penstock.telemetry.metrics import Metrics
from penstock.text import grammars
from penstock.text.grammar_limits import MAX_SOURCE
from penstock.text.grammars import Grammar
from penstock.text.structural_tags import structural_tag

_CACHED = 256

encode = msgspec.json.Encoder().encode

_Key = tuple[str, bytes]
"""A tenant and its grammar. Tenants share nothing: the time of a check would say whether another has used it."""

Build = Callable[[], tuple[Grammar, Sequence[tuple[str, Grammar]]]]
"""Makes a grammar, and its parts with their names, for messages that say which of them is at fault."""


class Checked(NamedTuple):
    """A grammar that passed."""

    source: str
    unenforced: tuple[str, ...]

    def told(self, exchange: Exchange | None, param: str) -> str:
        """The source; the client learns which keywords answers may violate, as it learns of ignored parameters."""
        if self.unenforced and exchange is not None:
            if exchange.refuses_unknown:
                raise InvalidRequest(
                    f"`{param}` cannot be enforced: {', '.join(self.unenforced)}.",
                    param=param,
                    code="unsupported_grammar",
                )
            exchange.ignored.extend(f"json_schema.{name}" for name in self.unenforced)
        return self.source


class _Check:
    """A grammar being checked, and how many requests wait for it."""

    __slots__ = ("job", "result", "waiting")

    def __init__(self, job: Job[Checked]) -> None:
        self.job = job
        self.result = asyncio.wrap_future(job.future)
        self.result.add_done_callback(lambda result: result.cancelled() or result.exception())
        self.waiting = 0


class GrammarCache:
    """Checks grammars and caches those that passed."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._known: OrderedDict[_Key, Checked] = OrderedDict()
        self._checks: dict[_Key, _Check] = {}
        self._queue = CompileQueue("grammars")
        self._sandbox = GrammarSandbox()

    def close(self) -> None:
        self._queue.close()
        self._sandbox.close()

    async def source(self, key: bytes, build: Build, param: str, exchange: Exchange | None) -> str:
        """The source of the grammar that `build` makes; `key` names it. A 400 about `param` when it cannot be used.
        `exchange`: whose it is; None for the gateway's own."""
        named = ("" if exchange is None else exchange.caller.tenant, key)
        known = self._known.get(named)
        if known is not None:
            self._known.move_to_end(named)
            self._metrics.grammar("known")
            return known.told(exchange, param)
        try:
            if len(key) > 4 * MAX_SOURCE:  # in bytes; what is longer than any grammar is not even looked at
                raise GrammarError(f"it has {len(key)} bytes; at most {MAX_SOURCE} characters are accepted")
            checked = await self._checked(named, build, exchange)
        except GrammarError as error:
            self._metrics.grammar("refused")
            raise InvalidRequest(
                f"`{param}` cannot be enforced: {error}", param=param, code="unsupported_grammar"
            ) from error
        except (QueueFull, SandboxUnavailable) as error:
            raise Overloaded(f"`{param}` cannot be checked now: {error}.", retry_after=1.0) from error
        self._metrics.grammar("compiled")
        self._known[named] = checked
        if len(self._known) > _CACHED:
            self._known.popitem(last=False)
        return checked.told(exchange, param)

    async def _checked(self, key: _Key, build: Build, exchange: Exchange | None) -> Checked:
        """The result of the check, which requests of a tenant with the same grammar share."""
        check = self._checks.get(key)
        if check is None:
            check = self._checks[key] = _Check(self._queue.submit(key[0], lambda job: self._check(build, job)))
        check.waiting += 1
        result = asyncio.shield(check.result)

        def leave(_: Exception) -> None:
            result.cancel()

        try:
            if exchange is None:
                return await result
            with exchange.watched(leave):
                return await result
        except asyncio.CancelledError:
            if result.cancelled() and not _being_cancelled():
                raise ClientDisconnected from None
            raise
        finally:
            check.waiting -= 1
            if not check.waiting:  # it is done, or nobody waits for it any more
                del self._checks[key]
                check.job.cancel()

    def _check(self, build: Build, job: Job[Checked]) -> Checked:
        if find_spec("llguidance") is None:
            raise GrammarError(grammars.NOT_INSTALLED)
        whole, parts = build()
        for where, part in parts:
            with explained(where):
                _ = part.source
        source = whole.source
        try:
            self._sandbox.try_out(source, job.interruptible)
        except GrammarTooComplex:
            raise
        except GrammarError:
            for where, part in parts:
                with explained(where):
                    self._sandbox.try_out(part.source, job.interruptible)
            raise
        return Checked(source, whole.unenforced)

    async def response_format(self, wanted: ResponseFormat | None, exchange: Exchange | None = None) -> str:
        """The grammar of a response format; empty for plain text."""
        if wanted is None or isinstance(wanted, TextFormat):
            return ""
        return await self.source(encode(wanted), lambda: (grammar_of(wanted), ()), param_of(wanted), exchange)


def _being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


@contextlib.contextmanager
def explained(where: str) -> Iterator[None]:
    """Says where in the request a grammar's mistake is."""
    try:
        yield
    except GrammarError as error:
        raise GrammarError(f"{where}: {error}") from error


def grammar_of(wanted: ResponseFormat) -> Grammar:
    match wanted:
        case JsonObjectFormat(schema):
            return grammars.json_object() if schema is None else grammars.json_schema(schema)
        case JsonSchemaFormat():
            return grammars.json_schema(schema_of(wanted))
        case RegexFormat(regex):
            return grammars.regex(regex)
        case ChoiceFormat(choice):
            return grammars.choice(choice)
        case GrammarFormat(grammar):
            return grammars.lark(grammar)
        case StructuralTagFormat():
            described = {"format": wanted.format, "structures": wanted.structures, "triggers": wanted.triggers}
            return structural_tag(described)
        case TextFormat():
            raise AssertionError("plain text has no grammar")


def schema_of(wanted: JsonSchemaFormat) -> dict[str, Any]:
    """The schema of a format, in either place."""
    if wanted.json_schema is not None:
        return wanted.json_schema.schema
    if wanted.schema is None:
        raise GrammarError("it has no schema; `json_schema.schema` holds it")
    return wanted.schema


def param_of(wanted: ResponseFormat) -> str:
    """The parameter that holds the grammar."""
    if isinstance(wanted, JsonSchemaFormat):
        return "response_format.json_schema.schema"
    return "response_format"
