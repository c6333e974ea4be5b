"""A corpus that is read into memory as a whole, often by code that is named lazy or streaming."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from plimsoll.diagnose.lint.helpers.datasets import dataset_classes
from plimsoll.diagnose.lint.helpers.source import (
    Edit,
    Function,
    Hit,
    Source,
    is_constant,
    keyword,
    last_name,
    names_in,
    path_of,
)

_CORPUS = re.compile(
    r"corpus|corpora|train|dataset|text|sentence|wiki|document|docs\b|\bdoc_|articles|book|raw_?data|data_?(?:path|file)|"
    r"(?:input|source|src|tgt|target)_?(?:file|path)|\.txt|\.jsonl|\.tsv|\.csv",
    re.IGNORECASE,
)
_TEXT_FILE = re.compile(r"\.txt\b|corpus|input_file|text_file", re.IGNORECASE)
_MESSAGE = "the whole file is read into memory, as Python objects several times its size"
_REMEDY = "read the file line by line, or keep offsets (`plimsoll data index`)"
_READER = re.compile(r"data|corpus|load|read|example|pair|parse", re.IGNORECASE)
_SMALL = re.compile(
    r"vocab|label|config|setup|require|readme|version|license|stop_?words?|merges|tokens?_file|(?:^|[^a-z])class(?:es)?(?:[^a-z]|$)|index|"
    r"manifest|\.py\b|\.json\b|\.ya?ml|\.md\b|proc|cpuinfo|meminfo|log_?file|template|prompt|\.toml|\.cfg|\.ini|\.html|"
    r"filelist|file_list|subprocess|stdin|special",
    re.IGNORECASE,
)


def hits(source: Source) -> Iterator[Hit]:
    """Find reads of whole files in data sets, and of files that are named like a corpus."""
    datasets = set(dataset_classes(source))
    for call in source.calls:
        is_kept = _is_kept_by_line(source, call) and not _SMALL.search(source.written(call))
        if is_kept and any(above in datasets for above in source.ancestors(call)):
            yield Hit(call, _MESSAGE, _REMEDY)
    for call in source.calls:
        in_dataset = any(above in datasets for above in source.ancestors(call))
        if not _reads_whole(source, call, in_dataset):
            continue
        about = _about(source, call)
        is_reader = bool(_READER.search(getattr(source.scope(call), "name", "")))
        is_corpus = _handles_text(source) and (is_reader or bool(_CORPUS.search(about)))
        if not _SMALL.search(about) and (in_dataset or is_corpus):
            yield Hit(
                call,
                _MESSAGE,
                _REMEDY,
                edits=_edits(source, call),
            )


def _reads_whole(source: Source, call: ast.Call, in_dataset: bool) -> bool:
    """Return whether a call reads a whole file.

    Every call that reads all lines of a file counts. A call that reads a file as one text counts in two cases: in a
    data set, or if a name or path near the call hints at a text file.
    """
    if isinstance(call.func, ast.Name):
        return call.func.id == "list" and len(call.args) == 1 and _is_file(source, call.args[0])
    if not isinstance(call.func, ast.Attribute) or last_name(call.func) not in (
        "readlines",
        "split",
        "splitlines",
        "read",
    ):
        return False
    if call.func.attr == "readlines":
        return not call.args
    if call.func.attr == "read":
        parent = source.parent(call)
        is_bound = isinstance(parent, ast.Assign) or (isinstance(parent, ast.Attribute) and parent.attr == "decode")
        return is_bound and not call.args and (in_dataset or bool(_TEXT_FILE.search(_about(source, call))))
    return _is_by_line(call) and _read_of(call) is not None


def _read_of(call: ast.Call) -> ast.Call | None:
    """Return the call ``f.read()`` from a chain of calls such as ``f.read().strip().split("\\n")``."""
    inner = call.func.value if isinstance(call.func, ast.Attribute) else None
    while isinstance(inner, ast.Call) and last_name(inner.func) in ("strip", "rstrip", "lower", "decode"):
        inner = inner.func.value if isinstance(inner.func, ast.Attribute) else None
    return (
        inner
        if isinstance(inner, ast.Call) and last_name(inner.func) in ("read", "read_text") and not inner.args
        else None
    )


def _is_kept_by_line(source: Source, call: ast.Call) -> bool:
    """Return whether a call opens a file whose lines are all stored in a list.

    An example is the `open(...)` in ``self.rows = [json.loads(line) for line in open(path)]``.
    """
    part = source.parent(call)
    is_gone_over = isinstance(part, ast.comprehension) and part.iter is call and not part.ifs
    if not is_gone_over or last_name(call.func) != "open":
        return False
    statement = source.statement(call)
    is_list = isinstance(source.parent(part), ast.ListComp)  # type: ignore[arg-type]
    return is_list and isinstance(statement, ast.Assign) and path_of(statement.targets[0]).startswith("self.")


def _is_by_line(call: ast.Call) -> bool:
    return (
        last_name(call.func) == "splitlines"
        or not call.args
        or is_constant(call.args[0], "\n")
        or is_constant(call.args[0], "\n\n")
    )


def _is_file(source: Source, node: ast.expr) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "open"
    return isinstance(node, ast.Name) and _opened(source, node, node.id) is not None


def _opened(source: Source, node: ast.AST, name: str) -> ast.Call | None:
    """Return the `open(...)` call that opened the file in a variable; ``None`` if it is not found."""
    for above in source.ancestors(node):
        if isinstance(above, ast.With):
            for item in above.items:
                given = item.context_expr
                if (
                    item.optional_vars is not None
                    and last_name(item.optional_vars) == name
                    and isinstance(given, ast.Call)
                ):
                    return given if last_name(given.func) == "open" else None
    for given_value in source.assignments(source.scope(node), name):
        value = given_value.value
        if isinstance(value, ast.Call) and last_name(value.func) == "open":
            return value
    return None


def _about(source: Source, call: ast.Call) -> str:
    """Return names and paths that hint at the content of a file.

    These are the `open` call, the name of the function around it, and the names to which the content is assigned.
    """
    reader = call.args[0] if isinstance(call.func, ast.Name) else call.func.value  # type: ignore[attr-defined]
    if (read := _read_of(call)) is not None:
        reader = read.func.value  # type: ignore[attr-defined]
    opened = reader if isinstance(reader, ast.Call) else _opened(source, call, last_name(reader))
    parts = [source.written(opened) if opened is not None else last_name(reader)]
    scope = source.scope(call)
    if isinstance(scope, Function):
        parts.append(scope.name)
    statement = source.statement(call)
    if isinstance(statement, ast.Assign):
        parts += [source.written(target) for target in statement.targets]
    if opened is not None:
        for name in names_in(opened):
            parts += [source.written(one.value) for one in source.assignments(scope, name)][:1]
    return " ".join(parts)


def _handles_text(source: Source) -> bool:
    return bool(
        re.search(
            r"^\s*(?:import|from)\s+(?:torch|transformers|tokenizers|datasets|torchtext)\b", source.text, re.MULTILINE
        )
    )


def _edits(source: Source, call: ast.Call) -> tuple[Edit, ...]:
    """Return edits that replace ``file.readlines()`` by ``file``.

    They are only returned if the code only iterates over the lines.
    """
    if last_name(call.func) != "readlines" or call.keywords or keyword(call, "hint"):
        return ()
    parent = source.parent(call)
    is_gone_over = isinstance(parent, ast.For | ast.comprehension) and parent.iter is call
    if not is_gone_over or not isinstance(call.func, ast.Attribute):
        return ()
    holder = next(above for above in source.ancestors(call) if not isinstance(above, ast.comprehension))
    uses = [node for node in ast.walk(holder) if isinstance(node, ast.Name) and node.id == last_name(call.func.value)]
    if isinstance(holder, ast.GeneratorExp) or len(uses) != 1:
        return ()  # the file may be closed when the loop runs, or the loop uses it in another way
    return (Edit(source.span(call.func.value)[1], source.span(call)[1], ""),)
