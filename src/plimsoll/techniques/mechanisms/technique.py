"""The interface of techniques, and the facts about a training from which a technique derives its choices."""

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
"""A function that computes something with a few real samples. It returns the reason why that fails, or ``None``."""


@dataclass(frozen=True)
class Setting:
    """The facts about a training, in addition to its workload, that a technique needs.

    Attributes:
        device: the kind of device that computes.
        batch_size: number of samples per batch on this rank.
        trace: a trace of the training without techniques other than pinned ones; ``None``: not traced yet.
        precision: the precision that the job sets; ``auto`` leaves it to the plan.
        allow: the names that the user allows, such as lossy techniques.
        lengths_vary: whether samples of one batch differ in length.
        sequence_length: number of tokens of the longest sample, if known.
        num_ranks: number of ranks that train together.
        ask_rows: calls a function with a few real samples, and undoes its effects; ``None`` if there are no samples.
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
"""A part of the training that a technique can modify."""

Moved = Literal["states", "parameters", "activations"]
"""Data that a technique can move off the device."""

Need = Literal["loss", "step"]
"""A requirement on the training loop.

``loss``: the loop computes its loss with ``workload.loss``. ``step``: the loop uses `plimsoll.step.train_step`."""

Stage = Literal[
    "precision", "model", "optimizer", "ranks", "batch", "places", "parts", "time", "calls", "update", "graph",
    "evaluation", "memory",
]  # fmt: skip
"""The stage at which a technique is installed; stages follow each other in this order.

1. Techniques that change the training, or move states and parameters. They stay installed when a run moves to a
   fallback whose first choices are the same.
2. Techniques that replace parts of the model, and those that wrap calls of it.
3. Techniques that change how memory is allocated.
"""

STAGES: tuple[Stage, ...] = get_args(Stage)

Tool = Literal["deepspeed", "accelerate", "transformers"]
"""A tool that a plan can be exported to.

The exports are a DeepSpeed configuration, a file for ``accelerate launch``, and arguments of
`transformers.TrainingArguments`.
"""


class Exported(NamedTuple):
    """Settings of another tool as nested dictionaries, and a note about the settings that could not be exported."""

    settings: dict[str, Any]
    note: str = ""


Export = Callable[[Choice, Literal["cpu", "cuda"]], Exported | None]
"""A function that returns the settings of another tool that are equivalent to a choice on a device.

