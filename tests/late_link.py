"""A link that is slower than everything else: copies are made as late as the schedule allows, or at any earlier time.

    with late_copies(seed=3) as link:
        ...                            # techniques, with the CPU in the place of a GPU
    assert link.num_late

If the CPU stands in for a GPU, a copy is normally made when it is requested, so that a missing wait is not noticed.
Here it is made at the latest correct time. The device's copies are made when the device waits, in the order of their
direction; the processor sees sent data only when it waits itself. Until then the target has no meaningful values. The
source must not change and, on the device, must be kept alive by the code that will wait. A seed makes some copies
earlier, at random.
"""

from __future__ import annotations

import gc
import random
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from plimsoll.techniques.mechanisms.side_stream import SideStream, Transfer


class LateTransfer(Transfer):
    """`Transfer` whose copies are made when some code waits for them."""

    def __init__(self, link: LateLink, copies: list[_Copy], queue: deque[_Copy]) -> None:
        super().__init__([copy.target if copy.to_device else copy.source() for copy in copies])
        self._link, self._copies, self._queue = link, copies, queue

    def wait(self) -> None:
        if not self._is_waited_for:
            self._make()
        super().wait()

    def synchronize(self) -> None:
        self._make()
        for copy in self._copies:
            copy.show()
        super().synchronize()

    def _make(self) -> None:
        """Make the copies, and all earlier ones of this direction."""
        while self._queue and self._queue[0].number <= self._copies[-1].number:
            self._link.num_late += 1
            self._queue.popleft().make(self._link)


class _Sent:
    """Data sent to the host; records whether the processor has seen it, and has written there since."""

    def __init__(self, home: torch.Tensor) -> None:
        self.values: torch.Tensor | None = None  # set when the copy has been made
        self._is_shown, self._version = False, home._version

    def show(self, home: torch.Tensor) -> None:
        if self.values is not None and not self._is_shown:
            home.copy_(self.values)
            self._is_shown, self._version = True, home._version

    def at(self, home: torch.Tensor) -> torch.Tensor:
        """Return the values for code that reads after the copy."""
        assert self.values is not None, "brought back before it was sent"
        if home._version == self._version:
            return self.values
        assert self._is_shown, "written by the processor before it had arrived"
        return home


class _Copy:
    """One copy; the transfer keeps device tensors alive, and torch protects host memory."""

    def __init__(self, number: int, target: torch.Tensor, source: torch.Tensor, to_device: bool) -> None:
        self.number, self.to_device = number, to_device
        self.source, self._version = weakref.ref(source), source._version
        self._home = source if to_device else target
        self._target = weakref.ref(target)
        target.detach().fill_(torch.nan if target.is_floating_point() else 1)
        self.sent = None if to_device else _Sent(target)

    @property
    def target(self) -> torch.Tensor | None:
        return self._target()

    @torch.no_grad()
    def make(self, link: LateLink) -> None:
        source, target = self.source(), self.target
        assert source is not None, "given back before it was copied"
        assert target is not None, "given back before the copy arrived"
        assert source._version == self._version, "overwritten before it was copied"
        if self.to_device:
            sent = link.sent.get(source)
            target.copy_(source if sent is None else sent.at(source))
        else:
            self.sent.values = source.detach().clone()

    @torch.no_grad()
    def show(self) -> None:
        """Make sent data visible to the processor: a wait of the device is not sufficient."""
        if self.sent is not None:
            self.sent.show(self._home)


class LateLink:
    """Copies that were requested and not made yet, by direction."""

    def __init__(self, seed: int | None) -> None:
        self._random = None if seed is None else random.Random(seed)
        self.asked: dict[tuple[SideStream, bool], deque[_Copy]] = {}
        self.sent = WeakTensorKeyDictionary()
        self.num_asked = self.num_late = 0

    def copy(self, side: SideStream, pairs, to_device: bool) -> Transfer:
        copies = []
        for target, source in pairs:
            self.num_asked += 1
            copies.append(_Copy(self.num_asked, target, source, to_device))
            if not to_device:
                self.sent[target] = copies[-1].sent
        queue = self.asked.setdefault((side, to_device), deque())
        queue.extend(copies)
        transfer = LateTransfer(self, copies, queue)
        if self._random is not None:
            for other in self.asked.values():
                while other and self._random.random() < 0.4:
                    other.popleft().make(self)
        return transfer


@contextmanager
def late_copies(seed: int | None = None) -> Iterator[LateLink]:
    """Make the copies of the block late; at its end, none may be pending."""
    link = LateLink(seed)
    with mock.patch.object(SideStream, "_copy", lambda side, pairs, to_device: link.copy(side, pairs, to_device)):
        yield link
    gc.collect()
    assert not any(link.asked.values()), "copies that nobody waited for"
