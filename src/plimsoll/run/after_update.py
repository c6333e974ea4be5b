"""What follows an update, each part once: the gradient scaler, the learning-rate schedule, and what tidies up.

The update has happened by then, so an error in one of these must not make anybody do the step again. Where memory runs
out in a part, what is reached from it (`plimsoll.run.reachable`) is put back as it was before, and the part is done
again; the other parts are done whatever becomes of it. If it fails again, `AfterUpdateError` says that the update is
done. Other errors pass when all parts have been tried.

Does NOT cover the hooks of an optimizer: they are a part of its update (`plimsoll.run.commit`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch

from plimsoll.device.base import Backend
from plimsoll.errors import AfterUpdateError
from plimsoll.records.run import OomEvent
from plimsoll.run.boundary import Position, attempt
from plimsoll.run.reachable import SMALL_BYTES, Reached, reached_from
from plimsoll.run.snapshot import MOST_TRIES, Change, Moving, Snapshot


class Part(NamedTuple):
    """Something that is done after an update.

    Attributes:
        name: what is called, as a user writes it.
        work: does it.
        owner: what it changes is reached from here.
        is_of_torch: whether it exchanges its containers for others and never changes those that have come since.
    """

    name: str
    work: Callable[[], object]
    owner: Any
    is_of_torch: bool = False


class AfterUpdate:
    """Does what follows the updates of one optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer, backend: Backend, position: Position) -> None:
        self._optimizer, self._backend, self._position = optimizer, backend, position
        self._moving: Moving = set()
        self._reached: dict[tuple[str, int, int], Reached] = {}  # of parts of torch's, for every step

    def do(
        self,
        scaler: torch.amp.GradScaler | None = None,
        schedule: torch.optim.lr_scheduler.LRScheduler | None = None,
        tidy_ups: tuple[Callable[[], None], ...] = (),
    ) -> None:
        """Do what follows the update of the step that ``position`` counts as done.

        Raises:
            AfterUpdateError: if memory ran out in a part, and again when it was tried anew.
        """
        with ExitStack() as others:  # they are done though one fails
            for part in reversed([*_parts(scaler, schedule, tidy_ups)]):
                others.callback(self._do, part)

    def _do(self, part: Part) -> None:
        left: list[Change] = []
        for number in range(MOST_TRIES):
            begun_with = left if number > 1 else []
            event, left = self._try(part, begun_with)
            if event is None:
                return
            self._backend.release()
            if number and left == begun_with:  # there is nothing to go on from
                break
        assert event is not None
        raise AfterUpdateError(
            f"memory ran out in {part.name} after the update of step {self._position.step} ({event.shortage}), "
            f"{number + 1} times; what it changed is as before. The update is done, do not repeat the step: give a "
            f"larger budget, call {part.name} yourself and go on with the next batch, or reload the last checkpoint"
        )

    def _try(self, part: Part, left: list[Change]) -> tuple[OomEvent | None, list[Change]]:
        """Do a part, or nothing of it; returns the event, and what failing changed."""
        snapshot = attempt(partial(self._snapshot_of, part), self._backend, self._position)
        if isinstance(snapshot, OomEvent):
            return snapshot, []
        is_done = False
        try:
            event = attempt(partial(snapshot.run, part.work, left), self._backend, self._position)
            is_done = event is None
        finally:
            if not is_done and isinstance(attempt(snapshot.put_back, self._backend, self._position), OomEvent):
                self._backend.release()
                snapshot.put_back()
        return event, snapshot.changes

    def _snapshot_of(self, part: Part) -> Snapshot:
        groups = self._optimizer.param_groups
        key = part.name, id(groups), len(groups)
        reached = self._reached.get(key)
        if reached is None:
            known = [self._optimizer, self._optimizer.state, *(group["params"] for group in groups)]
            roots = [(part.name.partition(".")[0], part.owner), ("optimizer.param_groups", groups)]
            reached = reached_from(roots, Reached(seen={id(one): one for one in known}))
            reached.arrays = [one for one in reached.arrays if one[1].nbytes <= SMALL_BYTES]
        if part.is_of_torch:
            self._reached[key] = reached
        return Snapshot(reached, self._moving)


def _parts(
    scaler: torch.amp.GradScaler | None,
    schedule: torch.optim.lr_scheduler.LRScheduler | None,
    tidy_ups: tuple[Callable[[], None], ...],
) -> Iterator[Part]:
    if scaler is not None:
        yield Part("scaler.update()", scaler.update, vars(scaler), type(scaler).__module__.startswith("torch."))
    if schedule is not None:
        # It may be a library's wrapper, which is not looked into by itself.
        is_of_torch = type(schedule).__module__ == "torch.optim.lr_scheduler"
        yield Part("schedule.step()", schedule.step, (schedule, vars(schedule)), is_of_torch)
    for tidy_up in tidy_ups:
        yield Part(getattr(tidy_up, "__name__", "tidy_up") + "()", tidy_up, tidy_up)
