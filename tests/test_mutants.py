"""The scripts `mutants.py` and `licences.py`: kinds of changes, selected tests, and distributions whose licences are
read.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys

import pytest

from mutants import ROOT, THROUGH, fails, files_for, meaning_of

SOURCE = '''
def f(x: int | None, y: int) -> bool:
    """True if it is so."""
    return x is not None and y > 1
'''


def test_annotations_docstrings_and_who_may_be_named_mean_nothing():
    other = SOURCE.replace("int | None", "int + None").replace("True if", "False if")
    assert meaning_of(other) == meaning_of(SOURCE)
    assert meaning_of(SOURCE.replace("y > 1", "y >= 1")) != meaning_of(SOURCE)
    assert meaning_of("def f(x, *, y=1): pass") == meaning_of("def f(x, /, y=1): pass")
    assert meaning_of("def f(x, *, y=1): pass") != meaning_of("def f(x, *, y=2): pass")
    assert meaning_of("def f(x, *y): pass") != meaning_of("def f(x, y): pass")


def test_what_is_no_python_has_no_meaning():
    assert meaning_of(SOURCE.replace("return", "retrun")) is None


def test_a_module_has_its_own_tests_and_those_that_go_through_it():
    own, *others = files_for("step/undo/step_state.py")
    assert own == "tests/unit/step/undo/test_step_undo_step_state.py"
    assert "tests/numerics/test_transaction.py" in others
    assert files_for("step/train_step.py").count("tests/unit/step/test_step_train_step.py") == 1
    assert all((ROOT / file).is_file() for files in THROUGH.values() for file in files)
    assert files_for("records/units.py") == ["tests/unit/records/test_records_units.py"]
    nested = "tests/unit/compression/methods/test_compression_methods_int4.py"
    assert files_for("compression/methods/int4.py") == ([nested] if (ROOT / nested).is_file() else [])
    assert files_for("planning/search/__init__.py") == []


@pytest.mark.slow
def test_a_change_that_a_test_sees_is_killed(tmp_path):
    package = tmp_path / "src" / "plimsoll"
    package.parent.mkdir()
    package.symlink_to(ROOT / "src" / "plimsoll")
    file = "tests/unit/records/test_records_units.py"
    assert not fails(package, file, None)
    package.unlink()
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('changed')")
    assert fails(package, file, None)


def test_mutants_are_drawn_by_the_seed():
    pytest.importorskip("cosmic_ray", reason="it is of the extra release: make mutants")
    from mutants import mutants_of

    sources = {"a.py": SOURCE, "b.py": SOURCE.replace("y", "z")}
    first, again, other = (list(mutants_of(sources, random.Random(seed))) for seed in (0, 0, 1))
    assert first == again
    assert first != other
    assert sorted(first) == sorted(other)
    assert any("y >= 1" in mutant for name, mutant in first if name == "a.py")
    assert any("z >= 1" in mutant for name, mutant in first if name == "b.py")
    assert not any("int + None" in mutant and "x is not None and y > 1" in mutant for _, mutant in first)


def test_licences_are_listed_and_none_reaches_over():
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])}
    command = [sys.executable, str(ROOT / "tests" / "licences.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if "PackageNotFoundError" in done.stderr:
        pytest.skip("Plimsoll is not installed here, so its requirements are not known")
    named = {line.split()[0] for line in done.stdout.splitlines()}
    assert {"torch", "transformers", "numpy", "scipy"} <= named
    assert "<-" not in done.stdout
    assert done.returncode == 0
