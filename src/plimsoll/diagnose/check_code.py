"""A linter for memory mistakes in Python files.

A comment at the end of a line suppresses rules in that line. ``# plimsoll: ignore[rule, rule]`` suppresses the named
rules, and ``# plimsoll: ignore`` suppresses all rules. Files are decoded with the encoding that they declare. Not
handled: notebooks and imports; each file is checked alone.
"""

from __future__ import annotations

import ast
import io
import os
import re
import tokenize
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from plimsoll.diagnose.lint import every_rule
from plimsoll.diagnose.lint.helpers.source import Edit, Hit, Source, parse
from plimsoll.errors import InputError, OutputError
from plimsoll.records.lint import LintFinding, LintReport, Unread

_SKIPPED = {"__pycache__", "build", "dist", "env", "node_modules", "site-packages", "venv"}
_TELLING = re.compile(
    r"torch|transformers|tensorflow|gensim|glove|fasttext|accelerate|lightning|tokenizer", re.IGNORECASE
)
_IGNORE = re.compile(r"#\s*plimsoll:\s*ignore(?![\w-])(?:\[([\w\s,-]*)\])?")
_MOST_ROUNDS = 5


class _Found(NamedTuple):
    rule: str
    hit: Hit


def check_code(
    paths: Iterable[Path],
    *,
    rules: Collection[str] | None = None,
    fix: bool = False,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> LintReport:
    """Check files, and all Python files in folders except hidden folders, virtual environments and build outputs.

    Args:
        paths: files and folders.
        rules: names of the rules to apply; all rules by default.
        fix: apply the safe fixes and write them to the files.
        report: progress callback, called with the number of files done and their total.

    Raises:
        InputError: if a path does not exist, no Python file is found, or a rule is unknown.
        OutputError: if a fixed file cannot be written.
    """
    chosen = _chosen(rules)
    files = list(_files(paths))
    findings: list[LintFinding] = []
    unread: list[Unread] = []
    num_lines = num_fixed = 0
    for number, path in enumerate(files):
        report(number, len(files))
        try:
            text, encoding = _read(path)
            if fix and (fixed := _fixed(text, chosen))[1]:
                _write(path, fixed[0], encoding)
                text = fixed[0]
                num_fixed += fixed[1]
            findings += _findings(str(path), text, chosen)
        except (SyntaxError, ValueError, RecursionError, MemoryError, OSError) as error:  # or nested too deeply
            unread.append(Unread(file=str(path), reason=_reason(error)))
            continue
        num_lines += text.count("\n") + (not text.endswith("\n") and text != "")
    report(len(files), len(files))
    return LintReport(
        findings=tuple(findings),
        num_files=len(files) - len(unread),
        num_lines=num_lines,
        num_fixed=num_fixed,
        unread=tuple(unread),
    )


def _chosen(rules: Collection[str] | None) -> list[str]:
    known = every_rule()
    for name in rules or ():
        if name not in known:
            raise InputError(f"there is no rule {name!r}: give one of {', '.join(known)}")
    return [name for name in known if rules is None or name in rules]


def _files(paths: Iterable[Path]) -> Iterator[Path]:
    seen = set[Path]()
    for path in paths:
        if not path.exists():
            raise InputError(f"there is no file or folder {path}: give Python files, or folders with some")
        found = [path] if not path.is_dir() else list(_within(path))
        if not found:
            raise InputError(f"there is no Python file in {path}: give a folder with some")
        for file in found:
            if (key := file.absolute()) not in seen:
                seen.add(key)
                yield file


def _within(folder: Path) -> Iterator[Path]:
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED and not name.startswith("."))
        yield from (Path(root, name) for name in sorted(names) if name.endswith((".py", ".pyw")))


def _read(path: Path) -> tuple[str, str]:
    if not path.is_file():
        raise ValueError(f"{path} is not a regular file: give a Python file")
    content = path.read_bytes()
    encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
    return content.decode(encoding), encoding


