"""Small faults for a module's source: a comparison turned, a sum made a difference, a bound moved by one.

Each fault replaces one expression, in place, so that its diff is one line and everything else keeps its formatting.
What no test could notice is left alone: annotations, docstrings, assertions, messages, `__all__`, imports.
"""

from __future__ import annotations

import ast
import copy
import difflib
from collections.abc import Iterator
from dataclasses import dataclass

_TURNED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.GtE,
    ast.LtE: ast.Gt,
    ast.Gt: ast.LtE,
    ast.GtE: ast.Lt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_EDGE: dict[type[ast.cmpop], type[ast.cmpop]] = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Add,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
_SWAPPED = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True, slots=True)
class Fault:
    """One changed expression of a module."""

    line: int
    kind: str
    source: str
    """The whole module with the fault in it."""
    before: str
    """The changed line without the fault; `after`: with it."""
    after: str

    def diff(self, original: str) -> str:
        lines = difflib.unified_diff(original.splitlines(), self.source.splitlines(), lineterm="", n=0)
        return "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))


def faults(source: str) -> list[Fault]:
    """Every fault that this module knows for `source`, in source order."""
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line.encode()))
    data = source.encode()
    found: list[Fault] = []
    for parent in _expressions(ast.parse(source)):
        for kind, node, text in _variants(parent):
            begin = starts[node.lineno - 1] + node.col_offset
            end = starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
            changed = (data[:begin] + text.encode() + data[end:]).decode()
            after = changed.splitlines()[node.lineno - 1].strip()
            before = lines[node.lineno - 1].strip()
            found.append(Fault(node.lineno, kind, changed, before, after))
    return sorted(found, key=lambda fault: (fault.line, fault.kind, fault.after))


def _variants(node: ast.expr | ast.stmt) -> Iterator[tuple[str, ast.expr | ast.stmt, str]]:
    """The faults of one node: a kind, what is replaced, and the new text."""
    match node:
        case ast.Compare(ops=ops):
            for at, op in enumerate(ops):
                yield "comparison turned", node, _with(node, ops=[*ops[:at], _TURNED[type(op)](), *ops[at + 1 :]])
                if type(op) in _EDGE:
                    yield "edge moved", node, _with(node, ops=[*ops[:at], _EDGE[type(op)](), *ops[at + 1 :]])
        case ast.BinOp(op=op) if type(op) in _ARITHMETIC and not _is_text(node):
            yield "arithmetic", node, _with(node, op=_ARITHMETIC[type(op)]())
        case ast.AugAssign(op=op) if type(op) in _ARITHMETIC and not _is_text(node.value):
            changed = copy.copy(node)
            changed.op = _ARITHMETIC[type(op)]()
            yield "arithmetic", node, ast.unparse(changed)
        case ast.BoolOp(op=op):
            yield "and/or", node, _with(node, op=ast.Or() if isinstance(op, ast.And) else ast.And())
        case ast.UnaryOp(op=ast.Not()):
            yield "not removed", node, f"({ast.unparse(node.operand)})"
        case ast.UnaryOp(op=ast.USub()):
            yield "sign removed", node, f"({ast.unparse(node.operand)})"
        case ast.Constant(value=bool(truth)):
            yield "constant", node, str(not truth)
        case ast.Constant(value=int(number) | float(number)):
            yield "constant", node, repr(number + 1)
            yield "constant", node, f"({number - 1!r})"
        case ast.Call(func=ast.Name(id=name) as called) if name in _SWAPPED:
            yield f"{_SWAPPED[name]} for {name}", called, _SWAPPED[name]
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            if not isinstance(test, ast.Compare | ast.UnaryOp | ast.BoolOp | ast.Constant | ast.NamedExpr):
                yield "condition negated", test, f"(not {ast.unparse(test)})"
        case ast.Return(value=ast.expr() as value):
            if not (isinstance(value, ast.Constant) and value.value is None):
                yield "return changed", node, "return None"
        case ast.Slice():
            if node.lower is not None:
                yield "slice bound", node, ast.unparse(ast.Slice(_plus_one(node.lower), node.upper, node.step))
            if node.upper is not None:
                yield "slice bound", node, ast.unparse(ast.Slice(node.lower, _plus_one(node.upper), node.step))
        case ast.Break():
            yield "continue for break", node, "continue"
        case ast.Continue():
            yield "break for continue", node, "break"


def _with(node: ast.expr, **fields: object) -> str:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return f"({ast.unparse(changed)})"


def _plus_one(bound: ast.expr) -> ast.expr:
    return ast.BinOp(bound, ast.Add(), ast.Constant(1))


def _is_text(node: ast.AST) -> bool:
    return any(
        isinstance(part, ast.JoinedStr) or (isinstance(part, ast.Constant) and isinstance(part.value, str))
        for part in ast.walk(node)
    )


def _expressions(tree: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """Every node a fault may be put into, without those that no test can notice."""
    for node in ast.iter_child_nodes(tree):
        match node:
            case ast.Assert() | ast.Import() | ast.ImportFrom() | ast.Raise() | ast.JoinedStr():
                continue  # an assertion guards what tests show; a message's wording is no behaviour
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                continue
            case ast.FunctionDef(name="__repr__" | "__str__"):
                continue
            case ast.Assign(targets=[ast.Name(id="__all__" | "__slots__")]):
                continue
            case ast.AnnAssign():
                if node.value is not None:
                    yield from _inside(node.value)
                continue
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                for default in (*node.args.defaults, *node.args.kw_defaults):
                    if default is not None:
                        yield from _inside(default)
                for statement in node.body:
                    yield from _inside(statement)
                continue
            case ast.ClassDef():
                for statement in node.body:
                    yield from _inside(statement)
                continue
        if isinstance(node, (ast.expr, ast.stmt)):
            yield node
        yield from _expressions(node)


def _inside(node: ast.expr | ast.stmt) -> Iterator[ast.expr | ast.stmt]:
    yield from _expressions(ast.Module([node], []))  # type: ignore[list-item]
