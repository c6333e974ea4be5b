"""The fallbacks of a plan on a live training: which techniques belong to which level, and those of one level at work.

Fallbacks that follow each other with the same techniques, and other micro-batches, are one level: going from one to the
next exchanges nothing. Techniques that are for the whole run are installed once and must be the same in every fallback.
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
    """What a plan says, put to work on one workload.

    Args:
        workload: what the techniques are installed on; those for the whole run at once.
        fallbacks: the plan's and those of its fallbacks, or their choices alone, each with a micro-batch.

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
                f"the fallbacks of a plan differ in what changes the training ({' | '.join(different)}): give the same "
                "to each"
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
        """Go on with other fallbacks of the same plan; what is at work stays so, until `use` is asked for another
        level.

        Raises:
            InputError: if they differ in what changes the training.
        """
        self.refuse_others(fallbacks)
        self._set(fallbacks)
        self._level = 0 if self._levels and self._levels[0] == tuple(choice for choice, _ in self._at_work) else None

    def refuse_others(self, fallbacks: Sequence[Configuration | Sequence[Choice]]) -> None:
        """Refuse fallbacks that are not for this training, whose choices for the whole run stay.

        Raises:
            InputError: if they differ in these.
        """
        ours, theirs = self._for_the_run, next((_split(choices_of(one))[0] for one in fallbacks), ())
        if ours != theirs:
            asked, made = (" ".join(map(str, choices)) or "nothing" for choices in (theirs, ours))
            raise InputError(
                f"the plan changes the training by {asked}, but the step was made with {made}: make the step with "
                "fallbacks=plan.fallbacks"
            )

    @property
    def has_one_in_force(self) -> bool:
        """Whether the techniques of some level are at work."""
        return self._level is not None or not self._levels

    @property
    def names(self) -> list[str]:
        """What tells these fallbacks from others, for a checkpoint."""
        return [f"{size.samples} {self.described(size.level)}" for size in self.sizes]

    def is_in_force(self, level: int) -> bool:
        """Whether the techniques of a level are at work."""
        return self._level == level or (not self._levels and level == 0)

    def use(self, level: int) -> None:
        """Put the techniques of a level to work in place of those that are.

        Those that both begin with stay, so that states in a file do not come back for a moment. If one cannot be
        installed, those before it are, and no level is in force.
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
        """Before a batch is cut: take no fallback that does, from now on, if there is a reason against it.

        Args:
            fallback_schedule: of these fallbacks.
            whole: what is known already.
            reason: finds out, with the techniques that are in force.
            shape: of the batch.

        Returns:
            Whether that is known now: without techniques in force (on any rank) it may not fit to find out, and who
            puts them to work asks before the batch is cut.
        """
        if whole.reason() is not None:
            return True
        if self._workload.ranks.agree(not self.has_one_in_force):
            return False
        if reason() is not None:
            fallback_schedule.keep_whole(self.sizes[0].samples if self.sizes else shape.num_samples)
        return True

    def described(self, level: int) -> str:
        """The techniques of a level, for a person."""
        return " ".join(map(str, self._levels[level])) or "no other technique"

    def close(self) -> None:
        """Take every technique back, also where one of them runs out of memory in it."""
        self._level = None
        with self._run_stack:
            self._let_go(num_kept=0)

    def _let_go(self, num_kept: int) -> None:
        """Take the techniques of the level back, the last first, but for the first few.

        One that runs out of memory leaves what cannot come back where it is; the others go all the same.
        """
        leaving, self._at_work = self._at_work[num_kept:], self._at_work[:num_kept]
        with ExitStack() as stack:
            for _, one in leaving:
                stack.push(one)


def take_back(fallbacks: InstalledFallbacks, workload: Workload, backend: Backend, position: Position) -> None:
    """Take the techniques back; what is off the device and does not fit back stays there, with a warning.

    Raises:
        OutOfMemoryError: if a model that is shared out over the ranks is not whole again on all of them.
    """
    is_shared = workload.hooks.sharding.is_sharded  # then all ranks close, and none waits for one that fails in it
    event = attempt_collectively(fallbacks.close, backend, position, workload.ranks if is_shared else Ranks())
    if isinstance(event, OomEvent) and is_shared:
        raise OutOfMemoryError(
            f"memory ran out while the model was put together from the parts of {workload.ranks.world_size} ranks "
            f"({event.shortage}): its checkpoints are intact; give a larger budget, or train with fewer ranks, or "
            "with one that has room for all of it"
        )
    if isinstance(event, OomEvent):
        warnings.warn(
            f"memory ran out while the techniques of the plan were taken back ({event.shortage}): parameters or "
            "optimizer states stay in a file or in the host's memory, where they can be used and saved",
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
    """Return the fallback schedule of a batch: that of the fallbacks, or made from the first batch, and anew for a
    larger one.

    Args:
        fallbacks: those of a plan, or none.
        before: the fallback schedule so far; what it knows of limits is kept.
        num_samples: samples of the batch.
        first_micro_batch: what to begin with where there are no fallbacks; ``None`` for the whole batch.
        grow_after: see `plimsoll.step.recovery.FallbackSchedule`.
        is_whole: whether batches must not be cut.
        learned: what a checkpoint knows, where there is no fallback schedule yet.
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


