"""Which rung is in force: down the planned ladder when memory runs out, up again when it is safe.

The rungs are planned before the run (a plan's, or `micro_batch_sizes`); nothing is searched in the crisis. A rung is a
micro-batch and a *level*: the techniques that are in force with it. What did not fit at one level may fit at another.
What is learned is kept in *elements* (samples times elements per sample), because memory follows the shape of a batch
and not its number of samples: an outlier of long texts that did not fit says nothing against as many short ones, and a
later outlier is cut before it fails.

- A size that held before and fails now gets one more try after a clean-up: something else took the memory for a moment.
  So does the smallest rung, where there is nothing to lose.
- A size that fails otherwise, or twice, is the known limit: no step goes as high again, until one that had to holds.
- After ``grow_after`` clean steps the next larger rung is taken, if it stays below the known limit.
- A size at which the whole process was killed (`state_after_death`) is not counted in elements, which died with it:
  the first batch after the restart says how many they were.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from plimsoll.errors import InputError
from plimsoll.records.job import Job


def micro_batch_sizes(batch_size: int) -> tuple[int, ...]:
    """The ladder for a batch: 1, 2, 4, 8, ... pieces of nearly equal size, down to single samples.

    >>> micro_batch_sizes(12)
    (12, 6, 3, 2, 1)
    """
    sizes, num_pieces = [batch_size], 1
    while sizes[-1] > 1:
        num_pieces *= 2
        sizes.append(math.ceil(batch_size / num_pieces))
    return tuple(sizes)


def samples_of_rank(job: Job) -> int:
    """Return the most samples of a step that one rank has."""
    return math.ceil(job.batch_size / job.ranks)


class Size(NamedTuple):
    """A rung: samples of one pass, and which techniques are in force with it, counted from 0."""

    samples: int
    level: int = 0


def state_after_death(state: dict[str, Any] | None, size: Size, too_large_rung: int | None = None) -> dict[str, Any]:
    """The state to load into a ladder whose process was killed for memory.

    Args:
        state: what the checkpoint has; ``None`` without one.
        size: the rung to begin with; earlier ones are taken again after clean steps ...
        too_large_rung: ... if they are smaller than this one, which is known to kill.
    """
    before = {"held_elements": [], "failed_elements": []} if state is None else state
    return before | {
        "size": size.samples, "level": size.level, "num_clean_steps": 0, "too_large_rung": too_large_rung
    }  # fmt: skip


class Ladder:
    """The rung in force. Rungs fall from one to the next; elements are those of all tensors of a batch."""

    def __init__(self, sizes: Sequence[int | Size], grow_after: int = 50, least_samples: int = 1) -> None:
        self.sizes = tuple(size if isinstance(size, Size) else Size(size) for size in sizes)
        if not _falls(self.sizes):
            raise InputError(
                f"micro-batches {list(sizes)} are not distinct sizes from large to small: give for example [32, 16, 8]"
            )
        num_levels = self.sizes[-1].level + 1
        # Rungs of smaller passes are kept, so that a rung has the number that the plan gives it, and never taken.
        self._usable = [rung for rung, size in enumerate(self.sizes) if size.samples >= least_samples] or [0]
        self._grow_after = grow_after
        self._rung = self._usable[0]
        self._num_clean_steps = 0
        self._held_elements = [0] * num_levels
        self._failed_elements: list[int | None] = [None] * num_levels
        self._too_large_rung: int | None = None
        self._retried: set[tuple[int, int, bool]] = set()

    @property
    def in_force(self) -> int:
        """The rung in force."""
        return self._rung

    def keep_whole(self, num_samples: int) -> None:
        """Take only rungs of at least so many samples from now on, where there are any."""
        whole = [rung for rung in self._usable if self.sizes[rung].samples >= num_samples]
        self._usable = whole or self._usable[:1]
        self._rung = next((rung for rung in self._usable if rung >= self._rung), self._usable[-1])

    def begin_again(self, state: dict[str, Any], rung: int) -> int:
        """Go on at a rung with the limits that were known before a step, for what failed in it taught nothing."""
        self.load_state_dict(state)
        self._rung = rung
        return rung

    def is_last(self, rung: int) -> bool:
        """Whether no rung comes after this one."""
        return rung == self._usable[-1]

    def start_at(self, num_samples: int, level: int = 0) -> None:
        """Begin at the first rung of at most ``num_samples`` of a level, or of a further level."""
        sizes = ((rung, self.sizes[rung]) for rung in self._usable)
        rungs = (rung for rung, size in sizes if (-size.level, size.samples) <= (-level, num_samples))
        self._rung = next(rungs, self._usable[-1])

    def choose(self, elements_per_sample: float) -> int:
        """The rung for a batch of this shape: the one in force, or a later one below the known limit."""
        if self._too_large_rung is not None:
            for samples, level in self.sizes[: self._too_large_rung + 1]:  # earlier rungs need more
                self._note_limit(level, math.ceil(samples * elements_per_sample))
            self._too_large_rung = None
        larger = [rung for rung in self._usable if rung < self._rung][-1:]
        if larger and self._num_clean_steps >= self._grow_after and self._is_allowed(larger[0], elements_per_sample):
            self._rung = larger[0]
            self._num_clean_steps = 0
        rungs = (rung for rung in self._usable if rung >= self._rung)
        return next((rung for rung in rungs if self._is_allowed(rung, elements_per_sample)), self._usable[-1])

    def _is_allowed(self, rung: int, elements_per_sample: float) -> bool:
        samples, level = self.sizes[rung]
        failed_elements = self._failed_elements[level]
        return failed_elements is None or samples * elements_per_sample < failed_elements

    def held(self, rung: int, num_elements: int) -> None:
        """A step with micro-batches of up to ``num_elements`` went through."""
        level = self.sizes[rung].level
        self._num_clean_steps += 1
        self._held_elements[level] = max(self._held_elements[level], num_elements)
        failed_elements = self._failed_elements[level]
        if failed_elements is not None and num_elements >= failed_elements:
            self._failed_elements[level] = None  # it was no limit: something else had the memory for a while
        self._retried.clear()

    def failed(self, rung: int, num_samples: int, num_elements: int, needs_other_level: bool = False) -> int | None:
        """Memory ran out: the rung to try next, which may be the same once more, or ``None`` if none is left.

        Args:
            rung: what it ran out with.
            num_samples: samples of a pass, which are fewer than the rung's in a small batch.
            num_elements: elements of a pass.
            needs_other_level: it ran out where the size of a pass changes nothing.
        """
        self._num_clean_steps = 0
        level = self.sizes[rung].level
        smaller = [
            later
            for later in self._usable
            if self.sizes[later].level > level
            or (later > rung and self.sizes[later].samples < num_samples and not needs_other_level)
        ]
        has_held = num_elements <= self._held_elements[level]
        is_outlier = 0 < self._held_elements[level] < num_elements
        this = rung, num_elements, needs_other_level
        if (has_held or not smaller or needs_other_level) and this not in self._retried:
            self._retried.add(this)
            return rung
        if not needs_other_level:
            self._note_limit(level, num_elements)
        if not smaller:
            self._retried.clear()
            return None
        if needs_other_level:
            self._note_limit(level, 1)  # no pass is small enough there
        # An outlier batch, for which the limit is known from now on, or which already runs below the rung in force,
        # leaves that rung to the others; but techniques are not exchanged there and back.
        if rung <= self._rung and not (is_outlier and self.sizes[smaller[0]].level == level):
            self._rung = smaller[0]
        return smaller[0]

    def _note_limit(self, level: int, num_elements: int) -> None:
        self._held_elements[level] = min(self._held_elements[level], num_elements - 1)
        self._failed_elements[level] = min(num_elements, self._failed_elements[level] or num_elements)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs to go on with the same sizes."""
        samples, level = self.sizes[self._rung]
        return {
            "size": samples,
            "level": level,
            "num_clean_steps": self._num_clean_steps,
            "held_elements": [*self._held_elements],
            "failed_elements": [*self._failed_elements],
            "too_large_rung": self._too_large_rung,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned; what is of levels that are no more is left out."""
        self.start_at(state["size"], state.get("level", 0))
        self._num_clean_steps = state["num_clean_steps"]
        num_levels = len(self._held_elements)
        self._held_elements = ([*_by_level(state["held_elements"]), *self._held_elements])[:num_levels]
        self._failed_elements = ([*_by_level(state["failed_elements"]), *self._failed_elements])[:num_levels]
        self._too_large_rung = state.get("too_large_rung")


def action_of(samples: int, next_samples: int, techniques: str | None, *, is_same_rung: bool) -> str:
    """Say what is done after memory ran out; ``techniques`` are those that are exchanged, if any are."""
    action = f"micro-batch {samples} -> {next_samples}" if next_samples != samples else "same micro-batch"
    if techniques is not None:
        return f"{action} with {techniques}"
    return f"{action} once more" if is_same_rung else action


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
