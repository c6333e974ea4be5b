"""The repository follows the rules of `house_rules.py`, and every rule can fail."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from house_rules import (
    HEAVY,
    RULES,
    TORCH_FREE,
    Repository,
    Rule,
    errors_say_the_value_and_the_remedy,
    every_entry_has_its_page,
    every_module_has_its_tests,
    functions_and_files_are_short,
    imports_point_down,
    names_are_words_of_the_field,
    no_global_and_no_broad_except,
    no_import_cycle,
    no_path_of_one_machine,
    no_test_is_skipped_without_a_reason,
    packages_are_small,
    part_of,
    quantities_carry_their_unit,
    readme_has_no_number_that_no_script_writes,
    techniques_are_known_by_themselves,
    torch_free_parts_stay_so,
    underscored_modules_are_private,
)

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def repository() -> Repository:
    """Read the handwritten files: code, tests, pages and files at the top."""
    folders = [ROOT / name for name in ("src/plimsoll", "tests", "docs", "benchmarks", "examples")]
    paths = [path for folder in folders for path in folder.rglob("*")] + list(ROOT.glob("*"))
    texts = [path for path in paths if path.suffix in {".py", ".md", ".toml", ".txt", ".yaml", ".html"}]
    texts += [path for path in (ROOT / "Makefile", ROOT / ".ci" / "run") if path.is_file()]
    return Repository({path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in texts})


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_repository_keeps_the_rule(rule: Rule, repository: Repository):
    faults = list(rule(repository))
    assert not faults, "\n".join(["", *faults])


def function_of(num_lines: int, name: str = "f") -> str:
    return f"def {name}():" + "\n    x = 1" * num_lines + "\n"


def raising(message: str, before: str = "") -> str:
    head = "from plimsoll.errors import DataError, JobError\n"
    return f"{head}{before}\ndef f(path, size):\n    raise DataError({message})\n"


# Each rule with files that break it, and a part of its message.
BROKEN: list[tuple[Rule, dict[str, str], str]] = [
    (
        imports_point_down,
        {"data/a.py": "import plimsoll.step.train_step"},
        "data imports plimsoll.step.train_step, which is not",
    ),
    (
        imports_point_down,
        {"data/a.py": "def f():\n    from plimsoll.step import checks"},
        "a.py:2: data imports plimsoll.step",
    ),
    (imports_point_down, {"files/a.py": "from plimsoll.data import corpus"}, "imports plimsoll.data, which is not"),
    (imports_point_down, {"report/a.py": "from plimsoll import models"}, "imports plimsoll.models, which is not"),
    (imports_point_down, {"cli/a.py": "from plimsoll import train"}, "imports plimsoll.train, which is not"),
    (imports_point_down, {"cli/a.py": "import plimsoll"}, "imports plimsoll, which is not"),
    (imports_point_down, {"cli/a.py": "from .b import c"}, "a relative import"),
    (imports_point_down, {"helpers.py": ""}, "helpers is in no layer"),
    (packages_are_small, {f"data/a{n}.py": "" for n in range(31)}, "src/plimsoll/data has 31 modules side by side"),
    (packages_are_small, {"helpers.py": ""}, "helpers.py lies loose in the root"),
    (
        underscored_modules_are_private,
        {"data/a.py": "from plimsoll.data.formats._csv import x", "data/formats/_csv.py": "x = 1"},
        "a.py:1: plimsoll.data.formats._csv is private to plimsoll.data.formats",
    ),
    (names_are_words_of_the_field, {"data/menus.py": "x = 1"}, "data/menus.py:1: menus: say choices"),
    (names_are_words_of_the_field, {"data/a.py": "def f(num_lanes): x"}, "a.py:1: num_lanes: say stream slot"),
    (names_are_words_of_the_field, {"data/a.py": "class RungOf: x"}, "a.py:1: RungOf: say fallback"),
    (names_are_words_of_the_field, {"data/a.py": "self.lanes = 1"}, "a.py:1: lanes: say stream slot"),
    (names_are_words_of_the_field, {"tests/a.py": "def test_wishes(): x"}, "a.py:1: test_wishes: say constraint"),
    (names_are_words_of_the_field, {"tests/golden/wish-a.txt": ""}, "wish-a.txt:1: wish-a: say constraint"),
    (
        no_import_cycle,
        {"step/a.py": "from plimsoll.step import b", "step/b.py": "def f():\n    import plimsoll.step.a"},
        "modules import each other: plimsoll.step.",
    ),
    (torch_free_parts_stay_so, {"records/a.py": "def f():\n    import torch.nn"}, "a.py:2: records imports torch.nn"),
    (torch_free_parts_stay_so, {"report/a.py": "from transformers import x"}, "report imports transformers"),
    (functions_and_files_are_short, {"a.py": "x = 1\n" * 801}, "a.py has 801 lines, more than 800"),
    (functions_and_files_are_short, {"a.py": function_of(11)}, "50% of the functions have up to 11 lines"),
    (
        functions_and_files_are_short,
        {"a.py": function_of(1) + function_of(41) * 2},
        "90% of the functions have up to 41",
    ),
    (functions_and_files_are_short, {"a.py": function_of(61)}, "a.py:1: f has 61 lines, more than 60"),
    (functions_and_files_are_short, {"a.py": "# long:\n" + function_of(61)}, "a.py:2: f has 61 lines"),
    (no_global_and_no_broad_except, {"a.py": "def f():\n    global x"}, "a.py:2: global x"),
    (no_global_and_no_broad_except, {"a.py": "try: x\nexcept Exception: y"}, "a.py:2: catches Exception"),
    (no_global_and_no_broad_except, {"a.py": "try: x\nexcept (OSError, BaseException): y"}, "catches BaseException"),
    (no_global_and_no_broad_except, {"a.py": "try: x\nexcept: y"}, "a.py:2: catches everything"),
    (no_global_and_no_broad_except, {"a.py": "with contextlib.suppress(Exception): x"}, "a.py:1: catches Exception"),
    (
        every_module_has_its_tests,
        {"data/formats/csv.py": "x = 1"},
        "csv.py has no tests: write tests/unit/data/formats/test_data_formats_csv.py or",
    ),
    (every_module_has_its_tests, {"data/__init__.py": "x = 1"}, "write tests/unit/data/test_data.py"),
    (every_module_has_its_tests, {"__init__.py": "def __getattr__(name): x"}, "write tests/unit/test_plimsoll.py"),
    (quantities_carry_their_unit, {"a.py": "def f(timeout: float): x"}, "a.py:1: timeout: float does not say its unit"),
    (quantities_carry_their_unit, {"a.py": "class A:\n    step_time: float | None"}, "a.py:2: step_time: float | None"),
    (
        quantities_carry_their_unit,
        {"a.py": "async def peak_memory() -> int: x"},
        "peak_memory: int does not say its unit",
    ),
    (
        errors_say_the_value_and_the_remedy,
        {"a.py": raising("'too big: use less'")},
        "a.py:4: the message holds no value",
    ),
    (
        errors_say_the_value_and_the_remedy,
        {"a.py": raising("f'{path} is too big'")},
        "does not say what to do: {} is too",
    ),
    (errors_say_the_value_and_the_remedy, {"a.py": raising("f'{path} is of no use'")}, "does not say what to do"),
    (
        errors_say_the_value_and_the_remedy,
        {"a.py": raising("said(path)", "def said(path):\n    'Too long; use less.'\n    return f'{path} is long'")},
        "does not say what to do: {} is long",
    ),
    (errors_say_the_value_and_the_remedy, {"a.py": raising("str(size)")}, "the message does not say what to do"),
    (
        errors_say_the_value_and_the_remedy,
        {"a.py": "from plimsoll.errors import DataError\ntry: x\nexcept OSError as e: raise DataError(f'x: {e}')"},
        "does not say what to do: x: {}",
    ),
    (every_entry_has_its_page, {"data/formats/csv.py": ""}, "csv.py has no page docs/formats/csv.md"),
    (no_test_is_skipped_without_a_reason, {"tests/a.py": "@pytest.mark.skip\ndef f(): x"}, "pytest.mark.skip without"),
    (
        no_test_is_skipped_without_a_reason,
        {"tests/a.py": "pytest.skip()"},
        "tests/a.py:1: pytest.skip without a reason",
    ),
    (
        no_test_is_skipped_without_a_reason,
        {"tests/a.py": "m = pytest.mark.skipif(x, y=1)"},
        "pytest.mark.skipif without",
    ),
    # No test is marked here: this is the text of a file in which the rule must find the missing reason.
    (no_test_is_skipped_without_a_reason, {"tests/a.py": "m = pytest.mark.xfail(x)"}, "pytest.mark.xfail without"),
    (no_path_of_one_machine, {"a.py": "x = '/home/anna/x'"}, "a.py:1: /home/a... is a path of one machine"),
    (no_path_of_one_machine, {"docs/a.md": "see\n/tmp/x"}, "docs/a.md:2: /tmp/x... is a path"),
    (readme_has_no_number_that_no_script_writes, {"README.md": "#\n\nOff by 3 %."}, "README.md:3: '3' is no part"),
    (
        readme_has_no_number_that_no_script_writes,
        {"README.md": "<!-- table a -->\n1\n<!-- /table -->\nNeeds half of it."},
        "README.md:4: 'half' is no part of a result: Needs half",
    ),
    (
        readme_has_no_number_that_no_script_writes,
        {"README.md": "```\nx = 1\n```\n\n```\n$ plimsoll a\nFits: 5\n```\n"},
        "README.md:6: a session with what it prints",
    ),
    (readme_has_no_number_that_no_script_writes, {"README.md": "`a` is 2 times b"}, "README.md:1: '2' is no part"),
    (
        techniques_are_known_by_themselves,
        {"techniques/lora.py": "", "step/a.py": "x = ['lora']"},
        "step/a.py:1: knows the technique 'lora' by its name",
    ),
    *(
        (
            techniques_are_known_by_themselves,
            {"techniques/cache.py": "", "techniques/evaluation.py": "", "step/a.py": text},
            "step/a.py:1: knows the technique 'cache' by its name",
        )
        for text in (
            "x = choice.technique == 'cache'",
            "x = technique not in {'cache', y}",
            "x = Choice(technique='cache')",
            "x = technique_of('cache')",
            "x = TECHNIQUES['cache']",
            "x = {'cache': 1, 'evaluation': 2}",
            "x = ('cache', 'evaluation')",
        )
    ),
]

# Correct code that resembles a fault: no rule finds anything here.
KEPT = {
    "__init__.py": '"""Docs."""\nfrom plimsoll.cli.main import main\n',
    "__main__.py": "import plimsoll\nx = ['cache', 'lora of cache']\n",
    "techniques/cache.py": "NAME = 'cache'\nx = Choice(technique='cache')\n",
    "cli/main.py": "import torch\nfrom plimsoll.data.formats import csv\n",
    "data/formats/__init__.py": "from plimsoll.errors import DataError\n",
    "data/formats/_shared.py": "import plimsoll.data.formats\n",
    "data/formats/csv.py": "from plimsoll.data.formats import _shared\nx = 1\n",
    "step/oom_boundary.py": "def f():\n    try: x\n    except BaseException: y\n",
    "step/train_step.py": "@x\n" + function_of(1, "g") * 9 + "# long: one table\n" + function_of(61),
    "step/units.py": "def f(limit_bytes: int, batch_size: int, num_peak: int, step_seconds: float, size: str): x\n",
    "step/direct.py": raising("f'{path} is {size} long: use less'"),
    "step/constant.py": raising("TEXT.format(path)", "TEXT = '{} is long; give ' 'less'\nVALUE = f'{TEXT}'"),
    "step/helper.py": raising(
        "said(path)", "from plimsoll.records.remedy import remedy\ndef said(path): return f'{path} is long' + remedy()"
    ),
    "records/remedy.py": "def remedy(): return ', use less'\n",
    "step/again.py": raising(
        "f'{path}; use less'", "def g():\n    try: x\n    except JobError as error: raise DataError(f'x: {error}')"
    ),
    # No test is marked here either: this is the text of a file with reasons, and the rule must accept it.
    "tests/unit/data/formats/test_csv.py": "pytest.skip('no file')\nm = pytest.mark.xfail(x, reason='y')\n",
    "tests/unit/step/test_oom_boundary.py": "x = '/tmp/x'\n",
    **{f"tests/unit/step/test_step_{name}.py": "" for name in ("units", "direct", "constant", "helper", "again")},
    "tests/unit/step/test_step_train_step.py": "",
    "tests/unit/records/test_records_remedy.py": "",
    "README.md": "GPT-2 in bfloat16, Python 3.11, `--budget 2GiB`, [a](b-2.md)\n\n"
    "<!-- table a b -->\n```\n$ a\n5\n```\n<!-- /table -->\n\n```yaml\nlr: 3e-4\n```\n",
    "tests/unit/techniques/test_techniques_cache.py": "x = TECHNIQUES['cache']\n",
    "docs/techniques/cache.md": "",
    "docs/formats/csv.md": "~/home/x, src/home/x and /tmp are anybody's\n",
}  # fmt: skip


def repository_of(files: dict[str, str]) -> Repository:
    """Return files by path from the root, or below the package if the path names no folder of the root."""
    return Repository(
        {
            path if path.startswith(("tests/", "docs/", "README")) else f"src/plimsoll/{path}": text
            for path, text in files.items()
        }
    )


@pytest.mark.parametrize(
    ("rule", "files", "fault"), BROKEN, ids=[f"{number}-{rule.__name__}" for number, (rule, _, _) in enumerate(BROKEN)]
)
def test_a_broken_rule_is_found(rule: Rule, files: dict[str, str], fault: str):
    assert fault in "\n".join(rule(repository_of(files)))


def test_every_rule_can_be_broken():
    assert {rule for rule, _, _ in BROKEN} == set(RULES)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_what_keeps_the_rule_is_left_alone(rule: Rule):
    assert not list(rule(repository_of(KEPT)))


# Print the loaded modules at exit, because `--help` ends in SystemExit.
LIST_MODULES = (
    "import atexit, json, sys; atexit.register(lambda: print(json.dumps(list(sys.modules)), file=sys.stderr))"
)
SHOW_HELP = "from plimsoll.cli.main import main; sys.argv = ['plimsoll', '--help']; main()"


@pytest.mark.long
def test_what_needs_no_torch_does_not_load_it(repository: Repository):
    """`import plimsoll`, `plimsoll --help`, records and reports start quickly, including their imports."""
    parts = {*TORCH_FREE, "cli", "__init__"}
    light = [source.module for source in repository.package if part_of(source.module) in parts]
    code = [LIST_MODULES, f"import {', '.join(light)}", *([SHOW_HELP] if "plimsoll.cli.main" in light else [])]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(code)], env=environment, capture_output=True, text=True, check=True
    )
    print(f"loading {len(light)} modules and showing the help took {time.perf_counter() - start:.2f} s")
    loaded = json.loads(done.stderr.splitlines()[-1])
    assert set(light) <= set(loaded)
    assert not HEAVY & set(loaded)
