"""A parsed Python file for lint rules: its syntax tree, imported names, and calls between its functions.

Names are resolved within the file only. A method is found by ``self.method`` in its own class, and a function by its
name. Not handled: imports of other files, inheritance between files, and names that are bound at run time.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeVar, overload

Function = ast.FunctionDef | ast.AsyncFunctionDef
Scope = ast.Module | Function
Loop = ast.For | ast.AsyncFor | ast.While
Severity = Literal["error", "warning", "note"]

Node = TypeVar("Node", bound=ast.AST)
_NESTED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


class Edit(NamedTuple):
    """A replacement ``text`` for the characters of the file from ``start`` up to ``end``."""

    start: int
    end: int
    text: str


class Given(NamedTuple):
    """A value that a statement assigns to a name.

    If the value is unpacked to several names, ``place`` is the index of this name among them, otherwise ``None``.
    """

    statement: ast.Assign | ast.AnnAssign | ast.AugAssign
    value: ast.expr
    place: int | None


@dataclass(frozen=True)
class Hit:
    """One mistake that a rule has found.

    Attributes:
        node: the code with the mistake.
        message: the effect of the mistake.
        remedy: how to fix it.
        severity: how serious it is.
        edits: changes to the text that fix it; empty if no safe fix is known.
    """

    node: ast.expr | ast.stmt | ast.keyword | ast.alias
    message: str
    remedy: str
    severity: Severity = "warning"
    edits: tuple[Edit, ...] = ()


@dataclass(frozen=True, eq=False)
class Source:
    """The text and syntax tree of a valid Python file, with queries for rules."""

    text: str
    tree: ast.Module = field(repr=False)

    @cached_property
    def _by_type(self) -> dict[type[ast.AST], list[ast.AST]]:
        found: dict[type[ast.AST], list[ast.AST]] = {}
        for node in self._parents:
            found.setdefault(type(node), []).append(node)
        return found

    @cached_property
    def _parents(self) -> dict[ast.AST, ast.AST]:
        parents: dict[ast.AST, ast.AST] = {}
        todo: list[ast.AST] = [self.tree]
        while todo:
            node = todo.pop()
            children = list(ast.iter_child_nodes(node))
            for child in children:
                if isinstance(child, ast.expr_context | ast.operator | ast.cmpop | ast.boolop | ast.unaryop):
                    continue  # these are shared between nodes and have no position
                parents[child] = node
            todo.extend(reversed(children))
        return parents

    @overload
    def every(self, kind: type[Node], /) -> list[Node]: ...
    @overload
    def every(self, *kinds: type[ast.AST]) -> list[Any]: ...
    def every(self, *kinds: type[ast.AST]) -> list[Any]:
        """Return all nodes of the given types: type by type, each in the order of the text."""
        return [node for kind in kinds for node in self._by_type.get(kind, [])]

    def parent(self, node: ast.AST) -> ast.AST | None:
        """Return the node that directly contains a node; ``None`` for the module."""
        return self._parents.get(node)

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes that contain a node, from its parent to the module."""
        above = self._parents.get(node)
        while above is not None:
            yield above
            above = self._parents.get(above)

    def is_in(self, node: ast.AST, outer: ast.AST) -> bool:
        """Return whether a node is within another node, or is that node."""
        return node is outer or any(above is outer for above in self.ancestors(node))

    def is_in_body(self, node: ast.AST, statements: list[ast.stmt]) -> bool:
        """Return whether a node is in one of the given statements."""
        return any(above in statements for above in (node, *self.ancestors(node)) if isinstance(above, ast.stmt))

    def scope(self, node: ast.AST) -> Scope:
        """Return the innermost function whose body contains a node, or else the module."""
        child = node
        for above in self.ancestors(node):
            if isinstance(above, Function) and child in above.body:
                return above
            child = above
        return self.tree

    def class_of(self, node: ast.AST) -> ast.ClassDef | None:
        """Return the innermost class that contains a node; ``None`` outside of classes."""
        return next((above for above in self.ancestors(node) if isinstance(above, ast.ClassDef)), None)

    def statement(self, node: ast.AST) -> ast.stmt:
        """Return the statement that contains an expression. A statement is returned itself."""
        return next(above for above in (node, *self.ancestors(node)) if isinstance(above, ast.stmt))

    def loops(self, node: ast.AST) -> list[Loop]:
        """Return the loops of the same function whose bodies contain a node, innermost first."""
        found: list[Loop] = []
        child = node
        for above in self.ancestors(node):
            if isinstance(above, _NESTED):
                break
            if isinstance(above, Loop) and child in above.body:
                found.append(above)
            child = above
        return found

    @overload
    def own(self, scope: ast.AST, kind: type[Node], /) -> list[Node]: ...
    @overload
    def own(self, scope: ast.AST, *kinds: type[ast.AST]) -> list[Any]: ...
    def own(self, scope: ast.AST, *kinds: type[ast.AST]) -> list[Any]:
        """Return the nodes of the given types inside ``scope``, but not in its nested functions or classes."""
        found: list[ast.AST] = []
        todo = list(ast.iter_child_nodes(scope))[::-1]
        while todo:
            node = todo.pop()
            if isinstance(node, kinds):
                found.append(node)
            if not isinstance(node, _NESTED):
                todo.extend(reversed(list(ast.iter_child_nodes(node))))
        return found

    @cached_property
    def imports(self) -> dict[str, str]:
        """The full name of each imported name: ``{"nn": "torch.nn", "autocast": "torch.cuda.amp.autocast"}``."""
        found: dict[str, str] = {}
        for node in self.every(ast.Import):
            for alias in node.names:
                found[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        for statement in self.every(ast.ImportFrom):
            for alias in statement.names:
                if statement.module and not statement.level:
                    found[alias.asname or alias.name] = f"{statement.module}.{alias.name}"
        return found

    def dotted(self, node: ast.AST | None) -> str:
        """Return the full name of code such as ``nn.Linear``: ``torch.nn.Linear``; "" if the code is not a name."""
        if isinstance(node, ast.Name):
            return self.imports.get(node.id, node.id)
        if isinstance(node, ast.Attribute) and (base := self.dotted(node.value)):
            return f"{base}.{node.attr}"
        return ""

    @cached_property
    def calls(self) -> list[ast.Call]:
        """All calls in the file."""
        return self.every(ast.Call)

    @cached_property
    def functions(self) -> dict[str, list[Function]]:
        """All functions and methods by their names."""
        found: dict[str, list[Function]] = {}
        for function in self.every(ast.FunctionDef, ast.AsyncFunctionDef):
            found.setdefault(function.name, []).append(function)
        return found

    def called(self, call: ast.Call) -> Function | None:
        """Return the function or method of this file that a call runs; ``None`` if it cannot be determined."""
        name, owner = last_name(call.func), None
        if isinstance(call.func, ast.Attribute):
            if not (isinstance(call.func.value, ast.Name) and call.func.value.id == "self"):
                return None
            owner = self.class_of(call)
        candidates = [one for one in self.functions.get(name, []) if self.class_of(one) is owner or owner is None]
        if owner is None:
            candidates = [one for one in candidates if not isinstance(self.parent(one), ast.ClassDef)]
        return candidates[0] if len(candidates) == 1 else None

    @cached_property
    def _callers(self) -> dict[Function, list[ast.Call]]:
        found: dict[Function, list[ast.Call]] = {}
        for call in self.calls:
            if (function := self.called(call)) is not None:
                found.setdefault(function, []).append(call)
        return found

    def callers(self, scope: Scope) -> list[ast.Call]:
        """Return the calls in this file of the function ``scope``; empty if ``scope`` is the module."""
        return [] if isinstance(scope, ast.Module) else self._callers.get(scope, [])

    def assignments(self, scope: ast.AST, name: str) -> list[Given]:
        """Return the values assigned to a name or to ``self.x`` in a function, in the order of the text."""
        if scope not in self._given:
            found: dict[str, list[Given]] = {}
            for node in self.own(scope, ast.Assign, ast.AnnAssign, ast.AugAssign):
                if node.value is None:
                    continue
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    is_apart = isinstance(target, ast.Tuple | ast.List)
                    elements = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
                    for place, element in enumerate(elements):
                        for bound in names_bound(element):
                            found.setdefault(bound, []).append(Given(node, node.value, place if is_apart else None))
            self._given[scope] = found
        return self._given[scope].get(name, [])

    @cached_property
    def _given(self) -> dict[ast.AST, dict[str, list[Given]]]:
        return {}

    @cached_property
    def _line_starts(self) -> list[int]:
        starts = [0]
        for line in self.text.split("\n"):
            starts.append(starts[-1] + len(line) + 1)
        return starts

    def offset(self, line: int, column_bytes: int) -> int:
        """Return the character offset in the text of a position that `ast` reports.

        Args:
            line: the line number.
            column_bytes: the column, in bytes of UTF-8.
        """
        start = self._line_starts[line - 1]
        row = self.text[start : self._line_starts[line] - 1]
        return start + len(row.encode()[:column_bytes].decode())

    def span(self, node: ast.expr | ast.stmt | ast.keyword | ast.alias) -> tuple[int, int]:
        """Return the character offsets at which a node begins and ends."""
        start = self.offset(node.lineno, node.col_offset)
        return start, self.offset(node.end_lineno or node.lineno, node.end_col_offset or 0)

    def written(self, node: ast.expr | ast.stmt) -> str:
        """Return the source text of a node."""
        start, end = self.span(node)
        return self.text[start:end]


def last_name(node: ast.AST | None) -> str:
    """Return the last part of a dotted name, ``c`` for ``a.b.c``; "" if the code does not end in a name."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def path_of(node: ast.AST | None) -> str:
    """Return a name or dotted name as written, such as ``a.b.c``; "" if the code is not such a name."""
    if isinstance(node, ast.Attribute) and (base := path_of(node.value)):
        return f"{base}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def names_bound(target: ast.AST) -> list[str]:
    """Return the names that an assignment to a target binds. They include paths such as ``self.x``."""
    if isinstance(target, ast.Tuple | ast.List):
        return [name for element in target.elts for name in names_bound(element)]
    if isinstance(target, ast.Starred):
        return names_bound(target.value)
    return [path] if (path := path_of(target)) else []


def names_in(node: ast.AST) -> set[str]:
    """Return every variable name in a node. Names of attributes are not included."""
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    """Return the value of a call's keyword argument; ``None`` if the argument is not given."""
    return next((one.value for one in call.keywords if one.arg == name), None)


def is_constant(node: ast.AST | None, value: object) -> bool:
    """Return whether a node is the given constant, such as ``True`` or ``"max_length"``."""
    return isinstance(node, ast.Constant) and type(node.value) is type(value) and node.value == value


def parse(text: str) -> Source:
    """Parse the text of a file.

    Raises:
        SyntaxError: if the text is not valid in this version of Python.
        ValueError: if the text contains a NUL.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # invalid escapes in the file are not reported here
        return Source(text, ast.parse(text))