It returns ``None`` if the tool has no equivalent.
"""


def by_deepspeed(choice: Choice, device: Literal["cpu", "cuda"]) -> Exported:
    """Return the settings of Accelerate that make it use DeepSpeed, which has its own configuration file."""
    return Exported({"distributed_type": "DEEPSPEED"})


class Technique(ABC):
    """A way to reduce memory or time: a module of this package, or an entry point `plimsoll.techniques` elsewhere.

    A subclass must define ``name``, ``numerics``, ``summary``, `choices` and `install`. The defaults of all other
    fields are safe: the technique is planned, run and reported, and exports list it as missing from other tools.
    """

    # Identity.
    name: ClassVar[str]  # key of the registry, word on the command line, page in docs/techniques, id of its tests
    numerics: ClassVar[Numerics]  # its effect on the results of the training
    summary: ClassVar[str]  # its effect, as a phrase
    may_be_allowed: ClassVar[bool] = False  # a job may list it under ``allow`` although it is not lossy

    # Effects.
    modifies: ClassVar[frozenset[Part]] = frozenset()  # parts of the training that it changes
    moves: ClassVar[frozenset[Moved]] = frozenset()  # data that it moves off the device
    reaches: ClassVar[frozenset[Category]] = frozenset()  # memory that it reduces; not tried if the peak has none of it
    only_in: ClassVar[frozenset[Phase]] = frozenset()  # the phases in which it changes something; empty: all of them
    is_for_the_run: ClassVar[bool] = False  # changes the trained model, so all fallbacks of a plan have it

    # Compatibility.
    needs: ClassVar[frozenset[Need]] = frozenset()  # requirements on the training loop
    excludes: ClassVar[Mapping[str, str]] = {}  # other techniques by name, with the reason why they cannot be combined
    works_on_shards: ClassVar[bool] = False  # works if each rank has only some rows of the parameters
    is_for_trainers: ClassVar[bool] = False  # may be part of a plan for Hugging Face's Trainer
    sets_up_heap: ClassVar[bool] = False  # configures the host heap for the lowest memory
    cuts_time: ClassVar[bool] = False  # recurrent layers never read a whole sequence in one call
    cuts_by_length: ClassVar[bool] = False  # samples of similar length share a micro-batch
    not_captured: ClassVar[str] = ""  # the reason why a CUDA graph of a pass cannot include it, if any

    # How plans are searched.
    may_be_faster: ClassVar[bool] = False  # may reduce the step time, so it is tried even if memory is plentiful
    leaves_out_work: ClassVar[bool] = False  # only avoids work, so a plan uses it if it can
    is_for_whole_batches: ClassVar[bool] = False  # has the effect of a smaller micro-batch, but is slower
    decides_time: ClassVar[bool] = False  # step times with and without it differ so much that both deserve a trial
    unoffered: ClassVar[Mapping[str, Value]] = {}  # options that `choices` omits as they rarely help, with their values

    # Work that a dry run may skip.
    is_traced: ClassVar[bool] = True  # False: changes how memory is allocated but no op, so a given trace is replayed
    keeps_state_between_passes: ClassVar[bool] = True  # False: a dry run runs one of all passes with equal input values
    spans_blocks: ClassVar[bool] = False  # starts work in one block that ends in the next, so equal blocks may differ

    # Equivalents elsewhere.
    exports: ClassVar[Mapping[Tool, Export]] = {}  # its settings in other tools
    by_hand: ClassVar[str] = ""  # instructions for a user's own script; printed by exports and `explain`
    remedies: ClassVar[Mapping[str, int]] = {}  # causes (`plimsoll.diagnose.causes`) it helps with; 0: the best remedy

    # Order of installation: by `STAGES`, then by turn, then by name.
    stage: ClassVar[Stage] = "calls"
    turn: ClassVar[int] = 0

    @abstractmethod
    def choices(self, workload: Workload, setting: Setting) -> Choices | str:
        """Return the possible choices, from weakest to strongest, or the reason, a sentence, why no choice is possible.

        The workload may be on the meta device: read modules and shapes, run nothing.
        """

    def conflicts(self, choice: Choice, others: Choices, workload: Workload, setting: Setting) -> str | None:
        """Return the reason why a choice cannot be combined with others; ``None`` if it can.

        It is also called without other choices, to find out whether the workload itself rules the choice out.
        """
        return self.excluded(others)

    def excluded(self, others: Choices) -> str | None:
        """Return the reason why this technique excludes one of the other choices; ``None`` if it excludes none."""
        return next((self.excludes[one.technique] for one in others if one.technique in self.excludes), None)

    def precision_of(self, choice: Choice) -> Precision | None:
        """Return the autocast precision that a choice sets, or ``None`` if the job decides."""
        return None

    def gradient_steps(self, choice: Choice, num_steps: int) -> int | None:
        """Return the maximum number of time steps, of ``num_steps``, that gradients reach back; ``None``: all steps."""
        return None

    def builds_outside(self, choice: Choice, device: Literal["cpu", "cuda"]) -> bool:
        """Return whether the model must be built outside the memory of its device, which may not hold it.

        The parameters are then in files if the device is the CPU, and in host memory on CUDA.
        """
        return False

    def kept_on_host(self, choice: Choice, model: nn.Module) -> Set[nn.Parameter]:
        """Return the parameters that stay in host memory when the model moves to its device."""
        return frozenset()

    def heap_rules(self, choice: Choice) -> HeapRules | None:
        """Return the host heap rules that a choice sets, or ``None`` if it sets none."""
        return TIGHT_HEAP if self.sets_up_heap else None

    def allocator_settings(self, choice: Choice) -> str:
        """Return settings of torch's CUDA allocator in the format of ``PYTORCH_CUDA_ALLOC_CONF``; "" for none."""
        return ""

    def exported(self, choice: Choice, tool: Tool, device: Literal["cpu", "cuda"]) -> Exported | None:
        """Return the settings of another tool that are equivalent to a choice; ``None`` if it has no equivalent."""
        export = self.exports.get(tool)
        return export(choice, device) if export is not None else None

    @abstractmethod
    def install(self, workload: Workload, choice: Choice) -> AbstractContextManager[None]:
        """Install the technique on a real training or a dry run; the exit restores the workload exactly.

        Installation is atomic: if it fails, the workload is unchanged.
        """
