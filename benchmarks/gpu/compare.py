"""Predicts the runs of a recording and says how far off each prediction is; used by the test and the benchmark.

A case is traced with the loop that was recorded (`cases.train`), lowered onto the recorded capability, and the trace
goes through Plimsoll's model of torch's allocator, with the workspaces of cuBLAS where the first product of forward and
of backward asks for them, and what the process held before the run.

NOT compared: what is outside the allocator, probes, event traces (they are for whoever looks for the reason), and runs
that failed on the GPU. The installed torch and transformers predict, the recorded ones ran: `versions_differ` says so,
and what is other code with other versions (`_is_other_code`) is left out.
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
from benchmarks.gpu.cases import JOB_MODEL, RECURRENT, Case, build, train

from plimsoll.device.gpus import cublas_workspace_bytes
from plimsoll.device.segments import text_of
from plimsoll.memory.allocator.caching import CachingAllocator, replay
from plimsoll.memory.allocator.options import rules_from_text
from plimsoll.memory.lowering.cuda import CudaLowering
from plimsoll.memory.trace import Rehearsal, trace_training
from plimsoll.memory.workspaces import deltas_with_workspaces
from plimsoll.records.trace import Trace

_BEFORE = -1  # a storage that is not of the trace
_MOST_MICRO_BATCHES = 4  # of a step that are traced: what comes after the second repeats it


@dataclass(frozen=True)
class Bounds:
    """How far off predictions may be, as shares: half of them, and the worst one."""

    allocated_median: float
    allocated_worst: float
    reserved_median: float
    reserved_worst: float
    wrong_verdicts_share: float


BOUNDS = {
    "transformers": Bounds(0.003, 0.03, 0.01, 0.12, 0.20),  # limits within 1 % of a peak go either way
    "recurrent": Bounds(0.003, 0.03, 0.05, 0.20, 0.20),
}


@dataclass(frozen=True)
class Predicted:
    """The numbers of a run, predicted; ``allocated_at`` has the bytes allocated at each of the run's marks."""

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    peak_requested_bytes: int
    num_retries: int
    is_oom: bool
    allocated_at: tuple[int, ...]


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
        """Whether the run had a limit: then it says whether it ran out of memory, and nothing else."""
        return self.recorded.get("limit_bytes") is not None

    @property
    def is_wrong_verdict(self) -> bool:
        return self.is_verdict and (self.recorded["status"] == "oom") != self.predicted.is_oom

    def error(self, name: Literal["allocated", "reserved"]) -> float:
        """How much more than recorded was predicted, as a share."""
        key = f"peak_{name}_bytes"
        share: float = getattr(self.predicted, key) / self.recorded[key] - 1
        return share


@dataclass
class Summary:
    """The errors of a group of runs, and the sentences that say which bound they break."""

    group: str
    num_runs: int
    figures: dict[str, float]
    faults: list[str] = field(default_factory=list)


# -- predicting --------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def trace_of(case: Case, capability: tuple[int, int], num_sms: int = 132) -> tuple[Trace, tuple[int, ...]]:
    """Trace a case; with it, the row of the op that was the last at each mark."""
    marks: list[int] = []

    def run(place: Rehearsal) -> None:
        train(_in_short(case), build(case), "cuda:0", lambda step, phase: marks.append(place.recorder.op_row))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # libraries' advice
        return trace_training(run, CudaLowering(capability, num_sms)), tuple(marks)


def predict(case: Case, header: dict[str, Any], before_bytes: int = 0, limit_bytes: int | None = None) -> Predicted:
    """Predict one run.

    Args:
        case: what is trained.
        header: of the recording: the capability and the allocator's settings count.
        before_bytes: what the process has allocated before the run and keeps.
        limit_bytes: what the allocator may reserve.
    """
    capability = (header["capability"][0], header["capability"][1])
    trace, marks = trace_of(case, capability, header.get("num_sms", 132))
    deltas = list(_with_workspaces(trace, f"{capability[0]}.{capability[1]}"))
    allocator = CachingAllocator(rules_from_text(text_of(header.get("environment", {}))), limit_bytes)
    given = [] if case.model in RECURRENT else [(-1, _BEFORE, before_bytes)] * (before_bytes > 0)
    events = given + deltas
    done = replay([(storage, num_bytes) for _, storage, num_bytes in events], allocator)
    ops = [op for op, _, _ in events]
    at = [bisect_right(ops, row) - 1 for row in marks]
    return Predicted(
        peak_allocated_bytes=done.peak_allocated_bytes,
        peak_reserved_bytes=allocator.peak_reserved_bytes,
        peak_requested_bytes=allocator.peak_requested_bytes,
        num_retries=allocator.num_retries,
        is_oom=done.oom is not None,
        allocated_at=tuple(done.allocated_bytes[event] for event in at if 0 <= event < len(done.allocated_bytes)),
    )


