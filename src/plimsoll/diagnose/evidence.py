"""What causes are looked for in, as plain numbers: a training process of a run or a loop, an error's text, a snapshot.

Of a run that was killed or resumed the process with the most steps is taken: what a process keeps is gone with it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Literal

from plimsoll.diagnose.growth import growth_of
from plimsoll.records.diagnosis import KnownHow, MemoryGrowth, Remedy, Share
from plimsoll.records.oom_text import OomText
from plimsoll.records.prediction import Holding, Prediction
from plimsoll.records.run import GraphLine, RunRecord

if TYPE_CHECKING:
    from plimsoll.step.missing_gradients import Unreached
    from plimsoll.step.train_step import TrainStep
from plimsoll.records.watch import Line, ProcessUse

_OF_MEMORY = ("OOM killer", "memory ran out")  # what the evidence of a death says where memory was why


@dataclass(frozen=True)
class Evidence:
    """One training process, or what is known of one; what is not known is empty or ``None``.

    Attributes:
        subject: what it is called.
        kind: of the device, such as ``"cpu"``, on which the host's memory counts.
        first_step: the step before its first.
        last_step: its last.
        last_step_of_run: the last of all processes of a run that was killed or resumed.
        used_bytes: in use after a step, by the step, ascending.
        graphs: what of earlier graphs was alive, ascending by step.
        peak_bytes: the most it used, as far as it was measured.
        message: what the run ended with, if it failed.
        event: the out-of-memory error that is to be explained.
        shares: what the peak is made of, where that is known.
        has_run_out: whether memory ran out, or is predicted to.
        limit_bytes: what there was to use.
        requested_bytes: what was asked for when memory ran out.
        asked_category: what that would have been, where it has a share of its own (`plimsoll.records.diagnosis.ASKED`).
        is_fragmented: whether the allocator then had as much as was asked for, not contiguous.
        phase: of the training in which the peak is.
        holdings: what is alive at the peak, like tensors grouped.
        sequence_length: tokens of a sample.
        vocab_size: tokens there are.
        padding_share: of the tokens of a batch, on average, those that are padding.
        remedies: what was found to free memory, best first.
        seen: what was seen in a live process.
        unreached: trainable parameters that no gradient has reached.
    """

    subject: str
    kind: Literal["cpu", "cuda"] | str
    first_step: int = 0
    last_step: int = 0
    last_step_of_run: int = 0
    used_bytes: tuple[tuple[int, int], ...] = ()
    graphs: tuple[GraphLine, ...] = ()
    peak_bytes: int | None = None
    message: str = ""
    event: OomText | None = None
    shares: tuple[Share, ...] = ()
    has_run_out: bool = False
    limit_bytes: int | None = None
    requested_bytes: int | None = None
    asked_category: str = ""
    is_fragmented: bool = False
    phase: str = ""
    holdings: tuple[Holding, ...] = ()
    sequence_length: int | None = None
    vocab_size: int | None = None
    padding_share: float | None = None
    remedies: tuple[Remedy, ...] = ()
    seen: Seen | None = None
    unreached: tuple[Unreached, ...] = ()

    @property
    def holdings_known(self) -> KnownHow:
        """How `holdings` are known: seen in a live process, or predicted."""
        return "predicted" if self.seen is None else "counted"

    @property
    def num_steps(self) -> int:
        """How many steps it did."""
        return self.last_step - self.first_step

    @property
    def growth(self) -> MemoryGrowth | None:
        """How the memory in use changed from step to step; ``None`` for too few steps to tell."""
        return growth_of(self.used_bytes)


def with_prediction(evidence: Evidence, prediction: Prediction, **more: Any) -> Evidence:
    """Add what a prediction says: what the peak is made of, and what is alive at it.

    Where memory ran out the peak is the one that is predicted: what was measured ends at the limit.
    """
    measured_bytes = None if evidence.has_run_out else evidence.peak_bytes
    return replace(
        evidence,
        peak_bytes=measured_bytes or prediction.peak.likely_bytes,
        shares=shares_of(prediction),
        limit_bytes=prediction.limit_bytes,
        phase=prediction.moment.phase,
        holdings=prediction.largest,
        sequence_length=prediction.sequence_length,
        **more,
    )


def shares_of(prediction: Prediction) -> tuple[Share, ...]:
    """Return what a predicted peak is made of, largest first, each with the module and line that made most of it."""
    places: dict[str, str] = {}
    for holding in prediction.largest:  # largest first
        places.setdefault(holding.category, place_of(holding))
    parts = sorted(prediction.parts.items(), key=lambda part: -part[1])
    return tuple(
        Share(category=name, num_bytes=size, known="predicted", place=places.get(name, "")) for name, size in parts
    )


def place_of(holding: Holding) -> str:
    """Say which module and line made something: ``transformer.h.*.attn, attention.py:193``."""
    path, colon, number = holding.made.line.rpartition(":")
    line = f"{PurePath(path).name}:{number}" if colon else ""
    return ", ".join(filter(None, (holding.made.module, line)))


def ended_in_oom(run: RunRecord) -> bool:
    """Whether a run ended because memory ran out: by its own error, or killed for it and not started again."""
    if run.status == "failed":
        event = next(reversed(run.oom_events), None)
        return "memory ran out" in run.message or (event is not None and not event.survived)
    death = next(reversed(run.deaths), None)
    if death is None or death.restarted_from_step is not None or run.status != "running":
        return False
    return any(words in death.evidence for words in _OF_MEMORY)


def evidence_of_run(run: RunRecord) -> Evidence:
    """Take the evidence out of the record of a run."""
    event = next(reversed(run.oom_events), None) if ended_in_oom(run) else None
    borders = [*sorted({start.step for start in run.starts} | {0}), max((step.step for step in run.steps), default=0)]
    first, last = max(pairwise(borders), key=lambda part: part[1] - part[0], default=(0, 0))
    steps = {line.step: line for line in run.steps if first < line.step <= last}
    graphs = {line.step: line for line in run.graphs if first < line.step <= last}
    evidence = Evidence(
        subject=run.name,
        kind=run.device.kind,
        first_step=first,
        last_step=last,
        last_step_of_run=borders[-1],
        used_bytes=tuple((step, steps[step].used_bytes or 0) for step in sorted(steps) if steps[step].used_bytes),
        graphs=tuple(graphs[step] for step in sorted(graphs)),
        peak_bytes=max((line.peak_bytes for line in steps.values() if line.peak_bytes), default=run.peak_bytes),
        message=run.message if run.status == "failed" else "",
        has_run_out=ended_in_oom(run),
        limit_bytes=run.limit_bytes,
        requested_bytes=event.requested_bytes if event else None,
        is_fragmented=event.is_fragmented if event else False,
    )
    prediction = run.plan.prediction
    if prediction is None:
        return evidence
    is_over = evidence.has_run_out and prediction.verdict != "fits"  # else parts of the peak do not explain the end
    return with_prediction(replace(evidence, has_run_out=is_over), prediction)


def evidence_of_step(step: TrainStep) -> Evidence:
    """Take the evidence out of a step that is used in a loop of one's own."""
    used = tuple(step.graphs.memory)
    return Evidence(
        subject=type(step.workload.model).__name__,
        kind=step.backend.kind,
        first_step=used[0][0] - 1 if used else step.num_steps,
        last_step=step.num_steps,
        used_bytes=used,
        graphs=tuple(step.graphs.lines),
        peak_bytes=max((used_bytes for _, used_bytes in used), default=None),
        message=step.graphs.failure,
        unreached=step.unreached.found,
    )


