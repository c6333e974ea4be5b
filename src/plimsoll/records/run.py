"""The events of a run, one per line of ``metrics.jsonl``, and the record that is built from them.

Each line is appended when its event has happened. So the directory of a killed run can be read like the directory of a
finished run (``RunRecord.from_directory``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, TypeAdapter, ValidationError

from plimsoll.errors import RecordError
from plimsoll.records.base import FormerNames, Frozen, Record
from plimsoll.records.device import Device
from plimsoll.records.plan import LossCheck, Plan
from plimsoll.records.units import format_bytes

Phase = Literal["fetch", "copy", "forward", "loss", "backward", "clip", "optimizer", "evaluation", "checkpoint"]
PHASES_OF_A_STEP: tuple[Phase, ...] = ("fetch", "copy", "forward", "loss", "backward", "clip", "optimizer")

_FORMER_NAMES = {"rung": "fallback", "next_rung": "next_fallback"}


class OomEvent(FormerNames):
    """An out-of-memory error: the phase that was running, the request, the memory in use, and the reaction.

    ``family`` is the kind of the error, such as the allocator that raised it. ``micro_batch`` and ``fallback`` were in
    use when memory ran out; ``next_micro_batch`` and ``next_fallback`` are for the retry. ``action`` describes the
    reaction. ``survived`` is false if the error ended the run.

    ``step`` counts from 1. For an error in an evaluation or a checkpoint, it is the last completed step. Fallbacks are
    numbered from 0 as in the plan; they are ``None`` in an evaluation. With several ranks, ``rank`` is the lowest rank
    that ran out of memory, and ``num_other_ranks`` counts the other ranks that also ran out of memory.
    """

    former_names: ClassVar[Mapping[str, str]] = _FORMER_NAMES

    event: Literal["oom"] = "oom"
    time_seconds: float = 0.0
    step: int | None = None
    phase: Phase | None = None
    family: str
    requested_bytes: int | None = None
    live_bytes: int | None = None
    reserved_bytes: int | None = None
    capacity_bytes: int | None = None
    micro_batch: int | None = None
    next_micro_batch: int | None = None
    fallback: int | None = None
    next_fallback: int | None = None
    action: str = ""
    survived: bool = True
    raw_text: str = ""
    rank: int | None = None
    num_other_ranks: int = 0

    @property
    def on_which_ranks(self) -> str:
        """The ranks that ran out of memory, such as " on rank 1 and 2 more"; empty for a single process."""
        others = f" and {self.num_other_ranks} more" if self.num_other_ranks else ""
        return "" if self.rank is None else f" on rank {self.rank}{others}"

    @property
    def shortage(self) -> str:
        """A phrase for messages: the ranks, the requested bytes (if the error states them) and the memory in use."""
        where = self.on_which_ranks.strip()
        if self.live_bytes is None:
            return where or "the memory in use is unknown"
        asked = f"asked for {format_bytes(self.requested_bytes)} with " if self.requested_bytes else ""
        limit = f" of {format_bytes(self.capacity_bytes)}" if self.capacity_bytes else ""
        return f"{where and f'{where}, '}{asked}{format_bytes(self.live_bytes)} in use{limit}"

    @property
    def is_fragmented(self) -> bool:
        """True if torch's CUDA allocator held enough unused memory for the request, but only in holes.

        Before it raises the error, the allocator has already released segments that are completely unused.
        """
        unused_bytes = (self.reserved_bytes or 0) - (self.live_bytes or 0)
        return self.family == "cuda" and self.requested_bytes is not None and unused_bytes >= self.requested_bytes


class GradientReach(Frozen):
    """The number of earlier tokens that a gradient reaches, if it stops at the start of a window or text.

    ``most_tokens`` is the maximum and ``mean_tokens`` the mean over the tokens that are predicted in an epoch. Tokens
    farther back influence a prediction only through the state of the model.
    """

    most_tokens: int = Field(ge=1)
    mean_tokens: float = Field(ge=1)


class StepLine(FormerNames):
    """One completed optimizer step.

    Its samples are the ``num_samples`` samples from position ``first_sample`` of the epoch's order. ``num_units`` is
    the number of samples or tokens that the loss averages over.

    ``used_bytes`` is the memory in use after the step. If user code retains no tensors, it is the same after every
    step. With several ranks, ``peak_bytes`` is the maximum over the ranks, and ``used_bytes`` and ``memory`` were
    measured on rank 0.
    """

    former_names: ClassVar[Mapping[str, str]] = _FORMER_NAMES

    event: Literal["step"] = "step"
    time_seconds: float
    step: int
    epoch: int
    first_sample: int
    num_samples: int
    num_units: int | float
    loss: float
    gradient_norm: float | None = None
    learning_rate: float
    step_seconds: float
    micro_batch: int
    fallback: int = 0
    peak_bytes: int | None = None
    used_bytes: int | None = None
    updated: bool = True
    memory: tuple[tuple[float, int], ...] = ()
    peak_bytes_of_ranks: tuple[int, ...] = ()


class EvaluationLine(Frozen):
    """One pass over the validation samples.

    ``accuracy`` is the share of correct labels: of texts in classification, of words in token classification.
    ``entity_f1`` is the F1 score of whole entities, if tags are B-..., I-... and O.
    """

    event: Literal["evaluation"] = "evaluation"
    time_seconds: float
    step: int
    loss: float
    num_samples: int
    num_units: int | float
    accuracy: float | None = None
    entity_f1: float | None = None


class CheckpointLine(Frozen):
    """A checkpoint that was completely written to the disk."""

    event: Literal["checkpoint"] = "checkpoint"
    time_seconds: float
    step: int
    num_bytes: int


class RetainedGraph(Frozen):
    """Tensors that user code retains after a step together with their autograd graph (``grad_fn``).

    ``holder`` is the attribute or variable that refers to them, such as ``model.history``. It is "" if only losses of
    earlier steps are known to be alive. ``marked_steps`` are the earlier steps whose graph was marked, to detect when
    it is freed. ``alive_steps`` are the marked steps whose graph is still in memory. ``num_bytes`` is the storage of
    the tensors on the training device. ``graph_bytes`` is the additional memory that the ``num_nodes`` operations of
    their graph keep alive (``None``: not counted). ``place`` and ``code`` are the line of user code that retains the
    tensors, and ``remedy`` is a replacement for this line ("": not found).
    """

    holder: str
    num_tensors: int
    num_bytes: int
    num_nodes: int | None = None
    graph_bytes: int | None = None
    marked_steps: tuple[int, ...]
    alive_steps: tuple[int, ...]
    place: str = ""
    code: str = ""
    remedy: str = ""


class GraphLine(FormerNames):
    """Graphs of earlier steps that were still in memory after a step. Steps without such graphs have no line."""

    former_names: ClassVar[Mapping[str, str]] = {"held": "retained"}

    event: Literal["graph"] = "graph"
    time_seconds: float = 0.0
    step: int
    retained: tuple[RetainedGraph, ...]


class LossLine(Frozen):
    """The result of the check whether a batch may be split. It was made before or in step ``step``."""

    event: Literal["loss"] = "loss"
    time_seconds: float = 0.0
    step: int
    check: LossCheck


class StartLine(FormerNames):
    """The start of a training process, which resumes after ``step`` completed steps.

    ``restarts`` counts the deaths of earlier training processes under the same supervisor. With ranks of torchrun,
    ``oom_kills`` is the kernel's count of OOM kills until this moment, by machine name.
    """

    former_names: ClassVar[Mapping[str, str]] = _FORMER_NAMES

    event: Literal["start"] = "start"
    time_seconds: float
    step: int
    micro_batch: int
    fallback: int = 0
    baseline_bytes: int
    restarts: int = 0
    wall_time: str
    oom_kills: dict[str, int] = {}


class DeathLine(FormerNames):
    """The death of the training process. ``evidence`` describes the cause and how it is known, for the user.

    ``restarted_from_step`` is the step of the checkpoint from which training resumes; ``None`` if the supervisor gave
    up. ``next_fallback`` and ``next_micro_batch`` are for the next process.
    """

    former_names: ClassVar[Mapping[str, str]] = _FORMER_NAMES

    event: Literal["death"] = "death"
    time_seconds: float
    signal: str
    evidence: str
    restarted_from_step: int | None = None
    next_fallback: int | None = None
    next_micro_batch: int | None = None


class EndLine(Frozen):
    """The end of a run."""

    event: Literal["end"] = "end"
    time_seconds: float
    step: int
    status: Literal["finished", "interrupted", "failed"]
    message: str = ""


Line = OomEvent | StepLine | GraphLine | LossLine | EvaluationLine | CheckpointLine | StartLine | DeathLine | EndLine
_LINE: TypeAdapter[Line] = TypeAdapter(Annotated[Line, Field(discriminator="event")])


def read_lines(path: Path) -> Iterator[Line]:
    """Yield the parsed lines of ``metrics.jsonl``. An incomplete last line, left by a kill, is skipped.

    Raises:
        RecordError: if a line other than the last cannot be read.
    """
    with path.open("rb") as file:  # bytes, because a kill can cut a line inside a character
        for number, text in enumerate(file, start=1):
            if not text.endswith(b"\n"):
                return
            yield parse_line(text, f"line {number} of {path}")


def parse_line(text: bytes, source: str) -> Line:
    """Parse one line of ``metrics.jsonl``. ``source`` names the line in error messages.

    Raises:
        RecordError: if the text is not a valid line.
    """
    try:
        return _LINE.validate_json(text)
    except ValidationError as error:
        why = error.errors()[0]["msg"]
        raise RecordError(f"{source} is not a metrics line ({why}): remove it or make the run again") from None


class Timeline(Frozen):
    """Memory over time, as columns. ``used_bytes`` is private memory on the CPU, allocated memory on CUDA."""

    source: Literal["predicted", "measured"]
    time_seconds: tuple[float, ...] = ()
    used_bytes: tuple[int, ...] = ()

    @property
    def peak_bytes(self) -> int | None:
        """The maximum of ``used_bytes``; ``None`` for an empty timeline."""
        return max(self.used_bytes, default=None)


class RunRecord(Record):
    """A run, finished or not: its job, plan and device, and all events in the order in which they happened."""

    record_kind: ClassVar[str] = "run"
    schema_version: ClassVar[int] = 2
    also_reads: ClassVar[frozenset[int]] = frozenset({1})

    name: str
    job: dict[str, Any]
    plan: Plan
    device: Device
    versions: dict[str, str] = {}
    status: Literal["running", "finished", "interrupted", "failed"]
    message: str = ""
    steps: tuple[StepLine, ...] = ()
    graphs: tuple[GraphLine, ...] = ()
    losses: tuple[LossLine, ...] = ()
    evaluations: tuple[EvaluationLine, ...] = ()
    checkpoints: tuple[CheckpointLine, ...] = ()
    oom_events: tuple[OomEvent, ...] = ()
    starts: tuple[StartLine, ...] = ()
    deaths: tuple[DeathLine, ...] = ()
    timeline: Timeline = Timeline(source="measured")
    gradient_reach: GradientReach | None = None
    preparation_bytes: int | None = None

    @property
    def limit_bytes(self) -> int | None:
        """The device budget of the run in bytes; ``None`` if the run has no budget."""
        return self.plan.budget.device_bytes

    @property
    def peak_bytes(self) -> int | None:
        """The peak memory during and between steps, in bytes; ``None`` if it was not measured."""
        seen = [step.peak_bytes for step in self.steps if step.peak_bytes is not None]
        return max([*seen, *self.timeline.used_bytes], default=None)

    @property
    def peak_bytes_of_ranks(self) -> tuple[int, ...]:
        """The peak bytes of each rank, over the steps that ran with the last number of ranks; empty for one process."""
        steps = self.finished_steps
        num_ranks = len(steps[-1].peak_bytes_of_ranks) if steps else 0
        alike = [step.peak_bytes_of_ranks for step in steps if len(step.peak_bytes_of_ranks) == num_ranks]
        return tuple(max(peaks) for peaks in zip(*alike, strict=True))

    @property
    def finished_steps(self) -> tuple[StepLine, ...]:
        """Each completed step once, in order. If a step was repeated after a restart, its last line counts."""
        latest = {line.step: line for line in self.steps}
        return tuple(latest[step] for step in sorted(latest))

    @property
    def unit_name(self) -> Literal["samples", "tokens"]:
        """The unit that the loss averages over: samples in classification, otherwise tokens."""
        return "samples" if self.job.get("task") == "classification" else "tokens"

    @property
    def units_per_second(self) -> float | None:
        """Samples or tokens (see `unit_name`) per second of step time; ``None`` if no step has completed.

        The first step is left out as a warm-up, unless it is the only step.
        """
        counted = self.steps[1:] or self.steps
        seconds = sum(step.step_seconds for step in counted)
        return sum(step.num_units for step in counted) / seconds if seconds else None

    @classmethod
    def from_directory(cls, directory: Path) -> RunRecord:
        """Read a run directory, also if the run is still in progress or was killed.

        Raises:
            RecordError: if the directory is not a run directory or a file in it is damaged.
        """
        if not (directory / "plan.json").is_file():
            raise RecordError(
                f"{directory} is not a run directory (it has no plan.json): give the --out of `plimsoll train`"
                if directory.exists()
                else f"there is no file or folder {directory}: give the --out of `plimsoll train`, or a file"
            )
        if not (directory / "run.json").exists():
            raise RecordError(
                f"the run in {directory} has not begun to train, so there is nothing to report: wait until it has, or "
                "train it with `plimsoll train`"
            )
        head = RunHead.load(directory / "run.json")
        metrics = directory / "metrics.jsonl"
        lines = list(read_lines(metrics)) if metrics.is_file() else []
        steps = tuple(line for line in lines if isinstance(line, StepLine))
        ends = [line for line in lines if isinstance(line, EndLine)]
        ended = ends[-1] if ends and isinstance(lines[-1], EndLine) else None
        points = [point for step in steps for point in step.memory]
        return cls(
            name=directory.resolve().name,
            job=head.job,
            device=head.device,
            versions=head.versions,
            gradient_reach=head.gradient_reach,
            preparation_bytes=head.preparation_bytes,
            plan=Plan.load(directory / "plan.json"),
            status=ended.status if ended else "running",
            message=ended.message if ended else "",
            steps=steps,
            graphs=tuple(line for line in lines if isinstance(line, GraphLine)),
            losses=tuple(line for line in lines if isinstance(line, LossLine)),
            evaluations=tuple(line for line in lines if isinstance(line, EvaluationLine)),
            checkpoints=tuple(line for line in lines if isinstance(line, CheckpointLine)),
            oom_events=tuple(line for line in lines if isinstance(line, OomEvent)),
            starts=tuple(line for line in lines if isinstance(line, StartLine)),
            deaths=tuple(line for line in lines if isinstance(line, DeathLine)),
            timeline=Timeline(
                source="measured",
                time_seconds=tuple(seconds for seconds, _ in points),
                used_bytes=tuple(used for _, used in points),
            ),
        )


class RunHead(Record):
    """The facts about a run before its first step, stored in ``run.json``.

    ``gradient_reach`` counts the earlier tokens that a gradient reaches; ``None`` if it reaches through whole samples.
    ``preparation_bytes`` is the peak private memory of indexing, tokenizer training and tokenization, if a separate
    process measured it.
    """

    record_kind: ClassVar[str] = "run-head"

    job: dict[str, Any]
    device: Device
    versions: dict[str, str]
    fingerprint: dict[str, str]
    gradient_reach: GradientReach | None = None
    preparation_bytes: int | None = None
