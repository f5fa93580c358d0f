"""A Jinja environment whose templates run in bounds: compiled code asks a `Meter` before everything that can be large.

The code generator emits a call of the meter around operators, literals, comparisons, slices, loops, calls and output;
filters and tests are wrapped. Nothing is evaluated at compile time, where no meter runs. Names that are not listed here
(`lipsum`, `wordwrap`, `urlize`, ...) do not exist: their cost has no simple bound, and no chat template needs them.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterable
from typing import Any

import jinja2
import jinja2.ext
import jinja2.filters
import jinja2.nodes as nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.tests
from jinja2.compiler import CodeGenerator, Frame
from jinja2.runtime import Context
from jinja2.utils import Namespace, pass_context

from penstock.text.template_meter import MAX_WIDTH, PRECISION, Meter, TemplateLimit

_MAX_INDENT = 16


class MeteredContext(Context):
    """The variables of one rendering, and its meter."""

    meter: Meter


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training tools; here it just renders its content."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """A namespace whose text does not contain its values, which may contain other namespaces."""

    def __repr__(self) -> str:
        return "<Namespace>"


def _binary(name: str) -> Callable[[Any, nodes.BinExpr, Frame], None]:
    def visit(self: _MeteredCode, node: nodes.BinExpr, frame: Frame) -> None:
        self.write(f"meter.{name}(")
        self.visit(node.left, frame)
        self.write(", ")
        self.visit(node.right, frame)
        self.write(")")

    return visit


class _MeteredCode(CodeGenerator):
    """Writes the Python code of a template."""

    def write_commons(self) -> None:
        super().write_commons()
        self.writeline("meter = context.meter")

    def visit_Add(self, node: nodes.BinExpr, frame: Frame) -> None:
        operands: list[nodes.Expr] = [node.right]
        left: nodes.Expr = node.left
        while isinstance(left, nodes.Add):
            operands.append(left.right)
            left = left.left
        operands.append(left)
        self.write("meter.add(" if len(operands) == 2 else "meter.cat(")
        for operand in reversed(operands):
            self.visit(operand, frame)
            self.write(", ")
        self.write(")")

    visit_Sub = _binary("sub")
    visit_Mul = _binary("mul")
    visit_Div = _binary("div")
    visit_FloorDiv = _binary("floordiv")
    visit_Pow = _binary("pow")
    visit_Mod = _binary("mod")

    def _metered(self, node: nodes.Expr, frame: Frame) -> None:
        if isinstance(node, nodes.Const):
            self.visit(node, frame)
        else:
            self.write("meter.use(")
            self.visit(node, frame)
            self.write(")")

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        if not isinstance(node, nodes.Const | nodes.TemplateData):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)

    def _output_child_pre(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        if frame.eval_ctx.volatile or frame.eval_ctx.autoescape:
            super()._output_child_pre(node, frame, finalize)
            self.write("meter.use(")
        else:
            # A sum has been charged already.
            self.write("str(" if isinstance(node, nodes.Add | nodes.Concat) else "meter.text(")

    def _output_child_post(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        super()._output_child_post(node, frame, finalize)
        if frame.eval_ctx.volatile or frame.eval_ctx.autoescape:
            self.write(")")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        if frame.eval_ctx.volatile:
            self.write("(markup_join if context.eval_ctx.volatile else str_join)((")
        else:
            self.write("markup_join((" if frame.eval_ctx.autoescape else "str_join((")
        for operand in node.nodes:
            self._metered(operand, frame)
            self.write(", ")
        self.write("))")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        first = node.ops[0]
        constant = isinstance(node.expr, nodes.Const) or isinstance(first.expr, nodes.Const)
        if constant and len(node.ops) == 1 and first.op not in ("in", "notin"):
            super().visit_Compare(node, frame)  # the usual case; it costs no more than the constant is long
            return
        self.write("(")
        self._metered(node.expr, frame)
        for operand in node.ops:
            self.write(f" {jinja2.compiler.operators[operand.op]} ")
            self._metered(operand.expr, frame)
        self.write(")")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if isinstance(node.arg, nodes.Slice):
            self.write("meter.sliced(")
            self.visit(node.node, frame)
            self.write(")[")
            self.visit(node.arg, frame)
            self.write("]")
            return
        self.write("environment.getitem(")
        self.visit(node.node, frame)
        self.write(", " if isinstance(node.arg, nodes.Const) else ", meter.key(")
        self.visit(node.arg, frame)
        self.write(")" if isinstance(node.arg, nodes.Const) else "))")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self.write("meter.built(")
        super().visit_List(node, frame)
        self.write(")")

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx == "store":
            super().visit_Tuple(node, frame)
            return
        self.write("meter.built(")
        super().visit_Tuple(node, frame)
        self.write(")")

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self.write("meter.built(")
        super().visit_Dict(node, frame)
        self.write(")")

    def visit_Call(self, node: nodes.Call, frame: Frame, forward_caller: bool = False) -> None:
        if isinstance(node.node, nodes.ContextReference):  # put there by `_weigh`
            self.write("meter.loop(")
            self.visit(node.args[0], frame)
            self.write(", ")
            self.visit(node.args[1], frame)
            self.write(")")
            return
        self.write("meter.call(context, ")
        self.visit(node.node, frame)
        extra: dict[str, Any] = {"caller": "caller"} if forward_caller else {}
        if frame.loop_frame:
            extra["_loop_vars"] = "_loop_vars"
        if frame.block_frame:
            extra["_block_vars"] = "_block_vars"
        self.signature(node, frame, extra or None)
        self.write(")")


class _Undeclared(_MeteredCode):
    """Collects the names that a template expects to be given, and writes nothing."""

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment, "<names>", "<names>", optimized=False)
        self.names: set[str] = set()

    def write(self, x: str) -> None:
        return

    def enter_frame(self, frame: Frame) -> None:
        super().enter_frame(frame)
        self.names |= {str(name) for action, name in frame.symbols.loads.values() if action == "resolve"}


class BoundedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox of chat templates, with what model authors rely on: block trimming, `strftime_now`, `tojson`, loop
    controls, the `generation` tag."""

    code_generator_class = _MeteredCode
    context_class = MeteredContext

    def __init__(self, raise_exception: Callable[[Any], None]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            extensions=[jinja2.ext.loopcontrols, _Generation],
        )
        self.filters = dict(_FILTERS)
        self.tests = dict(_TESTS)
        del self.globals["lipsum"]
        self.globals["namespace"] = _Namespace
        self.globals["raise_exception"] = raise_exception
        self.globals["strftime_now"] = _strftime_now

    def compiled(self, source: str) -> BoundedTemplate:
        tree = self.parse(source)
        names = _Undeclared(self)
        weight, call_weight = _weigh(tree)
        names.visit(tree)
        return BoundedTemplate(self.from_string(tree), weight, call_weight, frozenset(names.names))


