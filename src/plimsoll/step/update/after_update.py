"""The functions (parts) that run after an update: they advance the gradient scaler and the schedule, and clean up.

The update has already happened, so an error in such a part must not cause the step to be repeated. If memory runs out
in a part, the state that the part reaches (`plimsoll.step.undo.find_state`) is restored and the part is repeated. The
other parts run in any case. If a part keeps failing, `AfterUpdateError` reports that the update is done. Other errors
are raised after all parts have been tried.

Does not cover the hooks of an optimizer, which belong to its update (`plimsoll.step.update.commit`).
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
from plimsoll.step.oom_boundary import Position, attempt
from plimsoll.step.undo.snapshot import MOST_TRIES, Change, Snapshot
from plimsoll.step.undo.user_state import Kept


class Part(NamedTuple):
    """A function that runs after an update.

    Attributes:
        name: the call as a user would write it, for messages.
        work: the function.
        owners: objects from which all state that the function changes can be reached.
    """

    name: str
    work: Callable[[], object]
    owners: tuple[Any, ...]


class AfterUpdate:
    """Runs the parts of a step that follow the updates of one optimizer, such as the scheduler."""

    def __init__(self, optimizer: torch.optim.Optimizer, backend: Backend, position: Position) -> None:
        self._optimizer, self._backend, self._position = optimizer, backend, position
        self._kept: dict[int, tuple[Callable[[], object], list[dict[str, Any]], Kept]] = {}

    def do(
        self,
        scaler: torch.amp.GradScaler | None = None,
        schedule: torch.optim.lr_scheduler.LRScheduler | None = None,
        tidy_ups: tuple[Callable[[], None], ...] = (),
    ) -> None:
        """Run the parts that follow the update of the last completed step in ``position``.

        Args:
            scaler: the gradient scaler, whose scale is updated; ``None`` without fp16.
            schedule: the learning-rate schedule to step, if any.
            tidy_ups: further functions to call, which clean up after the step.

        Raises:
            AfterUpdateError: if memory ran out in a part and in each retry, or if changes of the part cannot be undone.
        """
        with ExitStack() as others:  # all parts run, even if one fails
            for number, part in reversed([*enumerate(_parts(scaler, schedule, tidy_ups))]):
                others.callback(self._do, part, self._kept_of(number, part))

    def _do(self, part: Part, kept: Kept) -> None:
        left: list[Change] = []
        for number in range(MOST_TRIES):
            begun_with = left if number > 1 else []
            event, left = self._try(part, kept, begun_with, is_again=number > 0)
            if event is None:
                return
            self._backend.release()
            if number and left == begun_with:  # no progress since the last try
                break
        assert event is not None
        raise AfterUpdateError(
            f"memory ran out in {part.name} after the update of step {self._position.step} ({event.shortage}), "
            f"{number + 1} times; its changes are undone. The update is done, so do not repeat the step: give a larger "
            f"budget, call {part.name} yourself and continue with the next batch, or reload the last checkpoint"
        )

    def _try(
        self, part: Part, kept: Kept, left: list[Change], *, is_again: bool
    ) -> tuple[OomEvent | None, list[Change]]:
        """Run a part as a transaction.

        Returns:
            The event if memory ran out, otherwise ``None``, and the changes of the failed part that a retry may keep.

        Raises:
            AfterUpdateError: if changes of the part cannot be undone.
        """

        def take() -> Snapshot:
            kept.begin(is_again=is_again)
            return Snapshot(kept)

        snapshot = attempt(take, self._backend, self._position)
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
        if event is not None and (lost := snapshot.lost):
            raise AfterUpdateError(
                f"memory ran out in {part.name} after the update of step {self._position.step} ({event.shortage}), and "
                f"{', '.join(lost)} cannot be put back. The update is done, so do not repeat the step: reload the last "
                "checkpoint, and give a larger budget"
            )
        return event, snapshot.changes

    def _kept_of(self, number: int, part: Part) -> Kept:
        """Return the tracker of the state of a part's owners. It is reused in later steps for the same part."""
        groups = self._optimizer.param_groups
        work, of_groups, kept = self._kept.get(number, (None, None, None))
        if kept is None or work != part.work or of_groups is not groups:
            owner = part.name.partition(".")[0]
            roots = [*((owner, one) for one in part.owners), ("optimizer.param_groups", groups)]
            kept = Kept(lambda: [roots], self._parameters)
            self._kept[number] = part.work, groups, kept
        return kept

    def _parameters(self) -> list[Any]:
        """Return the optimizer's objects that only its update changes: states and parameters, but not settings."""
        lists = (group["params"] for group in self._optimizer.param_groups)
        return [self._optimizer, self._optimizer.state, *lists]


def _parts(
    scaler: torch.amp.GradScaler | None,
    schedule: torch.optim.lr_scheduler.LRScheduler | None,
    tidy_ups: tuple[Callable[[], None], ...],
) -> Iterator[Part]:
    if scaler is not None:
        yield Part("scaler.update()", scaler.update, (vars(scaler),))
    if schedule is not None:
        # A schedule may be a library's wrapper, whose attributes are not searched by default.
        yield Part("schedule.step()", schedule.step, (schedule, vars(schedule)))
    for tidy_up in tidy_ups:
        yield Part(getattr(tidy_up, "__name__", "tidy_up") + "()", tidy_up, (tidy_up,))
