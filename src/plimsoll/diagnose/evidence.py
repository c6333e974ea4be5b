"""The facts from which causes of memory use are found. They come from a job, a run, a training loop or an error text.

For a run that was killed or resumed, the process with the most steps is used, because each process starts with fresh
memory.
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

_OF_MEMORY = ("OOM killer", "memory ran out")  # phrases in the evidence of a death that was caused by memory


@dataclass(frozen=True)
class Evidence:
    """Facts about one training process. Unknown facts are empty or ``None``.

    Attributes:
        subject: name of the run, job, model or file.
        kind: kind of device, such as ``"cpu"``, for which host memory counts.
        first_step: the step before the first step of this process.
        last_step: the last step of this process.
        last_step_of_run: the last step of the whole run, which several processes may have done.
        used_bytes: steps in ascending order, and the bytes in use after each.
        graphs: graphs of earlier steps that were still alive, in ascending order of the step.
        peak_bytes: the measured or predicted peak, in bytes.
        message: the error with which the run ended, if it failed.
        event: the out-of-memory error to explain.
        shares: the parts of the peak by category; empty if unknown.
        has_run_out: whether memory ran out, or is predicted to.
        limit_bytes: bytes that the process may use.
        requested_bytes: size of the allocation that failed.
        asked_category: category of the failed allocation, if it has a share of its own
            (`plimsoll.records.diagnosis.ASKED`).
        is_fragmented: whether the allocator had enough free bytes for the failed allocation, but not contiguous.
        phase: phase of the training in which the peak occurs.
        holdings: tensors that are alive at the peak; each holding groups tensors with equal shape, category and origin.
        sequence_length: tokens of a sample.
        vocab_size: number of tokens in the vocabulary.
        padding_share: average share of the tokens of a batch that are padding.
        remedies: remedies that the predictor has tried, best first.
        seen: observations in a live process; ``None`` for other evidence.
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
        """The provenance of `holdings`: ``"counted"`` in a live process, otherwise ``"predicted"``."""
        return "predicted" if self.seen is None else "counted"

    @property
    def num_steps(self) -> int:
        """The number of steps of this process."""
        return self.last_step - self.first_step

    @property
    def growth(self) -> MemoryGrowth | None:
        """The growth per step of the memory in use; ``None`` if there are too few measurements to estimate it."""
        return growth_of(self.used_bytes)


def with_prediction(evidence: Evidence, prediction: Prediction, **more: Any) -> Evidence:
    """Add to the evidence the parts of a predicted peak and the tensors that are alive at it.

    If memory ran out, the predicted peak replaces the measured peak, which cannot exceed the limit.

    Args:
        evidence: the evidence without a prediction.
        prediction: the predicted peak.
        more: values for other fields of `Evidence`.
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
    """Return the parts of a predicted peak, largest first, each with the module and line of its largest tensors."""
    places: dict[str, str] = {}
    for holding in prediction.largest:  # largest first
        places.setdefault(holding.category, place_of(holding))
    parts = sorted(prediction.parts.items(), key=lambda part: -part[1])
    return tuple(
        Share(category=name, num_bytes=size, known="predicted", place=places.get(name, "")) for name, size in parts
    )


def place_of(holding: Holding) -> str:
    """Return the module and line that created the tensors of a group: ``transformer.h.*.attn, attention.py:193``."""
    path, colon, number = holding.made.line.rpartition(":")
    line = f"{PurePath(path).name}:{number}" if colon else ""
    return ", ".join(filter(None, (holding.made.module, line)))


def ended_in_oom(run: RunRecord) -> bool:
    """Return whether a run ended because memory ran out: it failed with that error, or was killed and not restarted."""
    if run.status == "failed":
        event = next(reversed(run.oom_events), None)
        return "memory ran out" in run.message or (event is not None and not event.survived)
    death = next(reversed(run.deaths), None)
    if death is None or death.restarted_from_step is not None or run.status != "running":
        return False
    return any(words in death.evidence for words in _OF_MEMORY)


def evidence_of_run(run: RunRecord) -> Evidence:
    """Return the evidence that the record of a run contains."""
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
    is_over = evidence.has_run_out and prediction.verdict != "fits"  # else the peak's parts do not explain the end
    return with_prediction(replace(evidence, has_run_out=is_over), prediction)


def evidence_of_step(step: TrainStep) -> Evidence:
    """Return the evidence about a user's own loop that a `TrainStep` has collected."""
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
    """A value that a variable or attribute of user code keeps alive.

    Attributes:
        name: the expression in user code, such as ``history["loss"]`` or ``model.cache``.
        kind: type of the value, such as ``list``.
        num_items: number of items; 1 if the value is not a container.
        num_items_before: number of items after the first step, or at the start if the first step has not ended.
            ``None`` if the value did not exist then.
        tensor_bytes: bytes of the storages of its tensors, each counted once, without parameters.
        graph_bytes: bytes of the graphs of its tensors: nodes, and tensors saved for backward.
        host_bytes: bytes of other objects: numbers, texts, arrays.
        is_estimated: whether the sizes are extrapolated from a sample of the items.
        num_graphs: number of its tensors that have a graph.
        num_steps_back: number of steps that have finished since the oldest operation of these graphs.
        is_of_data: whether a data set or a loader owns it.
        place: the line that stores it, ``file.py:12``; "" if unknown.
        code: the source text of the line in ``place``.
        remedy: the line in ``code``, changed so that it stores the value without its graph; "" if unknown.
        is_made_at_once: whether it was created with all its items, as a batch is, so it does not grow.
        copy_of: if it is a copy, its kind: ``"checkpoint"``, ``"weights"`` or ``"model"``; "" otherwise.
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
        """The bytes of tensors, graphs and other objects together."""
        return self.tensor_bytes + self.graph_bytes + self.host_bytes

    @property
    def has_grown(self) -> bool:
        """True if the value has gained at least three items, and more than half of its items, since the first count."""
        before = self.num_items_before or 0
        return not self.is_made_at_once and self.num_items - before >= 3 and self.num_items > 1.5 * before


@dataclass(frozen=True)
class Seen:
    """Observations in one process at the moment its memory ran out.

    Attributes:
        kept: values that user variables keep alive, largest first.
        is_evaluating: whether every model that has parameters is in evaluation mode.
        records_graph: whether forward passes saved tensors for a backward pass.
        evaluation_place: the line that called the model; "" if unknown.
        processes: memory use of this process, then of its child processes.
        is_of_worker: whether memory ran out in a DataLoader worker.
        loader: the user's variable for the DataLoader, with the line that assigns it; ``None`` if none was found.
        num_workers: number of worker processes that ``loader`` starts.
        lines: the control group limits on this process, with the bytes in use of each.
        machine_bytes: total memory of the machine; ``None`` if unknown.
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
