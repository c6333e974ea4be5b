"""What is alive at every event of a trace, by category: sums over the births and deaths, nothing modelled."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from plimsoll.records.trace import CATEGORIES, Category, Trace

Column = NDArray[np.int64]


@dataclass(frozen=True)
class Live:
    """Columns with a row for each event of one place; ``by_category`` has those that occur and adds up to ``total``.

    ``event`` is the number of the event in the trace, ``storage`` the storage it is about, ``delta`` its bytes,
    negative for a death.
    """

    event: Column
    storage: Column
    delta: Column
    total: Column
    by_category: dict[Category, Column]

    @property
    def peak_row(self) -> int:
        """The first row of the largest total; -1 without events."""
        return int(self.total.argmax()) if len(self.total) else -1

    @property
    def peak_bytes(self) -> int:
        """The largest total."""
        return int(self.total[self.peak_row]) if len(self.total) else 0

    def alive_at(self, row: int) -> list[int]:
        """Return the storages that are alive after an event, largest first."""
        born = self.storage[: row + 1][self.delta[: row + 1] > 0]
        dead = self.storage[: row + 1][self.delta[: row + 1] < 0]
        alive = np.setdiff1d(born, dead)
        sizes = dict(zip(self.storage[: row + 1].tolist(), np.abs(self.delta[: row + 1]).tolist(), strict=True))
        return sorted(alive.tolist(), key=lambda storage: -sizes[storage])


def live_bytes(trace: Trace, on_host: bool = False) -> Live:
    """Add up a trace; ``on_host`` is for the host's memory of a training that is on another device."""
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
