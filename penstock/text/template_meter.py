"""What a chat template may do in one rendering: every operation whose cost depends on a value is charged here first.

A template comes with the model's files and is a program, so it may loop, double a string or print a list that contains
itself many times over. Invariant: no operation runs before its cost was charged, and the sum of charges is bounded; so
time, memory and output are bounded too, in C code as well, whatever the template and the messages are. One unit is
about one evaluated expression or sixteen characters: some 100 ns. `bounded_jinja` compiles templates so that they ask
here.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Iterable, Iterator
from types import BuiltinMethodType, MethodType
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.runtime import BlockReference, Context, LoopContext, Macro, Undefined
from jinja2.sandbox import SandboxedEnvironment

from penstock.errors import PenstockError

WORK = 4_000_000
"""Units that one rendering may take: some 0.5 seconds."""
MAX_WIDTH = 1000
"""The widest field of a format, and the deepest indentation."""
PRECISION = 100
_INT_BITS = 100_000
_WIDE = re.compile(r"\d{4}|\*")
_NESTED_FIELD = re.compile(r"\{[^{}]*\{")
_SEVERAL: Any = (list, tuple, range, type({}.keys()), type({}.values()), type({}.items()), set, frozenset)

_LINEAR = frozenset(
    [
        "capitalize",
        "casefold",
        "count",
        "encode",
        "endswith",
        "find",
        "index",
        "isalnum",
        "isalpha",
        "isascii",
        "isdecimal",
        "isdigit",
        "isidentifier",
        "islower",
        "isnumeric",
        "isprintable",
        "isspace",
        "istitle",
        "isupper",
        "lower",
        "lstrip",
        "partition",
        "removeprefix",
        "removesuffix",
        "rfind",
        "rindex",
        "rpartition",
        "rsplit",
        "rstrip",
        "split",
        "splitlines",
        "startswith",
        "strip",
        "swapcase",
        "title",
        "upper",
        "escape",
        "unescape",
    ]
)
"""Methods of strings whose result is no longer than a few times the text."""
_PADDING = frozenset(("center", "ljust", "rjust", "zfill"))
_OTHER: dict[type, frozenset[str]] = {
    dict: frozenset(("get", "items", "keys", "values", "copy")),
    list: frozenset(("count", "index", "copy")),
    tuple: frozenset(("count", "index")),
    range: frozenset(("count", "index")),
    bytes: frozenset(("decode", "hex", "startswith", "endswith")),
    int: frozenset(("bit_length", "bit_count", "conjugate", "as_integer_ratio")),
    bool: frozenset(("bit_length",)),
    float: frozenset(("is_integer", "hex", "conjugate", "as_integer_ratio")),
}
_ELEMENT = 10
"""The cost of an element of a container, which is looked at one by one."""
_CALL = 50
"""The cost of a call itself."""
_SCOPES = ("_loop_vars", "_block_vars")
"""Arguments that compiled code adds to calls, for functions that ask for the context."""


class TemplateLimit(PenstockError):
    """A rendering needs more work than it may do."""


class Meter:
    """The work that one rendering has left."""

    __slots__ = ("call_weight", "left")

    def __init__(self, work: int, call_weight: int) -> None:
        """`call_weight`: the cost of the template's largest macro, block or recursive loop."""
        self.left = work
        self.call_weight = call_weight

    def charge(self, units: int) -> None:
        self.left -= units
        if self.left < 0:
            raise TemplateLimit("it takes more work than one rendering may")

    def weigh(self, value: Any) -> int:
        """The size of a value written out in full: what is in it twice counts twice."""
        kind = type(value)
        if kind is str:
            return 1 + (len(value) >> 4)
        if kind is int or kind is bool or value is None or kind is float:
            return 1 if kind is not int else 1 + (value.bit_length() >> 6)
        total, limit = 1, self.left
        waiting = [value]
        while waiting:
            value = waiting.pop()
            if isinstance(value, str | bytes):
                total += len(value) >> 4
                continue
            if isinstance(value, dict):
                total += 2 * _ELEMENT * len(value)
            elif isinstance(value, _SEVERAL):
                total += _ELEMENT * len(value)
            elif isinstance(value, int):
                total += value.bit_length() >> 6
            if total > limit:
                raise TemplateLimit("it builds or reads a value that is too large")
            if isinstance(value, dict):
                waiting.extend(value)
                waiting.extend(value.values())
            elif isinstance(value, _SEVERAL) and not isinstance(value, range):
                waiting.extend(value)
        return total

    # --- what compiled templates call

    def use(self, value: Any) -> Any:
        """A value that is about to be compared or written out as a whole."""
        self.left -= 1 + (len(value) >> 4) if type(value) is str else self.weigh(value)
        if self.left < 0:
            self.charge(0)
        return value

    built = use
    """A list, tuple or dictionary that the template has written down."""

    def text(self, value: Any) -> str:
        """A value as output."""
        if type(value) is str:
            self.left -= 1 + (len(value) >> 4)
            if self.left < 0:
                self.charge(0)
            return value
        self.charge(self.weigh(value))
        return str(value)

    def key(self, value: Any) -> Any:
        """A subscript, which may have to be hashed."""
        kind = type(value)
        if kind is not str and kind is not int:
            self.charge(self.weigh(value))
        return value

    def sliced(self, value: Any) -> Any:
        """A value of which a slice is about to be copied."""
        if hasattr(value, "__len__"):
            self.charge(1 + (len(value) >> 2))
        return value

    def loop(self, values: Any, weight: int) -> Any:
        """What a loop goes over; `weight`: the cost of one iteration."""
        try:
            size = len(values)
        except TypeError:
            return self.counted(values, weight)
        self.charge((size + 1) * weight)
        return values

    def counted(self, values: Iterable[Any], weight: int) -> Iterator[Any]:
        for value in values:
            self.left -= weight
            if self.left < 0:
                self.charge(0)
            yield value

    def add(self, left: Any, right: Any) -> Any:
        if type(left) is str and type(right) is str:
            self.left -= 1 + ((len(left) + len(right)) >> 4)
            if self.left < 0:
                self.charge(0)
            return left + right
        return self._linear(operator.add, left, right)

    def cat(self, *parts: Any) -> Any:
        """A chain of additions, which are mostly strings."""
        size = 0
        for part in parts:
            if type(part) is not str:
                return functools.reduce(self.add, parts)
            size += len(part)
        self.left -= 1 + (size >> 4)
        if self.left < 0:
            self.charge(0)
        return "".join(parts)

    def sub(self, left: Any, right: Any) -> Any:
        return self._linear(operator.sub, left, right)

    def div(self, left: Any, right: Any) -> Any:
        return self._linear(operator.truediv, left, right)

    def floordiv(self, left: Any, right: Any) -> Any:
        return self._linear(operator.floordiv, left, right)

    def _linear(self, operation: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
        self.charge(self.weigh(left) + self.weigh(right))
        return operation(left, right)

    def mul(self, left: Any, right: Any) -> Any:
        for one, times in ((left, right), (right, left)):
            if isinstance(times, int) and not isinstance(one, int | float):
                self.charge(self.weigh(one) * max(int(times), 1))
                break
        else:
            self._check_bits(_bits(left) + _bits(right))
            self.charge(self.weigh(left) + self.weigh(right))
        return left * right

    def pow(self, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            self._check_bits(max(left.bit_length(), 1) * abs(right))
        self.charge(self.weigh(left) + self.weigh(right))
        return left**right

    def _check_bits(self, bits: int) -> None:
        if bits > _INT_BITS:
            raise TemplateLimit(f"it computes with integers of more than {_INT_BITS} bits")
        self.charge(1 + (bits >> 4))

    def mod(self, left: Any, right: Any) -> Any:
        if isinstance(left, str | bytes):
            self.format(left if isinstance(left, str) else left.decode("latin-1"), "%", right)
        else:
            self.charge(self.weigh(left) + self.weigh(right))
        return left % right

    def format(self, template: str, mark: str, arguments: Any) -> None:
        """A format string whose fields begin with `mark`, before it is applied."""
        self.charge(self.weigh(template))
        if _WIDE.search(template) or _NESTED_FIELD.search(template):
            raise TemplateLimit(f"fields of a format may be at most {MAX_WIDTH - 1} wide")
        fields = template.count(mark)
        self.charge(fields * (self.weigh(arguments) + (MAX_WIDTH >> 4)))

    # --- calls

    def call(self, context: Context, function: Any, *args: Any, **kwargs: Any) -> Any:
        """A call of a macro, a method or a function."""
        method = isinstance(function, BuiltinMethodType)
        if method and type(owner := function.__self__) is str and function.__name__ in _LINEAR:
            # The usual case: `strip`, `split`, `startswith`.
            size = len(owner) + sum(len(arg) if type(arg) is str else 16 * self.weigh(arg) for arg in args)
            self.charge(2 + (size >> 2))
            for name in _SCOPES:
                kwargs.pop(name, None)
            return function(*args, **kwargs)
        named = [value for name, value in kwargs.items() if name not in _SCOPES]
        self.charge(_CALL + sum(map(self.weigh, args)) + sum(map(self.weigh, named)))
        if method:
            args = self._method(function.__self__, function.__name__, args, kwargs)
        elif isinstance(function, Macro | BlockReference):
            self.charge(_CALL + self.call_weight)
        elif isinstance(function, LoopContext):
            args = tuple(self.loop(arg, _CALL + self.call_weight) for arg in args)
            self.charge(_CALL + self.call_weight)
        elif isinstance(function, MethodType):
            if isinstance(function.__self__, str):
                args = self._method(function.__self__, function.__name__, args, kwargs)
        elif isinstance(wrapped := getattr(function, "__wrapped__", None), BuiltinMethodType | MethodType):
            # `wrap_str_format` of the sandbox has replaced `format` and `format_map`.
            self.format(str(wrapped.__self__), "{", [args, named])
        elif not isinstance(function, Undefined) and not any(
            function is known for known in context.environment.globals.values()
        ):
            raise SecurityError(f"a call of {type(function).__name__} is not available in chat templates")
        environment = context.environment
        assert isinstance(environment, SandboxedEnvironment)
        result = environment.call(context, function, *args, **kwargs)
        if type(result) is not str:
            self.charge(self.weigh(result))
        return result

    def _method(self, owner: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Charges for a method of a built-in type; the methods that can blow up have a bound of their own."""
        if isinstance(owner, str):
            size = len(owner)
            self.charge(1 + (size >> 2))
            if name in _LINEAR:
                return args
            if name == "join" and args:
                return (self.joined(owner, args[0]), *args[1:])
            if name == "replace" and len(args) >= 2:
                self.replaced(owner, args[0], args[1])
                return args
            if name in _PADDING and args:
                self.charge(_width(args[0]))
                return args
            if name == "expandtabs":
                self.charge(owner.count("\t") * _width(args[0] if args else kwargs.get("tabsize", 8)))
                return args
        else:
            for kind in type(owner).__mro__:
                if name in _OTHER.get(kind, ()):
                    if name in ("count", "index", "copy", "hex", "decode"):
                        self.charge(self.weigh(owner))
                    return args
        raise SecurityError(f"the method {name} of {type(owner).__name__} is not available in chat templates")

    def joined(self, separator: Any, values: Any) -> list[Any]:
        """What is about to be joined."""
        parts = list(self.counted(values, 1))
        self.charge(self.weigh(parts) + len(parts) * self.weigh(separator))
        return parts

    def replaced(self, text: str, old: Any, new: Any) -> None:
        if isinstance(old, str) and isinstance(new, str):
            self.charge(2 + (len(text) >> 4) + (text.count(old) * len(new) >> 4))


def _width(value: Any) -> int:
    return max(int(value), 0) if isinstance(value, int) else 1


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 0
