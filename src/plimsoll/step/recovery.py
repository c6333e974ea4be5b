"""Which fallback is in force: down the fallback schedule when memory runs out, up again when it is safe.

The fallbacks are planned before the run (a plan's, or `micro_batch_sizes`); nothing is searched in the crisis. A
fallback is a micro-batch and a *level*: the techniques that are in force with it. What did not fit at one level may fit
at another.

What is learned is kept in *elements* (samples times elements per sample), because memory follows the shape of a batch
and not its number of samples: an outlier of long texts that did not fit says nothing against as many short ones, and a
later outlier is cut before it fails.
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
    """The fallback schedule for a batch: 1, 2, 4, 8, ... micro-batches of nearly equal size, down to single samples.

    >>> micro_batch_sizes(12)
    (12, 6, 3, 2, 1)
    """
    sizes, num_micro_batches = [batch_size], 1
    while sizes[-1] > 1:
        num_micro_batches *= 2
        sizes.append(math.ceil(batch_size / num_micro_batches))
    return tuple(sizes)


def samples_of_rank(job: Job) -> int:
    """Return the most samples of a step that one rank has."""
    return math.ceil(job.batch_size / job.ranks)


class Size(NamedTuple):
    """A fallback: samples of one pass, and which techniques are in force with it, counted from 0."""

    samples: int
    level: int = 0


class RanOut(NamedTuple):
    """The memory that was wanted where it ran out: what was in use and what was asked for, and what there is."""

    wanted_bytes: int
    limit_bytes: int

    def most_bytes(self, needed_bytes: int) -> float:
        """What may be predicted for a plan to fit, if all need as much more as this one, of which so much was."""
        return needed_bytes * min(1.0, self.limit_bytes / max(self.wanted_bytes, 1))


class Measured(NamedTuple):
    """The memory of a step that went through: its peak, and what is in use after it."""

    peak_bytes: int
    used_bytes: int


class _Seen(NamedTuple):
    """The most that clean steps with a fallback took, and the elements of its micro-batches."""

    fallback: int
    memory: Measured
    num_elements: int


_CLEAN_STEPS = 3  # before a measured peak is believed
_PATIENCE = 4  # times as many after each larger fallback that was tried in vain
_USABLE_SHARE = 0.95  # of the limit: a peak varies from step to step, and an allocator has holes


def state_after_death(
    state: dict[str, Any] | None, size: Size, too_large_fallback: int | None = None
) -> dict[str, Any]:
    """The state to load into a fallback schedule whose process was killed for memory.

    Args:
        state: what the checkpoint has; ``None`` without one.
        size: the fallback to begin with; earlier ones are taken again after clean steps ...
        too_large_fallback: ... if they are smaller than this one, which is known to kill.
    """
    before = {"held_elements": [], "failed_elements": []} if state is None else state
    return before | {
        "size": size.samples, "level": size.level, "num_clean_steps": 0, "too_large_fallback": too_large_fallback
    }  # fmt: skip


class FallbackSchedule:
    """The fallback in force. Fallbacks fall from one to the next; elements are those of all tensors of a batch.

    ``needs`` are the peaks in bytes that are predicted for the fallbacks, as far as they are.
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
        # Fallbacks of smaller passes are kept, so that a fallback has the number that the plan gives it, and never
        # taken.
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
        """The fallback in force."""
        return self._fallback

    @property
    def is_lowered(self) -> bool:
        """Whether memory has run out and larger fallbacks are left alone for it."""
        is_bound = self._fallback > self._usable[0] or any(limit is not None for limit in self._failed_elements)
        return self._limit_bytes is not None and is_bound

    def keep_whole(self, num_samples: int) -> None:
        """Take only fallbacks of at least so many samples from now on, where there are any."""
        whole = [fallback for fallback in self._usable if self.sizes[fallback].samples >= num_samples]
        self._usable = whole or self._usable[:1]
        self._fallback = next((fallback for fallback in self._usable if fallback >= self._fallback), self._usable[-1])

    def begin_again(self, state: dict[str, Any], fallback: int) -> int:
        """Go on at a fallback with the limits from before a step, whose failures say nothing of memory."""
        self.load_state_dict(state)
        self._fallback = fallback
        return fallback

    def is_last(self, fallback: int) -> bool:
        """Whether no fallback comes after this one."""
        return fallback == self._usable[-1]

    def start_at(self, num_samples: int, level: int = 0) -> None:
        """Begin at the first fallback of at most ``num_samples`` of a level, or of a further level."""
        sizes = ((fallback, self.sizes[fallback]) for fallback in self._usable)
        fallbacks = (fallback for fallback, size in sizes if (-size.level, size.samples) <= (-level, num_samples))
        self._fallback = next(fallbacks, self._usable[-1])

    def choose(self, elements_per_sample: float) -> int:
        """The fallback for a batch of this shape: the one in force, or a later one below the known limit."""
        if self._too_large_fallback is not None:  # its elements died with the process: this batch says how many
            for samples, level in self.sizes[: self._too_large_fallback + 1]:  # earlier fallbacks need more
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
        """Forget what was seen with the fallback in force: it is another, or something failed."""
        self._num_clean_steps, self._held_here, self._seen = 0, 0, None

    def _may_take(self, elements_per_sample: float, fallback: int) -> bool:
        """Whether a fallback may take a batch of this shape: it is in force or later, or as much has gone through."""
        samples, level = self.sizes[fallback]
        is_known = level == self.sizes[self._fallback].level and samples * elements_per_sample <= self._held_here
        return (fallback >= self._fallback or is_known) and self._is_allowed(fallback, elements_per_sample)

    def _larger_that_fits(self, fallback: int, elements_per_sample: float) -> int | None:
        """The largest fallback before this one that should fit, by the measured peak, once that is known.

        Where one fits, something else had taken the memory for which a larger one failed.
        """
        if self._limit_bytes is None or self._seen is None or self._num_clean_steps < self._clean_steps_wanted:
            return None
        most_bytes = _USABLE_SHARE * self._limit_bytes
        larger = (one for one in self._usable if one < fallback)
        return next((one for one in larger if self._needed_with(one, elements_per_sample) <= most_bytes), None)

    def _needed_with(self, fallback: int, elements_per_sample: float) -> float:
        """What a fallback should need, by what the one that was seen did."""
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
        """A step with micro-batches of up to ``num_elements`` went through, in so much memory if that was measured."""
        level = self.sizes[fallback].level
        self._num_clean_steps += 1
        self._held_elements[level] = max(self._held_elements[level], num_elements)
        failed_elements = self._failed_elements[level]
        if failed_elements is not None and num_elements >= failed_elements:
            self._failed_elements[level] = None  # it was no limit: something else had the memory for a while
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
        """Memory ran out: the fallback to try next, which may be the same once more, or ``None`` if none is left.

        Args:
            fallback: what it ran out with.
            num_samples: samples of a pass, which are fewer than the fallback's in a small batch.
            num_elements: elements of a pass.
            needs_other_level: it ran out where the size of a pass changes nothing.
            ran_out: the memory that was wanted, where that is known.
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
        # Where it went through before, something else took memory for a moment; where it is the last, nothing is lost.
        if (has_held or not smaller or needs_other_level) and this not in self._retried:
            self._retried.add(this)
            return fallback
        if not needs_other_level:
            self._note_limit(level, num_elements)
        if not smaller:
            self._retried.clear()
            return None
        if needs_other_level:
            self._note_limit(level, 1)  # no pass is small enough there
        following = self._likely_to_fit(fallback, smaller, ran_out)
        # An outlier batch, for which the limit is known from now on, or which already runs below the fallback in force,
        # leaves that fallback to the others; but techniques are not exchanged there and back.
        if fallback <= self._fallback and not (is_outlier and self.sizes[following].level == level):
            self._fallback = following
        return following

    def _likely_to_fit(self, fallback: int, smaller: Sequence[int], ran_out: RanOut | None) -> int:
        """The first, so fastest, that fits if it needs as much more than predicted as what failed, or else the last."""
        needs = self._needs[fallback]
        if ran_out is None or needs is None:
            return smaller[0]
        most_bytes = ran_out.most_bytes(needs)
        return next((later for later in smaller if (self._needs[later] or 0) <= most_bytes), smaller[-1])

    def _note_limit(self, level: int, num_elements: int) -> None:
        """Let no step go as high again, until one that had to goes through."""
        self._held_elements[level] = min(self._held_elements[level], num_elements - 1)
        self._failed_elements[level] = min(num_elements, self._failed_elements[level] or num_elements)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs to go on with the same sizes."""
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
        """Go on from what `state_dict` returned; what is of levels that are no more is left out."""
        state = renamed(state, {"too_large_rung": "too_large_fallback"})
        self.start_at(state["size"], state.get("level", 0))
        self._num_clean_steps = state["num_clean_steps"]
        num_levels = len(self._held_elements)
        self._held_elements = ([*_by_level(state["held_elements"]), *self._held_elements])[:num_levels]
        self._failed_elements = ([*_by_level(state["failed_elements"]), *self._failed_elements])[:num_levels]
        self._too_large_fallback = state.get("too_large_fallback")


def action_of(samples: int, next_samples: int, techniques: str | None, *, is_same_fallback: bool) -> str:
    """Say what is done after memory ran out; ``techniques`` are those that are exchanged, if any are."""
    action = f"micro-batch {samples} -> {next_samples}" if next_samples != samples else "same micro-batch"
    if techniques is not None:
        return f"{action} with {techniques}"
    return f"{action} once more" if is_same_fallback else action


def _by_level(limits: list[int | None] | int | None) -> list[Any]:
    """The limits of a checkpoint, which had one for all before there were levels."""
    return limits if isinstance(limits, list) else [limits]


def _falls(sizes: Sequence[Size]) -> bool:
    """Whether sizes are positive and fall within each level, and the levels count up from 0."""
    if not sizes or sizes[0].level != 0 or any(size.samples < 1 for size in sizes):
        return False
    return all(
        after.level == before.level + 1 or (after.level == before.level and after.samples < before.samples)
        for before, after in pairwise(sizes)
    )
