"""Which micro-batch is in force: down the planned ladder when memory runs out, up again when it is safe.

The rungs are planned before the run (`micro_batch_sizes`, or a plan's fallbacks); nothing is searched in the crisis.
What is learned is kept in *elements* (samples times elements per sample), because memory follows the shape of a batch
and not its number of samples: an outlier of long texts that did not fit says nothing against as many short ones, and a
later outlier is cut before it fails.

- A size that held before and fails now gets one more try after a clean-up: something else took the memory for a moment.
  So does the smallest rung, where there is nothing to lose.
- A size that fails otherwise, or twice, is the known limit: no step goes as high again.
- After ``grow_after`` clean steps the next larger rung is taken, if it stays below the known limit.
- A size at which the whole process was killed (`state_after_death`) is not counted in elements, which died with it:
  the first batch after the restart says how many they were.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from plimsoll.errors import InputError


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


def state_after_death(
    state: dict[str, int | None] | None, num_samples: int, too_large_samples: int | None = None
) -> dict[str, int | None]:
    """The state to load into a ladder whose process was killed for memory.

    Args:
        state: what the checkpoint has; ``None`` without one.
        num_samples: the micro-batch to begin with; larger ones are taken again after clean steps ...
        too_large_samples: ... if they are smaller than this one, which is known to kill.
    """
    before = {"held_elements": 0, "failed_elements": None} if state is None else state
    return before | {"size": num_samples, "num_clean_steps": 0, "too_large_samples": too_large_samples}


class Ladder:
    """The micro-batch in force. Sizes are samples, largest first; elements are those of all tensors of a batch."""

    def __init__(self, sizes: Sequence[int], grow_after: int = 50) -> None:
        if not sizes or any(size < 1 for size in sizes) or list(sizes) != sorted(set(sizes), reverse=True):
            raise InputError(
                f"micro-batches {list(sizes)} are not distinct sizes from large to small: give for example [32, 16, 8]"
            )
        self.sizes = tuple(sizes)
        self._grow_after = grow_after
        self._rung = 0
        self._num_clean_steps = 0
        self._held_elements = 0
        self._failed_elements: int | None = None
        self._too_large_samples: int | None = None
        self._retried_elements: int | None = None

    @property
    def in_force(self) -> int:
        """The micro-batch in force, in samples."""
        return self.sizes[self._rung]

    def start_at(self, num_samples: int) -> None:
        """Begin at the largest rung that is at most ``num_samples``."""
        self._rung = next((rung for rung, size in enumerate(self.sizes) if size <= num_samples), len(self.sizes) - 1)

    def choose(self, elements_per_sample: float) -> int:
        """The micro-batch for a batch of this shape: the one in force, or a smaller one below the known limit."""
        if self._too_large_samples is not None:
            self._note_limit(math.ceil(self._too_large_samples * elements_per_sample))
            self._too_large_samples = None
        if (
            self._rung > 0
            and self._num_clean_steps >= self._grow_after
            and self._is_allowed(self._rung - 1, elements_per_sample)
        ):
            self._rung -= 1
            self._num_clean_steps = 0
        allowed = (rung for rung in range(self._rung, len(self.sizes)) if self._is_allowed(rung, elements_per_sample))
        return self.sizes[next(allowed, len(self.sizes) - 1)]

    def _is_allowed(self, rung: int, elements_per_sample: float) -> bool:
        return self._failed_elements is None or self.sizes[rung] * elements_per_sample < self._failed_elements

    def held(self, num_elements: int) -> None:
        """A step with micro-batches of up to ``num_elements`` went through."""
        self._num_clean_steps += 1
        self._held_elements = max(self._held_elements, num_elements)
        self._retried_elements = None

    def failed(self, num_samples: int, num_elements: int) -> int | None:
        """Memory ran out with micro-batches of this size: the size to try next, or ``None`` if none is left."""
        self._num_clean_steps = 0
        smaller = [rung for rung, size in enumerate(self.sizes) if size < num_samples]
        has_held = num_elements <= self._held_elements
        if (has_held or not smaller) and self._retried_elements != num_elements:
            self._retried_elements = num_elements
            return num_samples
        self._note_limit(num_elements)
        if not smaller:
            return None
        # An outlier batch may already run below the rung in force; only a failure at that rung moves it.
        if num_samples >= self.in_force:
            self._rung = smaller[0]
        return self.sizes[smaller[0]]

    def _note_limit(self, num_elements: int) -> None:
        self._held_elements = min(self._held_elements, num_elements - 1)
        self._failed_elements = min(num_elements, self._failed_elements or num_elements)

    def state_dict(self) -> dict[str, int | None]:
        """What a checkpoint needs to go on with the same sizes."""
        return {
            "size": self.in_force,
            "num_clean_steps": self._num_clean_steps,
            "held_elements": self._held_elements,
            "failed_elements": self._failed_elements,
            "too_large_samples": self._too_large_samples,
        }

    def load_state_dict(self, state: dict[str, int | None]) -> None:
        """Go on from what `state_dict` returned."""
        self.start_at(state["size"] or 1)
        self._num_clean_steps = state["num_clean_steps"] or 0
        self._held_elements = state["held_elements"] or 0
        self._failed_elements = state["failed_elements"]
        self._too_large_samples = state.get("too_large_samples")
