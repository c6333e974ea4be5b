"""`torch.cuda.amp`, which is deprecated. `torch.amp` does the same, with the device as first argument."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from plimsoll.diagnose.lint.helpers.source import Edit, Hit, Source

_MESSAGE = "torch.cuda.amp is deprecated since torch 2.4, and supports only CUDA"
_REMEDY = 'import autocast and GradScaler from torch.amp and give the device: autocast("cuda"), GradScaler("cuda")'
_CALLED = {"autocast", "GradScaler"}


def hits(source: Source) -> Iterator[Hit]:
    """Find imports and uses of torch.cuda.amp."""
    imports: list[ast.ImportFrom | ast.Import] = source.every(ast.ImportFrom, ast.Import)
    for node in imports:
        if _is_old(node) and not _is_fallback(source, node):
            yield Hit(node, _MESSAGE, _REMEDY, edits=_import_edits(source, node))
    for call in source.calls:
        name = source.dotted(call.func)
        if name.startswith("torch.cuda.amp.") and name.count(".") == 3 and not _is_fallback(source, call):
            yield Hit(call, _MESSAGE, _REMEDY, edits=_call_edits(source, call))
    for function in source.every(ast.FunctionDef):
        for decorator in function.decorator_list:
            if not isinstance(decorator, ast.Call) and source.dotted(decorator).startswith("torch.cuda.amp."):
                yield Hit(decorator, _MESSAGE, _REMEDY)


def _is_old(node: ast.Import | ast.ImportFrom) -> bool:
    if isinstance(node, ast.Import):
        return any(alias.name.startswith("torch.cuda.amp") for alias in node.names)
    is_amp = node.module == "torch.cuda" and any(alias.name == "amp" for alias in node.names)
    return not node.level and (is_amp or (node.module or "").startswith("torch.cuda.amp"))


def _is_fallback(source: Source, node: ast.AST) -> bool:
    """Return whether a node is code for an older torch.

    Such code is in an exception handler, or under a condition that tests a version or calls ``hasattr``.
    """
    for above in source.ancestors(node):
        if isinstance(above, ast.ExceptHandler):
            return True
        if isinstance(above, ast.If) and any(
            isinstance(one, ast.Call) or "version" in ast.dump(one).lower() for one in ast.walk(above.test)
        ):
            return "version" in ast.dump(above.test).lower() or "hasattr" in ast.dump(above.test)
    return False


def _import_edits(source: Source, node: ast.Import | ast.ImportFrom) -> tuple[Edit, ...]:
    """Return edits that change an import to torch.amp, if all uses of the imported names can be changed too."""
    if not isinstance(node, ast.ImportFrom) or node.module != "torch.cuda.amp" or not _imports_can_change(source):
        return ()
    start, end = source.span(node)
    text = source.text[start:end].replace("torch.cuda.amp", "torch.amp", 1)
    return (Edit(start, end, text),)


def _imports_can_change(source: Source) -> bool:
    """Return whether the file imports only autocast and GradScaler from torch.cuda.amp, and only calls them."""
    imports = [node for node in source.every(ast.ImportFrom) if node.module == "torch.cuda.amp"]
    if any(alias.name not in _CALLED for node in imports for alias in node.names):
        return False
    if any(_is_fallback(source, node) for node in imports):
        return False
    uses = [
        node
        for node in source.every(ast.Name)
        if source.imports.get(node.id, "").startswith("torch.cuda.amp.") and isinstance(node.ctx, ast.Load)
    ]
    calls = {id(call.func): call for call in source.calls}
    return all(id(node) in calls and _device_edits(source, calls[id(node)]) for node in uses)


def _call_edits(source: Source, call: ast.Call) -> tuple[Edit, ...]:
    """Return edits that add the device to a call and change the module to torch.amp.

    A call by a bare name, such as ``autocast()``, is edited only if the import of that name is edited too.
    """
    if isinstance(call.func, ast.Name) and not _imports_can_change(source):
        return ()
    return _device_edits(source, call)


def _device_edits(source: Source, call: ast.Call) -> tuple[Edit, ...]:
    name = source.dotted(call.func).rsplit(".", 1)[-1]
    if name not in _CALLED or any(isinstance(one, ast.Starred) for one in call.args):
        return ()
    if name == "autocast" and len(call.args) > 1:
        return ()
    func_start, func_end = source.span(call.func)
    written = source.text[func_start:func_end]
    if "." in written and written != f"torch.cuda.amp.{name}":
        return ()
    edits = [Edit(func_start, func_end, f"torch.amp.{name}")] if "." in written else []
    begin = source.text.index("(", func_end) + 1
    device = '"cuda", ' if call.args or call.keywords else '"cuda"'
    begin = source.span(call.args[0])[0] if call.args else begin
    edits.append(Edit(begin, begin, device + "enabled=" * (name == "autocast" and bool(call.args))))
    return tuple(edits)
