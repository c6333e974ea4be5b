"""The fallbacks of a plan in a running training: their levels, and the installation of their techniques.

Consecutive fallbacks with the same techniques and different micro-batches form one level. A change between fallbacks of
one level installs nothing. Techniques for the whole run are installed once and must be the same in every fallback.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import takewhile
from typing import Any, Protocol

from plimsoll.device.base import Backend
from plimsoll.distributed.ranks import Ranks
from plimsoll.errors import InputError, OutOfMemoryError, PlimsollWarning
from plimsoll.models.workload import Reason, Workload
from plimsoll.records.device import MemoryUse
from plimsoll.records.plan import MICRO_BATCH, Choice, Configuration, without_micro_batch
from plimsoll.records.run import OomEvent
from plimsoll.step.collective import attempt_collectively
from plimsoll.step.micro_batches import Shape
from plimsoll.step.oom_boundary import Position
from plimsoll.step.recovery import FallbackSchedule, Measured, RanOut, Size, action_of, micro_batch_sizes
from plimsoll.techniques import TECHNIQUES, Choices, Setting, conflict_among, in_order, installed, technique_of
from plimsoll.techniques.mechanisms.uncuttable import WholeBatch


class InstalledFallbacks:
    """The fallbacks of a plan, and the techniques of one level, which are installed on a workload.

    Args:
        workload: the workload. Techniques for the whole run are installed on it at once.
        fallbacks: the configurations of a plan, or only their choices, each with a micro-batch.

    Raises:
        InputError: if a fallback has no micro-batch, or the techniques for the whole run differ between fallbacks.
    """

    def __init__(self, workload: Workload, fallbacks: Sequence[Configuration | Sequence[Choice]]) -> None:
        self._workload = workload
        self._set(fallbacks)
        batch_size = max((size.samples for size in self.sizes), default=1)
        for choices in map(choices_of, fallbacks):
            _refuse_impossible(choices, workload, batch_size)
        self._run_stack = ExitStack()
        self._run_stack.enter_context(installed(workload, self._for_the_run))
        self._at_work: list[tuple[Choice, ExitStack]] = []
        self._level: int | None = None

    def _set(self, fallbacks: Sequence[Configuration | Sequence[Choice]]) -> None:
        self.needs = tuple(
            fallback.peak.likely_bytes if isinstance(fallback, Configuration) and fallback.peak is not None else None
            for fallback in fallbacks
        )
        choices_by_fallback = [*map(choices_of, fallbacks)]
        for_the_run = [_split(choices)[0] for choices in choices_by_fallback] or [()]
        different = list(dict.fromkeys(" ".join(map(str, choices)) or "none" for choices in for_the_run))
        if len(different) > 1:
            raise InputError(
                f"the fallbacks of a plan differ in choices that change the training ({' | '.join(different)}): give "
                "the same choices to each"
            )
        self._for_the_run = for_the_run[0]
        self._levels: list[Choices] = []
        sizes: list[Size] = []
        for choices in choices_by_fallback:
            others = _split(choices)[1]
            if not self._levels or others != self._levels[-1]:
                self._levels.append(others)
            sizes.append(Size(samples_of(choices), len(self._levels) - 1))
        self.sizes = tuple(sizes)

    def exchange(self, fallbacks: Sequence[Configuration | Sequence[Choice]]) -> None:
        """Replace the fallbacks by others of the same plan. Installed techniques stay until `use` needs another level.

        Raises:
            InputError: if the fallbacks have different choices for the whole run.
        """
        self.refuse_others(fallbacks)
        self._set(fallbacks)
        self._level = 0 if self._levels and self._levels[0] == tuple(choice for choice, _ in self._at_work) else None

    def refuse_others(self, fallbacks: Sequence[Configuration | Sequence[Choice]]) -> None:
        """Refuse fallbacks with different choices for the whole run, because such choices cannot be exchanged.

        Raises:
            InputError: if these choices differ.
        """
        ours, theirs = self._for_the_run, next((_split(choices_of(one))[0] for one in fallbacks), ())
        if ours != theirs:
            asked, made = (" ".join(map(str, choices)) or "nothing" for choices in (theirs, ours))
            raise InputError(
                f"the plan uses {asked} for the whole run, but the step was created with {made}: create the step with "
                "fallbacks=plan.fallbacks"
            )

    @property
    def has_one_in_force(self) -> bool:
        """True if the techniques of some level are installed."""
        return self._level is not None or not self._levels

    @property
    def names(self) -> list[str]:
        """Descriptions of the fallbacks. A checkpoint with the same descriptions was made with the same fallbacks."""
        return [f"{size.samples} {self.described(size.level)}" for size in self.sizes]

    def is_in_force(self, level: int) -> bool:
        """Return whether the techniques of a level are installed."""
        return self._level == level or (not self._levels and level == 0)

    def use(self, level: int) -> None:
        """Install the techniques of a level in place of the current ones.

        Leading techniques that both levels share stay installed. So optimizer states in files are not moved back and
        forth. If a technique cannot be installed, the techniques before it stay installed, and no level is current.
        """
        if self.is_in_force(level):
            return
        wanted, self._level = self._levels[level], None
        both = zip(wanted, (choice for choice, _ in self._at_work), strict=False)
        self._let_go(num_kept=len(list(takewhile(lambda pair: pair[0] == pair[1], both))))
        for choice in wanted[len(self._at_work) :]:
            stack = ExitStack()
            stack.enter_context(installed(self._workload, [choice]))
            self._at_work.append((choice, stack))
        self._level = level

    def keep_whole(
        self, fallback_schedule: FallbackSchedule, whole: WholeBatch, reason: Callable[[], Reason | None], shape: Shape
    ) -> bool:
        """Find out whether batches may be split; if not, exclude the fallbacks that would split them.

        Call this before a batch is split.

        Args:
            fallback_schedule: the schedule of these fallbacks.
            whole: holds the reasons against splitting that are already known.
            reason: runs passes with the installed techniques. Returns the reason against splitting a batch; ``None``
                if it may be split.
            shape: the shape of the batch.

        Returns:
            True if it is known whether batches may be split. False if techniques are not installed on some rank,
            because passes may not fit without them. The caller then installs them on all ranks, and calls this again
            before it splits a batch.
        """
        if whole.reason() is not None:
            return True
        if self._workload.ranks.agree(not self.has_one_in_force):
            return False
        if reason() is not None:
            fallback_schedule.keep_whole(self.sizes[0].samples if self.sizes else shape.num_samples)
        return True

    def described(self, level: int) -> str:
        """Return a text that lists the techniques of a level."""
        return " ".join(map(str, self._levels[level])) or "no other technique"

    def close(self) -> None:
        """Remove every technique, even if memory runs out while one of them is removed."""
        self._level = None
        with self._run_stack:
            self._let_go(num_kept=0)

    def _let_go(self, num_kept: int) -> None:
        """Remove the techniques of the level in reverse order, except the first ``num_kept``.

        If memory runs out while a technique is removed, its tensors stay where they are, and the other techniques are
        still removed.
        """
        leaving, self._at_work = self._at_work[num_kept:], self._at_work[:num_kept]
        with ExitStack() as stack:
            for _, one in leaving:
                stack.push(one)


def take_back(fallbacks: InstalledFallbacks, workload: Workload, backend: Backend, position: Position) -> None:
    """Remove the techniques. Tensors that do not fit back on the device stay outside it, with a warning.

    Raises:
        OutOfMemoryError: if a model that is sharded over ranks cannot be gathered on all of them.
    """
    is_shared = workload.hooks.sharding.is_sharded  # all ranks must then close together, so that no rank waits forever
    event = attempt_collectively(fallbacks.close, backend, position, workload.ranks if is_shared else Ranks())
    if isinstance(event, OomEvent) and is_shared:
        raise OutOfMemoryError(
            f"memory ran out while the model was gathered from the shards of {workload.ranks.world_size} ranks "
            f"({event.shortage}): its checkpoints are intact; give a larger budget, or train on one rank with enough "
            "memory for the whole model"
        )
    if isinstance(event, OomEvent):
        warnings.warn(
            f"memory ran out while the techniques of the plan were removed ({event.shortage}): parameters or "
            "optimizer states stay in a file or in host memory, where they can be used and saved",
            PlimsollWarning,
            stacklevel=3,
        )


def fallback_schedule_of(
    fallbacks: InstalledFallbacks,
    before: FallbackSchedule | None,
    num_samples: int,
    *,
    first_micro_batch: int | None,
    grow_after: int,
    is_whole: bool,
    learned: dict[str, Any] | None = None,
) -> FallbackSchedule:
    """Return the fallback schedule for a batch.

    Without planned fallbacks, the size of the first batch determines the micro-batch sizes, and a larger batch gets a
    new schedule.

    Args:
        fallbacks: the fallbacks of a plan; they may be empty.
        before: the previous fallback schedule. A new one inherits its limits.
        num_samples: samples of the batch.
        first_micro_batch: the initial samples per micro-batch if there are no fallbacks; ``None`` for the whole batch.
        grow_after: see `plimsoll.step.recovery.FallbackSchedule`.
        is_whole: whether batches must not be split.
        learned: the schedule's state in a checkpoint, which is loaded if there is no previous schedule.
    """
    top = first_micro_batch or num_samples
    is_fixed = bool(fallbacks.sizes) or first_micro_batch is not None
    if before is not None and (is_fixed or top <= before.sizes[0].samples):
        return before
    known = before.state_dict() | {"size": top} if before else learned
    sizes: Sequence[int | Size] = fallbacks.sizes or micro_batch_sizes(top)
    whole = fallbacks.sizes[0].samples if fallbacks.sizes else top
    fallback_schedule = FallbackSchedule(
        sizes, grow_after, least_samples=whole if is_whole else 1, needs=fallbacks.needs
    )
    if known is not None:
        fallback_schedule.load_state_dict(known)
    return fallback_schedule


def after_oom(  # noqa: PLR0917 -- internal, called by step loops only
    event: OomEvent,
    fallback: int,
    shape: Shape,
    fallback_schedule: FallbackSchedule,
    fallbacks: InstalledFallbacks | None,
    backend: Backend,
) -> tuple[OomEvent, int | None]:
    """Return the event with the action taken, and the index of the next fallback; ``None`` if none is left."""
    before, samples = (
        fallback_schedule.sizes[fallback],
        min(fallback_schedule.sizes[fallback].samples, shape.num_samples),
    )
    # A smaller micro-batch does not help during the update, which holds no graph, nor while techniques are installed.
    needs_other_level = event.phase == "optimizer" or not (fallbacks is None or fallbacks.is_in_force(before.level))
    num_elements = math.ceil(samples * shape.elements_per_sample)
    following = fallback_schedule.failed(fallback, samples, num_elements, needs_other_level, ran_out_of(event))
    if following is None:
        stopped = {"fallback": fallback, "survived": False, "action": "stopped: nothing is left to try"}
        return event.model_copy(update=stopped), None
    after = fallback_schedule.sizes[following]
    if needs_other_level or fallback_schedule.is_last(following) or event.is_fragmented:
        backend.release(last_resort=True)
    next_size = min(after.samples, shape.num_samples)
    techniques = fallbacks.described(after.level) if fallbacks and after.level != before.level else None
    action = action_of(samples, next_size, techniques, is_same_fallback=following == fallback)
    backend.reset_peak()  # so that the next peak excludes the failed try
    goes_on = {"next_micro_batch": next_size, "fallback": fallback, "next_fallback": following, "action": action}
    return event.model_copy(update=goes_on), following


def ran_out_of(event: OomEvent) -> RanOut | None:
    """Return the memory that an out-of-memory event needed (in use plus requested), and the limit of the device.

    If no limit is known, the needed memory is returned as the limit. Returns ``None`` if the event has neither the
    size of the request nor the limit.
    """
    if event.capacity_bytes is None and event.requested_bytes is None:
        return None
    requested_bytes = min(event.requested_bytes or 0, event.capacity_bytes or math.inf)  # requests may be absurd
    wanted_bytes = (event.live_bytes or 0) + int(requested_bytes)
    return RanOut(wanted_bytes, event.capacity_bytes or wanted_bytes) if wanted_bytes else None


class Uses(Protocol):
    """An object that reports the memory in use: a backend, or a step, which adds the memory of graph replays."""

    def use(self) -> MemoryUse:
        """Return the memory in use."""


def measured(fallback_schedule: FallbackSchedule, device: Uses, ranks: Ranks) -> Measured | None:
    """Return the maximum over all ranks of the last step's memory use.

    Returns ``None`` if the schedule avoids no fallback and so needs no measurement (`FallbackSchedule.is_lowered`).
    """
    if not fallback_schedule.is_lowered:
        return None
    use = device.use()
    own = use.peak_bytes or use.used_bytes, use.used_bytes
    peaks, used = zip(*([own] if ranks.is_alone else ranks.each(own)), strict=True)
    return Measured(int(max(peaks)), int(max(used)))


def _refuse_impossible(choices: Sequence[Choice], workload: Workload, batch_size: int) -> None:
    """Refuse impossible choices and combinations. Lossy choices are allowed, because the caller asked for them."""
    allow = frozenset((*TECHNIQUES, "recut_batch_norm"))
    try:
        # In a dry run, a model for CUDA is on the CPU. So choices that are possible on either device are accepted.
        conflicts = [
            conflict_among(
                tuple(choices),
                workload,
                Setting(device, batch_size, precision="auto", allow=allow, num_ranks=workload.ranks.world_size),
            )
            for device in ("cpu", "cuda")
        ]
    except KeyError as missing:
        raise InputError(
            f"a fallback has a choice without its option {missing} ({' '.join(map(str, choices))}): give it a value"
        ) from None
    if all(conflicts):
        here = conflicts[workload.device.type == "cuda"]
        raise InputError(f"a fallback cannot be used: {here}; leave out this choice, or the one it conflicts with")


def _split(choices: Sequence[Choice]) -> tuple[Choices, Choices]:
    """Return the choices for the whole run, then all other choices except the micro-batch, in installation order."""
    others = without_micro_batch(in_order(choices))
    return (
        tuple(choice for choice in others if technique_of(choice.technique).is_for_the_run),
        tuple(choice for choice in others if not technique_of(choice.technique).is_for_the_run),
    )


def choices_of(fallback: Configuration | Sequence[Choice]) -> Sequence[Choice]:
    """Return the choices of a fallback, which may be given as a sequence of choices."""
    return fallback.choices if isinstance(fallback, Configuration) else fallback


def samples_of(choices: Sequence[Choice]) -> int:
    """Return the micro-batch of a fallback in samples.

    Raises:
        InputError: if it has no micro-batch, or several.
    """
    sizes = [int(choice.options["samples"]) for choice in choices if choice.technique == MICRO_BATCH]
    if len(sizes) != 1:
        raise InputError(f"a fallback has {len(sizes)} micro-batches ({' '.join(map(str, choices))}): give one to each")
    return sizes[0]
