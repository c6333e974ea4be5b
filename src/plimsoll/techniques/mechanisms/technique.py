"""What every technique says of itself and can do, and what it is told of a training before it says what it can do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, get_args

from plimsoll.models.workload import Workload
from plimsoll.records.plan import Choice, Numerics, Value
from plimsoll.records.trace import Category, Phase, Trace

Choices = tuple[Choice, ...]


@dataclass(frozen=True)
class Setting:
    """What a technique must know of a training beside its workload.

    ``trace`` is of the training without techniques but those that are pinned. ``allow`` names the lossy techniques that
    the user allows; ``precision`` is as the job has it (``auto`` leaves it to the plan). ``lengths_vary`` says that
    samples of one batch are of different lengths, and ``sequence_length`` how many tokens the longest has, if known.
    ``batch_size`` is what one of ``num_ranks`` has of a batch.
    """

    device: Literal["cpu", "cuda"]
    batch_size: int
    trace: Trace | None = None
    precision: Literal["fp32", "bf16", "fp16", "auto"] = "fp32"
    allow: frozenset[str] = frozenset()
    lengths_vary: bool = False
    sequence_length: int | None = None
    num_ranks: int = 1


Part = Literal["model", "loss", "optimizer", "precision", "batch cut"]
"""What a technique can modify of a training."""

Moved = Literal["states", "parameters", "activations"]
"""What a technique can keep elsewhere than the training left it."""

Need = Literal["loss", "step"]
"""What a technique can need of the loop it is used in: that the loss is computed by ``workload.loss``, or that the step
is `plimsoll.step.train_step`'s."""

Stage = Literal[
    "precision", "model", "optimizer", "ranks", "batch", "places", "parts", "time", "calls", "update", "graph",
    "evaluation", "memory",
]  # fmt: skip
"""When a technique is installed: first what changes the training or moves states and parameters, which stays at work
when a plan goes on to a fallback that begins alike; then what replaces parts of the model, and what wraps calls of it;
last how memory is handed out."""

STAGES: tuple[Stage, ...] = get_args(Stage)

Tool = Literal["deepspeed", "accelerate", "transformers"]
"""A tool whose settings a plan can be written as: a configuration of DeepSpeed, a file for ``accelerate launch``, and
arguments of `transformers.TrainingArguments`."""


class Exported(NamedTuple):
    """Settings of another tool, as nested dictionaries, and a sentence about what they leave out, if anything."""

    settings: dict[str, Any]
    note: str = ""


Export = Callable[[Choice, Literal["cpu", "cuda"]], Exported | None]
"""From a choice and the device to what does the same in another tool; ``None`` where nothing does."""


def by_deepspeed(choice: Choice, device: Literal["cpu", "cuda"]) -> Exported:
    """`Export` to Accelerate of what it leaves to DeepSpeed."""
    return Exported({"distributed_type": "DEEPSPEED"})


