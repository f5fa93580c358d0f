"""The filters and tests that a chat template may use, each charged to the meter of its rendering before it runs.

Names that are not listed here (`wordwrap`, `urlize`, ...) do not exist: their cost has no simple bound, and no chat
template needs them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

import jinja2.filters
import jinja2.tests
from jinja2.runtime import Context
from jinja2.utils import pass_context

from penstock.text.template_meter import MAX_WIDTH, PRECISION, Meter, TemplateLimit

_MAX_INDENT = 16


class MeteredContext(Context):
    """The variables of one rendering, and its meter."""

    meter: Meter


def _meter(context: Context) -> Meter:
    assert isinstance(context, MeteredContext)
    return context.meter


def _charged(function: Callable[..., Any], times: int = 1) -> Callable[..., Any]:
    """A filter or test that is charged `times` the size of what it is given, and the size of its result."""
    kind = getattr(getattr(function, "jinja_pass_arg", None), "name", None)

    @pass_context
    def call(context: Context, *args: Any, **kwargs: Any) -> Any:
        meter = _meter(context)
        meter.charge(20 + times * (sum(map(meter.weigh, args)) + sum(map(meter.weigh, kwargs.values()))))
        if kind == "context":
            result = function(context, *args, **kwargs)
        elif kind == "eval_context":
            result = function(context.eval_ctx, *args, **kwargs)
        elif kind == "environment":
            result = function(context.environment, *args, **kwargs)
        else:
            result = function(*args, **kwargs)
        if isinstance(result, str | int | float | bool | None):
            return result
        if hasattr(result, "__next__"):
            return meter.counted(result, 20)
        meter.charge(meter.weigh(result))
        return result

    return call


def _numbers_only(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(value: Any, *args: Any, **kwargs: Any) -> Any:
        if not all(isinstance(number, int | float) for number in (value, *args)):
            raise TypeError("a number is needed")
        return function(value, *args, **kwargs)

    return _charged(call)


def _round(value: Any, precision: int = 0, method: Any = "common") -> float:
    if not isinstance(value, int | float) or not isinstance(precision, int) or abs(precision) > PRECISION:
        raise TypeError(f"round needs a number and at most {PRECISION} digits")
    return jinja2.filters.do_round(value, precision, method)


@pass_context
def _to_json(
    context: Context, value: Any, ensure_ascii: bool = False, indent: int | str | None = None, **options: Any
) -> str:
    # Jinja's own filter escapes for HTML, which would change the prompt.
    meter = _meter(context)
    width = 0 if indent is None else indent if isinstance(indent, int) else len(indent)
    separators = options.get("separators") or ()
    if width > _MAX_INDENT or any(len(separator) > _MAX_INDENT for separator in separators):
        raise TemplateLimit(f"tojson indents and separates by at most {_MAX_INDENT} characters")
    size = meter.weigh(value)
    meter.charge(size * 2 if indent is None else size * (2 + _depth(value) * max(width, 0) // 16))
    if unknown := options.keys() - {"separators", "sort_keys"}:
        raise TypeError(f"tojson has no option {sorted(unknown)[0]!r}")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _depth(value: Any) -> int:
    """How deep containers are nested."""
    deepest, waiting = 0, [(value, 1)]
    while waiting:
        value, depth = waiting.pop()
        deepest = max(deepest, depth)
        if isinstance(value, dict):
            waiting.extend((item, depth + 1) for item in value.values())
        elif isinstance(value, list | tuple):
            waiting.extend((item, depth + 1) for item in value)
    return deepest


@pass_context
def _trim(context: Context, value: Any, chars: str | None = None) -> str:
    text = _meter(context).use(value)
    return jinja2.filters.do_trim(text, chars) if type(text) is not str else str(text.strip(chars))


@pass_context
def _join(context: Context, value: Any, d: Any = "", attribute: Any = None) -> str:
    if attribute is not None:
        value = map(jinja2.filters.make_attrgetter(context.environment, attribute), value)
    text: str = jinja2.filters.do_join(context.eval_ctx, _meter(context).joined(d, value), d)
    return text


@pass_context
def _replace(context: Context, s: Any, old: Any, new: Any, count: int | None = None) -> str:
    meter = _meter(context)
    text, old, new = (str(meter.use(value)) if not isinstance(value, str) else value for value in (s, old, new))
    meter.replaced(text, old, new)
    return jinja2.filters.do_replace(context.eval_ctx, s, old, new, count)


@pass_context
def _format(context: Context, value: Any, *args: Any, **kwargs: Any) -> str:
    _meter(context).format(str(_meter(context).use(value)), "%", [args, kwargs])
    return jinja2.filters.do_format(value, *args, **kwargs)


@pass_context
def _center(context: Context, value: Any, width: int = 80) -> str:
    _check_width(width)
    return jinja2.filters.do_center(_meter(context).use(value), width)


@pass_context
def _indent(context: Context, s: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    size = width if isinstance(width, int) else len(width)
    _check_width(size)
    text = _meter(context).use(s)
    _meter(context).charge(str(text).count("\n") * (1 + (max(size, 0) >> 4)))
    return jinja2.filters.do_indent(text, width, first, blank)


def _check_width(width: Any) -> None:
    if not isinstance(width, int) or width > MAX_WIDTH:
        raise TemplateLimit(f"text is padded and indented to at most {MAX_WIDTH} characters")


@pass_context
def _batch(context: Context, value: Iterable[Any], linecount: int, fill_with: Any = None) -> Any:
    _check_width(linecount)
    meter = _meter(context)
    return meter.counted(jinja2.filters.do_batch(meter.counted(value, 4), linecount, fill_with), 4 + max(linecount, 0))


@pass_context
def _sum(context: Context, iterable: Any, attribute: Any = None, start: Any = 0) -> Any:
    if not isinstance(start, int | float):
        raise TypeError("sum adds numbers")
    numbers = _meter(context).counted(iterable, 8)
    return jinja2.filters.sync_do_sum(context.environment, numbers, attribute, start)


_JINJA_FILTERS: dict[str, Any] = dict(jinja2.filters.FILTERS)
FILTERS: dict[str, Callable[..., Any]] = {
    **{name: _JINJA_FILTERS[name] for name in ("count", "default", "d", "first", "last", "length", "random")},
    **{
        name: _charged(_JINJA_FILTERS[name], 8)
        for name in [
            "abs",
            "attr",
            "capitalize",
            "e",
            "escape",
            "filesizeformat",
            "float",
            "forceescape",
            "int",
            "items",
            "list",
            "lower",
            "map",
            "reject",
            "rejectattr",
            "reverse",
            "safe",
            "select",
            "selectattr",
            "slice",
            "string",
            "title",
            "truncate",
            "upper",
            "urlencode",
            "wordcount",
            "xmlattr",
        ]
    },
    **{
        name: _charged(_JINJA_FILTERS[name], 32)  # they compare elements: as often as sorting does
        for name in ("dictsort", "groupby", "max", "min", "sort", "unique")
    },
    "batch": _batch,
    "center": _center,
    "format": _format,
    "indent": _indent,
    "join": _join,
    "replace": _replace,
    "round": _charged(_round),
    "sum": _sum,
    "tojson": _to_json,
    "trim": _trim,
}
_FREE_TESTS = [
    "boolean",
    "callable",
    "defined",
    "escaped",
    "false",
    "filter",
    "float",
    "integer",
    "iterable",
    "mapping",
    "none",
    "number",
    "sameas",
    "sequence",
    "string",
    "test",
    "true",
    "undefined",
]
_JINJA_TESTS: dict[str, Any] = dict(jinja2.tests.TESTS)
_NUMBER_TESTS = ("divisibleby", "even", "odd")
TESTS: dict[str, Callable[..., Any]] = {
    name: test if name in _FREE_TESTS else _numbers_only(test) if name in _NUMBER_TESTS else _charged(test)
    for name, test in _JINJA_TESTS.items()
}
