"""Where the stream slots of a stream of tokens are, and how far back their gradients reach: arithmetic alone, no torch.

A stream is cut into as many stream slots as a batch has samples; each is read from its begin to its end, one window a
step, so the state after a window is the state before the next. Neighbouring windows and stream slots have one token in
common: the last of one is only predicted there, and read at the begin of the next. So each token but the first is
predicted exactly once.

Window s of stream slot b is sample ``s * num_slots + b``: in the order of their numbers, samples make batches of one
window of each stream slot. It does NOT look at tokens: texts are given by the places of their end tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from plimsoll.data.samples import ragged
from plimsoll.errors import DataError, InputError
from plimsoll.records.run import GradientReach

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class StreamSlots:
    """The stream slots of the tokens from ``begin`` on.

    Args:
        begin: the first token.
        num_tokens: how many there are.
        num_slots: the samples of a batch.
        sequence_length: tokens of a window, of which all but the last are read.

    Raises:
        InputError: if one of the numbers is none.
        DataError: if a stream slot would not predict a token.
    """

    begin: int
    num_tokens: int
    num_slots: int
    sequence_length: int

    def __post_init__(self) -> None:
        for name, least in (("begin", 0), ("num_slots", 1), ("sequence_length", 2)):
            value = getattr(self, name)
            if value < least:
                raise InputError(
                    f"the stream slots of a stream cannot have {name} = {value}: give at least {least}"
                    + (", of which all tokens but the last are read" if least == 2 else "")
                )
        refuse_no_slot(self.num_tokens, self.num_slots, self.sequence_length)

    @property
    def slot_tokens(self) -> int:
        """How many tokens a stream slot reads, and as many it predicts."""
        return (self.num_tokens - 1) // self.num_slots

    @property
    def num_windows(self) -> int:
        """How many windows a stream slot has, the shorter last one included."""
        return -(-self.slot_tokens // (self.sequence_length - 1))

    @property
    def num_samples(self) -> int:
        """How many windows all stream slots have."""
        return self.num_windows * self.num_slots

    @property
    def num_dropped_tokens(self) -> int:
        """How many tokens at the end are in no stream slot: fewer than there are slots, the same in every epoch."""
        return self.num_tokens - 1 - self.slot_tokens * self.num_slots

    def places(self, ids: Ints) -> tuple[Ints, Ints]:
        """Return the first token of each sample and how many tokens it has, (B,) each."""
        windows_B, slots_B = ids // self.num_slots, ids % self.num_slots
        offsets_B = windows_B * (self.sequence_length - 1)
        starts_B = self.begin + slots_B * self.slot_tokens + offsets_B
        return starts_B, np.minimum(self.slot_tokens - offsets_B + 1, self.sequence_length)

    def reach(self, text_ends: Ints | None = None, segment_steps: int | None = None) -> GradientReach:
        """Count how many tokens back the gradient of a loss reaches: to the begin of its window, or of its text.

        Args:
            text_ends: where the end token of each text is, if the state begins anew at each; ``None`` if not.
            segment_steps: of the segments of a window at whose begins gradients stop too; ``None`` if they do not.
        """
        most = num_reaches = num_predicted = 0
        for slot in range(self.num_slots):
            runs = self._runs_of_slot(slot, text_ends, segment_steps)
            most = max(most, int(runs.max()))
            num_reaches += int((runs * (runs + 1) // 2).sum())
            num_predicted += int(runs.sum())
        return GradientReach(most_tokens=most, mean_tokens=num_reaches / num_predicted)

    def _runs_of_slot(self, slot: int, text_ends: Ints | None, segment_steps: int | None) -> Ints:
        """The tokens that are read between two places at which a gradient stops."""
        begin = self.begin + slot * self.slot_tokens
        end = begin + self.slot_tokens
        window_stops = np.arange(begin, end, self.sequence_length - 1)
        steps = np.arange(0, self.sequence_length - 1, segment_steps or self.sequence_length - 1)
        stops = (window_stops[:, None] + steps).reshape(-1)
        stops = stops[stops < end]
        if text_ends is not None:
            first, last = np.searchsorted(text_ends, (begin, end - 1))
            stops = np.union1d(stops, text_ends[first:last] + 1)
        return np.diff(stops, append=end)


def refuse_no_slot(num_tokens: int, num_slots: int, sequence_length: int, text: str = "a stream") -> None:
    """Refuse tokens of which a stream slot would predict none; ``text`` is what they are called.

    Raises:
        DataError: if one would.
    """
    if num_tokens <= num_slots:
        raise DataError(
            f"{text} of {num_tokens} tokens is too short for batch_size = {num_slots} stream slots, each of which "
            "predicts at least one: give more text, a larger share, or a smaller batch_size, of which each stream slot "
            f"has a window of {sequence_length} tokens"
        )


def truncated_reach(num_read: int, segment_steps: int) -> GradientReach:
    """Count how far back a gradient reaches that ends where a segment of a window begins; of streams, ask
    `StreamSlots`.

    Args:
        num_read: tokens of a window that are read to predict another.
        segment_steps: of a segment.
    """
    reaches = np.arange(num_read) % segment_steps + 1
    return GradientReach(most_tokens=int(reaches.max()), mean_tokens=float(reaches.mean()))


def training_slots(num_tokens: int, num_slots: int, sequence_length: int) -> StreamSlots:
    """Return the stream slots to train on, from the first token on.

    Raises:
        DataError: if a stream slot does not fill one window.
    """
    least_tokens = num_slots * (sequence_length - 1) + 1
    if num_tokens < least_tokens:
        most_slots = max(num_tokens - 1, 0) // max(sequence_length - 1, 1)
        fewer = f", or fewer stream slots with --set batch_size={most_slots}" if most_slots else ""
        shorter = "" if most_slots else f" (at most {num_tokens} with one stream slot)"
        raise DataError(
            f"the training text has {num_tokens} tokens, but batch_size = {num_slots} stream slots with one window of "
            f"sequence_length = {sequence_length} each need {least_tokens}: give more text{',' if fewer else ' or'} "
            f"a shorter sequence_length{shorter}{fewer}"
        )
    return StreamSlots(0, num_tokens, num_slots, sequence_length)


def slots_of_stream(
    num_tokens: int, share: float, num_slots: int, sequence_length: int
) -> tuple[StreamSlots, StreamSlots | None]:
    """Return the stream slots to train on and those held out: the end of the stream, so that both are contiguous.

    Args:
        num_tokens: of the whole stream.
        share: of the tokens held out, from 0 to less than 1; with 0 there are none.
        num_slots: the samples of a batch.
        sequence_length: tokens of a window.

    Raises:
        DataError: if one of the two is too short.
    """
    num_held_out = round(num_tokens * share)
    num_training = num_tokens - num_held_out
    train = training_slots(num_training, num_slots, sequence_length)
    return train, StreamSlots(num_training, num_held_out, num_slots, sequence_length) if share else None


def first_tokens(text_ends: Ints, starts_B: Ints, num_columns: int) -> NDArray[np.bool_]:
    """Return which tokens of some windows (B, T) are the first of a text; of the first text that is not said."""
    is_first_BT = np.zeros((len(starts_B), num_columns), np.bool_)
    first_B = np.searchsorted(text_ends, starts_B - 1)
    nums_B = np.searchsorted(text_ends, starts_B - 1 + num_columns) - first_B
    rows = np.repeat(np.arange(len(starts_B)), nums_B)
    is_first_BT[rows, text_ends[ragged.places(first_B, nums_B)] + 1 - starts_B[rows]] = True
    return is_first_BT
