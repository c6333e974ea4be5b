"""The supervisor of the training process: it explains why the process died, and restarts it.

The supervisor has no tensors and does not import torch. It starts the training process in a new process group and
forwards SIGINT and SIGTERM, both as SIGTERM. The first signal lets the process finish and save its step; the second
signal ends it at once. (SIGINT would raise KeyboardInterrupt in whichever library is being imported.) `_death` finds
the cause of a death, and `_Cause` defines the response. After most causes, training is restarted from the last good
checkpoint. Three deaths in a row without a checkpoint or a smaller micro-batch end the run.

Several ranks are started by torchrun's agent (`plimsoll.distributed.launch`). Does NOT watch processes on other
machines: torchrun restarts the ranks there.
"""

from __future__ import annotations

import resource
import signal
import sys
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from plimsoll.device.aborts import called_by
from plimsoll.device.cpu.cgroup import OomKills, oom_kill_count
from plimsoll.errors import (
    FragmentedHeapError,
    Interrupted,
    KilledError,
    OutOfMemoryError,
    OutputError,
    PlimsollError,
    RankLostError,
    TornStepError,
)
from plimsoll.records.device import Budget
from plimsoll.records.plan import Configuration, Plan
from plimsoll.records.run import CheckpointLine, DeathLine, RunHead, StartLine
from plimsoll.records.units import format_bytes
from plimsoll.training.processes import UNFINISHED, End, end_server, run_worker
from plimsoll.training.run_directory import RunDirectory

_CRASHES_WITHOUT_MEMORY = {signal.SIGSEGV, signal.SIGABRT}
_CRASHES = {*_CRASHES_WITHOUT_MEMORY, signal.SIGILL, signal.SIGFPE}
_MOST_DEATHS_WITHOUT_PROGRESS = 3


class _Cause(Enum):
    """The cause of a death. Each value is the advice to the user when the supervisor gives up."""

    # After the first three causes, the next fallback is used. Later steps may go up again (`plimsoll.step.recovery`).
    # The counters of the machine attribute SIGKILL to the kernel's OOM killer.
    KERNEL = "give a smaller --budget, which stops it below the machine's own limit, or free memory on the machine"
    # The exit code of the process tells that memory ran out, in an update or with every fallback in a fragmented heap.
    # The process has saved a checkpoint if it could.
    TOLD = "give a larger --budget"
    # A lack of memory is possible, but not proven: see `_death`.
    GUESS = (
        "if memory is the cause, give another --budget or free memory on the machine; otherwise stop the program that "
        "kills it"
    )
    # Not a lack of memory: restart with the same micro-batch. If a rank ended because another rank ended, the cause is
    # the end of the other rank; if no rank ended, a connection was lost.
    OUTSIDE = "stop the program that kills it"
    # A restart would crash again, so the run ends.
    CRASH = "find the cause of the crash; its stack is printed above, if the process could still write it"

    @property
    def may_be_memory(self) -> bool:
        """True if a lack of memory may be the cause, so that a smaller micro-batch may help."""
        return self in {_Cause.KERNEL, _Cause.TOLD, _Cause.GUESS}


class _Death(NamedTuple):
    """The end of a process that was killed, crashed or asked for a restart."""

    signal_name: str
    signal_number: int
    evidence: str
    cause: _Cause

    def error(self, what_happened: str, remedy: str, how: str = "") -> PlimsollError:
        """Return the error to raise when the supervisor gives up.

        It is an `OutOfMemoryError` if there is evidence of a memory problem, otherwise a `KilledError`.

        Args:
            what_happened: the first clause of the message.
            remedy: advice to the user.
            how: the option for starting the run again, such as " with --resume".
        """
        text = f"{what_happened}; {self.evidence}: {remedy}; start it again afterwards{how}"
        if self.cause in {_Cause.KERNEL, _Cause.TOLD}:
            return OutOfMemoryError(text)
        return KilledError(text, self.signal_number)


