"""Predict the runs of a recording, and compute the error of each prediction; used by the test and the benchmark.

A case is traced with the recorded loop (`cases.train`) and lowered to the recorded capability. The trace is replayed in
Plimsoll's model of torch's allocator. The replay includes cuBLAS's workspaces from the first product of forward and of
backward on, and the memory that the process held before the run.

NOT compared: memory outside the allocator, probes, event traces (which are for debugging), and runs that failed on the
GPU. The installed versions of torch and transformers predict runs of the recorded ones. `versions_differ` reports a
difference, and cases whose code differs between versions (`_is_other_code`) are left out.
"""

from __future__ import annotations

import math
import statistics
import warnings
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal

import torch
import transformers
from benchmarks.gpu.cases import JOB_MODEL, RECURRENT, Case, build, train, weights_key

from plimsoll.device.cuda.allocator_settings import text_of
from plimsoll.device.cuda.gpus import cublas_workspace_bytes, find_gpu
from plimsoll.memory.allocator.caching import CachingAllocator, replay
from plimsoll.memory.allocator.options import rules_from_text
from plimsoll.memory.library_buffers import deltas_with_workspaces
from plimsoll.memory.lowering.cuda import CudaLowering
from plimsoll.memory.lowering.cudnn_rnn import DROPOUT_STATE_BYTES
from plimsoll.memory.predict import count_on_cuda
from plimsoll.memory.trace import DryRun, trace_training
from plimsoll.records.trace import Trace

_KEPT, _GAP = -1, -2  # storages outside the trace
_MOST_MICRO_BATCHES = 4  # traced per step: all after the second repeat it


@dataclass(frozen=True)
class Kept:
    """Memory that the process holds before a run: cuDNN's dropout state, and its segment.

    ``is_current`` means that no seed was set since the state was created: a recurrent net then reuses it.
    """

    segment_bytes: int
    offset_bytes: int
    num_bytes: int
    is_current: bool = False

    def events(self) -> list[tuple[int, int]]:
        """Return ``(storage, bytes)`` events after which an allocator holds the state at its place."""
        gap = [(_GAP, self.offset_bytes), (_KEPT, self.num_bytes), (_GAP, -self.offset_bytes)]
        return [(_GAP, self.segment_bytes), (_GAP, -self.segment_bytes), *(gap if self.offset_bytes else gap[1:2])]


MEDIAN, NINE_IN_TEN, WORST = 0.003, 0.01, 0.03
"""Bounds for relative errors of predicted peaks: of the median, of nine in ten, and of the worst."""
IN_RANGE = 0.95
"""The share of peaks that must be within the predicted range."""