def after_oom(  # noqa: PLR0917 -- in the order of the sentence that it answers
    event: OomEvent,
    fallback: int,
    shape: Shape,
    fallback_schedule: FallbackSchedule,
    fallbacks: InstalledFallbacks | None,
    backend: Backend,
) -> tuple[OomEvent, int | None]:
    """Return what happened with what is done about it, and the next fallback: ``None`` where nothing is left."""
    before, samples = (
        fallback_schedule.sizes[fallback],
        min(fallback_schedule.sizes[fallback].samples, shape.num_samples),
    )
    # In the update the graph is gone, and before the techniques are at work there is none: a smaller micro-batch would
    # leave as much memory free.
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
    backend.reset_peak()  # what the next tries need is to be seen, and not what failed
    goes_on = {"next_micro_batch": next_size, "fallback": fallback, "next_fallback": following, "action": action}
    return event.model_copy(update=goes_on), following


def ran_out_of(event: OomEvent) -> RanOut | None:
    """What was wanted and what there is; without a limit, what could not be had. ``None`` where neither is known."""
    if event.capacity_bytes is None and event.requested_bytes is None:
        return None
    requested_bytes = min(event.requested_bytes or 0, event.capacity_bytes or math.inf)  # more tells nothing more
    wanted_bytes = (event.live_bytes or 0) + int(requested_bytes)
    return RanOut(wanted_bytes, event.capacity_bytes or wanted_bytes) if wanted_bytes else None


class Uses(Protocol):
    """What can say how much memory is in use: a backend, or a step, which knows what replays need."""

    def use(self) -> MemoryUse:
        """Read it."""


def measured(fallback_schedule: FallbackSchedule, device: Uses, ranks: Ranks) -> Measured | None:
    """What a step took that has just gone through, on the rank where it was most; only where a fallback schedule asks
    for it.
    """
    if not fallback_schedule.is_lowered:
        return None
    use = device.use()
    own = use.peak_bytes or use.used_bytes, use.used_bytes
    peaks, used = zip(*([own] if ranks.is_alone else ranks.each(own)), strict=True)
    return Measured(int(max(peaks)), int(max(used)))


def _refuse_impossible(choices: Sequence[Choice], workload: Workload, batch_size: int) -> None:
    """Refuse choices that are impossible, alone or combined; who gives fallbacks allows what is lossy in them."""
    allow = frozenset((*TECHNIQUES, "recut_batch_norm"))
    try:
        # In a dry run, a model for CUDA is on the CPU: what is possible on either is let through.
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
        raise InputError(f"a fallback cannot be used: {here}; leave one of its choices out")


def _split(choices: Sequence[Choice]) -> tuple[Choices, Choices]:
    """Those for the whole run, and the others but for the micro-batch, in order of installation."""
    others = without_micro_batch(in_order(choices))
    return (
        tuple(choice for choice in others if technique_of(choice.technique).is_for_the_run),
        tuple(choice for choice in others if not technique_of(choice.technique).is_for_the_run),
    )


def choices_of(fallback: Configuration | Sequence[Choice]) -> Sequence[Choice]:
    """Return the choices of a fallback, which may be given as they are."""
    return fallback.choices if isinstance(fallback, Configuration) else fallback


def samples_of(choices: Sequence[Choice]) -> int:
    """Return the micro-batch of a fallback.

    Raises:
        InputError: if it has none, or several.
    """
    sizes = [int(choice.options["samples"]) for choice in choices if choice.technique == MICRO_BATCH]
    if len(sizes) != 1:
        raise InputError(f"a fallback has {len(sizes)} micro-batches ({' '.join(map(str, choices))}): give one to each")
    return sizes[0]