def _in_short(case: Case) -> Case:
    """The same micro-batches, and fewer of them."""
    kept = min(case.accumulation, _MOST_MICRO_BATCHES)
    return replace(case, batch_size=case.batch_size // case.accumulation * kept, accumulation=kept)


def _with_workspaces(trace: Trace, architecture: str) -> Iterator[tuple[int, int, int]]:
    """``(op, storage, bytes)`` of the device, with cuBLAS's workspaces."""
    own_ops = (trace.event_op[event] for event, _, _ in trace.deltas())
    op = -1
    for storage, num_bytes in deltas_with_workspaces(trace, cublas_workspace_bytes(architecture)):
        if storage < len(trace.storages.num_bytes):
            op = next(own_ops)
        yield op, storage, num_bytes


# -- comparing ---------------------------------------------------------------------------------------------------------


def comparable(recording: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows with something to compare: runs that ended, and those that ran out of memory under a limit."""
    return [
        row
        for row in recording["runs"]
        if row.get("case") is not None
        and row.get("peak_reserved_bytes") is not None
        and (row["status"] == "ok" or (row["status"] == "oom" and row["limit_bytes"] is not None))
        and not _is_other_code(Case.from_dict(row["case"]), recording["header"])
    ]


def _is_other_code(case: Case, header: dict[str, Any]) -> bool:
    """Whether another version runs other kernels.

    T5 computed its attention itself up to transformers 5.17, and cuDNN's attention took any dropout up to torch 2.11.
    """
    is_other_model = case.model == "t5" and header["transformers"] != transformers.__version__
    has_other_kernel = case.attention == "cudnn" and header["torch"].split("+")[0] != torch.__version__.split("+")[0]
    return is_other_model or has_other_kernel


def of_first_cases(rows: list[dict[str, Any]], num_cases: int) -> list[dict[str, Any]]:
    """The rows of the first few cases, the small ones first, whatever the kind of the run: a case is traced once."""
    all_of_them = dict.fromkeys(Case.from_dict(row["case"]) for row in rows)
    first = sorted(all_of_them, key=lambda case: case.model == JOB_MODEL)[:num_cases]
    return [row for row in rows if Case.from_dict(row["case"]) in first]


def compare(recording: dict[str, Any], rows: Iterable[dict[str, Any]] | None = None) -> list[Compared]:
    """Predict the rows of a recording, or all that can be compared."""
    return [_compared(recording["header"], row) for row in (comparable(recording) if rows is None else rows)]


def _compared(header: dict[str, Any], row: dict[str, Any]) -> Compared:
    case = Case.from_dict(row["case"])
    predicted = predict(case, header, row.get("before_allocated_bytes") or 0, row["limit_bytes"])
    return Compared(row["id"], case.model, row["kind"], row, predicted)


def summarize(compared: Iterable[Compared]) -> list[Summary]:
    """The errors of each group, against its bounds."""
    groups: dict[str, list[Compared]] = {}
    for one in compared:
        groups.setdefault(one.group, []).append(one)
    return [_summary(group, runs, BOUNDS[group]) for group, runs in sorted(groups.items())]


def _summary(group: str, runs: list[Compared], bounds: Bounds) -> Summary:
    summary = Summary(group, len(runs), {})
    measured = [one for one in runs if not one.is_verdict]
    for name, median_bound, worst_bound in (
        ("allocated", bounds.allocated_median, bounds.allocated_worst),
        ("reserved", bounds.reserved_median, bounds.reserved_worst),
    ):
        if measured:
            _judge(summary, measured, name, median_bound, worst_bound)
    verdicts = [one for one in runs if one.is_verdict]
    wrong = [one for one in verdicts if one.is_wrong_verdict]
    summary.figures |= {"verdicts": len(verdicts), "wrong_verdicts": len(wrong)}
    if len(wrong) > bounds.wrong_verdicts_share * len(verdicts):
        summary.faults.append(
            f"{group}: {len(wrong)} of {len(verdicts)} verdicts are wrong, more than "
            f"{bounds.wrong_verdicts_share:.0%}: {', '.join(one.id for one in wrong)}"
        )
    return summary


def _judge(summary: Summary, runs: list[Compared], name: Any, median_bound: float, worst_bound: float) -> None:
    errors = {one.id: one.error(name) for one in runs}
    median = statistics.median(map(abs, errors.values()))
    worst = max(errors, key=lambda run_id: abs(errors[run_id]))
    summary.figures |= {f"{name}_median": round(median, 5), f"{name}_worst": round(errors[worst], 5)}
    if median > median_bound:
        summary.faults.append(f"{summary.group}: {name}, half are off by {median:.2%} or more, not {median_bound:.0%}")
    if abs(errors[worst]) > worst_bound:
        summary.faults.append(
            f"{summary.group}: {name}, {worst} is off by {errors[worst]:+.2%}, more than {worst_bound:.0%}"
        )


def versions_differ(header: dict[str, Any]) -> str:
    """A sentence if other versions were recorded than predict here; else nothing."""
    here = {"torch": torch.__version__, "transformers": transformers.__version__}
    others = [f"{name} {header[name]} (here {version})" for name, version in here.items() if header[name] != version]
    return f"recorded with {', '.join(others)}: other library code allocates otherwise" if others else ""


# -- showing -----------------------------------------------------------------------------------------------------------


def table(compared: Iterable[Compared]) -> str:
    """One line a run: MiB recorded and predicted."""
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
