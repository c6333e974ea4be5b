"""Live bytes of a trace after every event, by category. They are sums over births and deaths of storages."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from plimsoll.records.trace import CATEGORIES, Category, Trace

Column = NDArray[np.int64]


@dataclass(frozen=True)
class Live:
    """Live bytes on the device or in host memory; the columns have a row for each event in that memory.

    Attributes:
        event: index of the event in the trace.
        storage: id of the storage that is born or dies.
        delta: bytes of that storage, negative for a death.
        total: live bytes of all storages after the event.
        by_category: live bytes of each category that occurs; they add up to ``total``.
    """

    event: Column
    storage: Column
    delta: Column
    total: Column
    by_category: dict[Category, Column]

    @property
    def peak_row(self) -> int:
        """First row with the largest total; -1 without events."""
        return int(self.total.argmax()) if len(self.total) else -1

    @property
    def peak_bytes(self) -> int:
        """Largest total; 0 without events."""
        return int(self.total[self.peak_row]) if len(self.total) else 0

    def alive_at(self, row: int) -> list[int]:
        """Return the ids of the storages that are alive after the event of a row, largest first."""
        born = self.storage[: row + 1][self.delta[: row + 1] > 0]
        dead = self.storage[: row + 1][self.delta[: row + 1] < 0]
        alive = np.setdiff1d(born, dead)
        sizes = dict(zip(self.storage[: row + 1].tolist(), np.abs(self.delta[: row + 1]).tolist(), strict=True))
        return sorted(alive.tolist(), key=lambda storage: -sizes[storage])


def live_bytes(trace: Trace, on_host: bool = False) -> Live:
    """Compute the live bytes of a trace on the device, or with ``on_host`` in host memory."""
    signed = np.asarray(trace.events, dtype=np.int64)
    storage = np.abs(signed) - 1
    here = np.asarray(trace.storages.on_host, dtype=bool)[storage] == on_host if len(signed) else np.zeros(0, bool)
    event, signed, storage = np.flatnonzero(here), signed[here], storage[here]
    delta = np.asarray(trace.storages.num_bytes, dtype=np.int64)[storage] * np.sign(signed)
    number_of = {category: number for number, category in enumerate(CATEGORIES)}
    category = np.asarray([number_of[name] for name in trace.storages.category], dtype=np.int64)[storage]
    by_category = {
        name: np.cumsum(np.where(category == number, delta, 0))
        for name, number in number_of.items()
        if (category == number).any()
    }
    return Live(event, storage, delta, np.cumsum(delta), by_category)
