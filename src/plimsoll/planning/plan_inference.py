"""The planner for inference: it chooses the rows of a pass and the placement of weights, for any known device.

    plan = plan_inference(folder, "score", longest_tokens=256, limit_bytes=1 << 30)
    with placed_model(folder, plan) as model: ...

The pass of the task is dry-run on fake tensors (`plimsoll.inference.dry_run`). A model of the target's allocators
predicts the peak, and the time model the seconds. `plimsoll.planning.search.placement` searches for the placement. The
disk's read rate is measured on the files of the checkpoint when the plan is made. For a GPU of this machine, the host's
free memory is read as well.

Not handled: quantized weights, several devices, and texts of different lengths. Every row has the maximum length.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from plimsoll.device.cpu.pages import cache_free_bytes, cold_bytes_per_second
from plimsoll.device.probe import versions
from plimsoll.device.process import private_bytes
from plimsoll.device.speed import measured_speed, speed_of
from plimsoll.errors import InputError
from plimsoll.inference.dry_run import Applied
from plimsoll.memory.predict import Counted
from plimsoll.planning.baseline import StartedBaseline
from plimsoll.planning.cached_baseline import Baseline
from plimsoll.planning.search.placement import Evaluation, Guess, Placer, Reading, rejected_of
from plimsoll.planning.search.time_model import step_duration
from plimsoll.planning.targets import CUDA_HOST_BYTES, Target, device_here, find_target
from plimsoll.records.placement import InferencePlan, Part, Place
from plimsoll.records.plan import Duration
from plimsoll.records.prediction import Estimate
from plimsoll.records.speed import Speed, rate_at
from plimsoll.records.trace import Assumption
from plimsoll.records.units import format_bytes
from plimsoll.techniques.mechanisms.parts import ModelPart

Progress = Callable[[str], None]

_LARGE_BYTES = 1 << 30  # larger than every cache: the rate of main memory


def plan_inference(
    folder: Path,
    task: str,
    *,
    longest_tokens: int,
    new_tokens: int = 0,
    limit_bytes: int | None = None,
    device: str | None = None,
    dtype: torch.dtype | None = None,
    most_rows: int = 256,
    progress: Progress | None = None,
) -> InferencePlan:
    """Find the placement and micro-batch with the most rows a second inside a budget.

    Args:
        folder: folder of a checkpoint.
        task: a task of `plimsoll.models.inference`.
        longest_tokens: number of tokens in a row, 1 or more.
        new_tokens: number of tokens that ``generate`` adds to each row.
        limit_bytes: device memory in bytes that the process may use; ``None`` is the whole device.
        device: ``"cpu"``, ``"local"`` or ``"cuda"`` for a device of this machine, or the name of a GPU. ``None`` is
            ``"local"``.
        dtype: data type of the weights; ``None`` keeps the stored type.
        most_rows: maximum number of rows in a pass, 1 or more.
        progress: called with a message for each stage of the work.

    Returns:
        a plan. If nothing fits, its ``fits`` is False, and it has the smallest sufficient budget.

    Raises:
        InputError: if the folder is not a checkpoint for the task, a number is below 1, or the model cannot be traced.
        DeviceError: if there is no such device.
        BudgetError: if the device has less than the budget.
    """
    _check_numbers(longest_tokens, new_tokens, most_rows)
    tell = progress or (lambda text: None)
    applied = Applied.open(Path(folder), task, dtype, new_tokens)
    applied.require_length(longest_tokens)
    with ExitStack() as stack:
        name = device_here(device)
        started = stack.enter_context(StartedBaseline.of_inference(Path(folder), task)) if name == "cpu" else None
        return _Planner(applied, longest_tokens, most_rows, name, limit_bytes, started, tell).plan()


def _check_numbers(longest_tokens: int, new_tokens: int, most_rows: int) -> None:
    if longest_tokens < 1 or most_rows < 1 or new_tokens < 0:
        raise InputError(
            f"cannot plan rows of {longest_tokens} tokens with {new_tokens} new ones, at most {most_rows} at once: "
            "give 1 token and 1 row or more, and 0 new tokens or more"
        )


class _Planner:
    """Evaluator of placements of one model on one target."""

    def __init__(  # noqa: PLR0917 -- called here only
        self,
        applied: Applied,
        longest_tokens: int,
        most_rows: int,
        device: str,
        limit_bytes: int | None,
        started: Baseline | None,
        progress: Progress,
    ) -> None:
        self._started_seconds = time.perf_counter()
        self._applied, self._longest_tokens, self._progress = applied, longest_tokens, progress
        self._budget_bytes, self._most_rows = limit_bytes, most_rows
        self._evaluations: dict[tuple[int, frozenset[str]], Evaluation] = {}
        self._assumed: dict[str, Assumption] = {}
        self._target: Target = find_target(device, limit_bytes, lambda: _waited(started))
        self._is_cpu = self._target.spec is None
        speed = measured_speed(progress) if self._target.spec is None else speed_of(self._target.spec)
        self._speed = speed.model_copy(update={"link_bytes_per_second": _memory_bytes_per_second(speed)})
        if self._is_cpu:
            progress("measuring how fast the checkpoint is read")
            rate = cold_bytes_per_second(applied.files)
            self._reading = Reading(_free_bytes(), files_bytes_per_second=rate)
        else:
            rate = speed.link_bytes_per_second
            self._reading = Reading(_host_free_bytes(device), link_bytes_per_second=rate)

    def plan(self) -> InferencePlan:
        """Return the best plan that fits, or else the leanest plan with the budget that it needs."""
        applied, limit_bytes = self._applied, self._target.limit_bytes
        placer = Placer(
            applied.parts,
            self._always(),
            limit_bytes,
            self._most_rows,
            applied.num_passes,
            self._reading,
            self.evaluate,
        )
        guesses = placer.guesses()
        best = placer.best(guesses)
        if best is not None:
            chosen, evaluation = placer.verified(best)
            if evaluation.fits and placer.holds(chosen):
                return self._record(chosen, guesses, None)
        resident = placer.least()
        least = self.evaluate(1, resident)
        chosen = placer.measured(1, resident, least)
        fits = least.fits and placer.holds(chosen)  # a guess may need more memory than its trace
        return self._record(chosen, guesses, None if fits else self._smallest_bytes(least))

    def _always(self) -> frozenset[str]:
        """Return the names of the model parts that are always on the device: on a GPU, all parts except the blocks."""
        kinds = ("rest",) if self._is_cpu else ("rest", "tables", "output")
        return frozenset(part.name for part in self._applied.parts if part.kind in kinds)

    def evaluate(self, rows: int, resident: frozenset[str]) -> Evaluation:
        """Trace and evaluate a pass with the given rows and resident parts."""
        key = rows, resident
        if key not in self._evaluations:
            self._progress(f"tracing: {rows} rows with {len(resident)} of {len(self._applied.parts)} parts resident")
            self._evaluations[key] = self._evaluate(rows, resident)
        return self._evaluations[key]

    def _evaluate(self, rows: int, resident: frozenset[str]) -> Evaluation:
        outside = [part.name for part in self._applied.parts if part.name not in resident]
        trace = self._applied.dry_run(self._target.lowering(), rows, self._longest_tokens, outside)
        self._assumed |= {one.text: one for one in trace.assumptions}
        counted = self._target.count(trace)
        steps = sorted({step for step in trace.ops.step if step > 0})
        seconds = tuple(self._seconds(counted, rows, step) for step in steps)
        return Evaluation(counted.peak, counted.oom_row is None, seconds, counted.spread)

    def _seconds(self, counted: Counted, rows: int, step: int) -> float:
        return step_duration(
            counted, self._speed, batch_size=rows, micro_batch=rows, dry_run_samples=rows, step=step
        ).likely_seconds

    def _smallest_bytes(self, least: Evaluation) -> int:
        return least.peak.high_bytes + self._target.kept_back_bytes

    def _record(self, chosen: Guess, guesses: Sequence[Guess], smallest_bytes: int | None) -> InferencePlan:
        target, applied, reading = self._target, self._applied, self._reading
        parts = tuple(self._placed(part, chosen.resident) for part in applied.parts)
        streamed_bytes = sum(part.num_bytes for part in parts if part.is_streamed)
        spread = 1 + self._speed.spread
        return InferencePlan(
            model=applied.described,
            task=applied.name,
            device=target.name,
            device_kind="cpu" if self._is_cpu else "cuda",
            dtype=applied.dtype,
            is_converted=applied.is_converted,
            budget_bytes=self._budget_bytes,
            limit_bytes=target.limit_bytes,
            limit_source=target.limit_source,
            kept_back_bytes=target.kept_back_bytes,
            host_free_bytes=None if self._is_cpu else reading.free_bytes,
            parts=parts,
            longest_tokens=self._longest_tokens,
            new_tokens=applied.new_tokens,
            micro_batch=chosen.rows,
            peak=chosen.need,
            pass_time=Duration(
                likely_seconds=chosen.seconds,
                low_seconds=chosen.seconds / spread,
                high_seconds=chosen.seconds * spread,
            ),
            compute_seconds=chosen.compute_seconds,
            read_seconds=chosen.read_seconds,
            read_bytes=chosen.read_bytes,
            cached_bytes=max(streamed_bytes - chosen.read_bytes // applied.num_passes, 0) if self._is_cpu else 0,
            read_bytes_per_second=reading.bytes_per_second,
            rate_source="measured" if self._is_cpu else "table",
            rejected=rejected_of(guesses, chosen, target.limit_bytes, self._resident_bytes),
            smallest_budget_bytes=smallest_bytes,
            assumptions=(*self._assumed.values(), *self._unchecked(parts)),
            num_traces=len(self._evaluations),
            plan_seconds=time.perf_counter() - self._started_seconds,
            versions=versions(),
        )

    def _unchecked(self, parts: Sequence[Part]) -> tuple[Assumption, ...]:
        """Return the assumption that the host has memory for the parts of the model placed in it.

        The result is empty if no part is placed there, or if the free memory of the host is known.
        """
        host_bytes = sum(part.num_bytes for part in parts if part.place == "host")
        if not host_bytes or self._reading.free_bytes is not None:
            return ()
        return (Assumption(text=f"needs {format_bytes(host_bytes)} of the host's memory, which was not checked"),)

    def _placed(self, part: ModelPart, resident: frozenset[str]) -> Part:
        is_resident = part.name in resident
        place: Place = "device" if is_resident else "disk" if self._is_cpu else "host"
        return Part(
            name=part.name, num_bytes=part.num_bytes, place=place, is_streamed=part.is_streamable and not is_resident
        )

    def _resident_bytes(self, guess: Guess) -> int:
        return sum(part.num_bytes for part in self._applied.parts if part.name in guess.resident)


def _free_bytes() -> int:
    """Return the bytes available to the inference process and its page cache.

    These include the bytes that this process already uses.
    """
    return cache_free_bytes() + private_bytes()


def _host_free_bytes(device: str) -> int | None:
    """Return the host memory in bytes for weights; ``None`` for a GPU given by name, whose host is not present."""
    is_here = device == "cuda" or device.startswith("cuda:")
    return max(_free_bytes() - CUDA_HOST_BYTES[1], 0) if is_here else None


def _memory_bytes_per_second(speed: Speed) -> float:
    """Return the rate of reading weights from the page cache, which is the rate of main memory."""
    return rate_at(speed.bytes_per_second["plain"], _LARGE_BYTES)


def _waited(started: Baseline | None) -> Estimate:
    assert started is not None  # only a plan for the CPU calls this, and it has one
    return started.wait()
