"""The training loop: fetch, step, record, checkpoint and evaluate, until the last step or a request to stop.

The loop does not depend on techniques and catches no errors of a step, because a step is a transaction
(`plimsoll.step.train_step`). If work outside a step runs out of memory, it is retried after cached memory has been
freed (`_survive`). Any other error ends the run with its checkpoints intact.

A step that does not fit even with the last fallback is retried a few times, after pauses. This happens only if an
earlier step has fit with this fallback, because another program has then taken the memory. Otherwise the run ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TypeVar

from plimsoll.data.batches.loader import Batch, iterate_once
from plimsoll.device.base import Backend
from plimsoll.distributed.ranks import Ranks
from plimsoll.errors import (
    FragmentedHeapError,
    Interrupted,
    NonFiniteLossError,
    OutOfMemoryError,
    PlimsollError,
    TornStepError,
)
from plimsoll.models.assemble import Assembled
from plimsoll.models.build import save_model
from plimsoll.processes.children import parent_that_watches
from plimsoll.processes.signals import StopRequest, stop_on_signal
from plimsoll.records.job import Job
from plimsoll.records.run import (
    CheckpointLine,
    EndLine,
    EvaluationLine,
    LossLine,
    OomEvent,
    Phase,
    RunRecord,
    StartLine,
    StepLine,
)
from plimsoll.records.units import format_bytes
from plimsoll.step.collective import attempt_collectively, survived_elsewhere
from plimsoll.step.evaluate import Evaluation
from plimsoll.step.failpoints import failpoint
from plimsoll.step.oom_boundary import attempt, fitting
from plimsoll.step.rank_buffers import share_slots
from plimsoll.step.result import StepResult
from plimsoll.step.train_step import TrainStep
from plimsoll.training import checkpoint
from plimsoll.training.accuracy import Accuracy
from plimsoll.training.monitor import MemorySampler, View
from plimsoll.training.pauses import Pauses
from plimsoll.training.ranks import (
    may_begin_anew,
    oom_kills_by_machine,
    outside_of_steps,
    random_states,
    restore_random_state,
)
from plimsoll.training.run_directory import RunDirectory
from plimsoll.training.tagging import TagScores

_STOPPING = "stopping: the current step is finished and saved first; interrupt again to stop at once"
_TRIES = 3  # of a fetch, an evaluation or a checkpoint; cached memory is freed between them

T = TypeVar("T")


@dataclass(slots=True)
class Training:
    """A training run in progress: its job, model and step, and the run directory and live view that record it.

    Attributes:
        job: the job.
        parts: the model, optimizer, loss and data loader.
        step: the training step.
        directory: the run directory.
        fingerprint: facts about the job that a checkpoint must match.
        sampler: the thread that samples the used memory.
        view: the live view.
        host: the backend of the host memory; ``None`` if the training device is the CPU.
        stop: the request of a signal to stop this process.
        has_fallen: whether a step in this process has switched to another fallback.
        pauses: the pauses before retries of the current step.
        begun_at: the number of steps that were complete when this process began.
        asked_all: with several ranks, the number of a signal that asked any rank to stop; ``None`` without a signal.
    """

    job: Job
    parts: Assembled
    step: TrainStep
    directory: RunDirectory
    fingerprint: dict[str, str]
    sampler: MemorySampler
    view: View
    host: Backend | None = None
    stop: StopRequest = field(default_factory=StopRequest)
    has_fallen: bool = False
    pauses: Pauses = field(default_factory=Pauses)
    begun_at: int = 0
    asked_all: int | None = None

    @property
    def is_fragmented(self) -> bool:
        """True if a supervisor should replace this process after a failure, because its CPU heap may be fragmented."""
        return (self.has_fallen or self._has_stepped) and self._may_begin_anew

    @property
    def has_fragmented(self) -> bool:
        """True if steps may have fragmented the CPU heap of this process, and a supervisor can start a new process."""
        return self._has_stepped and self._may_begin_anew

    @property
    def pause_seconds(self) -> float | None:
        """Seconds to wait before a step that did not fit is retried unchanged; ``None`` if a retry cannot help."""
        return self.pauses.next_seconds(self.directory, self.step.fallback or 0)

    @property
    def _has_stepped(self) -> bool:
        return self.step.num_steps > self.begun_at

    @property
    def _may_begin_anew(self) -> bool:
        return self.backend.kind == "cpu" and may_begin_anew()

    @property
    def asked_by(self) -> int | None:
        """The number of the signal that asked to stop; ``None`` without a signal.

        All ranks agree on it, so that they stop after the same step.
        """
        return self.stop.signal_number if self.ranks.is_alone else self.asked_all

    @property
    def ranks(self) -> Ranks:
        """The ranks that train the model. Only rank 0 writes the metrics."""
        return self.step.ranks

    @property
    def backend(self) -> Backend:
        """The backend of the training device."""
        return self.step.backend


def train(training: Training, restarts: int = 0) -> RunRecord | None:
    """Train from the current step to the last step of the job.

    Args:
        training: the training run in progress.
        restarts: how often the training process has been restarted.

    Returns:
        The record of the whole run, also written to ``record.json``. ``None`` on ranks other than rank 0, and if memory
        runs out for the record, which grows with each step. The supervisor then writes it.

    Raises:
        Interrupted: after SIGINT or SIGTERM; the current step is finished and saved.
        OutOfMemoryError, NonFiniteLossError: as raised by a training step (`plimsoll.step.train_step`). The checkpoints
            are intact.
    """
    directory, step = training.directory, training.step
    stopping = stop_on_signal(lambda: training.view.say(_STOPPING), parent_that_watches())
    try:
        with ExitStack() as stack:
            fitting(lambda: stack.enter_context(training.sampler.running()), training.backend, "starting")
            stack.enter_context(training.view.shown())
            training.stop = stack.enter_context(stopping)
            directory.append(_start_line(training, restarts))
            outside_of_steps(lambda: _loop(training), training.backend)
        _finish(training)
    except PlimsollError as error:
        directory.append(
            EndLine(
                time_seconds=training.sampler.seconds(),
                step=step.num_steps,
                status="interrupted" if isinstance(error, Interrupted) else "failed",
                message=str(error),
            )
        )
        _record(training)
        raise
    directory.append(EndLine(time_seconds=training.sampler.seconds(), step=step.num_steps, status="finished"))
    return _record(training)


def _record(training: Training) -> RunRecord | None:
    """Write the record of the run on rank 0 and return it; ``None`` on other ranks, or if memory runs out."""
    if training.ranks.rank:
        return None
    record = attempt(training.directory.write_record, training.backend, training.step.position)
    return None if isinstance(record, OomEvent) else record


def resume(training: Training, saved: checkpoint.Checkpoint) -> None:
    """Restore the training run from a checkpoint, and remove metrics and checkpoints of later steps.

    Call this after the state of ``training.step``, which contains the current fallback, has been loaded.
    """
    training.step.install()  # before reading, so that optimizer states kept in a file are read into it
    workload = training.step.workload
    if workload.hooks.sharding.is_sharded or (saved.folder / "shards").is_dir():
        from plimsoll.training import sharded_checkpoint  # imports all of FSDP2

        random_state = sharded_checkpoint.restore(saved, workload)
    else:
        random_state = saved.restore(training.parts.model, workload.optimizer, training.backend.use)
    training.parts.loader.load_state_dict(saved.progress["loader"])
    restore_random_state(training.backend, random_state, training.ranks, training.job.seed + saved.step)
    begin_after(training, saved.step)


def begin_after(training: Training, step: int) -> None:
    """Remove metrics and checkpoints after ``step`` from the run directory, after every rank has read the files."""
    training.ranks.agree(False)
    if training.ranks.rank == 0:
        checkpoint.remove_later(training.directory.checkpoints, step)
        training.directory.keep_until(step)


def _loop(training: Training) -> None:
    job, step = training.job, training.step
    saved_step = training.begun_at = step.num_steps
    if _owes_evaluation(training):
        _evaluate(training)
    while step.num_steps < job.steps and training.asked_by is None:
        try:
            batch: Batch = _survive(training, "fetch", lambda: _fetch(training))
        except FragmentedHeapError:
            _save_if_possible(training, saved_step)
            raise
        try:
            result = _step(training, batch)
        except OutOfMemoryError as error:
            if isinstance(error, TornStepError):
                raise
            if not training.is_fragmented:
                if not _has_waited(training):
                    raise
                continue  # with the same batch, unless a stop was requested meanwhile
            _save_if_possible(training, saved_step)
            raise FragmentedHeapError(
                f"step {step.num_steps + 1} does not fit in this process with any fallback, because earlier steps have "
                "fragmented its heap: start a new process (`plimsoll train` does this automatically)"
            ) from None
        training.pauses = Pauses()
        training.parts.loader.advance()
        note_step(training, batch, result)
        if job.evaluate_every and result.step % job.evaluate_every == 0:
            _evaluate(training)
        if result.step % job.checkpoint.every == 0 or result.step == job.steps:
            _save(training)
            saved_step = result.step
    if step.num_steps < job.steps and (signal_number := training.asked_by) is not None:
        if saved_step != step.num_steps:
            _save(training)
        raise Interrupted(
            f"stopped after step {step.num_steps} of {job.steps}, which is saved: resume with "
            f"`plimsoll train --resume --out {training.directory.path}`",
            signal_number,
        )


def _has_waited(training: Training) -> bool:
    """Pause, so that other programs can free memory, and return whether to retry the step. Rank 0 decides for all."""
    seconds = training.ranks.each([training.pause_seconds or 0.0])[0][0]
    training.pauses.take(seconds, lambda: training.asked_by is not None)
    return seconds > 0


def _save_if_possible(training: Training, saved_step: int) -> None:
    """Save a checkpoint, so that a new process need not repeat steps. If memory runs out, do nothing."""
    if saved_step != training.step.num_steps:
        with suppress(OutOfMemoryError):
            _save(training)


def _fetch(training: Training) -> Batch:
    failpoint("fetch")
    return training.parts.loader.peek()


def _step(training: Training, batch: Batch) -> StepResult:
    def note(event: OomEvent) -> None:
        training.has_fallen |= event.next_fallback not in {None, event.fallback}
        if not event.survived and training.is_fragmented:
            anew = {"survived": True, "action": "restart in a new process, whose heap is not fragmented"}
            event = event.model_copy(update=anew)
        elif not event.survived and (seconds := training.pause_seconds) is not None:
            again = {"survived": True, "action": f"retry unchanged in {seconds:g} s: this has fit before"}
            event = event.model_copy(update=again)
        _note_oom(training, event)

    try:
        return training.step(batch.fields, on_oom=note)
    except NonFiniteLossError as error:
        good = checkpoint.newest_good(training.directory.checkpoints, training.fingerprint)
        where = f"the last good checkpoint is {good.folder}" if good else "there is no checkpoint yet"
        raise NonFiniteLossError(f"{error}; {where}") from None


def note_step(training: Training, batch: Batch, result: StepResult) -> None:
    """Append a completed step, with its memory use, to the metrics, and show it in the live view.

    Args:
        training: the training run in progress.
        batch: the batch of the step.
        result: the result of the step.
    """
    samples = training.sampler.drain()
    use = training.step.use()
    training.backend.reset_peak()
    peak_bytes_of_ranks = _told_after_step(training, use.peak_bytes or 0, result.oom_events)
    line = StepLine(
        time_seconds=training.sampler.seconds(),
        step=result.step,
        epoch=batch.epoch,
        first_sample=batch.first_sample,
        num_samples=result.num_samples,
        num_units=result.num_units,
        loss=result.loss,
        gradient_norm=result.gradient_norm,
        learning_rate=result.learning_rate,
        step_seconds=result.step_seconds,
        micro_batch=result.micro_batch,
        fallback=result.fallback,
        peak_bytes=max(peak_bytes_of_ranks, default=use.peak_bytes),
        used_bytes=use.used_bytes,
        updated=result.updated,
        memory=samples,
        peak_bytes_of_ranks=peak_bytes_of_ranks,
    )
    training.directory.append(line)
    if (check := training.step.additivity.news()) is not None:
        training.directory.append(LossLine(time_seconds=line.time_seconds, step=result.step, check=check))
    if (kept := training.step.graphs.line_of(result.step)) is not None:
        training.directory.append(kept.model_copy(update={"time_seconds": line.time_seconds}))
    memory = {"device": use} if training.host is None else {"device": use, "host": training.host.use()}
    training.view.update(line, memory)


def _told_after_step(training: Training, peak_bytes: int, events: Sequence[OomEvent]) -> tuple[int, ...]:
    """Exchange memory peaks, stop requests and recovered memory errors of the last step between ranks.

    Returns the peak memory of each rank in bytes; empty for a single process.
    """
    ranks = training.ranks
    if ranks.is_alone:
        return ()
    # Events without a rank are from the update, which follows the exchange of events between ranks.
    own = [event for event in events if event.rank is None]
    signals, peaks, nums = zip(*ranks.each([training.stop.signal_number or 0, peak_bytes, len(own)]), strict=True)
    training.asked_all = int(max(signals)) or None
    for event in survived_elsewhere(own, ranks) if any(nums) else ():
        _note_oom(training, event)
    return tuple(map(int, peaks))


def _note_oom(training: Training, event: OomEvent) -> None:
    if event.rank is None and not training.ranks.is_alone:
        event = event.model_copy(update={"rank": training.ranks.rank})
    training.directory.append(event.model_copy(update={"time_seconds": training.sampler.seconds()}))
    asked = f" (asked for {format_bytes(event.requested_bytes)})" if event.requested_bytes else ""
    training.view.say(f"out of memory in {event.phase}{event.on_which_ranks}, step {event.step}{asked}: {event.action}")


def _owes_evaluation(training: Training) -> bool:
    """Return whether the previous process ended during the evaluation after the last step."""
    every, step = training.job.evaluate_every, training.step.num_steps
    if not every or not step or step % every:
        return False
    return not any(isinstance(line, EvaluationLine) and line.step == step for line in training.directory.each_line())


def _evaluate(training: Training, *, is_saved: bool = False) -> None:
    """Evaluate. If the evaluation does not fit in the fragmented heap of this process, request a new process.

    ``is_saved``: a checkpoint of the last completed step already exists.
    """
    try:
        _evaluate_here(training)
    except OutOfMemoryError:
        if not training.has_fragmented:
            raise
        if not is_saved:
            with suppress(OutOfMemoryError):
                _save(training)
        raise FragmentedHeapError(
            f"the evaluation after step {training.step.num_steps} does not fit in this process, because its steps have "
            "fragmented the heap: start a new process (`plimsoll train` does this automatically)"
        ) from None


def _evaluate_here(training: Training) -> None:
    if training.parts.validation is None:
        return
    validation, batch_size = training.parts.validation, training.job.batch_size

    windows = getattr(validation, "windows", None)

    def evaluate() -> tuple[Evaluation, float | None, float | None]:
        model, position, ranks = training.parts.model, training.step.position, training.ranks
        parts = iterate_once(validation, batch_size, ranks.rank, ranks.world_size)
        batches = ((batch.fields, batch.sample_ids) for batch in parts)
        if training.job.task == "language-modeling":
            return training.step.evaluate(fields for fields, _ in batches), None, None
        if training.job.task == "token-classification":
            with TagScores(model, position, training.parts.label_names, windows, ranks) as scores:
                return training.step.evaluate(scores.counted(batches)), scores.accuracy(), scores.entity_f1()
        with Accuracy(model, position, windows, ranks) as accuracy:
            return training.step.evaluate(accuracy.counted(batches)), accuracy.share(), None

    evaluation, accuracy, entity_f1 = _survive(training, "evaluation", evaluate)
    for event in evaluation.oom_events:
        _note_oom(training, event)
    line = EvaluationLine(
        time_seconds=training.sampler.seconds(),
        step=training.step.num_steps,
        loss=evaluation.loss,
        num_samples=evaluation.num_samples,
        num_units=evaluation.num_units,
        accuracy=accuracy,
        entity_f1=entity_f1,
    )
    training.directory.append(line)
    of = "" if windows is None else " of the texts"
    of = " of the words" if training.job.task == "token-classification" else of
    shown = "" if line.accuracy is None else f", accuracy {line.accuracy:.1%}{of}"
    shown += "" if line.entity_f1 is None else f", entity F1 {line.entity_f1:.1%}"
    training.view.say(f"step {line.step}: validation loss {line.loss:.4f}{shown} over {line.num_samples} samples")


def _save(training: Training) -> None:
    """Write a checkpoint on rank 0, with the random states of all ranks. If the model is sharded, all ranks write."""
    step, parts = training.step, training.parts
    random_state = _survive(
        training, "checkpoint", lambda: random_states(training.backend, training.ranks), is_collective=True
    )
    _survive(training, "checkpoint", lambda: share_slots(parts.model, training.ranks), is_collective=True)
    if training.ranks.rank and not step.workload.hooks.sharding.is_sharded:
        return
    progress: dict[str, Any] = {
        "fingerprint": training.fingerprint,
        "training_step": step.state_dict(),
        "loader": parts.loader.state_dict(),
    }
    if training.ranks.rank == 0:
        training.directory.sync_metrics()  # after a power loss, no checkpoint may be newer than the recorded steps
    if step.workload.hooks.sharding.is_sharded:
        _save_shards(training, random_state, progress)
        return
    saved = _survive(
        training,
        "checkpoint",
        lambda: checkpoint.save(
            training.directory.checkpoints,
            step.num_steps,
            model=parts.model,
            optimizer=step.workload.optimizer,  # a technique may have replaced the optimizer of the job
            random_state=random_state,
            progress=progress,
            keep=training.job.checkpoint.keep,
        ),
    )
    training.directory.append(
        CheckpointLine(time_seconds=training.sampler.seconds(), step=saved.step, num_bytes=saved.num_bytes)
    )


def _save_shards(training: Training, random_state: Any, progress: dict[str, Any]) -> None:
    """Write a sharded checkpoint; each rank writes its shard."""
    from plimsoll.training import sharded_checkpoint  # imports all of FSDP2

    saved = _survive(
        training,
        "checkpoint",
        lambda: sharded_checkpoint.save(
            training.directory.checkpoints,
            training.step.num_steps,
            workload=training.step.workload,
            ranks=training.ranks,
            random_state=random_state,
            progress=progress,
            keep=training.job.checkpoint.keep,
        ),
    )
    if training.ranks.rank == 0:
        training.directory.append(
            CheckpointLine(time_seconds=training.sampler.seconds(), step=saved.step, num_bytes=saved.num_bytes)
        )


def _survive(training: Training, phase: Phase, work: Callable[[], T], *, is_collective: bool = False) -> T:
    """Run ``work``, which must have no side effects. If memory runs out, free cached memory and retry a few times.

    With ``is_collective``, a memory error on one rank counts as a memory error on all ranks.
    """
    training.step.position.phase = phase
    ranks = training.ranks if is_collective else Ranks()
    for tries_left in reversed(range(_TRIES)):
        outcome = attempt_collectively(work, training.backend, training.step.position, ranks)
        if not isinstance(outcome, OomEvent):
            return outcome
        training.backend.release(last_resort=True)
        what = "freed cached memory and retried" if tries_left else f"stopped after {_TRIES} tries"
        survived = bool(tries_left) or (training.has_fragmented and phase != "evaluation")
        event = outcome.model_copy(update={"action": what, "micro_batch": None, "survived": survived})
        _note_oom(training, event)
    text = f"memory ran out {_TRIES} times in the {phase} phase after step {training.step.num_steps} ({event.shortage})"
    if training.has_fragmented and phase != "evaluation":  # `_evaluate` saves before it requests a new process
        raise FragmentedHeapError(f"{text}; start a new process (`plimsoll train` does this automatically)")
    raise OutOfMemoryError(f"{text}; give a larger budget")


def _finish(training: Training) -> None:
    """Finish the run after its last step: free the optimizer states, evaluate and save the model.

    The evaluation is left out if the last step was already followed by one.
    """
    training.step.drop_optimizer_states()
    if not training.job.evaluate_every or training.job.steps % training.job.evaluate_every:
        _evaluate(training, is_saved=True)
    if training.step.workload.hooks.sharding.is_sharded:
        training.step.close()  # gathers the whole model on every rank
    if training.ranks.rank == 0:
        fitting(
            lambda: save_model(training.parts.model, training.directory.model), training.backend, "writing the model"
        )
    # Closing moves tensors back to the device. They are no longer needed, so a memory error here is ignored.
    attempt(training.step.close, training.backend, training.step.position)


def _start_line(training: Training, restarts: int) -> StartLine:
    return StartLine(
        time_seconds=training.sampler.seconds(),
        step=training.step.num_steps,
        micro_batch=training.step.micro_batch or training.job.batch_size,
        fallback=training.step.fallback,
        baseline_bytes=training.backend.use().used_bytes,
        restarts=restarts,
        wall_time=datetime.now(UTC).isoformat(timespec="milliseconds"),
        oom_kills=oom_kills_by_machine(training.ranks),
    )
