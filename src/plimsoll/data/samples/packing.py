"""Whole texts packed into rows of one length, with almost no padding and without attention between texts.

Rows are filled by best-fit decreasing over pools of 65,536 spans. Longer spans come first, and each goes into the row
with the least space that fits it. The algorithm works on the histogram of lengths. Rows with the same lengths of spans
are one kind of row, which is computed once. So its time does not grow with the number of rows. The assignment of spans
to rows is a table of 8 bytes per span.

Positions restart with each text. Models of transformers derive from these positions that attention stops between texts.
For other models, `plimsoll.data.samples.masks` makes masks, and `plimsoll.data.samples.packable` tests whether a model
needs them. The shifted loss never predicts the first token of a text. So a loss averaged over tokens equals the loss of
the same texts unpacked.

Not handled: classification, which has one label per row, and recurrent networks, whose state runs from one text into
the next.

Shapes: B rows, T tokens of a row; M spans in all rows together, N tokens in all spans together.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from plimsoll.data.samples import ragged
from plimsoll.data.samples.masks import block_diagonal_mask
from plimsoll.data.samples.text_windows import Spans
from plimsoll.data.samples.windows import IGNORED_LABEL, Samples
from plimsoll.errors import DataError
from plimsoll.files.checksums import require_whole
from plimsoll.files.store import Facts, Progress, Store, kept, kept_facts, silent

_RECIPE = 1  # increase it if the same spans are packed differently
_SPANS_PER_POOL = 1 << 16
_MEMBERS_FILE, _ENDS_FILE = "members.bin", "ends.bin"

Ints = NDArray[np.int64]
_Pattern = tuple[tuple[int, int], ...]  # (length, number of spans) for one kind of row, longest first


class Packs:
    """The spans of each row; picklable. Row ``i`` has the spans ``members[ends[i - 1] : ends[i]]`` (row 0: from 0)."""

    def __init__(self, spans: Spans, folder: Path, facts: Facts) -> None:
        self.spans, self.folder = spans, folder
        self.sequence_length: int = facts["sequence_length"]
        require_whole(folder)
        self.members: Ints = np.asarray(np.memmap(folder / _MEMBERS_FILE, np.int64, "r"))
        self.ends: Ints = np.asarray(np.memmap(folder / _ENDS_FILE, np.int64, "r"))

    def __reduce__(self) -> tuple[Any, ...]:
        return open_packs, (self.spans, self.folder)

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def padding_share(self) -> float:
        """The fraction of all rows that is padding."""
        return 1 - self.spans.num_tokens / (len(self) * self.sequence_length)


class PackedDataset(Samples):
    """Rows of whole texts, for language modelling.

    Args:
        packs: the spans of each row.
        pad_id: the id of the padding token. The padding of a row has positions like a separate text, and no labels.
        mask: adds ``attention_mask`` (B, 1, T, T) bool, true where attention is allowed. It is for models that do not
            derive it from ``position_ids``: ``"causal"``, or ``"bidirectional"`` for encoders.
    """

    def __init__(self, packs: Packs, pad_id: int, mask: Literal["causal", "bidirectional"] | None = None) -> None:
        self.packs, self.mask, self._pad_id = packs, mask, pad_id
        self.sequence_length = packs.sequence_length

    def __len__(self) -> int:
        return len(self.packs)

    @property
    def fingerprint(self) -> str:
        """A string that differs if the samples differ."""
        return f"{self.packs.spans.folder.name} {self.packs.folder.name} {self.mask} {self._pad_id}"

    def batch(self, ids: NDArray[np.int64], epoch: int = 0) -> dict[str, torch.Tensor]:
        """Return ``input_ids``, ``position_ids`` and ``labels`` (B, T) int64.

        Labels are -100 at the first token of a text and on padding.
        """
        spans, num_rows = self.packs.spans, len(ids)
        stops_B = self.packs.ends[ids]
        nums_B = stops_B - np.where(ids > 0, self.packs.ends[ids - 1], 0)
        members_M = self.packs.members[ragged.places(stops_B - nums_B, nums_B)]
        tokens_N, lengths_M = spans.rows(members_M)
        used_B = np.add.reduceat(lengths_M, np.cumsum(nums_B) - nums_B)
        positions_N = ragged.positions(lengths_M)
        is_known_N = positions_N < np.repeat(np.maximum(spans.num_known(members_M), 1), lengths_M)
        inside_BT = ragged.inside(used_B, self.sequence_length)
        position_ids_BT = np.tile(np.arange(self.sequence_length), (num_rows, 1)) - used_B[:, None]
        position_ids_BT[inside_BT] = positions_N
        labels_BT = ragged.padded(np.where(is_known_N, IGNORED_LABEL, tokens_N), inside_BT, IGNORED_LABEL)
        fields = {
            "input_ids": torch.from_numpy(ragged.padded(tokens_N, inside_BT, self._pad_id)),
            "position_ids": torch.from_numpy(position_ids_BT),
            "labels": torch.from_numpy(labels_BT),
        }
        if self.mask is not None:
            fields["attention_mask"] = block_diagonal_mask(fields["position_ids"], causal=self.mask == "causal")
        return fields

    def lengths(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return ``sequence_length`` for each row, because padding costs as much computation as tokens."""
        return np.full(len(ids), self.sequence_length)


