"""The line of user code that stores a value in an attribute or variable, and a replacement that drops the graph.

The source of the methods of the object's class (or of the loss function) is parsed with `ast`. The search covers
assignments to the name or to one of its items, also as one of several targets or with ``+=``. It also covers calls of
its methods such as ``.append(...)``. Lines that already detach the value or store a constant are skipped. ``__init__``
is searched last.

If the object's own code does not store the value, the code that calls the step is searched (`callers`). An example is a
loop that appends to a list of the model. Not handled: code without a source file, ``setattr`` and other functions.
"""

from __future__ import annotations

import ast
import inspect
import os
import sys
import textwrap
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from torch import nn

from plimsoll.step.undo.find_state import FOLDERS_OF_LIBRARIES

_ADDS = {"append", "appendleft", "extend", "insert", "add", "update", "setdefault"}
_STATEMENTS = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr, ast.Return)
_CONTAINERS = {"list", "dict", "tuple", "deque", "defaultdict", "OrderedDict"}
_METHODS_WITHOUT_GRAPH, _FUNCTIONS_WITHOUT_GRAPH = {"detach", "item", "tolist", "numpy"}, {"float", "int"}


class Assignment(NamedTuple):
    """A line that stores a value: its file and line number, its code, and a replacement that drops the graph."""

    place: str
    code: str
    remedy: str


def assignment_of(
    owners: Iterable[Any], variable: str, value: Any = None, also_without_graph: bool = False
) -> Assignment | None:
    """Find the line of user code that stores a value in ``variable``; ``None`` if no line is found.

    Args:
        owners: the object with the attribute, or the function or code with the variable; then the objects that contain
            that object.
        variable: the name of the attribute or variable; with a leading dot, only an attribute matches.
        value: the current value; if it is a tuple or list of states, the replacement detaches each item.
        also_without_graph: whether lines that already drop the graph match, too.
    """
    for owner in owners:
        is_variable = isinstance(owner, FunctionType | CodeType) and not variable.startswith(".")
        wanted = _Wanted(variable.removeprefix("."), is_variable, also_without_graph)
        for function in _functions_of(owner):
            for node, line in _statements(function):
                if (remedy := _remedy(node, wanted, value)) is not None:
                    return Assignment(f"{_shown(inspect.getsourcefile(function))}:{line}", ast.unparse(node), remedy)
    return None


def callers() -> list[CodeType]:
    """Return the user's code objects on the call stack, innermost first."""
    found, frame = [], sys._getframe(1).f_back
    while frame is not None:
        if not frame.f_code.co_filename.startswith(FOLDERS_OF_LIBRARIES):
            found.append(frame.f_code)
        frame = frame.f_back
    return found


def is_read(owners: Iterable[Any], variable: str) -> bool:
    """Return whether an object's code reads an attribute. If so, it may carry state from pass to pass."""
    for owner in owners:
        wanted = _Wanted(variable, isinstance(owner, FunctionType | CodeType))
        for function in _functions_of(owner):
            for node, _ in _statements(function):
                loads = [part for part in ast.walk(node) if isinstance(getattr(part, "ctx", None), ast.Load)]
                if sum(map(wanted.is_at, loads)) > (_added(node, wanted) is not None):
                    return True
    return False


def _functions_of(owner: Any) -> list[FunctionType | CodeType]:
    if isinstance(owner, CodeType):
        return [owner]
    if isinstance(owner, FunctionType):
        return [inspect.unwrap(owner)]
    kind = owner if isinstance(owner, type) else type(owner)
    classes = [one for one in kind.__mro__ if one not in {nn.Module, object}]
    found = [value for one in classes for value in vars(one).values()]
    functions = [getattr(value, "__func__", value) for value in found]  # unwraps class and static methods
    own = [inspect.unwrap(function) for function in functions if isinstance(function, FunctionType)]
    return [*sorted(own, key=lambda function: function.__name__ == "__init__")]


def _statements(function: FunctionType | CodeType) -> Iterator[tuple[ast.stmt, int]]:
    """Yield the statements of a function, with their line numbers in the file.

    For a code object, statements in loops come first.
    """
    try:
        is_file = isinstance(function, CodeType) and function.co_name == "<module>"  # `getsourcelines` cuts it
        lines, first = (inspect.findsource(function)[0], 0) if is_file else inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):  # no source, or a lambda, which is not a statement
        return
    found = [node for node in ast.walk(tree) if isinstance(node, _STATEMENTS)]
    if isinstance(function, CodeType):
        loops = [node for node in ast.walk(tree) if isinstance(node, ast.For | ast.While)]
        repeated = {id(node) for loop in loops for node in ast.walk(loop)}
        found.sort(key=lambda node: id(node) not in repeated)
    for node in found:
        yield node, max(first, 1) + node.lineno - 1  # the first line of a whole file is 0


