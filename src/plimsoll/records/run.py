"""What happened in a run: one line of ``metrics.jsonl`` per event, and the record made of them.

A run directory is the run's memory: every line is appended when its event has happened, so a killed run can be read
as well as a finished one. ``RunRecord.from_directory`` is the only reader.
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
    """An out-of-memory error: what was running, what was asked for, and what was done about it.

    ``step`` is the step that was running, counted from 1; in an evaluation or a checkpoint the step before it.
    Fallbacks are those of the plan, counted from 0; an evaluation has none. ``rank`` is the first rank on which memory
    ran out, where several train together, and ``num_other_ranks`` on how many more it did.
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
        """On which of several ranks, such as " on rank 1 and 2 more"; empty where there is one."""
        others = f" and {self.num_other_ranks} more" if self.num_other_ranks else ""
        return "" if self.rank is None else f" on rank {self.rank}{others}"

    @property
    def shortage(self) -> str:
        """On which of several ranks, what was asked for (not every error says) and what was in use, for a message."""
        where = self.on_which_ranks.strip()
        if self.live_bytes is None:
            return where or "the memory in use is unknown"
        asked = f"asked for {format_bytes(self.requested_bytes)} with " if self.requested_bytes else ""
        limit = f" of {format_bytes(self.capacity_bytes)}" if self.capacity_bytes else ""
        return f"{where and f'{where}, '}{asked}{format_bytes(self.live_bytes)} in use{limit}"

    @property
    def is_fragmented(self) -> bool:
        """Whether CUDA's allocator had as much as was asked for, in holes: it had given back all that was whole."""
        unused_bytes = (self.reserved_bytes or 0) - (self.live_bytes or 0)
        return self.family == "cuda" and self.requested_bytes is not None and unused_bytes >= self.requested_bytes


class GradientReach(Frozen):
    """How many tokens back the gradient of a loss reaches where it stops at the begin of a window or of a text.

    ``mean_tokens`` is over the tokens that are predicted in an epoch; what comes before is known by its state alone.
    """

    most_tokens: int = Field(ge=1)
    mean_tokens: float = Field(ge=1)


class StepLine(FormerNames):
    """One optimizer step that happened. ``first_sample``..``+num_samples`` are positions in the epoch's order.

    ``used_bytes`` is what was in use when the step was over, which in a training that keeps nothing stays the same. Of
    several ranks ``peak_bytes`` is of the one that took most, and the rest of the first.
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

    ``accuracy`` is the share of right labels, of texts in classification and of words in token-classification;
    ``entity_f1`` is that of whole entities, where tags are B-..., I-... and O.
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
    """A checkpoint that is complete on disk."""

    event: Literal["checkpoint"] = "checkpoint"
    time_seconds: float
    step: int
    num_bytes: int


class RetainedGraph(Frozen):
    """Tensors that something of the user's keeps after a step with the graph that made them (their ``grad_fn``).

    ``holder`` is the attribute or the variable that has them, such as ``model.history``; "" where only the losses of
    earlier steps are known to be alive. ``marked_steps`` are the steps whose graph was marked before, of which
    ``alive_steps`` are still in memory. ``num_bytes`` is the storage of the tensors themselves, on the device of the
    training; ``graph_bytes`` what their graph keeps besides, of ``num_nodes`` operations (``None``: not counted).
    ``place``, ``code`` and ``remedy`` are the line of the user's that keeps them, and what to write instead ("": not
    found).
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
    """What of earlier steps' graphs was still in memory after a step; there is none where nothing was."""

    former_names: ClassVar[Mapping[str, str]] = {"held": "retained"}

    event: Literal["graph"] = "graph"
    time_seconds: float = 0.0
    step: int
    retained: tuple[RetainedGraph, ...]


class LossLine(Frozen):
    """What was found, in or before a step, of whether a batch may be cut."""

    event: Literal["loss"] = "loss"
    time_seconds: float = 0.0
    step: int
    check: LossCheck


