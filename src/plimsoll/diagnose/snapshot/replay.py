"""A replay of the events of one device: live memory over time, the allocations at the peak, and when they were freed.

Sizes are the requested sizes, as in the events. An allocation ends with the request to free it. Allocations from before
the first event are known in two ways: they are freed without having been allocated, or their blocks are in use at the
end and no event allocated them. torch keeps only the last events, so allocations that were made and freed among missing
events are not seen.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from plimsoll.diagnose.snapshot.read import Segment, Snapshot
from plimsoll.diagnose.snapshot.recording import (
    ALLOC,
    FREE_COMPLETED,
    FREE_REQUESTED,
    OOM,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    EventRow,
    Phase,
    Site,
)
from plimsoll.records.diagnosis import Share

NEVER = -1
FROM_BEFORE = -1
"""Takes the place of an event number for allocations from before the first event."""


class Piece(NamedTuple):
    """One allocation during a recording.

    Attributes:
        born: number of the event that made it, or `FROM_BEFORE`.
        freed: number of the event that freed it, or `NEVER`.
        num_bytes: the requested size.
        site: the line of user code and the phase that allocated it.
    """

    born: int
    freed: int
    num_bytes: int
    site: Site


@dataclass(frozen=True)
class Replay:
    """The replayed events of one device.

    Attributes:
        device: index of the device.
        snapshot: the snapshot.
        rows: row numbers of the device's events in the snapshot's columns, oldest first. Event numbers are indices into
            this list.
        segments: segments of the device.
        live_bytes: bytes of live allocations after each event.
        reserved_bytes: bytes that the allocator has reserved after each event.
        freed_at: for each event that allocated memory, the event that freed this memory, or `NEVER`.
        before: allocations from before the first event.
        oom_event: the number of the last event in which memory ran out; ``None`` if memory did not run out.
    """

    device: int
    snapshot: Snapshot
    rows: list[EventRow]
    segments: tuple[Segment, ...]
    live_bytes: array[int]
    reserved_bytes: array[int]
    freed_at: array[int]
    before: tuple[Piece, ...]
    oom_event: int | None

    @property
    def top_event(self) -> int:
        """The number of the event after which the most memory was live; `FROM_BEFORE` if it was before all events."""
        if not self.rows or max(self.live_bytes) <= self._before_bytes:
            return FROM_BEFORE
        return self.live_bytes.index(max(self.live_bytes))

    @property
    def peak_bytes(self) -> int:
        """The most bytes that were live at one time."""
        return max(self._before_bytes, max(self.live_bytes, default=0))

    @property
    def _before_bytes(self) -> int:
        return sum(piece.num_bytes for piece in self.before)

    def site(self, event: int) -> Site:
        """Return the site (line of user code and phase) of an event."""
        return self.snapshot.sites[self.snapshot.columns.sites[self.rows[event]]]

    def size_bytes(self, event: int) -> int:
        """Return the size that an event allocated, freed or failed to allocate, in bytes."""
        return self.snapshot.columns.sizes[self.rows[event]]

    def live_at(self, event: int) -> Iterator[Piece]:
        """Yield the allocations that were live after an event."""
        for piece in self.before:
            if piece.freed == NEVER or piece.freed > event:
                yield piece
        actions = self.snapshot.columns.actions
        for born in range(event + 1):
            if actions[self.rows[born]] == ALLOC and (self.freed_at[born] == NEVER or self.freed_at[born] > event):
                yield Piece(born, self.freed_at[born], self.size_bytes(born), self.site(born))


def replay(snapshot: Snapshot, device: int) -> Replay:
    """Replay the events of one device."""
    rows = snapshot.traces[device] if device < len(snapshot.traces) else []
    segments = tuple(segment for segment in snapshot.segments if segment.device == device)
    freed_at, before, open_births = _lives(snapshot, rows)
    end = [block for segment in segments for block in segment.blocks if block.is_used]
    before += [
        Piece(FROM_BEFORE, NEVER, block.asked_bytes, block.site) for block in end if block.address not in open_births
    ]
    return Replay(
        device=device,
        snapshot=snapshot,
        rows=rows,
        segments=segments,
        live_bytes=_live(snapshot, rows, freed_at, before),
        reserved_bytes=_reserved(snapshot, rows, sum(segment.size_bytes for segment in segments)),
        freed_at=freed_at,
        before=tuple(before),
        oom_event=next(
            (event for event in reversed(range(len(rows))) if snapshot.columns.actions[rows[event]] == OOM), None
        ),
    )


def _lives(snapshot: Snapshot, rows: list[EventRow]) -> tuple[array[int], list[Piece], dict[int, int]]:
    """Return when allocations begin and end.

    Returns:
        the number of the event that freed the memory of each event, or `NEVER`; the freed allocations from before the
        first event; and the event of each allocation that is live at the end, by its address.
    """
    columns = snapshot.columns
    freed_at = array("q", [NEVER]) * len(rows)
    before: list[Piece] = []
    born_at: dict[int, int] = {}
    requested: set[int] = set()
    for event, row in enumerate(rows):
        action, address = columns.actions[row], columns.addresses[row]
        if action == ALLOC:
            born_at[address] = event
            requested.discard(address)
        elif action == FREE_REQUESTED or (action == FREE_COMPLETED and address not in requested):
            born = born_at.pop(address, None)
            if born is not None:
                freed_at[born] = event
            else:
                # The stack of a free event shows the line that freed the memory, not the line that allocated it.
                before.append(Piece(FROM_BEFORE, event, columns.sizes[row], snapshot.sites[0]))
            if action == FREE_REQUESTED:
                requested.add(address)
        elif action == FREE_COMPLETED:
            requested.discard(address)
    return freed_at, before, born_at


def _live(snapshot: Snapshot, rows: list[EventRow], freed_at: array[int], before: list[Piece]) -> array[int]:
    columns = snapshot.columns
    changes = defaultdict[int, int](int)
    for piece in before:
        if piece.freed != NEVER:
            changes[piece.freed] -= piece.num_bytes
    live_bytes = sum(piece.num_bytes for piece in before)
    curve = array("q", bytes(8 * len(rows)))
    for event, row in enumerate(rows):
        if columns.actions[row] == ALLOC:
            live_bytes += columns.sizes[row]
            if freed_at[event] != NEVER:
                changes[freed_at[event]] -= columns.sizes[row]
        live_bytes += changes.pop(event, 0)
        curve[event] = live_bytes
    return curve


def _reserved(snapshot: Snapshot, rows: list[EventRow], at_end_bytes: int) -> array[int]:
    """Return the reserved bytes after each event.

    They are computed backwards, because only the reserved bytes at the end are known.
    """
    columns = snapshot.columns
    curve = array("q", bytes(8 * len(rows)))
    reserved_bytes = at_end_bytes
    for event in reversed(range(len(rows))):
        curve[event] = reserved_bytes
        action, size_bytes = columns.actions[rows[event]], columns.sizes[rows[event]]
        if action == SEGMENT_ALLOC:
            reserved_bytes = max(0, reserved_bytes - size_bytes)
        elif action == SEGMENT_FREE:
            reserved_bytes += size_bytes
    return curve


_MOST_SHARES = 12

_BY_PHASE: dict[Phase, str] = {
    "parameters": "parameters",
    "optimizer": "optimizer states",
    "backward": "gradients",
    "forward": "activations",
    "": "unknown",
}
# Assumed from the frame names of the allocation and of the free: memory that autograd allocated, and an optimizer freed
# or nothing freed yet, is a gradient. Memory that the backward pass freed was saved for it.
_FREED_IN: dict[tuple[Phase, Phase], str] = {
    ("optimizer", "optimizer"): "temporaries",
    ("backward", "backward"): "temporaries",
    ("forward", "forward"): "temporaries",
    ("", "backward"): "activations",
    ("", "optimizer"): "gradients",
}


def shares_at(replay: Replay, event: int) -> tuple[Share, ...]:
    """Return the memory that was live after an event by category and line, largest first.

    Only the largest shares are listed. The rest becomes one share, ``others``.
    """
    sizes = Counter[tuple[str, str]]()
    for piece in replay.live_at(event):
        sizes[category_of(replay, piece), piece.site.place] += piece.num_bytes
    ranked = sorted(sizes.items(), key=lambda item: (-item[1], item[0]))
    shares = [
        Share(category=category, num_bytes=num_bytes, known="assumed", place=place)
        for (category, place), num_bytes in ranked[:_MOST_SHARES]
        if num_bytes
    ]
    others_bytes = sum(num_bytes for _, num_bytes in ranked[_MOST_SHARES:])
    if others_bytes:
        shares.append(Share(category="others", num_bytes=others_bytes, known="counted"))
    return tuple(shares)


def category_of(replay: Replay, piece: Piece) -> str:
    """Return the category of an allocation.

    It is guessed from the phases in which the memory was allocated and freed, which follow from names in the stacks.
    """
    phase = piece.site.phase
    if piece.freed != NEVER:
        return _FREED_IN.get((phase, replay.site(piece.freed).phase), _BY_PHASE[phase])
    return _BY_PHASE[phase]
