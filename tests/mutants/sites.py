"""Where a source can be made wrong in one place, and how: a pure function of its text.

A mutant is one small replacement of source text. Left alone: annotations, docstrings,
the words of exceptions and of asserts (a test that quotes them proves no decision),
names of literals in types, and sizes of caches.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final, NamedTuple

_COMPARE: Final[dict[type[ast.cmpop], tuple[str, ...]]] = {
    ast.Lt: ("<=", ">"),
    ast.LtE: ("<", ">"),
    ast.Gt: (">=", "<"),
    ast.GtE: (">", "<"),
    ast.Eq: ("!=",),
    ast.NotEq: ("==",),
    ast.Is: ("is not",),
    ast.IsNot: ("is",),
    ast.In: ("not in",),
    ast.NotIn: ("in",),
}
_BINARY: Final[dict[type[ast.operator], str]] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "/",
    ast.Div: "*",
    ast.FloorDiv: "*",
    ast.Pow: "*",
    ast.Mod: "*",
}
_CACHES: Final = frozenset({"lru_cache", "cached_property"})


class Mutant(NamedTuple):
    """One wrong version: what stands at `line`, and the whole source with it."""

    line: int
    before: str
    after: str
    source: str


def mutants(source: str) -> list[Mutant]:
    """Return all mutants of a module that still compile, in the order of the text."""
    found: list[Mutant] = []
    starts = _line_starts(source)
    raw = source.encode()
    for node, after in _sites(ast.parse(source)):
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        before = raw[begin:end].decode()
        if before == after:
            continue
        mutated = (raw[:begin] + after.encode() + raw[end:]).decode()
        try:
            if ast.dump(ast.parse(mutated)) == ast.dump(ast.parse(source)):
                continue
        except SyntaxError:
            continue
        found.append(Mutant(node.lineno, before, after, mutated))
    return sorted(set(found))


def _line_starts(source: str) -> list[int]:
    starts, at = [], 0
    for line in source.encode().split(b"\n"):
        starts.append(at)
        at += len(line) + 1
    return starts


Place = ast.expr | ast.stmt


def _sites(node: ast.AST) -> Iterator[tuple[Place, str]]:
    """Yield (what to replace, by what) in a tree; skips what the module text names."""
    if isinstance(node, ast.Raise | ast.Assert | ast.Import | ast.ImportFrom):
        if isinstance(node, ast.Raise):
            yield node, "pass"
        elif isinstance(node, ast.Assert):
            yield from _sites(node.test)
        return
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return  # a docstring, or the ... of a protocol
    if isinstance(node, ast.stmt):
        yield from _statement(node)
    elif isinstance(node, ast.expr):
        yield from _expression(node)
    for child in _children(node):
        yield from _sites(child)


def _children(node: ast.AST) -> Iterator[ast.AST]:
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "bases"):
            continue
        if name == "slice" and isinstance(node, ast.Subscript) and _is_type(node):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST):
                continue
            if isinstance(node, ast.JoinedStr) and isinstance(child, ast.Constant):
                continue  # `_expression` takes an f-string as a whole
            if isinstance(node, ast.FormattedValue) and name == "format_spec":
                continue
            yield child


def _is_type(node: ast.Subscript) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("Literal", "Final")


def _statement(node: ast.stmt) -> Iterator[tuple[Place, str]]:
    match node:
        case ast.Return(value=value) if value is not None:
            if not (isinstance(value, ast.Constant) and value.value is None):
                yield node, "return None"
        case ast.If(test=test) | ast.While(test=test):
            yield test, f"(not ({ast.unparse(test)}))"
        case ast.Expr(value=ast.Call()) | ast.Delete() | ast.AugAssign():
            yield node, "pass"
        case ast.Assign(targets=[ast.Subscript() | ast.Attribute()]):
            yield node, "pass"
        case ast.Break():
            yield node, "continue"
        case ast.Continue():
            yield node, "break"


def _expression(node: ast.expr) -> Iterator[tuple[Place, str]]:
    match node:
        case ast.Constant(value=bool(value)):
            yield node, str(not value)
        case ast.Constant(value=int(value)):
            yield node, str(value + 1)
        case ast.Constant(value=float(value)):
            yield node, repr(value + 1.0)
        case ast.Constant(value=str(value)):
            yield node, repr(value + "!")
        case ast.BoolOp(op=op, values=values):
            word = " or " if isinstance(op, ast.And) else " and "
            yield node, "(" + word.join(f"({ast.unparse(v)})" for v in values) + ")"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield node, f"({ast.unparse(operand)})"
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            sign = _BINARY[type(op)]
            yield node, f"(({ast.unparse(left)}) {sign} ({ast.unparse(right)}))"
        case ast.Compare(left=left, ops=ops, comparators=rest):
            for index, op in enumerate(ops):
                for sign in _COMPARE[type(op)]:
                    yield node, _compared(left, ops, rest, index, sign)
        case ast.IfExp(test=test, body=body, orelse=orelse):
            yield (
                node,
                (
                    f"({ast.unparse(body)} if not ({ast.unparse(test)})"
                    f" else {ast.unparse(orelse)})"
                ),
            )
        case ast.comprehension():
            return


def _compared(
    left: ast.expr, ops: list[ast.cmpop], rest: list[ast.expr], at: int, sign: str
) -> str:
    text = ast.unparse(left)
    for index, (op, value) in enumerate(zip(ops, rest, strict=True)):
        word = sign if index == at else _word(op)
        text += f" {word} {ast.unparse(value)}"
    return f"({text})"


def _word(op: ast.cmpop) -> str:
    compared = ast.unparse(ast.Compare(ast.Name("a"), [op], [ast.Name("b")]))
    return compared.removeprefix("a ").removesuffix(" b")