@dataclass(slots=True)
class _Retries:
    """The arguments of the next training process, and the counts that decide when to give up.

    ``num_fruitless`` counts the deaths in a row without a new checkpoint or a smaller fallback. ``deaths_at`` counts
    the deaths with each fallback that may have had too little memory. ``fallback`` is for the next process; ``None``:
    it uses the fallback of the checkpoint.
    """

    num_fallbacks: int
    beginning: tuple[str, ...]
    num_deaths: int = 0
    num_fruitless: int = 0
    fallback: int | None = None
    too_large_fallback: int | None = None
    deaths_at: Counter[int] = field(default_factory=Counter)

    def arguments(self) -> list[str]:
        """Return the arguments that follow the run directory in the next ``plimsoll train-worker`` command."""
        fallbacks = {
            "--fallback": self.fallback,
            "--too-large-fallback": self.too_large_fallback if self.fallback is not None else None,
        }
        given = (word for name, fallback in fallbacks.items() if fallback is not None for word in (name, str(fallback)))
        return [*self.beginning, *given, "--restarts", str(self.num_deaths)]

    def note_begun(self) -> None:
        """Record that training has begun, so that a new process resumes from the newest checkpoint.

        Until then, the newest checkpoint may be one from an earlier run.
        """
        self.beginning = ("--resume-newest",)

    def note_saved(self) -> None:
        """Record that a process has written a checkpoint. The next process reads the fallback from it."""
        self.num_fruitless, self.fallback = -1, None

    def note_death(self, cause: _Cause, in_force: int, has_fit: bool) -> int:
        """Count a death, and return the fallback of the next process.

        Args:
            cause: the cause of the death.
            in_force: the fallback that was used when the process died.
            has_fit: whether a step has completed with ``in_force``; also true if the process died while loading.
        """
        self.num_deaths += 1
        self.num_fruitless += 1
        if not cause.may_be_memory:
            return in_force if self.fallback is None else self.fallback
        self.deaths_at[in_force] += 1
        # As in a step: if the fallback has fit before, another program may have taken the memory. It is retried once.
        if not has_fit or self.deaths_at[in_force] > 1:
            self.too_large_fallback = max(in_force, self.too_large_fallback or 0)
        following = min(in_force + 1, self.num_fallbacks - 1)
        if following > max(in_force, self.fallback or 0):
            self.num_fruitless = 0
        self.fallback = following
        return following


def supervise(
    directory: RunDirectory, worker_arguments: tuple[str, ...] = (), quiet: bool = False, num_ranks: int = 1
) -> int:
    """Run the training process of ``directory`` to the end of the run, and restart it after a death.

    Args:
        directory: the run directory, with its ``job.yaml``, ``plan.json`` and prepared data.
        worker_arguments: further arguments of the first ``plimsoll train-worker``.
        quiet: show no progress.
        num_ranks: number of processes that train the model.

    Returns:
        The exit code of the training process if it ended by itself; 128 + n if signal n asked it to end.

    Raises:
        OutOfMemoryError: if the process is killed for memory repeatedly without progress.
        KilledError: if the process is killed for another reason repeatedly, or crashes.
        OutputError: if the run directory was deleted.
        Interrupted: if a second signal, or a kill during the stop, ended the process in the middle of a step.
    """
    plan = Plan.load(directory.plan)
    retries = _Retries(len(plan.fallbacks), worker_arguments)
    launched = ["launch-worker", str(num_ranks), "--"] if num_ranks > 1 else []
    shown = ["--quiet"] if quiet else []
    while True:
        kills_before, num_starts = oom_kill_count(), len(_starts(directory))
        end = run_worker([*launched, "train-worker", str(directory.path), *retries.arguments(), *shown])
        if launched:
            end = end._replace(return_code=_signalled(end.return_code))
        if end.return_code != OutputError.exit_code:  # with that code, the process has reported a missing directory
            directory.require_there()
        death = _death(end, kills_before, _host_budget_bytes(directory, plan.budget))
        if death is None:
            _complete_record(directory)
            _require_saved(directory, end)
            return end.exit_code
        fallbacks = Plan.load(directory.plan).fallbacks  # a trial may have changed them
        retries.num_fallbacks = len(fallbacks)
        if death.cause in {_Cause.KERNEL, _Cause.GUESS}:  # the machine needs the memory of the fork server
            end_server()
        has_begun = len(_starts(directory)) > num_starts
        if has_begun:
            retries.note_begun()
            if _has_saved(directory):
                retries.note_saved()
        in_force = directory.fallback_in_force() or 0
        # A death while loading does not show that the fallback is too large.
        has_fit = not has_begun or directory.has_fit(in_force)
        following = retries.note_death(death.cause, in_force, has_fit)
        saved_step = directory.last_saved_step()
        gives_up = death.cause is _Cause.CRASH or retries.num_fruitless >= _MOST_DEATHS_WITHOUT_PROGRESS
        _note(directory, death, None if gives_up else saved_step, following, fallbacks[following])
        if gives_up:
            _complete_record(directory)
            what_happened = _what_happened(death, retries.num_fruitless, saved_step, fallbacks[in_force])
            raise death.error(what_happened, death.cause.value, " with --resume" if saved_step else " with --force")


