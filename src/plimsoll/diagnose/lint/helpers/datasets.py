"""Detection of the data sets in a file, and of lists of Python objects in which they hold their samples."""

from __future__ import annotations

import ast
import re
from functools import lru_cache

from plimsoll.diagnose.lint.helpers.source import Function, Source, last_name, path_of

_OBJECTS = {"readlines", "splitlines", "split", "tolist", "to_dict", "load_jsonl", "read_jsonl"}
_TENSORS = re.compile(r"^(?:torch|numpy|np)\.")


@lru_cache(maxsize=4)
def dataset_classes(source: Source) -> list[ast.ClassDef]:
    """Return the classes of a file that are data sets, directly or through a base class in the same file."""
    classes = {one.name: one for one in source.every(ast.ClassDef)}

    def is_dataset(one: ast.ClassDef, depth: int = 5) -> bool:
        bases = [last_name(base.value if isinstance(base, ast.Subscript) else base) for base in one.bases]
        if any(re.search(r"Dataset$|IterDataPipe$|MapDataPipe$", base) for base in bases):
            return True
        return depth > 0 and any(base in classes and is_dataset(classes[base], depth - 1) for base in bases)

    return [one for one in classes.values() if is_dataset(one)]


@lru_cache(maxsize=16)
def object_list(source: Source, owner: ast.ClassDef) -> str:
    """Return the attribute in which a data set holds a list of Python objects; "" if no such attribute is found."""
    methods = [one for one in owner.body if isinstance(one, Function)]
    paths = (path for method in methods for path in (*_assigned(source, method), *_appended(source, method)))
    return next((path for path in paths if not _becomes_tensor(source, methods, path)), "")


def _assigned(source: Source, method: Function) -> list[str]:
    """Return the attributes to which a method assigns lists of objects."""
    return [
        path
        for node in source.own(method, ast.Assign, ast.AnnAssign)
        if node.value is not None and _is_objects(source, node.value)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if (path := path_of(target)).startswith("self.")
    ]


def _appended(source: Source, method: Function) -> list[str]:
    """Return the attributes to which a method appends objects in a loop."""
    return [
        path
        for call in source.own(method, ast.Call)
        if isinstance(call.func, ast.Attribute) and call.func.attr == "append" and call.args and source.loops(call)
        if (path := path_of(call.func.value)).startswith("self.") and path.count(".") == 1
        if _is_object(source, call.args[0])
    ]


def _becomes_tensor(source: Source, methods: list[Function], path: str) -> bool:
    """Return whether a class later replaces a list by a tensor or an array: ``self.x = torch.tensor(self.x)``."""
    for method in methods:
        for given in source.assignments(method, path):
            value = given.value
            if isinstance(value, ast.Call) and (
                _TENSORS.match(source.dotted(value.func))
                or last_name(value.func) in ("tensor", "LongTensor", "stack", "cat", "array", "to")
            ):
                return True
    return False


def _is_objects(source: Source, node: ast.expr, depth: int = 3) -> bool:
    """Return whether an expression is a list whose items are objects but not tensors."""
    if isinstance(node, ast.ListComp):
        return _is_object(source, node.elt)
    if isinstance(node, ast.Call):
        return _makes_objects(source, node, depth)
    if not isinstance(node, ast.Name) or not depth:
        return False
    scope = source.scope(node)
    given = [one for one in source.assignments(scope, node.id) if one.place is None]
    above = [one.value for one in given if one.statement.lineno < node.lineno]
    if above and isinstance(above[-1], ast.List) and not above[-1].elts:
        return _is_filled(source, scope, node.id)
    return bool(above) and _is_objects(source, above[-1], depth - 1)


def _makes_objects(source: Source, call: ast.Call, depth: int) -> bool:
    """Return whether a call returns a list of objects: from a file, from JSON, or from a function in the file."""
    if isinstance(call.func, ast.Attribute) and call.func.attr in _OBJECTS:
        return True
    if source.dotted(call.func) in ("json.load", "json.loads", "pickle.load", "list", "sorted") and call.args:
        return True
    function = source.called(call)
    if function is None or not depth:
        return False
    given = [one.value for one in source.own(function, ast.Return) if one.value is not None]
    return bool(given) and all(_is_objects(source, one, depth - 1) for one in given)


def _is_filled(source: Source, scope: ast.AST, name: str) -> bool:
    calls = [call for call in source.own(scope, ast.Call) if last_name(call.func) == "append" and call.args]
    return any(
        isinstance(call.func, ast.Attribute)
        and path_of(call.func.value) == name
        and source.loops(call)
        and _is_object(source, call.args[0])
        for call in calls
    )


def _is_object(source: Source, node: ast.expr) -> bool:
    """Return whether an expression certainly is a Python object and not a tensor: a text, a dict, a tuple, a list."""
    if isinstance(node, ast.Dict | ast.List | ast.Tuple | ast.JoinedStr | ast.ListComp | ast.DictComp):
        return True
    if isinstance(node, ast.Call):
        name = last_name(node.func)
        if _TENSORS.match(source.dotted(node.func)) or name in ("tensor", "LongTensor", "FloatTensor"):
            return False
        return isinstance(node.func, ast.Attribute) and name in (
            "strip",
            "rstrip",
            "lower",
            "split",
            "join",
            "loads",
            "encode",
            "tokenize",
            "replace",
            "tolist",
        )
    return isinstance(node, ast.Name) and node.id in (
        "line",
        "text",
        "sentence",
        "row",
        "record",
        "example",
        "obj",
        "sample",
        "item",
        "doc",
    )