class _Wanted(NamedTuple):
    """The name to search for. It matches attributes, and with ``is_variable`` also variables."""

    name: str
    is_variable: bool
    also_without_graph: bool = False

    def is_at(self, node: ast.AST) -> bool:
        """Return whether an AST node is the wanted attribute or variable itself."""
        is_variable = self.is_variable and isinstance(node, ast.Name) and node.id == self.name
        return is_variable or (isinstance(node, ast.Attribute) and node.attr == self.name)

    def is_stored_in(self, target: ast.AST) -> bool:
        """Return whether an assignment to this target changes the wanted attribute or variable, or one of its items."""
        return self.is_at(target.value if isinstance(target, ast.Subscript) else target)


def _added(node: ast.AST, wanted: _Wanted) -> ast.Call | None:
    """Return the call in a statement that adds an item to the wanted container, such as ``.append``; else ``None``."""
    call = node.value if isinstance(node, ast.Expr) else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or call.func.attr not in _ADDS:
        return None
    return call if call.args and wanted.is_stored_in(call.func.value) else None


def _remedy(node: ast.stmt, wanted: _Wanted, value: Any) -> str | None:
    """Return a replacement for a statement that stores the wanted value with its graph; otherwise ``None``."""
    if (call := _added(node, wanted)) is not None:
        return None if _is_harmless(call.args[-1], wanted) else _remedy_of_call(call)
    if not isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) or node.value is None:
        return None
    if _is_harmless(node.value, wanted):
        return None
    if isinstance(node, ast.AugAssign):
        is_own = wanted.is_stored_in(node.target)
        return f"{ast.unparse(node.target)} += {_detached(ast.unparse(node.value))}" if is_own else None
    return _remedy_of_assignment(node, wanted, value)


def _remedy_of_call(call: ast.Call) -> str:
    *others, last = map(ast.unparse, call.args)
    is_many = isinstance(call.func, ast.Attribute) and call.func.attr in {"extend", "update"}
    kept = f"[one.detach() for one in {last}]" if is_many else _detached(last)
    return f"{ast.unparse(call.func)}({', '.join([*others, kept])})"


def _remedy_of_assignment(node: ast.Assign | ast.AnnAssign, wanted: _Wanted, value: Any) -> str | None:
    assert node.value is not None
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        if wanted.is_stored_in(target):
            return f"{ast.unparse(target)} = {_all_detached(ast.unparse(node.value), value)}"
        parts = [one for one in ast.walk(target) if one is not target]
        own = [ast.unparse(one) for one in parts if isinstance(target, ast.Tuple) and wanted.is_stored_in(one)]
        if own:
            return f"{ast.unparse(node)}; {own[0]} = {_all_detached(own[0], value)}"
    return None


def _is_harmless(value: ast.expr, wanted: _Wanted) -> bool:
    """Return whether storing this value retains no graph: it is a constant, an empty container or already detached."""
    items = getattr(value, "elts", getattr(value, "keys", getattr(value, "args", [None])))
    is_container = isinstance(value, ast.List | ast.Tuple | ast.Dict) or _name_of(value) in _CONTAINERS
    called = [part.func for part in ast.walk(value) if isinstance(part, ast.Call)]
    leaves_out = not wanted.also_without_graph and any(
        getattr(one, "attr", None) in _METHODS_WITHOUT_GRAPH or getattr(one, "id", None) in _FUNCTIONS_WITHOUT_GRAPH
        for one in called
    )
    return isinstance(value, ast.Constant) or (is_container and not items) or leaves_out


def _name_of(call: ast.expr) -> str | None:
    """Return the name of the called function, without its module."""
    function = call.func if isinstance(call, ast.Call) else None
    return getattr(function, "id", getattr(function, "attr", None))


def _detached(code: str) -> str:
    """Return an expression with ``.detach()``, in parentheses if needed."""
    is_simple = isinstance(ast.parse(code, mode="eval").body, ast.Name | ast.Attribute | ast.Call | ast.Subscript)
    return f"{code}.detach()" if is_simple else f"({code}).detach()"


def _all_detached(code: str, value: Any) -> str:
    if isinstance(value, tuple):
        return f"tuple(state.detach() for state in {code})"
    return f"[state.detach() for state in {code}]" if isinstance(value, list) else _detached(code)


def _shown(file: str | None) -> str:
    """Return the path of a source file, relative to the current folder if it is below it."""
    if file is None:
        return "?"
    here = os.path.relpath(file)
    return file if here.startswith(os.pardir) else here