def _complete_record(directory: RunDirectory) -> None:
    """Write the record of the run if the training process could not, for lack of memory or time."""
    try:
        if not directory.has_its_record():
            directory.write_record()
    except PlimsollError as error:  # the exit code of the training matters more
        print(f"the record of the run could not be written: {error}", file=sys.stderr)


def _require_saved(directory: RunDirectory, end: End) -> None:
    """Raise if the run was asked to stop but steps are not saved. Exit code 128 + n means that all steps are saved."""
    if end.asked_by is None:
        return
    done, saved = directory.last_step(), directory.last_saved_step()
    if end.return_code in {FragmentedHeapError.exit_code, TornStepError.exit_code}:
        if done > saved:
            raise OutOfMemoryError(
                f"stopped after step {done}, but there was no memory to save it: step {saved} is the last one saved; "
                f"resume from it with `plimsoll train --resume --out {directory.path}` and more memory"
            )
    elif end.return_code < 0 or (end.return_code in UNFINISHED and done > saved):  # by a second signal, or a kill
        number = -end.return_code if end.return_code < 0 else signal.SIGTERM
        how = "stopped at once" if number == signal.SIGTERM else f"killed ({signal.Signals(number).name})"
        begun = f"{how}, and step {saved} is the last one saved"
        if saved:
            again = f"{begun}: resume with `plimsoll train --resume --out {directory.path}`"
            raise Interrupted(again, end.asked_by)
        raise Interrupted(f"{begun}: give the same command again, with --force", end.asked_by)


def _signalled(exit_code: int) -> int:
    """Return the return code of a rank from the exit code of its launcher: negative if a signal killed it."""
    number = exit_code - 128
    return -number if number in {signal.SIGKILL, signal.SIGBUS, *_CRASHES} else exit_code


def _what_happened(death: _Death, num_deaths: int, saved_step: int, configuration: Configuration) -> str:
    if death.cause is _Cause.CRASH:
        return f"the training process crashed with {death.signal_name} after step {saved_step}, the last one saved"
    return (
        f"the training process was killed ({death.signal_name}) {num_deaths} times without getting past step "
        f"{saved_step}, {_described(configuration)}"
    )


def _described(configuration: Configuration) -> str:
    """Return a text for the user that names the micro-batch and techniques of a fallback."""
    return " ".join(
        ["with micro-batch", str(configuration.micro_batch), *(f"and {choice}" for choice in configuration.others)]
    )


