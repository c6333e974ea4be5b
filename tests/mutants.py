"""Mutation tests: a sample of mutants of a module, made with cosmic-ray's operators.

    python tests/mutants.py src/plimsoll/step/undo/step_state.py src/plimsoll/step/update/commit.py --number 20 --seed 0
    python tests/mutants.py src/plimsoll/step --number 100    # of all modules there, all places equally likely

Mutants are drawn from each module, or from all modules of a folder together. Each is one small change (a comparison, a
number, a `not`, ...) in a copy of the sources. The module's tests run on it until one fails. Then follow the tests next
to them that import the module, and tests of commands that use it (`THROUGH`). Mutants do not count if they are not
valid Python, or change only annotations, docstrings or which arguments may be named. Prints each survivor as a diff,
the share of killed mutants, and one JSON object as the last line. A survivor is a gap in the tests or a change without
an effect: examine it.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor
from functools import cache
from itertools import islice
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "src" / "plimsoll"
THROUGH = {
    "step/(undo/.*|update/.*|[a-z_]*).py": [
        "tests/numerics/test_transaction.py", "tests/numerics/test_first_updates.py",
    ],
    "(inference/.*|planning/plan_inference).py": [
        "tests/unit/cli/test_cli_apply.py", "tests/end_to_end/test_apply.py",
    ],
    "(training/.*|step/evaluate|step/retained/.*|diagnose/watch).py": [
        "tests/unit/cli/test_cli_train.py", "tests/end_to_end/test_resume.py",
    ],
    "(distributed/.*|training/sharded_checkpoint|training/ranks|planning/dry_run/ranks|step/collective).py": [
        "tests/numerics/test_rank_numerics.py",
    ],
    "planning/.*.py": ["tests/unit/planning/test_planning_plan.py", "tests/unit/cli/test_cli_plan.py"],
    "compression/[a-z_]*.py": ["tests/unit/cli/test_cli_shrink.py"],
    "(training/teacher_cache|planning/teacher_loss).py": ["tests/end_to_end/test_distilled_jobs.py"],
    "training/tagging.py": ["tests/end_to_end/test_tagged_jobs.py"],
}  # fmt: skip
"""Some quick tests that use modules (a regular expression) without naming them."""
_PATIENCE = 5  # tests of a mutant may take this many times as long as with the unchanged module, plus a margin
_PATIENCE_SECONDS = 30.0
_LOOK_SECONDS = 0.1
_ended = threading.Event()
_unusable: set[str] = set()


def main() -> None:
    """Draw mutants, run the tests on them, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", type=Path, nargs="+", help="files or folders below src/plimsoll")
    parser.add_argument("--number", type=int, default=20, help="mutants of each file or folder (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample (default: %(default)s)")
    parser.add_argument(
        "--workers", type=int, default=1, help="modules that are tested in parallel (default: %(default)s)"
    )
    arguments = parser.parse_args()
    killed: Counter[str] = Counter()
    drawn: Counter[str] = Counter()
    for part in arguments.parts:
        modules = [part] if part.is_file() else sorted(part.rglob("*.py"))
        names = [path.resolve().relative_to(SOURCES).as_posix() for path in modules]
        if without := [name for name in names if not files_for(name)]:
            print(f"left out, having no tests of their own: {', '.join(without)}", flush=True)
            names = [name for name in names if name not in without]
        sources = {name: (SOURCES / name).read_text("utf-8") for name in names}
        chosen = list(islice(mutants_of(sources, random.Random(arguments.seed)), arguments.number))
        drawn.update(name for name, _ in chosen)
        names = sorted({name for name, _ in chosen})
        mutants = [[mutant for of, mutant in chosen if of == name] for name in names]
        with ThreadPoolExecutor(arguments.workers) as workers:
            try:
                killed.update(dict(zip(names, workers.map(examined, names, mutants), strict=True)))
            except BaseException:
                _ended.set()  # otherwise Ctrl-C waits for all mutants of the tested modules
                raise
    print(f"{killed.total()} of {drawn.total()} mutants killed")
    print(json.dumps({"seed": arguments.seed, "killed": {name: [killed[name], drawn[name]] for name in drawn}}))
    sys.exit(bool(_unusable))