@dataclass(frozen=True)
class Predicted:
    """The predicted numbers of a run.

    ``allocated_at`` has the allocated bytes at each of the run's marks. The range of a peak is ``low_share`` to
    ``high_share`` times the peak.
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    peak_requested_bytes: int
    num_retries: int
    is_oom: bool
    allocated_at: tuple[int, ...]
    low_share: float = 1.0
    high_share: float = 1.0


@dataclass(frozen=True)
class Compared:
    """One recorded run and its prediction."""

    id: str
    model: str
    kind: str
    recorded: dict[str, Any]
    predicted: Predicted

    @property
    def group(self) -> str:
        return "recurrent" if self.model in RECURRENT else "transformers"

    @property
    def is_verdict(self) -> bool:
        """True if the run had a limit, so that only the verdict "out of memory" or not is compared."""
        return self.recorded.get("limit_bytes") is not None

    @property
    def is_wrong_verdict(self) -> bool:
        return self.is_verdict and (self.recorded["status"] == "oom") != self.predicted.is_oom

    def error(self, name: Literal["allocated", "reserved"]) -> float:
        """Return the relative error of the prediction."""
        key = f"peak_{name}_bytes"
        share: float = getattr(self.predicted, key) / self.recorded[key] - 1
        return share

    def is_in_range(self, name: Literal["allocated", "reserved"]) -> bool:
        """Return whether the recorded value is within the predicted range."""
        key = f"peak_{name}_bytes"
        predicted_bytes = getattr(self.predicted, key)
        low, high = self.predicted.low_share, self.predicted.high_share
        return bool(low * predicted_bytes <= self.recorded[key] <= high * predicted_bytes)


@dataclass
class Summary:
    """The errors of a group of runs, and a sentence for each violated bound."""

    group: str
    num_runs: int
    figures: dict[str, float]
    faults: list[str] = field(default_factory=list)


# -- predicting --------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def trace_of(case: Case, capability: tuple[int, int], num_sms: int = 132) -> tuple[Trace, tuple[int, ...]]:
    """Trace a case; also return the row of the last op at each mark."""
    marks: list[int] = []

    def run(place: DryRun) -> None:
        train(_in_short(case), build(case), "cuda:0", lambda step, phase: marks.append(place.recorder.op_row))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # libraries' advice
        return trace_training(run, CudaLowering(capability, num_sms)), tuple(marks)


def predict(
    case: Case, header: dict[str, Any], before: Kept | None = None, limit_bytes: int | None = None
) -> Predicted:  # fmt: skip
    """Predict one run.

    Args:
        case: the training.
        header: of the recording: the capability and the allocator's settings are used.
        before: memory that the process holds before the run.
        limit_bytes: maximum bytes that the allocator may reserve.
    """
    ops, events, marks = _events(case, header, before)
    allocator = CachingAllocator(rules_from_text(text_of(header.get("environment", {}))), limit_bytes)
    done = replay(events, allocator)
    at = [bisect_right(ops, row) - 1 for row in marks]
    low, high = _range(case, (header["capability"][0], header["capability"][1]), header.get("num_sms", 132))
    return Predicted(
        peak_allocated_bytes=done.peak_allocated_bytes,
        peak_reserved_bytes=allocator.peak_reserved_bytes,
        peak_requested_bytes=allocator.peak_requested_bytes,
        num_retries=allocator.num_retries,
        is_oom=done.oom is not None,
        allocated_at=tuple(done.allocated_bytes[event] for event in at if 0 <= event < len(done.allocated_bytes)),
        low_share=low,
        high_share=high,
    )


@lru_cache(maxsize=256)
def _range(case: Case, capability: tuple[int, int], num_sms: int) -> tuple[float, float]:
    """Return the range of reserved memory as in `plimsoll predict`, in shares, which are equal for all GPUs."""
    most = count_on_cuda(trace_of(case, capability, num_sms)[0], find_gpu("H200")).most_reserved
    return most.low_bytes / most.likely_bytes, most.high_bytes / most.likely_bytes


def _events(
    case: Case, header: dict[str, Any], before: Kept | None
) -> tuple[list[int], list[tuple[int, int]], tuple[int, ...]]:
    """Return the rows of the ops, their ``(storage, bytes)`` events, and the rows of the marks.

    A recurrent net creates a dropout state and then frees the existing one, unless that one is current.
    """
    capability = (header["capability"][0], header["capability"][1])
    trace, marks = trace_of(case, capability, header.get("num_sms", 132))
    events = [(-1, *event) for event in before.events()] if before else []
    is_held = before is not None and case.model in RECURRENT
    for op, storage, num_bytes in _with_workspaces(trace, f"{capability[0]}.{capability[1]}"):
        is_state = is_held and num_bytes == DROPOUT_STATE_BYTES  # it stays to the end
        if not (is_state and before.is_current):
            events.append((op, storage, num_bytes))
        if is_state:
            events += [] if before.is_current else [(op, _KEPT, -num_bytes)]
            is_held = False
    return [op for op, _, _ in events], [event[1:] for event in events], marks


@lru_cache(maxsize=256)
def kept_by(case: Case, capability: tuple[int, int], num_sms: int, before: Kept | None) -> Kept | None:
    """Return the memory that a run of a recurrent net leaves in its process."""
    _, events, _ = _events(case, {"capability": capability, "num_sms": num_sms}, before)
    state = next((storage for storage, num_bytes in events if num_bytes == DROPOUT_STATE_BYTES and storage >= 0), None)
    if state is None:
        return before and replace(before, is_current=True)
    allocator = CachingAllocator()
    live = replay(events, allocator).live
    return Kept(*allocator.place_of(live[state]), DROPOUT_STATE_BYTES, is_current=True)


def kept_before(recording: dict[str, Any], row: dict[str, Any]) -> Kept | None:
    """Return memory left by earlier runs of the same process; `record.Runner` sets the seed as it builds a model."""
    header, kept = recording["header"], None
    built: set[object] = set()
    for other in recording["runs"]:
        if other["kind"] not in ("shared", "limited") or not other.get("case") or other["status"] == "left out":
            continue
        case = Case.from_dict(other["case"])
        if not other["before_allocated_bytes"]:
            kept, built = None, built if kept is None else set()
        if kept is not None:
            segment_bytes = other["before_reserved_bytes"]
            kept = replace(
                kept,
                segment_bytes=segment_bytes,
                offset_bytes=min(kept.offset_bytes, segment_bytes - kept.num_bytes),
                is_current=kept.is_current and weights_key(case) in built,
            )
        built.add(weights_key(case))
        if other is row:
            return kept
        if case.model in RECURRENT and other["status"] == "ok":
            kept = kept_by(case, tuple(header["capability"]), header.get("num_sms", 132), kept)
    return None


def _in_short(case: Case) -> Case:
    """Return the case with the same micro-batches, but fewer of them."""
    kept = min(case.accumulation, _MOST_MICRO_BATCHES)
    return replace(case, batch_size=case.batch_size // case.accumulation * kept, accumulation=kept)


def _with_workspaces(trace: Trace, architecture: str) -> Iterator[tuple[int, int, int]]:
    """Yield ``(op, storage, bytes)`` of the device, including cuBLAS's workspaces."""
    own_ops = (trace.event_op[event] for event, _, _ in trace.deltas())
    op = -1
    for storage, num_bytes in deltas_with_workspaces(trace, cublas_workspace_bytes(architecture)):
        if storage < len(trace.storages.num_bytes):
            op = next(own_ops)
        yield op, storage, num_bytes


