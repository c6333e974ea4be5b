"""Tokens as contiguous streams: a sample is the window of a stream slot that comes next, for models that carry a state.

Batches of ``batch_size`` samples in the order of their numbers hold one window of each stream slot
(`plimsoll.data.samples.stream_slots` says where these are), and each goes on where the one before has ended. Beside
``input_ids`` and ``labels`` a sample says which stream slot it is of and which window of it, by which a model finds the
state to go on from (`plimsoll.models.recurrent.carried_state`), and, if asked to, which of its tokens are the first of
a text.

It does NOT cover another order, other batches than ``batch_size`` samples, and augmentation.

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
    """The windows of the stream slots of a token stream; all windows of a batch are equally long.

    Args:
        store: the texts.
        slots: where the stream slots are in it.
        resets: whether samples say where texts begin, for the state to begin anew there.
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
        """A name that differs where the samples do; ``None`` where the tokens are in no store."""
        folder = getattr(self._store, "folder", None)
        if folder is None:
            return None
        slots = self.slots
        # In the words of the release before: a checkpoint keeps the fingerprint of its data.
        said = (
            f"Lanes(begin={slots.begin}, num_tokens={slots.num_tokens}, num_lanes={slots.num_slots}, "
            f"sequence_length={slots.sequence_length})"
        )
        return f"{folder.name} {said} {self._resets}"

    def batch(self, ids: NDArray[np.int64], epoch: int = 0) -> dict[str, torch.Tensor]:
        """Return ``input_ids`` and ``labels`` (B, T), ``slots`` and ``windows`` (B,).

        Labels are for a model that shifts them: the last token is predicted and not read. With resets there is
        ``resets`` (B, T): before which tokens the state begins anew. Of windows that are not equally long, the shorter
        ones are filled up with what is not predicted.
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
        """Return the tokens of each window."""
        return self.slots.places(ids)[1]
