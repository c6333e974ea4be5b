"""What every technique says of itself and can do, and what it is told of a training before it says what it can do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, get_args

from torch import nn

from plimsoll.models.workload import Precision, Workload
from plimsoll.records.allocator import TIGHT_HEAP, HeapRules
from plimsoll.records.plan import Choice, Numerics, Value
from plimsoll.records.trace import Category, Phase, Trace

Choices = tuple[Choice, ...]

OfRows = Callable[[Workload, Any], str | None]
"""Computes something with a few real samples; returns why it cannot be, or ``None``."""


@dataclass(frozen=True)
class Setting:
    """What a technique must know of a training beside its workload.

    ``trace`` is of the training without techniques but those that are pinned. ``allow`` names the lossy techniques that
    the user allows; ``precision`` is as the job has it (``auto`` leaves it to the plan). ``lengths_vary`` says that
    samples of one batch are of different lengths, and ``sequence_length`` how many tokens the longest has, if known.
    ``batch_size`` is what one of ``num_ranks`` that train together has of a batch. ``ask_rows`` asks a function with a
    few real samples, and undoes what that computes; ``None`` where there are none.
    """

    device: Literal["cpu", "cuda"]
    batch_size: int
    trace: Trace | None = None
    precision: Literal["fp32", "bf16", "fp16", "auto"] = "fp32"
    allow: frozenset[str] = frozenset()
    lengths_vary: bool = False
    sequence_length: int | None = None
    num_ranks: int = 1
    ask_rows: Callable[[OfRows], str | None] | None = None


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

    # What it is.
    name: ClassVar[str]  # key of the registry, word on the command line, page in docs/techniques, id of its tests
    numerics: ClassVar[Numerics]  # what it changes about the numbers
    summary: ClassVar[str]  # what it does, in a phrase
    may_be_allowed: ClassVar[bool] = False  # a job may list it under ``allow`` although it is not lossy

    # What it does.
    modifies: ClassVar[frozenset[Part]] = frozenset()  # parts of the training that it changes
    moves: ClassVar[frozenset[Moved]] = frozenset()  # what it keeps elsewhere
    reaches: ClassVar[frozenset[Category]] = frozenset()  # memory it can reduce; not tried if the peak has none of it
    only_in: ClassVar[frozenset[Phase]] = frozenset()  # the phases in which it changes something; empty: all of them
    is_for_the_run: ClassVar[bool] = False  # changes what is trained, so it stays for all fallbacks of a plan

    # What goes with it.
    needs: ClassVar[frozenset[Need]] = frozenset()  # what the loop must provide
    excludes: ClassVar[Mapping[str, str]] = {}  # other techniques by name, with the reason why they cannot be combined
    works_on_shards: ClassVar[bool] = False  # works where each rank has only some rows of the parameters
    is_for_trainers: ClassVar[bool] = False  # may be part of a plan for Hugging Face's Trainer
    sets_up_heap: ClassVar[bool] = False  # sets up the host's heap for the least memory
    cuts_time: ClassVar[bool] = False  # recurrent layers never read a whole sequence in one call
    cuts_by_length: ClassVar[bool] = False  # samples of similar length share a micro-batch
    not_captured: ClassVar[str] = ""  # why a CUDA graph of a pass cannot include it, if it cannot

    # How plans are searched.
    may_be_faster: ClassVar[bool] = False  # may shorten a step, so it is tried even if memory is plentiful
    leaves_out_work: ClassVar[bool] = False  # only leaves out work, so every plan that can has it
    is_for_whole_batches: ClassVar[bool] = False  # does what a micro-batch does, but slower
    decides_time: ClassVar[bool] = False  # plans with and without it differ so much in time that both deserve a trial
    unoffered: ClassVar[Mapping[str, Value]] = {}  # options that `choices` omits as they seldom pay, with their values

    # What a dry run may leave out.
    is_traced: ClassVar[bool] = True  # False: changes how memory is handed out but no op, so a given trace is replayed
    keeps_state_between_passes: ClassVar[bool] = True  # False: one pass stands for all passes on equal values
    spans_blocks: ClassVar[bool] = False  # starts work in one block that ends in the next, so equal blocks may differ

    # What it is called elsewhere.
    exports: ClassVar[Mapping[Tool, Export]] = {}  # its settings in other tools
    by_hand: ClassVar[str] = ""  # what to do in a script of one's own; said by exports and `explain`
    remedies: ClassVar[Mapping[str, int]] = {}  # causes (`plimsoll.diagnose.causes`) it helps with; 0: the best remedy

    # When it is installed: in the order of `STAGES`, then of turns, then of names.
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

    def precision_of(self, choice: Choice) -> Precision | None:
        """Return what autocast computes in with a choice, or ``None`` where that is as the job says."""
        return None

    def gradient_steps(self, choice: Choice, num_steps: int) -> int | None:
        """Return how many steps gradients reach back at most in a sequence of so many; ``None``: to its beginning."""
        return None

    def builds_outside(self, choice: Choice, device: Literal["cpu", "cuda"]) -> bool:
        """Whether a model is to be built outside of the memory of its device, which may not hold it.

        On a CPU that is in files, on CUDA on the host.
        """
        return False

    def kept_on_host(self, choice: Choice, model: nn.Module) -> Set[nn.Parameter]:
        """Return the parameters that stay on the host when a model is put on its device."""
        return frozenset()

    def heap_rules(self, choice: Choice) -> HeapRules | None:
        """Return the rules of the host's heap with a choice, or ``None`` where it does not set the heap up."""
        return TIGHT_HEAP if self.sets_up_heap else None

    def allocator_settings(self, choice: Choice) -> str:
        """Return what is set of torch's CUDA allocator, as ``PYTORCH_CUDA_ALLOC_CONF`` has it; "" for nothing."""
        return ""

    def exported(self, choice: Choice, tool: Tool, device: Literal["cpu", "cuda"]) -> Exported | None:
        """Return what does the same in another tool, or ``None`` where nothing does."""
        export = self.exports.get(tool)
        return export(choice, device) if export is not None else None

    @abstractmethod
    def install(self, workload: Workload, choice: Choice) -> AbstractContextManager[None]:
        """Put the technique to work on a live (or fake) training; the exit restores everything exactly.

        Nothing is half installed: an error on the way in leaves the workload as it was.
        """
