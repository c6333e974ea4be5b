"""The exception tree is the one its docstring draws, and every error is also the built-in one it means."""

import inspect
import re

import pytest

from plimsoll import errors
from plimsoll.errors import Interrupted, KilledError, PlimsollError

CLASSES = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, PlimsollError)]


def drawn_bases() -> dict[str, str]:
    """Read the drawing: each class and the one it hangs below."""
    above: list[re.Match] = []
    bases = {}
    for line in re.finditer(r"^ {4}[ |`-]*([A-Z]\w+)", errors.__doc__, flags=re.MULTILINE):
        column = line.start(1) - line.start()
        above = [other for other in above if other.start(1) - other.start() < column]
        bases[line[1]] = above[-1][1] if above else "Exception"
        above.append(line)
    return bases


def test_the_docstring_draws_the_tree_there_is():
    assert drawn_bases() == {cls.__name__: cls.__base__.__name__ for cls in CLASSES}


@pytest.mark.parametrize(
    ("cls", "built_in", "exit_code"),
    [
        ("JobError", ValueError, 2),
        ("DataError", ValueError, 2),
        ("EmbeddingError", ValueError, 2),
        ("WeightsError", ValueError, 2),
        ("BudgetError", ValueError, 2),
        ("DeviceError", ValueError, 2),
        ("RecordError", ValueError, 2),
        ("OutputError", ValueError, 2),
        ("CheckpointError", ValueError, 2),
        ("NonFiniteLossError", ArithmeticError, 2),
        ("OutOfMemoryError", MemoryError, 3),
        ("TornStepError", MemoryError, 75),
        ("AfterUpdateError", MemoryError, 75),
        ("FragmentedHeapError", MemoryError, 76),
    ],
)
def test_an_error_is_the_built_in_one_and_has_its_exit_code(cls: str, built_in: type[Exception], exit_code: int):
    error = getattr(errors, cls)("why: do that")
    assert isinstance(error, built_in)
    assert (error.exit_code, str(error)) == (exit_code, "why: do that")


@pytest.mark.parametrize(("signal_number", "exit_code"), [(2, 130), (15, 143)])
def test_an_interruption_has_the_exit_code_of_its_signal(signal_number: int, exit_code: int):
    assert Interrupted("saved", signal_number).exit_code == exit_code


@pytest.mark.parametrize(("signal_number", "exit_code"), [(9, 137), (11, 139)])
def test_a_death_by_a_signal_has_the_exit_code_that_a_shell_gives_it(signal_number: int, exit_code: int):
    assert KilledError("killed", signal_number).exit_code == exit_code
