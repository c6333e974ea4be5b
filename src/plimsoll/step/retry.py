"""Doing a step again after memory ran out: what was there before it is put back, and that this is all is proven.

A retry is right only if all state that a step reads is put back (`plimsoll.step.undo.step_state`), and who looks for
state may overlook some. So before the first step goes on, two of its samples go forward and backward, everything is put
back, and they go again: loss, gradients and what the pass has written must be the same. What differs by more than
rounding comes from state that nobody sees: from then on an out-of-memory error is raised in place of a retry, and says
where that state enters. Kernels that add in any order (atomics, on a GPU) give another rounding each time, which is let
through. Where an iterator is kept, whose position cannot be put back, nothing is tried before a step has left it where
it was; a step that moves it is not done again.

Does NOT see state that makes no difference to two samples. Where these fail by themselves nothing is compared.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from plimsoll.data.batch import batch_size_of, pick_samples
from plimsoll.device.base import Backend
from plimsoll.distributed.ranks import Ranks
from plimsoll.errors import InputError, OutOfMemoryError, PlimsollWarning, TornStepError
from plimsoll.records.run import OomEvent
from plimsoll.step.cuda_graphs.fingerprints import PassPrint, Print, print_of
from plimsoll.step.missing_gradients import is_compiled
from plimsoll.step.oom_boundary import Position, attempt, attempt_twice, without_fail
from plimsoll.step.undo.saved import Stateful, is_same_state
from plimsoll.step.undo.step_state import Undo

T = TypeVar("T")
LossOf = Callable[[], Tensor]

_NUM_SAMPLES = 2
_MOST_NAMES = 3

_OTHER_NUMBERS = (
    "the first of two passes of the same samples draws other random numbers than the second, so there is a cache that "
    "is filled once and is not put back; the numbers of this training are not those of a loop of plain PyTorch"
)
_WHAT_TO_GIVE = (
    "objects with state_dict and load_state_dict, or allow retries all the same with allow_hidden_state=True"
)


class Retry:
    """What one training needs to do a step again.

    Args:
        roots: where training code can keep something, by name; ``"model"`` and ``"loss"`` among them.
        backend: of the device.
        position: where the training is.
        optimizer: what the model is trained with.
        extra_state: objects of the user's whose state is put back, too.
        allow_hidden_state: whether to retry although state was found that is not put back.
        observes: whether passes are real; those of a dry run are not.

    Attributes:
        extra_state: as it was given.
        undo: remembers and puts back.
        hidden: what was found to be not put back, or ``None``.
        is_exact: whether two passes had the same bits; ``None`` where none were compared.
    """

    def __init__(
        self,
        roots: Mapping[str, Any],
        backend: Backend,
        position: Position,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        extra_state: Sequence[Stateful] = (),
        allow_hidden_state: bool = False,
        observes: bool = True,
    ) -> None:
        self.extra_state = tuple(extra_state)
        self.undo = Undo(roots, backend, self.extra_state, optimizer, observes)
        self.hidden: str | None = None
        self.is_exact: bool | None = None
        self._is_unproven = False
        self._idle_iterators: set[str] = set()  # names of those that a step has left where they were ...
        self._unseen_iterators: list[str] = []  # ... and of those of which that is not known yet
        self._model: nn.Module = roots["model"]
        self._backend, self._position, self._allows = backend, position, allow_hidden_state

    def load(self, states: Sequence[dict[str, Any]]) -> None:
        """Give the extra state back that a checkpoint has.

        Raises:
            InputError: if it has that of more objects, or of fewer.
        """
        if len(states) != len(self.extra_state):
            raise InputError(
                f"the state of {len(states)} objects was saved, but extra_state has {len(self.extra_state)}: give the "
                "same ones"
            )
        for one, state in zip(self.extra_state, states, strict=True):
            one.load_state_dict(state)

    def remember(
        self,
        batch: Any,
        loss_of: LossOf | None,
        parameters: Sequence[nn.Parameter] | None,
        others: Callable[[], None] = lambda: None,
    ) -> None:
        """Take the state as it is now for the one to go back to, and see once for each kind of batch that it is all.

        Args:
            batch: the whole batch.
            loss_of: computes the loss of the first samples; ``None`` where nothing is to be compared.
            parameters: whose gradients are compared; ``None`` where passes must not go backward.
            others: puts back what a pass changes and is not the undo's.
        """
        self.undo.remember(batch)
        if loss_of is None or not self.undo.is_due:
            return
        self._unseen_iterators = sorted(self.undo.iterators() - self._idle_iterators)
        if self._unseen_iterators:  # which a comparison may move
            self._is_unproven = True
            return
        go_back = partial(self.go_back, parameters, others)
        one_pass = partial(self._pass, loss_of, parameters, go_back)
        with warnings.catch_warnings(action="ignore"):
            found = attempt(partial(self._compare, one_pass), self._backend, self._position)
        go_back()
        self._is_unproven = isinstance(found, OomEvent)
        if isinstance(found, OomEvent):
            self._backend.release()
            warn_at_the_loop(
                f"memory ran out while two passes of the same samples were compared ({found.shortage}), which is done "
                "again in the next step: until then it is not known whether there is state that is not put back"
            )
        elif found is not None:
            self._note(found)
        if moved := self.undo.moved_iterators():  # in a branch that no step has taken yet
            self._note(said_of_iterators(moved))

    def observed(self) -> None:
        """Say that the passes of a step went through; what could not be compared yet, the next step does."""
        if self.undo.is_due:
            moved = self.undo.moved_iterators()
            if moved:
                self._note(said_of_iterators(moved))
                self._is_unproven = False
            self._idle_iterators |= self.undo.iterators() - {*moved}
            self._unseen_iterators = []
        self.undo.observed(is_all=not self._is_unproven)

    def observing(self) -> AbstractContextManager[None]:
        """See what passes write, as long as passes of their kind have not been seen."""
        return self.undo.observing() if self.undo.is_due else nullcontext()

    @contextmanager
    def unmarked(self) -> Iterator[None]:
        """Learn of the passes of the block what they write; the steps after it are observed as without them."""
        kinds, idle_iterators = {*self.undo.kinds}, {*self._idle_iterators}
        try:
            yield
        finally:
            self.undo.kinds, self._idle_iterators = kinds, idle_iterators

    def put_back(self, others: Callable[[], None]) -> None:
        """Put everything back, by ``others`` what is not the undo's; where memory runs out in that, once more.

        Raises:
            TornStepError: if memory ran out in it twice.
        """

        def work() -> None:
            self.undo.look()
            others()
            self.undo.restore()

        event = attempt_twice(work, self._backend, self._position)
        if event is not None:
            raise TornStepError(
                f"memory ran out while step {self._position.step + 1} was undone ({event.shortage}), and again in a "
                "second try: the model may be changed; reload the last checkpoint, and give a larger budget"
            )

    def until_settled(self, passes: Callable[[], T], put_back: Callable[[], None]) -> T:
        """Run passes, and once more where they show that what a failure had changed is state (see `Undo.leave`)."""
        result = passes()
        while self.undo.has_left_state:
            put_back()
            self.undo.settle()
            result = passes()
        return result

    @property
    def doubt(self) -> str | None:
        """Why not all that passes have changed is known to be put back; ``None`` where it is."""
        if self.hidden is None and self._unseen_iterators:
            return said_of_iterators(self._unseen_iterators)
        if self.hidden is None and self.undo.lost:
            return f"what it has changed is not put back: {', '.join(dict.fromkeys(self.undo.lost))}"
        return self.hidden

    def refuse(self, event: OomEvent, ranks: Ranks) -> None:
        """Refuse to go on after an event, where not all that the step has changed is put back.

        Raises:
            OutOfMemoryError: if that is known, and not allowed.
        """
        why = self.doubt
        if ranks.agree(why is not None and not self._allows):
            reason = why or "another rank has state that is not put back"
            raise OutOfMemoryError(
                f"memory ran out in the {event.phase} phase of step {event.step} ({event.shortage}), and the step is "
                f"not done again, because {reason}: give what keeps it as extra_state=[...], {_WHAT_TO_GIVE}"
            )

    # -- the proof -----------------------------------------------------------------------------------------------------

    def _compare(self, one_pass: Callable[[], PassPrint | OomEvent | None]) -> str | OomEvent | None:
        """Why two passes differ, if they do; or that there is no memory for them."""
        first, second = one_pass(), one_pass()
        if not isinstance(first, PassPrint) or not isinstance(second, PassPrint):
            return first if isinstance(first, OomEvent) else second if isinstance(second, OomEvent) else None
        self.is_exact = first[:-1] == second[:-1]
        if not is_same_state(first.random_state, second.random_state):
            return _OTHER_NUMBERS
        if first.is_near(second):
            return None
        outputs: list[list[tuple[str, list[Print]]]] = []
        for _ in range(2):
            with _noting_outputs(self._model) as kept:
                one_pass()
            outputs.append(kept)
        return _said(first, second, *outputs)

    def _pass(
        self, loss_of: LossOf, parameters: Sequence[nn.Parameter] | None, go_back: Callable[[], None]
    ) -> PassPrint | OomEvent | None:
        """One pass from the remembered state; ``None`` where so few samples fail, as the whole batch need not."""
        go_back()
        loss: Tensor | None = None

        def forward_backward() -> None:
            nonlocal loss
            self._position.phase = "forward"
            loss = loss_of()
            self._position.phase = "backward"
            if parameters is not None:
                loss.backward()  # type: ignore[no-untyped-call]
            self.undo.passed()

        with self.undo.observing():
            failure = without_fail(lambda: attempt(forward_backward, self._backend, self._position))
        if failure is not None or loss is None:
            return failure if isinstance(failure, OomEvent) else None
        gradients = [one.grad for one in parameters or () if one.grad is not None]
        written = [*map(print_of, self.undo.written())]
        return PassPrint(print_of(loss), [*map(print_of, gradients)], written, self._backend.random_state())

    def go_back(self, parameters: Sequence[nn.Parameter] | None, others: Callable[[], None] = lambda: None) -> None:
        """Go back to the remembered state, without gradients; arguments as of `remember`."""
        for parameter in parameters or ():
            parameter.grad = None
        self.undo.look()
        others()
        self.undo.restore()

    def _note(self, why: str) -> None:
        if self.hidden == why:
            return
        self.hidden = why
        if self._allows:
            text = f"{why}. Where memory runs out, steps are done again all the same, as allowed"
        else:
            text = (
                f"{why}. Where memory runs out, no step is done again: give what keeps it as extra_state=[...], "
                f"{_WHAT_TO_GIVE}"
            )
        warn_at_the_loop(text)


def warn_at_the_loop(text: str) -> None:
    """Warn at the line of the user's loop, however it called us."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("plimsoll."):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, PlimsollWarning, stacklevel=level)


