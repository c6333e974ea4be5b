"""``with plimsoll.explained():`` around any training code explains an out-of-memory error when it is raised.

The exception propagates unchanged. The explanation needs some memory, so a reserve is held while the code runs, and
freed before the explanation. If the reserve is too small, a note replaces the diagnosis. Without ``record``, the only
work while the code runs is to read the memory in use after each ``step()`` of a torch optimizer. This takes 50 to 70
microseconds per step.

Not handled:

- A process that the kernel kills; use ``plimsoll watch``, or ``plimsoll explain`` on its log.
- An abort of Rust code that is refused memory; the place and reason are printed, see `plimsoll.device.aborts`.
- Errors of `plimsoll.TrainStep`, which explain themselves, and errors that the code catches itself.
"""

from __future__ import annotations

import sys
from contextlib import ContextDecorator, ExitStack
from types import FrameType, TracebackType
from typing import Any, TextIO, final

import rich.console
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from plimsoll.device.aborts import told_where
from plimsoll.device.base import backend_for
from plimsoll.diagnose.causes import every_cause
from plimsoll.diagnose.findings import diagnosed
from plimsoll.diagnose.frames import users_callers
from plimsoll.diagnose.of_error import Before, backend_of, evidence_of_error
from plimsoll.errors import PlimsollError
from plimsoll.memory.inventory import Births, inventory
from plimsoll.records.diagnosis import Diagnosis
from plimsoll.report.as_text import diagnosis_report
from plimsoll.step.oom_boundary import without_fail

_RESERVE_BYTES = 16 << 20
_MOST_STEPS = 4096


@final
class Explained(ContextDecorator):
    """The context manager that `explained` returns; ``diagnosis`` is set when memory has run out."""

    def __init__(self, record: bool = False, file: TextIO | None = None) -> None:
        self.diagnosis: Diagnosis | None = None
        self._record = record
        self._file = file
        self._stack = ExitStack()
        self._before = Before()
        self._reserve = bytearray()
        self._depth = 0

    def __enter__(self) -> Explained:
        """Start to observe memory.

        Of nested blocks, as in a decorated recursive function, only the outermost block observes.
        """
        self._depth += 1
        if self._depth > 1:
            return self
        every_cause()  # import all causes now: imports may fail when memory has run out
        baseline_bytes = _used_bytes(False) - sum(one.num_bytes for one in inventory("cpu").pieces)
        self._before = Before(baseline_bytes=max(0, baseline_bytes))
        self._before.look_at(_frames(sys._getframe(1)))
        self._reserve = bytearray(_RESERVE_BYTES)
        with ExitStack() as stack:
            stack.callback(register_optimizer_step_post_hook(self._note_step).remove)
            stack.enter_context(told_where())
            if self._record:
                births = stack.enter_context(Births(_line_of_now))
                self._before.births = births.lines
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Explain the error if it is an out-of-memory error. Every exception propagates."""
        self._depth -= 1
        if self._depth:
            return
        self._stack.close()
        self._reserve = bytearray()
        if error is None or isinstance(error, PlimsollError):
            return
        told = without_fail(lambda: _diagnosis_of(error, self._before, sys._getframe(3)))
        if isinstance(told, str):
            print(f"plimsoll: the error could not be explained ({told})", file=self._file or sys.stderr)
        elif told is not None:
            self.diagnosis = told
            without_fail(lambda: self._print(told))

    def _print(self, diagnosis: Diagnosis) -> None:
        rich.console.Console(file=self._file or sys.stderr).print(diagnosis_report(diagnosis))

    def _note_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        before = self._before
        before.num_steps += 1
        if before.num_steps == 1:
            before.look_at(_frames(sys._getframe(1)))
        is_cuda = next((one.is_cuda for group in optimizer.param_groups for one in group["params"]), False)
        before.used_bytes.append((before.num_steps, _used_bytes(is_cuda)))
        before.borders.append(int(torch._C._autograd._get_sequence_nr()))
        if len(before.borders) > _MOST_STEPS:  # keep every second measurement
            del before.used_bytes[1::2], before.borders[1::2]


def explained(*, record: bool = False, file: TextIO | None = None) -> Explained:
    """Explain which objects used the memory if it runs out in a block or, as a decorator, in a function.

        with plimsoll.explained():
            train(model, loader)

    Args:
        record: also record the line that made each large tensor; each torch operation then takes 10 to 20 microseconds
            more.
        file: where to print; standard error by default.

    Returns:
        the context manager; its ``diagnosis`` is the diagnosis that was printed, or ``None`` if memory did not run out.
    """
    return Explained(record, file)


def _diagnosis_of(error: BaseException, before: Before, caller: FrameType | None) -> Diagnosis | None:
    found = backend_of(error)
    if found is None:
        return None
    return diagnosed(evidence_of_error(error, found[0], before, caller))


def _frames(frame: FrameType) -> list[FrameType]:
    return [line.frame for line in users_callers(frame)]


def _line_of_now() -> str:
    frame: FrameType | None = sys._getframe(3)
    lines = users_callers(frame)
    return lines[0].place if lines else ""


def _used_bytes(is_cuda: bool) -> int:
    return backend_for("cuda" if is_cuda else "cpu").use().used_bytes
