"""The choice of the fallback for each batch: a later one when memory runs out, an earlier one again when it is safe.

The fallbacks are planned before the run (by a plan, or `micro_batch_sizes`), so nothing is searched when memory runs
out. A fallback is a micro-batch and a *level*, that is, the techniques installed with it. A micro-batch size that did
not fit at one level may fit at another.

Limits are learned in *elements* (samples times elements per sample). Memory depends on the shape of a batch, not on its
number of samples. If a batch of long texts did not fit, a batch of as many short texts still runs whole. The next batch
of long texts is split before it fails.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

from plimsoll.errors import InputError
from plimsoll.records.former import renamed
from plimsoll.records.job import Job


def micro_batch_sizes(batch_size: int) -> tuple[int, ...]:
    """Return the micro-batch sizes for a batch that is split into 1, 2, 4, 8, ... nearly equal parts, down to 1 sample.

    >>> micro_batch_sizes(12)
    (12, 6, 3, 2, 1)
    """
    sizes, num_micro_batches = [batch_size], 1
    while sizes[-1] > 1:
        num_micro_batches *= 2
        sizes.append(math.ceil(batch_size / num_micro_batches))
    return tuple(sizes)


def samples_of_rank(job: Job) -> int:
    """Return the maximum number of samples that one rank gets in a step."""
    return math.ceil(job.batch_size / job.ranks)


class Size(NamedTuple):
    """A fallback: the samples per micro-batch, and the level of its techniques, counted from 0."""

    samples: int
    level: int = 0


class RanOut(NamedTuple):
    """The memory needed when memory ran out (in use plus requested), and the limit of the device."""

    wanted_bytes: int
    limit_bytes: int

    def most_bytes(self, needed_bytes: int) -> float:
        """Return the largest predicted peak that should fit.

        ``needed_bytes`` is the predicted peak of the fallback that ran out of memory. All other predictions are assumed
        to be wrong by the same factor as this prediction.
        """
        return needed_bytes * min(1.0, self.limit_bytes / max(self.wanted_bytes, 1))


class Measured(NamedTuple):
    """The memory of a completed step: its peak, and the memory in use after it."""

    peak_bytes: int
    used_bytes: int


class _Seen(NamedTuple):
    """The maximum memory of successful steps with a fallback, and the elements of the micro-batch that needed it."""

    fallback: int
    memory: Measured
    num_elements: int


_CLEAN_STEPS = 3  # number of successful steps before a measured peak is trusted
_PATIENCE = 4  # factor by which this number grows after each larger fallback that failed
_USABLE_SHARE = 0.95  # of the limit, because peaks vary between steps and the heap is fragmented


def state_after_death(
    state: dict[str, Any] | None, size: Size, too_large_fallback: int | None = None
) -> dict[str, Any]:
    """Return the state to load into a fallback schedule after the process was killed because memory ran out.

    Args:
        state: the state of the checkpoint; ``None`` without one.
        size: the fallback to begin with.
        too_large_fallback: the fallback that killed the process, if known. After enough successful steps, only
            fallbacks with smaller micro-batches are tried again.
    """
    before = {"held_elements": [], "failed_elements": []} if state is None else state
    return before | {
        "size": size.samples, "level": size.level, "num_clean_steps": 0, "too_large_fallback": too_large_fallback
    }  # fmt: skip


class FallbackSchedule:
    """The state machine that selects the fallback for each batch.

    Args:
        sizes: the fallbacks, from large to small within each level, with levels counted up from 0.
        grow_after: number of successful steps after which the next larger fallback is tried.
        least_samples: fallbacks with smaller micro-batches are never used.
        needs: predicted peaks of the fallbacks in bytes; ``None`` if unknown.

    Raises:
        InputError: if the sizes are not in this order.
    """

    def __init__(
        self,
        sizes: Sequence[int | Size],
        grow_after: int = 50,
        least_samples: int = 1,
        needs: Sequence[int | None] = (),
    ) -> None:
        self.sizes = tuple(size if isinstance(size, Size) else Size(size) for size in sizes)
        if not _falls(self.sizes):
            raise InputError(
                f"micro-batches {list(sizes)} are not distinct sizes from large to small: give for example [32, 16, 8]"
            )
        num_levels = self.sizes[-1].level + 1
        # Fallbacks with smaller passes stay in `sizes`, so that numbers agree with the plan, but are never used.
        self._usable = [fallback for fallback, size in enumerate(self.sizes) if size.samples >= least_samples] or [0]
        self._grow_after = grow_after
        self._fallback = self._usable[0]
        self._num_clean_steps = 0
        self._held_elements = [0] * num_levels
        self._failed_elements: list[int | None] = [None] * num_levels
        self._too_large_fallback: int | None = None
        self._retried: set[tuple[int, int, bool]] = set()
        self._needs = [*needs, *[None] * (len(self.sizes) - len(needs))]
        self._limit_bytes: int | None = None
        self._held_here = 0
        self._seen: _Seen | None = None
        self._clean_steps_wanted = _CLEAN_STEPS
        self._is_trying_larger = False

    @property
    def in_force(self) -> int:
        """The index of the current fallback in ``sizes``."""
        return self._fallback

    @property
    def is_lowered(self) -> bool:
        """True if memory has run out and larger fallbacks are therefore avoided."""
        is_bound = self._fallback > self._usable[0] or any(limit is not None for limit in self._failed_elements)
        return self._limit_bytes is not None and is_bound

    def keep_whole(self, num_samples: int) -> None:
        """Use only fallbacks whose micro-batch has at least ``num_samples``, for all later batches.

        If all micro-batches are smaller, use only the first fallback.
        """
        whole = [fallback for fallback in self._usable if self.sizes[fallback].samples >= num_samples]
        self._usable = whole or self._usable[:1]
        self._fallback = next((fallback for fallback in self._usable if fallback >= self._fallback), self._usable[-1])

    def begin_again(self, state: dict[str, Any], fallback: int) -> int:
        """Forget the failures of a step: restore the schedule's ``state`` from before it, and return to ``fallback``.

        Returns:
            ``fallback``.
        """
        self.load_state_dict(state)
        self._fallback = fallback
        return fallback

    def is_last(self, fallback: int) -> bool:
        """Return whether this is the last fallback."""
        return fallback == self._usable[-1]

    def start_at(self, num_samples: int, level: int = 0) -> None:
        """Start at the first fallback of this level whose micro-batch has at most ``num_samples``.

        If the level has no such fallback, start at the first fallback of the next level.
        """
        sizes = ((fallback, self.sizes[fallback]) for fallback in self._usable)
        fallbacks = (fallback for fallback, size in sizes if (-size.level, size.samples) <= (-level, num_samples))
        self._fallback = next(fallbacks, self._usable[-1])

    def choose(self, elements_per_sample: float) -> int:
        """Return the fallback for a batch of this shape: the current one, or a later one below the known limit.

        An earlier fallback is returned after enough successful steps, or if the measured peak shows that it fits.
        """
        if self._too_large_fallback is not None:  # its elements are unknown; assume batches of this shape
            for samples, level in self.sizes[: self._too_large_fallback + 1]:  # earlier fallbacks need more memory
                self._note_limit(level, math.ceil(samples * elements_per_sample))
            self._too_large_fallback = None
        larger = [fallback for fallback in self._usable if fallback < self._fallback][-1:]
        if larger and self._num_clean_steps >= self._grow_after and self._is_allowed(larger[0], elements_per_sample):
            self._take(larger[0])
        takes = partial(self._may_take, elements_per_sample)
        fallback = next(filter(takes, self._usable), self._usable[-1])
        fitting = self._larger_that_fits(fallback, elements_per_sample)
        if fitting is None:
            return fallback
        self._take(fitting)
        self._failed_elements[self.sizes[fitting].level] = None
        self._is_trying_larger = True
        return fitting

    def _take(self, fallback: int) -> None:
        self._fallback = fallback
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Reset the measurements of the current fallback, because it changed or failed."""
        self._num_clean_steps, self._held_here, self._seen = 0, 0, None

    def _may_take(self, elements_per_sample: float, fallback: int) -> bool:
        """Return whether a fallback may run a batch of this shape.

        It must be below the known limits. If it comes before the current fallback, passes with as many elements must
        have succeeded.
        """
        samples, level = self.sizes[fallback]
        is_known = level == self.sizes[self._fallback].level and samples * elements_per_sample <= self._held_here
        return (fallback >= self._fallback or is_known) and self._is_allowed(fallback, elements_per_sample)

    def _larger_that_fits(self, fallback: int, elements_per_sample: float) -> int | None:
        """Return the first of the earlier fallbacks that should fit according to the measured peak, or ``None``.

        This may be a fallback that failed before, because other code may have held memory at that time.
        """
        if self._limit_bytes is None or self._seen is None or self._num_clean_steps < self._clean_steps_wanted:
            return None
        most_bytes = _USABLE_SHARE * self._limit_bytes
        larger = (one for one in self._usable if one < fallback)
        return next((one for one in larger if self._needed_with(one, elements_per_sample) <= most_bytes), None)

    def _needed_with(self, fallback: int, elements_per_sample: float) -> float:
        """Estimate the peak memory of a fallback, in bytes, from the measured peak of the last successful fallback."""
        assert self._seen is not None
        (samples, level), (peak_bytes, used_bytes) = self.sizes[fallback], self._seen.memory
        predicted, here = self._needs[fallback], self._needs[self._seen.fallback]
        if predicted is not None and here is not None:
            return peak_bytes + (predicted - here) * max(1.0, peak_bytes / here)
        if level != self.sizes[self._seen.fallback].level:
            return math.inf
        return used_bytes + (peak_bytes - used_bytes) * samples * elements_per_sample / self._seen.num_elements

    def _is_allowed(self, fallback: int, elements_per_sample: float) -> bool:
        samples, level = self.sizes[fallback]
        failed_elements = self._failed_elements[level]
        return failed_elements is None or samples * elements_per_sample < failed_elements

    def held(self, fallback: int, num_elements: int, memory: Measured | None = None) -> None:
        """Record a successful step with micro-batches of up to ``num_elements``, and its memory if it was measured."""
        level = self.sizes[fallback].level
        self._num_clean_steps += 1
        self._held_elements[level] = max(self._held_elements[level], num_elements)
        failed_elements = self._failed_elements[level]
        if failed_elements is not None and num_elements >= failed_elements:
            self._failed_elements[level] = None  # not a limit: other code held the memory for a while
        if level == self.sizes[self._fallback].level:
            self._held_here = max(self._held_here, num_elements)
        if memory is not None:
            seen = _Seen(fallback, memory, num_elements)
            self._seen = max(seen, self._seen) if self._seen is not None and self._seen.fallback == fallback else seen
        self._is_trying_larger = False
        self._retried.clear()

    def failed(
        self,
        fallback: int,
        num_samples: int,
        num_elements: int,
        needs_other_level: bool = False,
        ran_out: RanOut | None = None,
    ) -> int | None:
        """Return the fallback to try after memory ran out, possibly the same one again; ``None`` if none is left.

        Args:
            fallback: the fallback that ran out of memory.
            num_samples: samples per pass; fewer than in the fallback if the batch is small.
            num_elements: elements per pass.
            needs_other_level: whether only a fallback of another level can help, not a smaller micro-batch.
            ran_out: the wanted memory and the limit, if known.
        """
        self._begin_anew()
        if ran_out is not None:
            self._limit_bytes = ran_out.limit_bytes
        if self._is_trying_larger:
            self._clean_steps_wanted *= _PATIENCE
            self._is_trying_larger = False
        level = self.sizes[fallback].level
        smaller = [
            later
            for later in self._usable
            if self.sizes[later].level > level
            or (later > fallback and self.sizes[later].samples < num_samples and not needs_other_level)
        ]
        has_held = num_elements <= self._held_elements[level]
        is_outlier = 0 < self._held_elements[level] < num_elements
        this = fallback, num_elements, needs_other_level
        # If a pass of this size succeeded before, other code may have held memory briefly. The last fallback has no
        # alternative.
        if (has_held or not smaller or needs_other_level) and this not in self._retried:
            self._retried.add(this)
            return fallback
        if not needs_other_level:
            self._note_limit(level, num_elements)
        if not smaller:
            self._retried.clear()
            return None
        if needs_other_level:
            self._note_limit(level, 1)  # no pass of this level is small enough
        following = self._likely_to_fit(fallback, smaller, ran_out)
        # An outlier batch does not lower the current fallback, because its limit is now known and other batches fit. It
        # does lower the current fallback if techniques change, so that techniques are not exchanged back and forth.
        if fallback <= self._fallback and not (is_outlier and self.sizes[following].level == level):
            self._fallback = following
        return following

    def _likely_to_fit(self, fallback: int, smaller: Sequence[int], ran_out: RanOut | None) -> int:
        """Return the first of the ``smaller`` fallbacks that should fit (`RanOut.most_bytes`), or else the last."""
        needs = self._needs[fallback]
        if ran_out is None or needs is None:
            return smaller[0]
        most_bytes = ran_out.most_bytes(needs)
        return next((later for later in smaller if (self._needs[later] or 0) <= most_bytes), smaller[-1])

    def _note_limit(self, level: int, num_elements: int) -> None:
        """Avoid passes with this many elements until such a pass succeeds because it could not be avoided."""
        self._held_elements[level] = min(self._held_elements[level], num_elements - 1)
        self._failed_elements[level] = min(num_elements, self._failed_elements[level] or num_elements)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint needs to resume with the same sizes."""
        samples, level = self.sizes[self._fallback]
        return {
            "size": samples,
            "level": level,
            "num_clean_steps": self._num_clean_steps,
            "held_elements": [*self._held_elements],
            "failed_elements": [*self._failed_elements],
            "too_large_fallback": self._too_large_fallback,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from the state that `state_dict` returned. State of levels that no longer exist is ignored."""
        state = renamed(state, {"too_large_rung": "too_large_fallback"})
        self.start_at(state["size"], state.get("level", 0))
        self._num_clean_steps = state["num_clean_steps"]
        num_levels = len(self._held_elements)
        self._held_elements = ([*_by_level(state["held_elements"]), *self._held_elements])[:num_levels]
        self._failed_elements = ([*_by_level(state["failed_elements"]), *self._failed_elements])[:num_levels]
        self._too_large_fallback = state.get("too_large_fallback")


def action_of(samples: int, next_samples: int, techniques: str | None, *, is_same_fallback: bool) -> str:
    """Return a text that describes the action after memory ran out.

    ``techniques`` describes the techniques to change to; ``None`` if the techniques do not change.
    """
    action = f"micro-batch {samples} -> {next_samples}" if next_samples != samples else "same micro-batch"
    if techniques is not None:
        return f"{action} with {techniques}"
    return f"{action} once more" if is_same_fallback else action


def _by_level(limits: list[int | None] | int | None) -> list[Any]:
    """Return the limits of a checkpoint by level. Old checkpoints have one limit for all levels."""
    return limits if isinstance(limits, list) else [limits]


def _falls(sizes: Sequence[Size]) -> bool:
    """Return whether sizes are positive and decrease within each level, and levels count up from 0."""
    if not sizes or sizes[0].level != 0 or any(size.samples < 1 for size in sizes):
        return False
    return all(
        after.level == before.level + 1 or (after.level == before.level and after.samples < before.samples)
        for before, after in pairwise(sizes)
    )
