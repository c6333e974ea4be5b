"""The positions of stream slots in a token stream, and how far back their gradients reach. It does not import torch.

A stream is cut into one stream slot per sample of a batch. Each slot is read from beginning to end, one window per
step, so the state after a window is the state before the next. Neighbouring windows and stream slots share one token.
It is predicted at the end of the earlier window and read at the beginning of the later one. So each token except the
first is predicted exactly once.

Window s of stream slot b is sample ``s * num_slots + b``. So consecutive samples form batches with one window of each
stream slot. Tokens are not read: texts are given by the indices of their end tokens.
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
    """The stream slots into which ``num_tokens`` tokens from index ``begin`` are cut.

    Args:
        begin: the index of the first token.
        num_tokens: the number of tokens.
        num_slots: the number of stream slots, equal to the number of samples of a batch.
        sequence_length: the number of tokens of a window. The model reads all of them except the last.

    Raises:
        InputError: if ``begin``, ``num_slots`` or ``sequence_length`` is too small.
        DataError: if there are too few tokens for each stream slot to predict one token.
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
                    + (", because all tokens of a window except the last are read" if least == 2 else "")
                )
        refuse_no_slot(self.num_tokens, self.num_slots, self.sequence_length)

    @property
    def slot_tokens(self) -> int:
        """The number of tokens that a stream slot reads, which is also the number that it predicts."""
        return (self.num_tokens - 1) // self.num_slots

    @property
    def num_windows(self) -> int:
        """The number of windows of a stream slot, including a shorter last one."""
        return -(-self.slot_tokens // (self.sequence_length - 1))

    @property
    def num_samples(self) -> int:
        """The number of windows of all stream slots."""
        return self.num_windows * self.num_slots

    @property
    def num_dropped_tokens(self) -> int:
        """The number of tokens at the end that are in no stream slot. It is less than ``num_slots``."""
        return self.num_tokens - 1 - self.slot_tokens * self.num_slots

    def places(self, ids: Ints) -> tuple[Ints, Ints]:
        """Return the index of the first token of each sample and its number of tokens, (B,) each."""
        windows_B, slots_B = ids // self.num_slots, ids % self.num_slots
        offsets_B = windows_B * (self.sequence_length - 1)
        starts_B = self.begin + slots_B * self.slot_tokens + offsets_B
        return starts_B, np.minimum(self.slot_tokens - offsets_B + 1, self.sequence_length)

    def reach(self, text_ends: Ints | None = None, segment_steps: int | None = None) -> GradientReach:
        """Compute how many tokens back the gradient of a loss reaches: to the beginning of its window or of its text.

        Args:
            text_ends: the index of the end token of each text if the state is reset at each text, else ``None``.
            segment_steps: the length of the segments of a window at whose beginnings gradients also stop, or ``None``.
        """
        most = num_reaches = num_predicted = 0
        for slot in range(self.num_slots):
            runs = self._runs_of_slot(slot, text_ends, segment_steps)
            most = max(most, int(runs.max()))
            num_reaches += int((runs * (runs + 1) // 2).sum())
            num_predicted += int(runs.sum())
        return GradientReach(most_tokens=most, mean_tokens=num_reaches / num_predicted)

    def _runs_of_slot(self, slot: int, text_ends: Ints | None, segment_steps: int | None) -> Ints:
        """Return the number of tokens between consecutive positions of a slot at which gradients stop."""
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
    """Raise if the tokens are too few for each stream slot to predict one. ``text`` names the tokens in the message.

    Raises:
        DataError: if there are at most ``num_slots`` tokens.
    """
    if num_tokens <= num_slots:
        raise DataError(
            f"{text} of {num_tokens} tokens is too short for batch_size = {num_slots} stream slots, each of which "
            f"must predict at least one token and should have a window of {sequence_length} tokens: give more text, a "
            "larger share, or a smaller batch_size"
        )


def truncated_reach(num_read: int, segment_steps: int) -> GradientReach:
    """Compute how far back gradients reach if they stop at the beginning of each segment of a window.

    For streams, use `StreamSlots.reach`.

    Args:
        num_read: the number of tokens of a window that are read to predict the next token.
        segment_steps: the number of tokens of a segment.
    """
    reaches = np.arange(num_read) % segment_steps + 1
    return GradientReach(most_tokens=int(reaches.max()), mean_tokens=float(reaches.mean()))


def training_slots(num_tokens: int, num_slots: int, sequence_length: int) -> StreamSlots:
    """Return the stream slots to train on, beginning at the first token.

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
    """Return the stream slots for training and for validation. Validation takes the end, so both parts are contiguous.

    Args:
        num_tokens: the number of tokens of the whole stream.
        share: the fraction of tokens held out, from 0 to less than 1. With 0, the validation slots are ``None``.
        num_slots: the number of samples of a batch.
        sequence_length: the number of tokens of a window.

    Raises:
        DataError: if the training part or the validation part is too short.
    """
    num_held_out = round(num_tokens * share)
    num_training = num_tokens - num_held_out
    train = training_slots(num_training, num_slots, sequence_length)
    return train, StreamSlots(num_training, num_held_out, num_slots, sequence_length) if share else None


def first_tokens(text_ends: Ints, starts_B: Ints, num_columns: int) -> NDArray[np.bool_]:
    """Return whether each token of windows (B, T) is the first of a text. The stream's first text is not marked."""
    is_first_BT = np.zeros((len(starts_B), num_columns), np.bool_)
    first_B = np.searchsorted(text_ends, starts_B - 1)
    nums_B = np.searchsorted(text_ends, starts_B - 1 + num_columns) - first_B
    rows = np.repeat(np.arange(len(starts_B)), nums_B)
    is_first_BT[rows, text_ends[ragged.places(first_B, nums_B)] + 1 - starts_B[rows]] = True
    return is_first_BT