@dataclass(frozen=True)
class Kept:
    """What one variable or attribute of the user's keeps.

    Attributes:
        name: as the user would write it, such as ``history["loss"]`` or ``model.cache``.
        kind: of the value, such as ``list``.
        num_items: in it; 1 for what is no container.
        num_items_before: as it was first seen, after the first step or before it; ``None`` where it was not there.
        tensor_bytes: the storages of its tensors, each once, without those of parameters.
        graph_bytes: what the graphs of its tensors save for a backward pass, and their nodes.
        host_bytes: of what is no tensor: numbers, texts, arrays.
        is_estimated: whether sizes come from a sample of the items.
        num_graphs: tensors in it that have a graph.
        num_steps_back: how many finished steps the oldest operation of these graphs is older than.
        is_of_data: whether a data set or a loader has it.
        place: the line that stores it, ``file.py:12``; "" where it was not found.
        code: that line.
        remedy: the line without the graph.
        is_made_at_once: whether it was made with all its items, as a batch is, and is no collection that grows.
        copy_of: what of the training it is a copy of, ``"checkpoint"``, ``"weights"`` or ``"model"``; "" for none.
    """

    name: str
    kind: str
    num_items: int = 1
    num_items_before: int | None = None
    tensor_bytes: int = 0
    graph_bytes: int = 0
    host_bytes: int = 0
    is_estimated: bool = False
    num_graphs: int = 0
    num_steps_back: int = 0
    is_of_data: bool = False
    place: str = ""
    code: str = ""
    remedy: str = ""
    is_made_at_once: bool = False
    copy_of: str = ""

    @property
    def num_bytes(self) -> int:
        """All of it."""
        return self.tensor_bytes + self.graph_bytes + self.host_bytes

    @property
    def has_grown(self) -> bool:
        """Whether it has got items since it was first seen, and not one for the other."""
        before = self.num_items_before or 0
        return not self.is_made_at_once and self.num_items - before >= 3 and self.num_items > 1.5 * before


@dataclass(frozen=True)
class Seen:
    """One process at the moment its memory ran out.

    Attributes:
        kept: what the user's variables keep, largest first.
        is_evaluating: whether every model that has parameters is in evaluation mode.
        records_graph: whether autograd was recording.
        evaluation_place: the line that called the model, where that is so.
        processes: this process first, then those it started.
        is_of_worker: whether the error is that of a worker of a DataLoader.
        loader: the variable of the user's that has the loader, with the line that made it.
        num_workers: that this loader starts.
        lines: the limits on this process, with what is used of each.
        machine_bytes: the memory that the machine has.
    """

    kept: tuple[Kept, ...] = ()
    is_evaluating: bool = False
    records_graph: bool = False
    evaluation_place: str = ""
    processes: tuple[ProcessUse, ...] = ()
    is_of_worker: bool = False
    loader: Kept | None = None
    num_workers: int = 0
    lines: tuple[Line, ...] = ()
    machine_bytes: int | None = None