class Technique(ABC):
    """One way to need less memory: one module of this package, or an entry point `plimsoll.techniques` of another.

    Only ``name``, ``numerics``, ``summary``, `choices` and `install` have to be given. The other fields have defaults
    that are safe for whatever says nothing more: it is planned, run and reported, and named as what other tools lack.
    """

    # ``name`` is the registry's key, the word on the command line, the page in ``docs/techniques`` and the test's id.
    # ``numerics`` is what it does to the numbers, and ``summary`` what it does, in a phrase. ``may_be_allowed`` says
    # that a job may have it in ``allow``, where lossy ones have to be, though it is none.
    name: ClassVar[str]
    numerics: ClassVar[Numerics]
    summary: ClassVar[str]
    may_be_allowed: ClassVar[bool] = False

    # ``modifies`` are the parts of a training that it changes, and ``moves`` what it keeps elsewhere. ``reaches`` are
    # the categories of memory that it can make smaller: the planner does not try it where the peak has none of them.
    # ``only_in`` are the phases outside which it changes nothing; none stands for all. ``is_for_the_run`` says that it
    # is installed before the first step and stays for all of a plan's fallbacks, because it changes what is trained.
    modifies: ClassVar[frozenset[Part]] = frozenset()
    moves: ClassVar[frozenset[Moved]] = frozenset()
    reaches: ClassVar[frozenset[Category]] = frozenset()
    only_in: ClassVar[frozenset[Phase]] = frozenset()
    is_for_the_run: ClassVar[bool] = False

    # ``needs`` is what the loop must have, and ``excludes`` has the reason why it cannot be used, by the name of
    # another technique. ``works_on_shards`` says that it can be used where each rank has some rows of the parameters,
    # and ``is_for_trainers`` that a plan for Hugging Face's Trainer may have it. ``sets_up_heap`` says that it sets up
    # the host's heap, as tightly as there is. ``not_captured`` is why a CUDA graph of a pass cannot have it, if so.
    needs: ClassVar[frozenset[Need]] = frozenset()
    excludes: ClassVar[Mapping[str, str]] = {}
    works_on_shards: ClassVar[bool] = False
    is_for_trainers: ClassVar[bool] = False
    sets_up_heap: ClassVar[bool] = False
    not_captured: ClassVar[str] = ""

    # ``may_be_faster`` says that a step may take less time with it: it is then tried also where memory is plenty.
    # ``leaves_out_work`` says that it does nothing else, so that every plan has it that can. ``is_for_whole_batches``
    # says that it does in more time what a micro-batch does. ``decides_time`` says that plans which differ in it are so
    # unlike in time that both are worth a trial. ``unoffered`` are options that `choices` leaves out where they seldom
    # pay, and what they then are.
    may_be_faster: ClassVar[bool] = False
    leaves_out_work: ClassVar[bool] = False
    is_for_whole_batches: ClassVar[bool] = False
    decides_time: ClassVar[bool] = False
    unoffered: ClassVar[Mapping[str, Value]] = {}

    # ``is_traced`` is False of what changes no op, only how memory is handed out: it is counted on a trace that is
    # there. ``keeps_state_between_passes`` is False where passes on the same values do the same, so that one of them is
    # enough. ``spans_blocks`` says that it begins in one block what ends in the next, so that blocks of equal structure
    # do not do the same.
    is_traced: ClassVar[bool] = True
    keeps_state_between_passes: ClassVar[bool] = True
    spans_blocks: ClassVar[bool] = False

    # ``exports`` are its settings in other tools, and ``by_hand`` is what does the same in a script where none has it.
    # ``remedies`` are the causes (`plimsoll.diagnose.causes`) that it is a remedy for, with its place among the
    # remedies of each: 0 is the best.
    exports: ClassVar[Mapping[Tool, Export]] = {}
    by_hand: ClassVar[str] = ""
    remedies: ClassVar[Mapping[str, int]] = {}

    # ``stage`` and ``turn`` say when it is installed: in the order of `STAGES`, then of turns, then of names.
    stage: ClassVar[Stage] = "calls"
    turn: ClassVar[int] = 0

    @abstractmethod
    def choices(self, workload: Workload, setting: Setting) -> Choices | str:
        """Return what can be chosen, weakest first, or a sentence that says why nothing can.

        The workload may be on the meta device: read modules and shapes, run nothing.
        """

    def conflicts(self, choice: Choice, others: Choices, workload: Workload, setting: Setting) -> str | None:
        """Return ``None``, or a sentence that says why a choice is impossible with others.

        It is also asked with no others, for what the workload itself forbids.
        """
        return self.excluded(others)

    def excluded(self, others: Choices) -> str | None:
        """Return why the first of other choices that it excludes cannot go with it, or ``None``."""
        return next((self.excludes[one.technique] for one in others if one.technique in self.excludes), None)

    def exported(self, choice: Choice, tool: Tool, device: Literal["cpu", "cuda"]) -> Exported | None:
        """Return what does the same in another tool, or ``None`` where nothing does."""
        export = self.exports.get(tool)
        return export(choice, device) if export is not None else None

    @abstractmethod
    def install(self, workload: Workload, choice: Choice) -> AbstractContextManager[None]:
        """Put the technique to work on a live (or fake) training; the exit restores everything exactly.

        Nothing is half installed: an error on the way in leaves the workload as it was.
        """