# -- comparing ---------------------------------------------------------------------------------------------------------


def comparable(recording: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows that can be compared: finished runs, and those that ran out of memory under a limit."""
    return [
        row
        for row in recording["runs"]
        if row.get("case") is not None
        and row.get("peak_reserved_bytes") is not None
        and (row["status"] == "ok" or (row["status"] == "oom" and row["limit_bytes"] is not None))
        and not _is_other_code(Case.from_dict(row["case"]), recording["header"])
    ]


def left_out(recording: dict[str, Any]) -> dict[str, list[str]]:
    """Return the ids of all other rows with a case, by reason."""
    compared = {row["id"] for row in comparable(recording)}
    found: dict[str, list[str]] = {}
    for row in recording["runs"]:
        if row.get("case") is not None and row["id"] not in compared:
            other = _is_other_code(Case.from_dict(row["case"]), recording["header"])
            found.setdefault(other or f"which ended otherwise ({row['status']})", []).append(row["id"])
    return found


def _is_other_code(case: Case, header: dict[str, Any]) -> str:
    """Return the reason why another version runs other kernels, or an empty string."""
    if case.model == "t5" and header["transformers"] != transformers.__version__:
        return f"as T5 of transformers {header['transformers']} computes its attention itself"
    if case.attention == "cudnn" and header["torch"].split("+")[0] != torch.__version__.split("+")[0]:
        return f"as cuDNN's attention takes any dropout in torch {header['torch']}"
    return ""


def of_first_cases(rows: list[dict[str, Any]], num_cases: int) -> list[dict[str, Any]]:
    """Return the rows of the first few cases, small ones first, of all kinds of runs, because a case is traced once."""
    all_of_them = dict.fromkeys(Case.from_dict(row["case"]) for row in rows)
    first = sorted(all_of_them, key=lambda case: case.model == JOB_MODEL)[:num_cases]
    return [row for row in rows if Case.from_dict(row["case"]) in first]


def compare(recording: dict[str, Any], rows: Iterable[dict[str, Any]] | None = None) -> list[Compared]:
    """Predict the given rows of a recording, or all that can be compared."""
    return [_compared(recording, row) for row in (comparable(recording) if rows is None else rows)]


def _compared(recording: dict[str, Any], row: dict[str, Any]) -> Compared:
    case = Case.from_dict(row["case"])
    predicted = predict(case, recording["header"], kept_before(recording, row), row["limit_bytes"])
    return Compared(row["id"], case.model, row["kind"], row, predicted)


def summarize(compared: Iterable[Compared]) -> list[Summary]:
    """Compute the errors of each group, and check the bounds."""
    groups: dict[str, list[Compared]] = {}
    for one in compared:
        groups.setdefault(one.group, []).append(one)
    return [_summary(group, runs) for group, runs in sorted(groups.items())]


def _summary(group: str, runs: list[Compared]) -> Summary:
    summary = Summary(group, len(runs), {})
    measured = [one for one in runs if not one.is_verdict]
    names: tuple[Literal["allocated", "reserved"], ...] = ("allocated", "reserved")
    for name in names if measured else ():
        errors = {one.id: one.error(name) for one in measured}
        outside = [one.id for one in measured if not one.is_in_range(name)]
        figures, faults = judged(errors, outside)
        summary.figures |= {f"{name}_{figure}": value for figure, value in figures.items()}
        summary.faults += [f"{group}: {name}, {fault}" for fault in faults]
    verdicts = [one for one in runs if one.is_verdict]
    wrong = [one.id for one in verdicts if one.is_wrong_verdict]
    summary.figures |= {"verdicts": len(verdicts), "wrong_verdicts": len(wrong)}
    if wrong:
        summary.faults.append(f"{group}: {len(wrong)} of {len(verdicts)} verdicts are wrong: {', '.join(wrong)}")
    return summary


def judged(errors: dict[str, float], outside: list[str]) -> tuple[dict[str, float], list[str]]:
    """Compute figures from errors by row name, and a sentence for each violated bound.

    Args:
        errors: relative errors of the predictions.
        outside: the rows outside their predicted range.
    """
    sizes = sorted(map(abs, errors.values()))
    worst = max(errors, key=lambda name: abs(errors[name]))
    figures = {
        "median": round(statistics.median(sizes), 5),
        "p90": round(sizes[math.ceil(0.9 * len(sizes)) - 1], 5),
        "worst": round(errors[worst], 5),
        "in_range": round(1 - len(outside) / len(errors), 3),
    }
    faults = [
        f"{words} off by {figures[name]:.2%}, more than {bound:.1%}"
        for name, words, bound in (("median", "half are", MEDIAN), ("p90", "one in ten is", NINE_IN_TEN))
        if figures[name] > bound
    ]
    faults += [
        f"{name} is off by {error:+.2%}, more than {WORST:.0%}" for name, error in errors.items() if abs(error) > WORST
    ]
    if figures["in_range"] < IN_RANGE:
        faults.append(f"{figures['in_range']:.0%} lie in their range, not {IN_RANGE:.0%}: {', '.join(outside)} do not")
    return figures, faults


def versions_differ(header: dict[str, Any]) -> str:
    """Return a sentence if the recorded versions differ from the installed ones, or an empty string."""
    here = {"torch": torch.__version__, "transformers": transformers.__version__}
    others = [f"{name} {header[name]} (here {version})" for name, version in here.items() if header[name] != version]
    return f"recorded with {', '.join(others)}: other library code allocates otherwise" if others else ""


# -- showing -----------------------------------------------------------------------------------------------------------


def table(compared: Iterable[Compared]) -> str:
    """Return a table with one line per run: recorded and predicted MiB."""
    heads = ("run", "allocated", "predicted", "error", "reserved", "predicted", "error", "verdict")
    lines = [f"{heads[0]:66}" + "".join(f"{head:>11}" for head in heads[1:])]
    for one in compared:
        cells = [f"{one.id:66}"]
        for name in ("allocated", "reserved"):
            key = f"peak_{name}_bytes"
            error = "" if one.is_verdict else f"{one.error(name):+.2%}"  # type: ignore[arg-type]
            cells += [f"{_mib(one.recorded[key])}{_mib(getattr(one.predicted, key))}{error:>11}"]
        lines.append("".join([*cells, f"{_verdict(one):>11}"]))
    return "\n".join(lines)


def _verdict(one: Compared) -> str:
    if not one.is_verdict:
        return ""
    words = [("OOM" if is_oom else "fits") for is_oom in (one.recorded["status"] == "oom", one.predicted.is_oom)]
    return words[0] if words[0] == words[1] else f"{words[0]}/{words[1]}!"


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:>11,.1f}" if math.isfinite(num_bytes) else f"{'-':>11}"