def first_samples(batch: Any, micro_batch: int, model: nn.Module) -> Any:
    """The samples of a batch that are compared: as many as BatchNorm needs, but no more than a pass may have.

    Of a compiled model a whole pass: it would be compiled for the few samples, and again.
    """
    most = micro_batch if any(map(is_compiled, model.modules())) else min(_NUM_SAMPLES, micro_batch)
    return pick_samples(batch, range(min(most, batch_size_of(batch))))


def scaler_as_now(scaler: torch.amp.GradScaler) -> torch.amp.GradScaler:
    """Make a scaler with the same scale that has seen no gradients: what it noted of them cannot be taken back."""
    fresh = type(scaler)(scaler._device, enabled=scaler.is_enabled())
    fresh.load_state_dict(scaler.state_dict())
    return fresh


@contextmanager
def _noting_outputs(model: nn.Module) -> Iterator[list[tuple[str, list[Print]]]]:
    """Keep prints of what the modules return, in the order in which they do."""
    kept: list[tuple[str, list[Print]]] = []

    def note(name: str, _module: nn.Module, _inputs: Any, outputs: Any) -> None:
        kept.append((name, [print_of(leaf) for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]))

    hooks = [module.register_forward_hook(partial(note, name)) for name, module in model.named_modules()]
    try:
        yield kept
    finally:
        for hook in hooks:
            hook.remove()


def said_of_iterators(names: Sequence[str]) -> str:
    """Say that iterators cannot be put back."""
    what = "is an iterator, whose position" if len(names) == 1 else "are iterators, whose positions"
    return f"{' and '.join(names[:_MOST_NAMES])} {what} cannot be put back"


def _said(
    first: PassPrint, second: PassPrint, one: list[tuple[str, list[Print]]], other: list[tuple[str, list[Print]]]
) -> str:
    """Where two passes differ first, for a person."""
    pairs = zip(one, other, strict=False)
    differing = next((ours for ours, theirs in pairs if ours != theirs), None)
    if differing is None:
        where = "every module returns the same, so it is in the loss, in a hook or in a backward pass"
    else:
        where = f"the first module that returns something else is {differing[0] or 'the model itself'}"
    what = "other gradients" if first.loss.bits == second.loss.bits else "other losses"
    return f"two passes of the same samples have {what}, so there is state that is not put back ({where})"
