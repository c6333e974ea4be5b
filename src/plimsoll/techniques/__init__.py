"""The registry of all techniques, and the context manager that installs a set of them.

    with installed(workload, choices):
        ...

`TECHNIQUES` has the techniques of this folder, one per module, and the techniques that other packages register as entry
points of `plimsoll.techniques`. They are in the order of installation (see `Technique`). A technique describes itself:
no other code depends on its name. The contract tests run for every technique in the registry.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from importlib import import_module
from inspect import isabstract
from types import ModuleType
from typing import Any, get_args

from plimsoll.errors import InputError
from plimsoll.models.names import own_techniques, require_technique, techniques_of_others
from plimsoll.models.workload import Workload
from plimsoll.records.plan import Choice, Numerics
from plimsoll.techniques.mechanisms.technique import STAGES, Choices, Setting, Technique

__all__ = [
    "TECHNIQUES", "Choices", "Setting", "Technique", "conflict_among", "in_order", "installed", "technique_of",
]  # fmt: skip


class _Registry(UserDict[str, Technique]):
    """The mapping from names to techniques. It is filled at the first access.

    Earlier it cannot be filled, because the packages that register techniques import this module.
    """

    def __init__(self) -> None:
        pass  # `data` is computed at the first access

    @cached_property
    def data(self) -> dict[str, Technique]:  # type: ignore[override]
        """All techniques by name, in the order of installation."""
        own = [_technique_in(module) for module in _OWN]
        found = sorted((*own, *_others()), key=lambda one: (STAGES.index(one.stage), one.turn, one.name))
        return {technique.name: technique for technique in found}


def _technique_in(module: ModuleType) -> Technique:
    """Create the technique that a module of this folder defines."""
    classes = [one for one in vars(module).values() if isinstance(one, type) and issubclass(one, Technique)]
    (found,) = [one for one in classes if one.__module__ == module.__name__ and not isabstract(one)]
    return found()


def _others() -> Iterator[Technique]:
    """Create the techniques that other packages register as entry points.

    Raises:
        InputError: if an entry point cannot be loaded, is not a technique, or has a name that is taken.
    """
    taken = set(own_techniques())
    for entry in techniques_of_others():
        found = None
        try:
            found = entry.load()
            fault = _fault_of(found, entry.name, taken)
        except _FAULTS as error:
            fault = f"{type(error).__name__}: {error}"
        if fault is not None or found is None:
            package = entry.dist.name if entry.dist is not None else entry.value
            raise InputError(
                f"cannot use the technique {entry.value}: {fault}; remove the package that brings it, {package}"
            )
        taken.add(entry.name)
        yield found()


_FAULTS = (  # errors that loading a third-party module may raise
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)


def _fault_of(found: Any, name: str, taken: Collection[str]) -> str | None:
    """Return the reason why ``found``, a loaded entry point, is not the technique ``name``; ``None`` if it is."""
    if not (isinstance(found, type) and issubclass(found, Technique)) or name in taken or found.name != name:
        return f"it must be a `Technique` whose name is `{name}`, and the only one of that name"
    if missing := sorted(found.__abstractmethods__):
        return f"it has no {' and no '.join(missing)}"
    if found.numerics not in get_args(Numerics):
        return f"its numerics are {found.numerics!r}, and not one of {', '.join(get_args(Numerics))}"
    return None if found.stage in STAGES else f"its stage is {found.stage!r}, and not one of {', '.join(STAGES)}"


TECHNIQUES = _Registry()


def technique_of(name: str) -> Technique:
    """Return a technique by its name.

    Raises:
        InputError: if the name is unknown; the message suggests the nearest name.
    """
    try:
        return TECHNIQUES[name]
    except KeyError:
        require_technique(name, TECHNIQUES)
        raise


def in_order(choices: Iterable[Choice]) -> Choices:
    """Sort choices into the order of installation.

    Raises:
        InputError: if a technique is unknown (see `technique_of`).
    """
    order = list(TECHNIQUES)
    return tuple(sorted(choices, key=lambda choice: order.index(technique_of(choice.technique).name)))


def conflict_among(choices: Choices, workload: Workload, setting: Setting) -> str | None:
    """Return the first reason why choices cannot be installed together; ``None`` if they can."""
    for number, choice in enumerate(choices):
        others = choices[:number] + choices[number + 1 :]
        reason = technique_of(choice.technique).conflicts(choice, others, workload, setting)
        if reason is not None:
            return f"{choice}: {reason}"
    return None


@contextmanager
def installed(workload: Workload, choices: Iterable[Choice]) -> Iterator[None]:
    """Install techniques in order; on exit, restore the workload exactly."""
    with ExitStack() as stack:
        for choice in in_order(choices):
            stack.enter_context(technique_of(choice.technique).install(workload, choice))
        yield


# Imported eagerly, so that imports do not count as memory of a training; below the names that these modules import.
_OWN = tuple(import_module(f"{__name__}.{name}") for name in own_techniques())