def examined(module: str, mutants: list[str]) -> int:
    """Run tests on mutants of a module, and return the number of killed ones."""
    files = files_for(module)
    print(f"{module}: {len(mutants)} mutants, {' '.join(files)}", flush=True)
    num_killed = 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        package = Path(name) / "src" / "plimsoll"
        shutil.copytree(SOURCES, package, ignore=shutil.ignore_patterns("__pycache__"))
        for mutant in mutants:
            (package / module).write_text(mutant, "utf-8")
            is_killed = any(
                fails(package, file, seconds) for file in files if (seconds := patience_seconds(file)) is not None
            )
            num_killed += is_killed
            if not is_killed:
                print(difference((SOURCES / module).read_text("utf-8"), mutant, module), flush=True)
    print(f"{module}: {num_killed} of {len(mutants)} killed", flush=True)
    return num_killed


@cache
def patience_seconds(file: str) -> float | None:
    """Return the time limit for tests of a mutant, from the time with the unchanged module; None if they fail there."""
    began = time.monotonic()
    if fails(SOURCES, file, None):
        print(f"left out: {file} fails without a change: mend that first", flush=True)
        _unusable.add(file)
        return None
    return _PATIENCE * (time.monotonic() - began) + _PATIENCE_SECONDS


def mutants_of(sources: Mapping[str, str], drawn: random.Random) -> Iterator[tuple[str, str]]:
    """Yield every mutant that changes the behaviour of a module, with the module's name, in random order."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator, operator_names

    names = [name for name in operator_names() if "Variable" not in name]  # these need a variable name
    operators = [get_operator(name)() for name in sorted(names)]
    places = []
    for module, source in sources.items():
        nodes = list(ast_nodes(get_ast(source)))
        counts = [sum(1 for node in nodes for _ in operator.mutation_positions(node)) for operator in operators]
        places += [(module, index, place) for index, number in enumerate(counts) for place in range(number)]
    drawn.shuffle(places)
    for module, index, place in places:
        mutant = mutate_code(sources[module], operators[index], place)
        if mutant is not None and meaning_of(mutant) not in {None, meaning_of(sources[module])}:
            yield module, mutant


def meaning_of(source: str) -> str | None:
    """Return the syntax tree without annotations, docstrings and the `*` that ends positional arguments, or None for
    invalid syntax.
    """
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.arguments):
            values = [*[None] * (len(node.args) + len(node.posonlyargs) - len(node.defaults)), *node.defaults]
            node.kwonlyargs = [*node.posonlyargs, *node.args, *node.kwonlyargs]
            node.kw_defaults = [*values, *node.kw_defaults]
            node.posonlyargs, node.args, node.defaults = [], [], []
        for name in ("annotation", "returns"):
            if getattr(node, name, None) is not None:
                setattr(node, name, ast.Constant(None))
        body = getattr(node, "body", None)
        if (
            isinstance(body, list)
            and body
            and isinstance(body[0], ast.Expr)
            and isinstance(body[0].value, ast.Constant)
        ):
            body[0].value = ast.Constant(None)
    return ast.dump(tree)


def files_for(module: str) -> list[str]:
    """Return the test files for a module: its own, files next to it that import the module, and files of `THROUGH`."""
    path = Path(module)
    own = "_".join(("test", *path.with_suffix("").parts))
    name = f"tests/unit/{path.parent}/{own}.py"
    if not (ROOT / name).is_file():
        return []
    imports = re.compile(rf"^(from|import) plimsoll\.{'.'.join(path.with_suffix('').parts)}\b", re.MULTILINE)
    beside = sorted((ROOT / name).parent.glob("test_*.py"))
    importing = [file.relative_to(ROOT).as_posix() for file in beside if imports.search(file.read_text("utf-8"))]
    through = [one for modules, files in THROUGH.items() if re.fullmatch(modules, module) for one in files]
    return list(dict.fromkeys([name, *importing, *through]))


def fails(package: Path, file: str, patience_seconds: float | None) -> bool:
    """Return whether a test of a file fails with these sources, or does not end.

    Raises:
        CancelledError: if the program is to end.
    """
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", file]
    environment = os.environ | {"PYTHONPATH": str(package.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, process_group=0
    )
    last_seconds = math.inf if patience_seconds is None else time.monotonic() + patience_seconds
    try:
        while process.poll() is None and time.monotonic() < last_seconds:
            if _ended.wait(_LOOK_SECONDS):
                raise CancelledError
        return process.poll() != 0
    finally:
        if process.poll() is None:
            os.killpg(process.pid, 9)
            process.wait()


def difference(source: str, mutant: str, name: str) -> str:
    """Return a mutant's change as a diff."""
    lines = difflib.unified_diff(source.splitlines(), mutant.splitlines(), name, "survived", lineterm="", n=1)
    return "\n".join(lines)


if __name__ == "__main__":
    main()
