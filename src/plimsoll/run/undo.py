"""Everything that a step can change before its update, besides the gradients, remembered so that it can be put back.

What is written is observed, not guessed. In the first step a dispatch mode sees which tensors of before are written, and
copies them first (`plimsoll.run.written`); from then on the same ones are copied before each step. What Python keeps is
copied one level deep wherever training code can keep something (`plimsoll.run.reachable`), and so are generators of
random numbers. A tensor that is first written in a later step is noticed by its version counter: after passes that went
through it is one of those that are copied; passes that are undone cannot put it back, and say so (`Undo.lost`).

Does NOT see a first write in a later step that counts no version (through ``.data``), and what `reachable` and
`written` do not see: give such state as ``extra_state``.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol

import numpy
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from plimsoll.device import cudnn_dropout
from plimsoll.device.base import Backend
from plimsoll.run.reachable import Items, Reached, may_hold_state, reached_from
from plimsoll.run.written import Writes, key_of

_SMALL_BYTES = 1 << 16
"""What is no parameter and so small is copied before every step, whether or not a write of it was seen."""
_LONGEST_PAUSE_STEPS = 200


class Stateful(Protocol):
    """What can say its state and take it back, as torch's and accelerate's checkpoints have it."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Take a state back."""


@dataclass(slots=True)
class _Before:
    """What was reached, and how it was before the step."""

    reached: Reached
    contents: list[Any] = field(default_factory=list)
    copies: list[tuple[Any, Any]] = field(default_factory=list)
    versions: list[tuple[str, Tensor, int]] = field(default_factory=list)
    generators: list[tuple[Any, Any]] = field(default_factory=list)


class Undo:
    """Remembers the state before a step and puts it back.

    Args:
        roots: where training code can keep something, by name: the model, the loss, hooks.
        backend: of the device, whose random numbers are remembered too.
        extra_state: objects of the user's, remembered by their state_dict.

    Attributes:
        lost: names of what the last `restore` could not put back.
    """

    def __init__(self, roots: dict[str, Any], backend: Backend, extra_state: Sequence[Stateful] = ()) -> None:
        self.lost: tuple[str, ...] = ()
        self._roots, self._backend, self._extra_state = roots, backend, extra_state
        self._reached: Reached | None = None
        self._moving: set[int] = set()  # places that some step has changed
        self._written: set[str] = set()  # names of tensors that some step has written
        self._before: list[_Before] = []
        self._extra: list[Any] = []
        self._random_state: dict[str, Any] = {}
        self._num_steps, self._next_look = 0, 1
        for one in roots.values():
            if isinstance(one, nn.Module):
                cudnn_dropout.find_for(one)

    def remember(self, batch: Any = None) -> None:
        """Take the state as it is now for the one to go back to; ``batch`` is part of it."""
        self.lost = ()
        self._random_state = self._backend.random_state()
        if self._reached is None:
            self._reached = reached_from(self._roots.items())
        before = self._remembered(self._reached)
        roots = [("batch", batch), *self._news(before)]
        self._before = [before, self._remembered(reached_from(roots, self._reached))]
        self._extra = [copy.deepcopy(one.state_dict()) for one in self._extra_state]

    def forget(self) -> None:
        """Let go of what was remembered, and look for everything anew: techniques are about to change."""
        self._reached, self._before, self._extra = None, [], []
        self._moving.clear()

    @contextmanager
    def observing(self) -> Iterator[None]:
        """See which tensors of before the block writes: they are put back with the rest, now and in later steps."""
        with Writes() as writes:  # type: ignore[no-untyped-call]
            yield
        self._take(writes)

    def passed(self) -> None:
        """Learn, after passes that went through and before the update, which tensors they wrote."""
        self._written.update(self._newly_written())
        for before in self._before:
            before.versions = []  # an update changes what is trained

    def done(self) -> None:
        """Let go of the state of before; which places change is looked for after ever fewer steps."""
        self._num_steps += 1
        if self._before and self._num_steps >= self._next_look:
            self._next_look = self._num_steps + min(max(self._num_steps // 4, 1), _LONGEST_PAUSE_STEPS)
            self._moving.update(number for number, _ in self._changed(self._before[0]))
        self._before, self._extra = [], []

    @torch.no_grad()
    def restore(self) -> None:
        """Go back to the remembered state; what cannot be put back is named in ``lost``. It can be done twice."""
        self.lost = tuple(self._newly_written())
        for before in self._before:
            for number, content in self._changed(before):
                before.reached.places[number][1].fill(content)
            for value, content in before.copies:
                value.copy_(content) if isinstance(value, Tensor) else numpy.copyto(value, content)
            for generator, state in before.generators:
                put_state(generator, state)
        for one, state in zip(self._extra_state, self._extra, strict=False):
            one.load_state_dict(copy.deepcopy(state))
        self._backend.restore_random_state(self._random_state)

    def _remembered(self, reached: Reached) -> _Before:
        before = _Before(reached, [place.content() for _, place in reached.places])
        ...

    def _news(self, before: _Before) -> Iterator[tuple[str, Any]]:
        """What has come, since everything was looked for, into places that change."""
        seen = before.reached.seen
        for number in self._moving:
            name, content = before.reached.places[number][0], before.contents[number]
            values = content.items() if isinstance(content, dict) else enumerate(content)
            for key, value in values:
                if may_hold_state(value) and id(value) not in seen:
                    yield f"{name}[{key!r}]", value

    def _changed(self, before: _Before) -> Iterator[tuple[int, Any]]:
        for number, ((_, place), content) in enumerate(zip(before.reached.places, before.contents, strict=True)):
            if not _is_same(place.content(), content):
                yield number, content

    def _newly_written(self) -> list[str]:
        return [
            name for before in self._before for name, tensor, version in before.versions if tensor._version != version
        ]