class StartLine(FormerNames):
    """A training process began, at ``step`` finished steps; ``restarts`` counts those that were killed before it.

    ``oom_kills`` has how many processes the kernel had killed for memory on each machine of several ranks, by its name.
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
    """The training process was killed; ``evidence`` is what the machine says about it."""

    former_names: ClassVar[Mapping[str, str]] = _FORMER_NAMES

    event: Literal["death"] = "death"
    time_seconds: float
    signal: str
    evidence: str
    restarted_from_step: int | None = None
    next_fallback: int | None = None
    next_micro_batch: int | None = None


class EndLine(Frozen):
    """How the run ended."""

    event: Literal["end"] = "end"
    time_seconds: float
    step: int
    status: Literal["finished", "interrupted", "failed"]
    message: str = ""


Line = OomEvent | StepLine | GraphLine | LossLine | EvaluationLine | CheckpointLine | StartLine | DeathLine | EndLine
_LINE: TypeAdapter[Line] = TypeAdapter(Annotated[Line, Field(discriminator="event")])


def read_lines(path: Path) -> Iterator[Line]:
    """Read ``metrics.jsonl`` line by line; a last line torn by a kill is left out.

    Raises:
        RecordError: if a line other than the last cannot be read.
    """
    with path.open("rb") as file:  # bytes: a line can be torn inside a character
        for number, text in enumerate(file, start=1):
            if not text.endswith(b"\n"):
                return
            yield parse_line(text, f"line {number} of {path}")


def parse_line(text: bytes, source: str) -> Line:
    """Read one line of ``metrics.jsonl``; ``source`` says where it is from.

    Raises:
        RecordError: if it is none.
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
        """The highest point; ``None`` for an empty timeline."""
        return max(self.used_bytes, default=None)


class RunRecord(Record):
    """One run, finished or not."""

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
        """The line: the budget of the device the run trained on."""
        return self.plan.budget.device_bytes

    @property
    def peak_bytes(self) -> int | None:
        """The highest memory seen in any step or between two."""
        seen = [step.peak_bytes for step in self.steps if step.peak_bytes is not None]
        return max([*seen, *self.timeline.used_bytes], default=None)

    @property
    def peak_bytes_of_ranks(self) -> tuple[int, ...]:
        """The highest memory of each rank, of the ranks that trained last; none where one process trained."""
        steps = self.finished_steps
        num_ranks = len(steps[-1].peak_bytes_of_ranks) if steps else 0
        alike = [step.peak_bytes_of_ranks for step in steps if len(step.peak_bytes_of_ranks) == num_ranks]
        return tuple(max(peaks) for peaks in zip(*alike, strict=True))

    @property
    def finished_steps(self) -> tuple[StepLine, ...]:
        """Each step once, in order: a step repeated after a restart counts as it was written last."""
        latest = {line.step: line for line in self.steps}
        return tuple(latest[step] for step in sorted(latest))

    @property
    def unit_name(self) -> Literal["samples", "tokens"]:
        """What the loss averages over: samples in classification, else tokens."""
        return "samples" if self.job.get("task") == "classification" else "tokens"

    @property
    def units_per_second(self) -> float | None:
        """Units of the loss (tokens or samples) per second of step time, the first step (warm-up) left out."""
        counted = self.steps[1:] or self.steps
        seconds = sum(step.step_seconds for step in counted)
        return sum(step.num_units for step in counted) / seconds if seconds else None

    @classmethod
    def from_directory(cls, directory: Path) -> RunRecord:
        """Read a run directory, also of a run that is still going or was killed.

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
    """What is known of a run before its first step: ``run.json``.

    ``gradient_reach`` is ``None`` where it is the sample. ``preparation_bytes`` is the most private memory that
    indexing the texts, making the tokenizer and tokenizing took, in a process before this one.
    """

    record_kind: ClassVar[str] = "run-head"

    job: dict[str, Any]
    device: Device
    versions: dict[str, str]
    fingerprint: dict[str, str]
    gradient_reach: GradientReach | None = None
    preparation_bytes: int | None = None