def prepare_data(
    directory: RunDirectory, cache: Path, quiet: bool, again: bool = False, constraints: tuple[str, ...] = ()
) -> int:
    """Index the texts, train the tokenizer and tokenize in a separate process, so that all its memory is freed.

    Args:
        directory: the run directory, with its ``job.yaml``.
        cache: folder for the tokens.
        quiet: show no progress.
        again: the data were prepared before, and the result must be the same.
        constraints: arguments ``--pin`` and ``--forbid``; contradictions between them are refused at once.

    Returns:
        The exit code of the process.

    Raises:
        Interrupted: if SIGINT or SIGTERM asked the process to stop.
        OutOfMemoryError: if the process is killed for memory.
        KilledError: if the process is killed for another reason, or crashes.
    """
    shown = [*(["--quiet"] if quiet else []), *(["--again"] if again else [])]
    return _done_in_a_process(
        ["prepare-worker", str(directory.path), str(cache), *constraints, *shown],
        f"prepares the data in {cache}",
        "give the path of an existing tokenizer",
    )


def make_plan(directory: RunDirectory, arguments: tuple[str, ...], quiet: bool) -> int:
    """Plan the training in a separate process, which imports torch.

    Args:
        directory: the run directory, with its ``job.yaml``.
        arguments: further arguments of ``plimsoll plan-worker``.
        quiet: show no progress.

    Returns:
        The exit code of the process.

    Raises:
        Interrupted: if SIGINT or SIGTERM asked the process to stop.
        OutOfMemoryError: if the process is killed for memory.
        KilledError: if the process is killed for another reason, or crashes.
    """
    return _done_in_a_process(
        ["plan-worker", str(directory.path), *arguments, *(["--quiet"] if quiet else [])],
        f"plans the run in {directory.path}",
        "train without a plan (--no-plan)",
    )


def _done_in_a_process(arguments: list[str], what_it_does: str, remedy: str) -> int:
    """Run a command in a separate process before the training, and return its exit code.

    ``what_it_does`` describes the process in error messages. ``remedy`` is advice to the user on how to reduce memory.
    """
    kills_before = oom_kill_count()
    end = run_worker(arguments)
    if end.asked_by is not None and end.exit_code == 128 + end.asked_by:
        raise Interrupted(
            f"the process that {what_it_does} was stopped ({signal.Signals(end.asked_by).name}) before anything was "
            "trained: give the same command again",
            end.asked_by,
        )
    death = _death(end, kills_before, host_budget_bytes=None)
    if death is None:
        return end.exit_code
    raise death.error(
        f"the process that {what_it_does} was killed ({death.signal_name})",
        f"free memory on the machine, or {remedy}" if death.cause.may_be_memory else death.cause.value,
    )


def _death(end: End, kills_before: OomKills | None, host_budget_bytes: int | None) -> _Death | None:
    """Return the signal, cause and evidence of a process's death; ``None`` if it ended by itself, or on request."""
    if end.asked_by is not None:
        return None
    if end.return_code == TornStepError.exit_code:
        evidence = "memory ran out inside optimizer.step(), and only a checkpoint can undo that"
        return _Death("torn step", 0, evidence, _Cause.TOLD)
    if end.return_code == FragmentedHeapError.exit_code:
        evidence = "memory ran out with every fallback, because the heap is fragmented; only a new process helps"
        return _Death("fragmented heap", 0, evidence, _Cause.TOLD)
    if end.return_code == RankLostError.exit_code:
        return _Death("rank lost", 0, "a rank ended, or did not answer in time", _Cause.OUTSIDE)
    number = -end.return_code
    if number not in {signal.SIGKILL, signal.SIGBUS, *_CRASHES}:
        return None
    if number == signal.SIGKILL:
        cause, evidence = _killer(kills_before)
    elif number == signal.SIGBUS:
        cause = _Cause.GUESS
        evidence = "a guess: a page of a mapped file could not be read or written, as if /dev/shm or the disk is full"
    elif (host_budget_bytes is not None or _has_limit_of_others()) and number in _CRASHES_WITHOUT_MEMORY:
        cause, evidence = _Cause.GUESS, _refused(host_budget_bytes)
    elif number in _CRASHES_WITHOUT_MEMORY:
        cause, evidence = _Cause.CRASH, "no budget was enforced that could have refused it memory"
    else:
        cause, evidence = _Cause.CRASH, "a lack of memory does not cause this signal"
    if number in _CRASHES and (place := called_by(end.fault)):
        evidence += f"; it was called by {place}"
    return _Death(signal.Signals(number).name, number, evidence, cause)