@kept
def pack(spans: Spans, sequence_length: int | None = None, progress: Progress = silent) -> Store[Packs]:
    """Return rows of whole spans, from the cache folder that holds ``spans``, or packed now.

    Args:
        spans: the texts or windows.
        sequence_length: the number of tokens of a row; by default the maximum length of a span.
        progress: called with the stage ``"packs"``, and the done and total number of spans.

    Raises:
        DataError: if a row is shorter than the maximum length of a span.
        OutputError: if the cache cannot be written.
    """
    sequence_length = spans.sequence_length if sequence_length is None else sequence_length
    if sequence_length < spans.sequence_length:
        raise DataError(
            f"rows of {sequence_length} tokens cannot hold texts of up to {spans.sequence_length}: use rows of at "
            f"least {spans.sequence_length}, or cut the texts to {sequence_length} tokens"
        )

    def write(folder: Path) -> Facts:
        num_members = 0
        with (folder / _MEMBERS_FILE).open("wb") as members_file, (folder / _ENDS_FILE).open("wb") as ends_file:
            for begin in range(0, len(spans), _SPANS_PER_POOL):
                ids = np.arange(begin, min(begin + _SPANS_PER_POOL, len(spans)))
                members, nums = best_fit(spans.lengths(ids), sequence_length)
                members_file.write((members + begin).data)
                ends_file.write((np.cumsum(nums) + num_members).data)
                num_members += len(members)
                progress("packs", num_members, len(spans))
        return {"sequence_length": sequence_length}

    folder = spans.folder.with_name(f"{spans.folder.name}-packs-{sequence_length}-{_RECIPE}")
    return Store(folder, write, partial(Packs, spans))


def open_packs(spans: Spans, folder: Path) -> Packs:
    """Open the memory-mapped packs that `pack` stored in ``folder``.

    Raises:
        DataError: if the packs are missing or damaged.
    """
    return Packs(spans, folder, kept_facts(folder, "packs"))


def best_fit(lengths_M: Ints, row_tokens: int) -> tuple[Ints, Ints]:
    """Pack spans by best-fit decreasing.

    Args:
        lengths_M: the length of each span, from 1 to ``row_tokens``, int64.
        row_tokens: the number of tokens of a row.

    Returns:
        the indices of the spans, row after row (M,), and the number of spans in each row (B,).
    """
    order_M = np.argsort(-lengths_M, kind="stable")
    nums = np.bincount(lengths_M, minlength=row_tokens + 1)
    firsts = dict(zip(range(row_tokens, 0, -1), (np.cumsum(nums[:0:-1]) - nums[:0:-1]).tolist(), strict=True))
    parts, sizes = [], []
    for pattern, num_rows in _row_kinds(nums, row_tokens):
        columns = []
        for length, num_each in pattern:
            num_taken = num_each * num_rows
            columns.append(order_M[firsts[length] : firsts[length] + num_taken].reshape(num_rows, num_each))
            firsts[length] += num_taken
        rows = np.concatenate(columns, axis=1)
        parts.append(rows.ravel())
        sizes.append(np.full(num_rows, rows.shape[1]))
    return np.concatenate(parts), np.concatenate(sizes)


def num_packed_rows(lengths_M: Ints, row_tokens: int) -> int:
    """Return the number of rows that `pack` makes from spans of these lengths."""
    pools = (lengths_M[begin : begin + _SPANS_PER_POOL] for begin in range(0, len(lengths_M), _SPANS_PER_POOL))
    return sum(len(best_fit(pool, row_tokens)[1]) for pool in pools)


def _row_kinds(nums: Ints, row_tokens: int) -> Iterator[tuple[_Pattern, int]]:
    """Yield the kinds of rows, each given by the lengths of its spans, and the number of rows of each kind.

    ``nums[n]`` is the number of spans of length ``n``.
    """
    by_room: dict[int, list[tuple[_Pattern, int]]] = {}  # rows by their number of free tokens
    rooms = 0  # the keys of `by_room` as bits: bit 5 is set if a row has 5 free tokens
    for length in np.flatnonzero(nums)[::-1].tolist():
        num_left = int(nums[length])
        while num_left:
            room = _least_room(rooms, length)
            pattern, num_rows = by_room[room].pop() if room else ((), num_left)
            free = room or row_tokens
            num_each = min(free // length, num_left)
            num_filled = min(num_left // num_each, num_rows)
            num_left -= num_filled * num_each
            filled = (*pattern, (length, num_each)), num_filled
            by_room.setdefault(free - num_each * length, []).append(filled)
            rooms |= 1 << (free - num_each * length)
            if room and num_rows > num_filled:
                by_room[room].append((pattern, num_rows - num_filled))
            if room and not by_room[room]:
                rooms &= ~(1 << room)
    for kinds in by_room.values():
        yield from kinds


def _least_room(rooms: int, length: int) -> int:
    """Return the least free space of a started row that fits a span of ``length`` tokens, or 0 if no row fits it.

    Bit ``n`` of ``rooms`` is set if a row has ``n`` free tokens.
    """
    enough = rooms >> length
    return length + (enough & -enough).bit_length() - 1 if enough else 0
