"""The tests marked `gpu`; in parallel if pytest-xdist is installed and the GPU has enough memory."""

from __future__ import annotations

import ast
import re
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.gpu.parts import ROOT, Task, run

TESTS = ROOT / "tests"
_MARK = re.compile(r"mark\.gpu\b")
_MOST_PROCESSES, _FREE_BYTES_EACH = 6, 8 << 30  # each test process takes a few GiB of GPU memory, including its context


def run_part(task: Task) -> None:
    files = [path for path in sorted(TESTS.rglob("test_*.py")) if _MARK.search(path.read_text("utf-8"))]
    missing = {path: lacking for path in files if (lacking := missing_modules(path))}
    for path, names in missing.items():
        task.not_reached(f"{path.relative_to(ROOT)}: {', '.join(names)} is not installed")
    wanted = [str(path.relative_to(ROOT)) for path in files if path not in missing]
    report = task.folder / "tests.xml"
    words = [
        "-m",
        "pytest",
        "-m",
        "gpu",
        "-p",
        "no:cacheprovider",
        "-W",
        "default",
        "-o",
        "addopts=-q",
        f"--junitxml={report}",
    ]
    if (number := processes_of(task)) > 1:
        words += ["-n", str(number)]
    done = run(task, *words, *(["--collect-only"] if task.is_tiny else []), *wanted)
    if done.code is None:
        task.not_reached(f"all tests in {done.seconds:.0f} s")
        return
    if task.is_tiny:
        task.check("tests are found", done.code, 0, done.code == 0)
        return
    if not report.is_file():
        task.check("tests run", done.last_line, "a report", ok=False)
        return
    judge(task, report, done.code)


def judge(task: Task, report: Path, code: int) -> None:
    """Report the number of tests that passed, and the names of the others."""
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    passed = len(cases) - len(failed) - len(skipped)
    task.check(f"{len(cases)} tests", f"{passed} passed, {len(skipped)} skipped", "none fails", code == 0)
    for case in failed:
        task.check(f"{case.get('classname')}::{case.get('name')}", "failed", "passes", ok=False)


def processes_of(task: Task) -> int:
    if task.is_tiny or find_spec("xdist") is None:
        return 1
    import torch

    return max(1, min(_MOST_PROCESSES, torch.cuda.mem_get_info()[0] // _FREE_BYTES_EACH))


def missing_modules(path: Path, seen: frozenset[Path] = frozenset()) -> list[str]:
    """Return modules that a test file imports at its top, also through helpers, and that are not installed."""
    lacking: list[str] = []
    for name in imported(path):
        helpers = [folder / f"{name}.py" for folder in (path.parent, TESTS) if (folder / f"{name}.py").is_file()]
        if helpers:
            if helpers[0] not in seen:
                lacking += missing_modules(helpers[0], seen | {path, helpers[0]})
        elif name not in {"benchmarks", "plimsoll"} and find_spec(name) is None:
            lacking.append(name)
    return sorted(set(lacking))


def imported(path: Path) -> set[str]:
    """Return the top-level names of modules that a file imports outside functions."""
    names: set[str] = set()
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names
