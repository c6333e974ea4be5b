"""What every technique offers, and what it is told of a training before it says what it can do for it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

from plimsoll.models.workload import Workload
from plimsoll.records.plan import Choice, Numerics
from plimsoll.records.trace import Category, Trace

Choices = tuple[Choice, ...]


@dataclass(frozen=True)
class Setting:
    """What a technique must know of a training beside its workload.

    ``trace`` is of the training without techniques but those that are pinned. ``allow`` names the lossy techniques that
    the user allows; ``precision`` is as the job has it (``auto`` leaves it to the plan). ``lengths_vary`` says that
    samples of one batch are of different lengths, and ``sequence_length`` how many tokens the longest has, if known.
    ``batch_size`` is what one of ``num_ranks`` that train together has of a batch.
    """

    device: Literal["cpu", "cuda"]
    batch_size: int
    trace: Trace | None = None
    precision: Literal["fp32", "bf16", "fp16", "auto"] = "fp32"
    allow: frozenset[str] = frozenset()
    lengths_vary: bool = False
    sequence_length: int | None = None
    num_ranks: int = 1


class Technique(Protocol):
    """One way to need less memory: one module of this package, listed in its ``__init__``.

    ``name`` is the registry's key, the word on the command line, the page in ``docs/techniques`` and the test's id.
    ``reaches`` are the categories of memory that it can make smaller: the planner does not try it where the peak has
    none of them. ``is_for_the_run`` says that it is installed before the first step and stays for all of a plan's
    fallbacks, because it changes what is trained. ``may_be_faster`` says that a step may take less time with it: it is
    then tried also where memory is plenty.
    """

    name: ClassVar[str]
    numerics: ClassVar[Numerics]
    summary: ClassVar[str]
    reaches: ClassVar[frozenset[Category]]
    is_for_the_run: ClassVar[bool]
    may_be_faster: ClassVar[bool]

    def choices(self, workload: Workload, setting: Setting) -> Choices | str:
        """Return what can be chosen, weakest first, or a sentence that says why nothing can.

        The workload may be on the meta device: look at modules and shapes, run nothing.
        """
        ...

    def conflicts(self, choice: Choice, others: Choices, workload: Workload, setting: Setting) -> str | None:
        """Return ``None``, or a sentence that says why a choice is impossible together with others.

        It is also asked with no others, for what the workload itself forbids.
        """
        ...

    def install(self, workload: Workload, choice: Choice) -> AbstractContextManager[None]:
        """Put the technique to work on a live (or fake) training; the exit restores everything exactly.

        Nothing is half installed: an error on the way in leaves the workload as it was.
        """
        ...