def _found(text: str, rules: list[str]) -> list[_Found]:
    """Return the hits of some rules in a text, sorted by line, without hits that a comment ignores."""
    if not _TELLING.search(text):
        return []
    source, known, ignored = parse(text), every_rule(), _ignored(text)
    found = [_Found(rule, hit) for rule in rules for hit in known[rule](source)]
    kept = [one for one in found if not _is_ignored(one, source, ignored)]
    return sorted(kept, key=lambda one: (one.hit.node.lineno, one.hit.node.col_offset, one.rule))


def _ignored(text: str) -> dict[int, set[str] | None]:
    """Return the rules that a comment ignores, by line number; ``None`` means all rules."""
    if "plimsoll:" not in text:
        return {}
    found: dict[int, set[str] | None] = {}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and (match := _IGNORE.search(token.string)):
            names = match.group(1)
            found[token.start[0]] = None if names is None else {name.strip() for name in names.split(",")}
    return found


def _is_ignored(found: _Found, source: Source, ignored: dict[int, set[str] | None]) -> bool:
    """Return whether a comment ignores a hit, on one of the hit's lines or on the first line of its statement."""
    if not ignored:
        return False
    node = found.hit.node
    statement = source.statement(node)
    last = node.lineno if isinstance(node, ast.For | ast.While | ast.If | ast.With) else node.end_lineno or node.lineno
    for line in {statement.lineno, *range(node.lineno, last + 1)}:
        if line in ignored and ((names := ignored[line]) is None or found.rule in names):
            return True
    return False


def _findings(file: str, text: str, rules: list[str]) -> list[LintFinding]:
    lines = text.split("\n")
    findings = []
    for (_, rule), hit in {(one.hit.node.lineno, one.rule): one.hit for one in _found(text, rules)}.items():
        line = lines[hit.node.lineno - 1]
        findings.append(
            LintFinding(
                file=file,
                line=hit.node.lineno,
                column=len(line.encode()[: hit.node.col_offset].decode(errors="replace")) + 1,
                rule=rule,
                severity=hit.severity,
                message=hit.message,
                remedy=hit.remedy,
                code=line.strip(),
                is_fixable=bool(hit.edits),
            )
        )
    return findings


def _fixed(text: str, rules: list[str]) -> tuple[str, int]:
    """Return a text with all safe fixes applied, and the number of fixes."""
    num_fixed = 0
    if re.search(r"\r(?!\n)", text):
        return text, 0  # ast counts a lone CR as a line break, so its line numbers would not match the text's
    for _ in range(_MOST_ROUNDS):
        mended = [one.hit for one in _found(text, rules) if one.hit.edits]
        if not mended:
            break
        changed, num_done = _edited(text, mended)
        if not _parses(changed):
            break
        text, num_fixed = changed, num_fixed + num_done
    return text, num_fixed


def _parses(text: str) -> bool:
    """Return whether a fixed text is still valid Python. A text that is not valid is not written."""
    try:
        compile(text, "text", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    return True


def _edited(text: str, hits: list[Hit]) -> tuple[str, int]:
    """Apply the edits of all hits whose edits overlap no earlier edit. Return the new text and the number of fixes."""
    taken: list[Edit] = []
    num_done = 0
    for hit in hits:
        if not any(
            (one.start < other.end and other.start < one.end) or one == other for one in hit.edits for other in taken
        ):
            taken += hit.edits
            num_done += 1
    for edit in sorted(taken, key=lambda one: (one.start, one.end), reverse=True):
        text = text[: edit.start] + edit.text + text[edit.end :]
    return text, num_done


def _write(path: Path, text: str, encoding: str) -> None:
    """Replace a file by its fixed text and keep its permissions. A symbolic link stays a link."""
    target = path.resolve()
    beside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with beside.open("wb") as file:
            file.write(text.encode(encoding))
            file.flush()
            os.fsync(file.fileno())
        beside.chmod(target.stat().st_mode)
        beside.replace(target)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise OutputError(
            f"cannot write the fixed {path} ({error.strerror}): leave --fix out, or make it writable"
        ) from None


def _reason(error: Exception) -> str:
    if isinstance(error, SyntaxError):
        return f"line {error.lineno}: {error.msg}" if error.lineno else str(error.msg)
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return str(error) or "the code is nested too deeply"
