"""Contiguous streams of tokens: a sample is the next window of a stream slot, for models that carry a state.

Consecutive samples form batches of ``batch_size`` samples with one window of each stream slot
(`plimsoll.data.samples.stream_slots`). Each window continues at the end of the previous one. A sample also has the
numbers of its stream slot and window, with which a model finds the state to continue from
(`plimsoll.models.recurrent.carried_state`). On request, a sample also marks the tokens that are the first of a text.

Not handled: shuffled samples, batches of other than ``batch_size`` samples, and augmentation.

Shapes: B samples of the batch, T tokens of a window.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from plimsoll.data.samples.stream_slots import StreamSlots, first_tokens
from plimsoll.data.samples.windows import IGNORED_LABEL, Samples
from plimsoll.data.tokens.store import Tokens


class StreamDataset(Samples):
    """The windows of the stream slots of a token stream. All windows of a batch have equal length.

    Args:
        store: the tokens of all texts.
        slots: the positions of the stream slots in the store.
        resets: whether samples mark where texts begin, so that the state is reset there.
    """

    def __init__(self, store: Tokens, slots: StreamSlots, resets: bool = False) -> None:
        self._store, self._resets, self.slots = store, resets, slots
        self.sequence_length, self.num_slots = slots.sequence_length, slots.num_slots

    def __reduce__(self) -> tuple[Any, ...]:
        return StreamDataset, (self._store, self.slots, self._resets)

    def __len__(self) -> int:
        return self.slots.num_samples

    @property
    def fingerprint(self) -> str | None:
        """A string that differs if the samples differ; ``None`` if the tokens are in no store."""
        folder = getattr(self._store, "folder", None)
        if folder is None:
            return None
        slots = self.slots
        # The format of the previous release, because checkpoints hold the fingerprint of their data.
        said = (
            f"Lanes(begin={slots.begin}, num_tokens={slots.num_tokens}, num_lanes={slots.num_slots}, "
            f"sequence_length={slots.sequence_length})"
        )
        return f"{folder.name} {said} {self._resets}"

    def batch(self, ids: NDArray[np.int64], epoch: int = 0) -> dict[str, torch.Tensor]:
        """Return ``input_ids`` and ``labels`` (B, T), ``slots`` and ``windows`` (B,), all int64.

        Labels are for a model that shifts them: the last token is predicted and not read. With resets, the batch also
        has ``resets`` (B, T) bool, true for tokens before which the state is reset. If windows differ in length, the
        shorter windows are padded with tokens that are not predicted.
        """
        starts_B, lengths_B = self.slots.places(ids)
        num_columns = int(lengths_B.max())
        columns_T = np.arange(num_columns)
        places_BT = starts_B[:, None] + np.minimum(columns_T, lengths_B[:, None] - 1)
        input_ids_BT = torch.from_numpy(self._store.tokens[places_BT].astype(np.int64))
        labels_BT = input_ids_BT.masked_fill(torch.from_numpy(columns_T >= lengths_B[:, None]), IGNORED_LABEL)
        fields = {
            "input_ids": input_ids_BT,
            "labels": labels_BT,
            "slots": torch.from_numpy(ids % self.slots.num_slots),
            "windows": torch.from_numpy(ids // self.slots.num_slots),
        }
        if self._resets:
            fields["resets"] = torch.from_numpy(first_tokens(self._store.ends, starts_B, num_columns))
        return fields

    def lengths(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of tokens of each window."""
        return self.slots.places(ids)[1]
