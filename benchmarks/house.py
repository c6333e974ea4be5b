"""The layout of the source: modules and lines per package, and counts of constructs that the design forbids or limits.

    python benchmarks/house.py                  # of the working tree
    python benchmarks/house.py --at v0.1.0      # of a commit

Counted are

- technique names in text outside ``techniques/`` (as in `tests/house_rules.py`);
- imports inside functions, and imports of underscore modules from another package;
- modules in the largest package;
- modules that a budget passes from the command to its enforcement.

No code is executed.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import subprocess
import sys
import tarfile
from collections import Counter
from pathlib import PurePosixPath

from _results import table

PACKAGE = PurePosixPath("src/plimsoll")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--at", default=None, help="a commit (default: the working tree)")
    files = sources(parser.parse_args().at)
    src = {path: text for path, text in files.items() if path.is_relative_to(PACKAGE)}
    lines, modules = Counter[str](), Counter[str]()
    for path, text in src.items():
        part = path.relative_to(PACKAGE).parts[0] if len(path.relative_to(PACKAGE).parts) > 1 else "(root)"
        lines[part] += text.count("\n")
        modules[part] += path.stem != "__init__"
    print(
        table(
            ("package", "modules", "lines"), [(part, str(modules[part]), f"{lines[part]:,}") for part in sorted(lines)]
        )
    )
    found = {
        "lines of src": sum(lines.values()),
        "of these, code": sum(code_lines(text) for text in src.values()),
        "lines of tests": sum(text.count("\n") for path, text in files.items() if path.parts[0] == "tests"),
        "modules": sum(modules.values()),
        "modules in the root": modules["(root)"],
        "modules side by side, at most": max(Counter(path.parent for path in src if path.stem != "__init__").values()),
        "modules with a technique's name as text": len(with_technique_names(src)),
        "imports of one particular technique from elsewhere": technique_imports(src),
        "imports inside functions": sum(lazy_imports(text) for text in src.values()),
        "imports of private modules from elsewhere": private_imports(src),
        "longest module, lines": max(text.count("\n") for text in src.values()),
        "fmt: skip": sum(text.count("# fmt: skip") for text in src.values()),
    }
    print(table(("what", "how many"), [(name, f"{number:,}") for name, number in found.items()]))
    print(json.dumps(found))


def code_lines(text: str) -> int:
    """Count the lines that are neither blank nor part of a docstring or a whole-line comment."""
    has_docstring = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    in_docstring: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, has_docstring) and ast.get_docstring(node, clean=False) is not None:
            in_docstring.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    numbered = enumerate(text.splitlines(), start=1)
    return sum(
        bool(line.strip()) and not line.lstrip().startswith("#") and at not in in_docstring for at, line in numbered
    )


def sources(commit: str | None) -> dict[PurePosixPath, str]:
    """Return the Python files of src and tests by path."""
    if commit is None:
        names = subprocess.run(["git", "ls-files", "src", "tests"], capture_output=True, text=True, check=True).stdout
        paths = [PurePosixPath(name) for name in names.splitlines() if name.endswith(".py")]
        return {path: open(path, encoding="utf-8").read() for path in paths}
    packed = subprocess.run(["git", "archive", commit, "src", "tests"], capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        members = [one for one in archive if one.isfile() and one.name.endswith(".py")]
        return {PurePosixPath(one.name): archive.extractfile(one).read().decode() for one in members}  # type: ignore[union-attr]


def with_technique_names(src: dict[PurePosixPath, str]) -> set[PurePosixPath]:
    """Return the modules outside ``techniques/`` that mention a technique, except for words with other meanings."""
    folder = PACKAGE / "techniques"
    names = {path.stem for path in src if path.parent == folder} - {"__init__"}
    words = {"cache", "heap", "attention", "evaluation", "autocast", "allocator"}
    names = {name for name in names if not name.startswith("_")} - words
    return {
        path
        for path, text in src.items()
        if not path.is_relative_to(folder)
        and any(isinstance(one, ast.Constant) and one.value in names for one in ast.walk(ast.parse(text)))
    }


def technique_imports(src: dict[PurePosixPath, str]) -> int:
    """Count the imports of individual techniques' modules from outside ``techniques/``."""
    folder = PACKAGE / "techniques"
    modules = {f"plimsoll.techniques.{path.stem}" for path in src if path.parent == folder and path.stem != "__init__"}
    count = 0
    for path, text in src.items():
        if not path.is_relative_to(folder):
            for one in ast.walk(ast.parse(text)):
                if isinstance(one, ast.ImportFrom):
                    count += bool({one.module, *(f"{one.module}.{alias.name}" for alias in one.names)} & modules)
    return count


def lazy_imports(text: str) -> int:
    """Count the imports inside functions."""
    functions = [one for one in ast.walk(ast.parse(text)) if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
    inside = {id(one): one for function in functions for one in ast.walk(function)}
    return sum(isinstance(one, ast.Import | ast.ImportFrom) for one in inside.values())


def private_imports(src: dict[PurePosixPath, str]) -> int:
    """Count the imports of underscore modules from outside their package."""
    dotted = {".".join(path.with_suffix("").parts[1:]): path.parent for path in src}
    count = 0
    for path, text in src.items():
        for one in ast.walk(ast.parse(text)):
            if isinstance(one, ast.ImportFrom) and one.module:
                for name in {one.module, *(f"{one.module}.{alias.name}" for alias in one.names)} & dotted.keys():
                    is_private = name.rpartition(".")[2].startswith("_") and not name.endswith("__main__")
                    count += is_private and dotted[name] != path.parent
    return count


if __name__ == "__main__":
    sys.exit(main())
