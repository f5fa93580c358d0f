"""A Jinja environment whose templates run in bounds: compiled code asks a `Meter` before everything that can be large.

The code generator emits a call of the meter around operators, literals, comparisons, slices, loops, calls and output;
filters and tests are those of `template_filters`. Nothing is evaluated at compile time, where no meter runs.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes as nodes
import jinja2.parser
import jinja2.sandbox
from jinja2.compiler import CodeGenerator, Frame
from jinja2.utils import Namespace

from penstock.text.template_filters import FILTERS, TESTS, MeteredContext
from penstock.text.template_meter import Meter


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
        self.filters = dict(FILTERS)
        self.tests = dict(TESTS)
        del self.globals["lipsum"]
        self.globals["namespace"] = _Namespace
        self.globals["raise_exception"] = raise_exception
        self.globals["strftime_now"] = strftime_now

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


def strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)