def _refused(host_budget_bytes: int | None) -> str:
    """Return the probable reason why native code aborted a process that has a memory limit."""
    what = "the limit that is set on it (ulimit)"
    if host_budget_bytes is not None:
        what = f"the budget of {format_bytes(host_budget_bytes)}"
    return (
        f"a guess: native code (Rust, as in tokenizers, or C++) ends the process when {what} refuses it memory, and "
        "prints an error before"
    )


def _has_limit_of_others() -> bool:
    """Return whether this process has a memory limit (RLIMIT_DATA, RLIMIT_AS), which child processes inherit."""
    limits = (resource.RLIMIT_DATA, resource.RLIMIT_AS)
    return any(resource.getrlimit(limit)[0] != resource.RLIM_INFINITY for limit in limits)


def _killer(before: OomKills | None) -> tuple[_Cause, str]:
    """Return the cause of a SIGKILL, with evidence: the kernel's counts of OOM kills before the process and now."""
    now = oom_kill_count()
    if now is None or before is None or now.is_whole_machine != before.is_whole_machine:
        return _Cause.GUESS, "unknown sender of SIGKILL: neither a memory cgroup nor /proc/vmstat counts OOM kills here"
    num_kills = now.number - before.number
    if not now.is_whole_machine:
        if num_kills > 0:
            return (
                _Cause.KERNEL,
                f"the memory cgroup counts {num_kills} OOM kill(s) more than before: the kernel's OOM killer",
            )
        return _Cause.OUTSIDE, "the memory cgroup counts no OOM kill: another program sent the signal"
    if num_kills > 0:
        return _Cause.KERNEL, (
            f"the whole machine counts {num_kills} OOM kill(s) more than before (no memory cgroup counts them): "
            "probably the kernel's OOM killer"
        )
    return _Cause.OUTSIDE, "the whole machine counts no OOM kill: another program sent the signal"


def _host_budget_bytes(directory: RunDirectory, budget: Budget) -> int | None:
    """Return the limit on host memory in bytes, or ``None`` without one. A GPU budget does not limit host memory."""
    is_on_cpu = directory.head.is_file() and RunHead.load(directory.head).device.kind == "cpu"
    return budget.host_bytes if budget.host_bytes is not None or not is_on_cpu else budget.device_bytes


def _note(
    directory: RunDirectory,
    death: _Death,
    restarted_from_step: int | None,
    following: int,
    configuration: Configuration,
) -> None:
    lines = directory.lines()
    last = lines[-1].time_seconds if lines else 0.0
    directory.append(
        DeathLine(
            time_seconds=last,
            signal=death.signal_name,
            evidence=death.evidence,
            restarted_from_step=restarted_from_step,
            next_fallback=following,
            next_micro_batch=configuration.micro_batch,
        )
    )
    then = (
        "giving up"
        if restarted_from_step is None
        else f"resuming from step {restarted_from_step} {_described(configuration)}"
    )
    ended = "killed" if death.signal_number else "ended"
    print(f"training process {ended} ({death.signal_name}): {death.evidence}; {then}", file=sys.stderr)


def _starts(directory: RunDirectory) -> list[StartLine]:
    return [line for line in directory.lines() if isinstance(line, StartLine)]


def _has_saved(directory: RunDirectory) -> bool:
    """Return whether the last training process that started has written a checkpoint."""
    for line in reversed(directory.lines()):
        if isinstance(line, CheckpointLine | StartLine):
            return isinstance(line, CheckpointLine)
    return False