class BoundedTemplate:
    """A compiled template."""

    def __init__(self, template: jinja2.Template, weight: int, call_weight: int, names: frozenset[str]) -> None:
        self._template = template
        self._weight = weight
        self._call_weight = call_weight
        self.names = names
        """The variables that it expects."""

    def render(self, variables: dict[str, Any], work: int) -> str:
        """The text; `TemplateLimit` when it takes more than `work`. `variables` must contain the globals."""
        template = self._template
        context = MeteredContext(template.environment, variables, template.name, template.blocks)
        context.meter = meter = Meter(work, self._call_weight)
        meter.charge(self._weight)
        return "".join(template.root_render_func(context))


def _weigh(tree: nodes.Template) -> tuple[int, int]:
    """The cost of the parts that run once, and of the largest that can be called. Every loop gets the cost of its
    body."""
    largest = 1

    def cost(node: nodes.Node) -> int:
        nonlocal largest
        total = 1 + (len(node.data) >> 4 if isinstance(node, nodes.TemplateData) else 0)
        if isinstance(node, nodes.For):
            outside = [node.target, node.iter]
            body = 2 + sum(cost(child) for child in node.iter_child_nodes() if child not in outside)
            total += cost(node.target) + cost(node.iter)
            node.iter = nodes.Call(nodes.ContextReference(), [node.iter, nodes.Const(body)], [], None, None)
            if node.recursive:
                largest = max(largest, body)
            return total
        total += sum(map(cost, node.iter_child_nodes()))
        if isinstance(node, nodes.Macro | nodes.CallBlock | nodes.Block):
            largest = max(largest, total)
        return total

    return cost(tree), largest


# --- functions


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


# --- filters


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
_FILTERS: dict[str, Callable[..., Any]] = {
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
_TESTS: dict[str, Callable[..., Any]] = {
    name: test if name in _FREE_TESTS else _numbers_only(test) if name in _NUMBER_TESTS else _charged(test)
    for name, test in _JINJA_TESTS.items()
}
