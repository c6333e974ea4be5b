"""The placement of weights, and the number of rows in a pass, that give the most rows a second within a limit.

Passes with two numbers of rows are traced, with as few weights as possible on the device. For other numbers of rows,
memory and time are interpolated linearly. The interpolation only guides the search. The chosen placement is traced as a
whole, and reduced if it does not fit.

A pass takes its compute time or its read time, whichever is longer. On a CPU, each pass reads the streamed parts that
the page cache cannot hold. On a GPU, each pass copies all streamed parts over the link. Larger passes read less per
row, but leave less of the limit for resident parts. Parts that do not fit the host's memory must stay on the device,
even if they could be streamed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from plimsoll.records.placement import RejectedPlacement
from plimsoll.records.prediction import Estimate
from plimsoll.records.units import format_bytes
from plimsoll.techniques.mechanisms.parts import ModelPart

MOST_REJECTED = 8
_MOST_ROUNDS = 4  # rounds of tracing a smaller placement, if a placement needs more memory than guessed
_AS_GOOD_SHARE = 0.01  # share of rows a second: for a smaller gain, the smaller pass is taken


@dataclass(frozen=True)
class Guess:
    """The expected memory need and time of a pass with ``rows`` rows, if the ``resident`` parts stay on the device."""

    rows: int
    resident: frozenset[str]
    need: Estimate
    compute_seconds: float
    read_seconds: float
    read_bytes: int

    @property
    def seconds(self) -> float:
        """The time in seconds of one pass."""
        return max(self.compute_seconds, self.read_seconds)

    @property
    def rows_per_second(self) -> float:
        """Rows computed per second."""
        return self.rows / self.seconds


@dataclass(frozen=True)
class Reading:
    """The source and speed of streamed weights.

    With ``files_bytes_per_second``, the weights come from files. The page cache holds some of these files: it uses the
    part of ``free_bytes`` that the process does not use. With ``link_bytes_per_second``, the weights come from host
    memory of ``free_bytes``, where ``None`` is an unknown size.
    """

    free_bytes: int | None
    files_bytes_per_second: float | None = None
    link_bytes_per_second: float | None = None

    @property
    def is_linked(self) -> bool:
        """True if the weights come from host memory."""
        return self.link_bytes_per_second is not None

    @property
    def bytes_per_second(self) -> float:
        """The rate at which weights are read, in bytes per second."""
        rate = self.link_bytes_per_second if self.is_linked else self.files_bytes_per_second
        assert rate is not None
        return rate

    def read_bytes(self, streamed_bytes: int, used_bytes: int) -> int:
        """Return how many bytes of the streamed parts a pass reads, if the process uses ``used_bytes`` of memory."""
        if self.is_linked or self.free_bytes is None:
            return streamed_bytes
        return max(streamed_bytes - max(self.free_bytes - used_bytes, 0), 0)

    def missing_bytes(self, streamed_bytes: int) -> int:
        """Return the bytes of streamed parts that do not fit in host memory; 0 if its size is unknown, or for files."""
        return max(streamed_bytes - self.free_bytes, 0) if self.is_linked and self.free_bytes is not None else 0


@dataclass(frozen=True)
class Evaluation:
    """The traced peak and times of passes with one placement.

    ``steps_seconds`` has the seconds of the only pass, or of the first and the last pass if tokens are generated.
    ``spread`` is the relative error of the predicted memory.
    """

    peak: Estimate
    fits: bool
    steps_seconds: tuple[float, ...]
    spread: float


Evaluate = Callable[[int, frozenset[str]], Evaluation]
"""Function that traces passes, given the number of rows and the names of the resident parts."""


def candidate_rows(most_rows: int) -> tuple[int, ...]:
    """Return the numbers of rows to consider, ascending: powers of two, their midpoints, and the maximum.

    >>> candidate_rows(14)
    (1, 2, 3, 4, 6, 8, 12, 14)
    """
    found = {rows for power in range(most_rows.bit_length()) for rows in (1 << power, 3 << power >> 1)}
    return tuple(sorted({rows for rows in found if 1 <= rows <= most_rows} | {most_rows}))


def spread_out(names: Sequence[str], num_kept: int) -> tuple[str, ...]:
    """Return ``num_kept`` names at equal distances, so that resident blocks lie evenly between streamed blocks.

    >>> spread_out("abcdef", 2)
    ('c', 'f')
    """
    count = len(names)
    return tuple(
        name for number, name in enumerate(names) if (number + 1) * num_kept // count > number * num_kept // count
    )


class Placer:
    """Search for the number of rows and the resident parts that give the most rows a second within a limit.

    Args:
        parts: parts of the model.
        always: names of the parts that are always on the device.
        limit_bytes: device memory in bytes that the process may use.
        most_rows: maximum number of rows in a pass.
        num_passes: passes through the model for one set of rows: one, and one more for each new token.
        reading: source and speed of streamed weights.
        evaluate: traces a pass, given the number of rows and the resident parts.
    """

    def __init__(  # noqa: PLR0917 -- called in one place
        self,
        parts: Sequence[ModelPart],
        always: frozenset[str],
        limit_bytes: int,
        most_rows: int,
        num_passes: int,
        reading: Reading,
        evaluate: Evaluate,
    ) -> None:
        self._parts, self._limit_bytes, self._num_passes = parts, limit_bytes, num_passes
        self._reading, self._evaluate = reading, evaluate
        self._rows = candidate_rows(most_rows)
        self.always = always
        self.all_names = frozenset(part.name for part in parts)
        few, many = self._rows[0], self._rows[min(len(self._rows) - 1, 8)]
        self._ends = tuple((rows, evaluate(rows, self.always)) for rows in sorted({few, many}))

    def guesses(self) -> list[Guess]:
        """Return the best guess for each number of rows."""
        return [self._guess(rows) for rows in self._rows]

    def best(self, guesses: Sequence[Guess]) -> Guess | None:
        """Return the fitting guess with the most rows a second, or ``None``. If nearly equal, prefer fewer rows."""
        fitting = [guess for guess in guesses if self.holds(guess)]
        if not fitting:
            return None
        most = max(guess.rows_per_second for guess in fitting)
        return next(guess for guess in fitting if guess.rows_per_second >= most * (1 - _AS_GOOD_SHARE))

    def holds(self, guess: Guess) -> bool:
        """Return whether a guess fits the device and the host."""
        is_on_host = self._reading.missing_bytes(self._streamed_bytes(guess.resident)) == 0
        return is_on_host and guess.need.high_bytes <= self._limit_bytes

    def least(self) -> frozenset[str]:
        """Return the fewest parts that must be on the device: ``always``, and blocks that do not fit in host memory."""
        missing_bytes = self._reading.missing_bytes(self._streamed_bytes(self.always))
        blocks = [part for part in self._parts if part.kind == "block" and part.name not in self.always]
        smallest_bytes = min((part.num_bytes for part in blocks), default=0)
        num_kept = min(-(-missing_bytes // smallest_bytes), len(blocks)) if smallest_bytes else 0
        return self.always.union(spread_out([part.name for part in blocks], num_kept) if num_kept else ())

    def verified(self, guess: Guess) -> tuple[Guess, Evaluation]:
        """Trace the placement of a guess as a whole, and reduce resident parts and rows until it fits."""
        over_bytes = 0
        for _ in range(_MOST_ROUNDS):
            evaluation = self._evaluate(guess.rows, guess.resident)
            if evaluation.fits and evaluation.peak.high_bytes <= self._limit_bytes:
                break
            over_bytes += max(evaluation.peak.high_bytes - self._limit_bytes, 1)
            smaller = self._guess(guess.rows, over_bytes)
            if smaller.resident == guess.resident:
                fewer = [rows for rows in self._rows if rows < guess.rows]
                if not fewer:
                    break
                smaller = self._guess(fewer[-1], over_bytes)
            guess = smaller
        return self.measured(guess.rows, guess.resident, evaluation), evaluation

    def measured(self, rows: int, resident: frozenset[str], evaluation: Evaluation) -> Guess:
        """Return a guess with the traced memory and times in place of interpolated ones."""
        return self._with_reading(rows, resident, evaluation.peak, evaluation.steps_seconds)

    def _guess(self, rows: int, kept_free_bytes: int = 0) -> Guess:
        bare, steps_seconds = self._between(rows)
        resident = self._kept_in(self._limit_bytes - bare.high_bytes - kept_free_bytes)
        kept_bytes = sum(part.num_bytes for part in self._parts if part.name in resident - self.always)
        need = Estimate(
            likely_bytes=bare.likely_bytes + kept_bytes,
            low_bytes=bare.low_bytes + kept_bytes,
            high_bytes=bare.high_bytes + self._with_spread(kept_bytes),
            modelled_bytes=bare.likely_bytes + kept_bytes,
        )
        return self._with_reading(rows, resident, need, steps_seconds)

    def _with_reading(
        self, rows: int, resident: frozenset[str], need: Estimate, steps_seconds: Sequence[float]
    ) -> Guess:
        read_bytes = self._reading.read_bytes(self._streamed_bytes(resident), need.likely_bytes)
        first, rest = steps_seconds[0], [steps_seconds[-1]] * (self._num_passes - 1)
        return Guess(
            rows=rows,
            resident=resident,
            need=need,
            compute_seconds=sum((first, *rest)),
            read_seconds=read_bytes / self._reading.bytes_per_second * self._num_passes,
            read_bytes=read_bytes * self._num_passes,
        )

    def _streamed_bytes(self, resident: frozenset[str]) -> int:
        return sum(part.num_bytes for part in self._parts if part.is_streamable and part.name not in resident)

    def _kept_in(self, free_bytes: int) -> frozenset[str]:
        """Return the resident parts: all parts if those besides ``always`` fit in ``free_bytes``.

        Otherwise ``always``, the output layer if it fits, and as many blocks as possible.
        """
        free = [part for part in self._parts if part.name not in self.always]
        if self._with_spread(sum(part.num_bytes for part in free)) <= free_bytes:
            return self.all_names
        kept = set(self.always)
        for part in free:
            if part.kind == "output" and self._with_spread(part.num_bytes) <= free_bytes:
                kept.add(part.name)
                free_bytes -= self._with_spread(part.num_bytes)
        blocks = [part for part in free if part.kind == "block"]
        largest_bytes = max((self._with_spread(part.num_bytes) for part in blocks), default=1)
        num_kept = min(max(free_bytes, 0) // largest_bytes, len(blocks))
        return frozenset(kept.union(spread_out([part.name for part in blocks], num_kept) if num_kept else ()))

    def _with_spread(self, num_bytes: int) -> int:
        """Return the upper end of the range for ``num_bytes`` of weights on the device."""
        return int(num_bytes * (1 + self._ends[0][1].spread))

    def _between(self, rows: int) -> tuple[Estimate, tuple[float, ...]]:
        """Interpolate the memory and step times for a number of rows, with only the ``always`` parts on the device."""
        (few, less), (many, more) = self._ends[0], self._ends[-1]
        share = (rows - few) / (many - few) if many > few else 0.0

        def on_line(first: float, last: float) -> float:
            return max(first + share * (last - first), min(first, last) * rows / many)

        ends = (less.peak.model_dump(), more.peak.model_dump())
        peak = Estimate(**{name: int(on_line(ends[0][name], ends[1][name])) for name in Estimate.model_fields})
        seconds = tuple(map(on_line, less.steps_seconds, more.steps_seconds))
        return peak, seconds


def rejected_of(
    guesses: Sequence[Guess], chosen: Guess, limit_bytes: int, resident_bytes: Callable[[Guess], int]
) -> tuple[RejectedPlacement, ...]:
    """Return the numbers of rows nearest to the chosen one, each with the reason why it was rejected.

    Args:
        guesses: all guesses.
        chosen: the guess that was chosen.
        limit_bytes: device memory in bytes that the process may use.
        resident_bytes: returns the bytes of weights that a guess keeps on the device.
    """
    others = [guess for guess in guesses if guess.rows != chosen.rows]
    nearest = sorted(others, key=lambda guess: abs(guess.rows.bit_length() - chosen.rows.bit_length()))[:MOST_REJECTED]
    return tuple(
        RejectedPlacement(
            micro_batch=guess.rows,
            resident_bytes=resident_bytes(guess),
            peak=guess.need,
            rows_per_second=guess.rows_per_second,
            reason=_reason(guess, chosen, limit_bytes),
        )
        for guess in sorted(nearest, key=lambda guess: guess.rows)
    )


def _reason(guess: Guess, chosen: Guess, limit_bytes: int) -> str:
    over_bytes = guess.need.high_bytes - limit_bytes
    if over_bytes > 0:
        return f"may exceed the limit by {format_bytes(over_bytes)} even with the fewest weights on the device"
    share = guess.rows_per_second / chosen.rows_per_second - 1
    if abs(share) <= _AS_GOOD_SHARE:
        return "the same rows a second, with more memory" if guess.rows > chosen.rows else "the same rows a second"
    return f"predicted to do {abs(share):.0%} {'fewer' if share < 0 else 'more'} rows a second"
