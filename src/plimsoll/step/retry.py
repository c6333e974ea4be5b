"""Retrying a step after an out-of-memory error, and the check that all state it changed can be restored.

A retry is correct only if all state that a step reads is restored (`plimsoll.step.undo.step_state`). The search for
state may miss some of it. So before the first step, two samples of the batch run forward and backward, the state is
restored, and the same pass runs again. Loss, gradients and written tensors must agree. A difference beyond rounding
proves hidden state. From then on, an out-of-memory error is raised instead of a retry, and names the module in which
the passes first differ. Kernels with a nondeterministic order of additions (atomics on a GPU) are tolerated.

The position of an iterator cannot be restored. If user code holds an iterator, nothing is compared until a step has run
without advancing it. A step that advances it is not retried.

Does not detect state that has no effect on the results of two samples. If their pass fails, nothing is compared.
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
    "is filled once and is not put back; this training draws other random numbers than a loop in plain PyTorch"
)
_WHAT_TO_GIVE = "with state_dict and load_state_dict, or allow retries anyway with allow_hidden_state=True"


class Retry:
    """The state of one training run that is needed to retry a step.

    Args:
        roots: objects that may hold state of the training code, by name, including ``"model"`` and ``"loss"``.
        backend: the backend of the device.
        position: the current position in the training run.
        optimizer: the optimizer of the model.
        extra_state: user objects whose state is restored too.
        allow_hidden_state: whether to retry although some state cannot be restored.
        observes: whether passes compute real values; False in a dry run.

    Attributes:
        extra_state: the argument of this name.
        undo: saves and restores the state.
        hidden: a description of state that is not restored; ``None`` if no such state is known.
        is_exact: whether two passes were bitwise equal; ``None`` if none were compared.
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
        self._idle_iterators: set[str] = set()  # names of iterators that a step did not advance
        self._unseen_iterators: list[str] = []  # names of iterators that no step has been checked for yet
        self._model: nn.Module = roots["model"]
        self._backend, self._position, self._allows = backend, position, allow_hidden_state

    def load(self, states: Sequence[dict[str, Any]]) -> None:
        """Load the extra state of a checkpoint.

        Raises:
            InputError: if the checkpoint has the state of more or fewer objects.
        """
        if len(states) != len(self.extra_state):
            raise InputError(
                f"the checkpoint has the state of {len(states)} objects, but extra_state has "
                f"{len(self.extra_state)}: give the same objects"
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
        """Save the current state for `put_back`. Once for each kind of batch, check that the saved state is complete.

        Args:
            batch: the whole batch.
            loss_of: computes the loss of the first samples; ``None`` skips the check.
            parameters: parameters whose gradients are compared; ``None`` compares forward passes only.
            others: a function that restores state which a pass changes and ``undo`` does not cover.
        """
        self.undo.remember(batch)
        if loss_of is None or not self.undo.is_due:
            return
        self._unseen_iterators = sorted(self.undo.iterators() - self._idle_iterators)
        if self._unseen_iterators:  # a comparison might advance them
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
                f"memory ran out while two passes of the same samples were compared ({found.shortage}). The next step "
                "compares them again; until then it is unknown whether there is state that is not put back"
            )
        elif found is not None:
            self._note(found)
        if moved := self.undo.moved_iterators():  # by a branch that no step has taken before
            self._note(said_of_iterators(moved))

    def observed(self) -> None:
        """Record that the passes of a step succeeded. If no passes could be compared, the next step compares them."""
        if self.undo.is_due:
            moved = self.undo.moved_iterators()
            if moved:
                self._note(said_of_iterators(moved))
                self._is_unproven = False
            self._idle_iterators |= self.undo.iterators() - {*moved}
            self._unseen_iterators = []
        self.undo.observed(is_all=not self._is_unproven)

    def observing(self) -> AbstractContextManager[None]:
        """Return a context that observes the writes of passes, unless passes of this kind have been observed."""
        return self.undo.observing() if self.undo.is_due else nullcontext()

    @contextmanager
    def unmarked(self) -> Iterator[None]:
        """Forget, after the block, which kinds of passes were observed in it, so that they are observed again later."""
        kinds, idle_iterators = {*self.undo.kinds}, {*self._idle_iterators}
        try:
            yield
        finally:
            self.undo.kinds, self._idle_iterators = kinds, idle_iterators

    def put_back(self, others: Callable[[], None]) -> None:
        """Restore the saved state, and call ``others`` to restore other state. If memory runs out, try a second time.

        Raises:
            TornStepError: if memory ran out in both tries.
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
        """Run the passes until they change no value that was kept from a failed try, and return their result.

        `Undo.leave` keeps values that only failed tries have changed. If successful passes also change such a value,
        it is part of the training state. It is then restored, and the passes run again.
        """
        result = passes()
        while self.undo.has_left_state:
            put_back()
            self.undo.settle()
            result = passes()
        return result

    @property
    def doubt(self) -> str | None:
        """The reason why some changes of passes may not be restored; ``None`` if all changes are restored."""
        if self.hidden is None and self._unseen_iterators:
            return said_of_iterators(self._unseen_iterators)
        if self.hidden is None and self.undo.lost:
            return f"it has changed state that is not put back: {', '.join(dict.fromkeys(self.undo.lost))}"
        return self.hidden

    def refuse(self, event: OomEvent, ranks: Ranks) -> None:
        """Refuse to retry after an event if some change of the step is not restored.

        Raises:
            OutOfMemoryError: if such state is known and ``allow_hidden_state`` is False.
        """
        why = self.doubt
        if ranks.agree(why is not None and not self._allows):
            reason = why or "another rank has state that is not put back"
            raise OutOfMemoryError(
                f"memory ran out in the {event.phase} phase of step {event.step} ({event.shortage}), and the step is "
                f"not retried, because {reason}: give the objects that hold it as extra_state=[...], {_WHAT_TO_GIVE}"
            )

    # -- the proof -----------------------------------------------------------------------------------------------------

    def _compare(self, one_pass: Callable[[], PassPrint | OomEvent | None]) -> str | OomEvent | None:
        """Run a pass twice. Return why the results differ, or an event if memory ran out; otherwise ``None``."""
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
        """Run one pass from the saved state, and return its fingerprints, or an event if memory ran out.

        Returns ``None`` after any other error, because a pass of the whole batch may still succeed.
        """
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
        """Restore the saved state and drop the gradients. The arguments are the same as for `remember`."""
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
            text = f"{why}. If memory runs out, steps are retried anyway, as allowed"
        else:
            text = (
                f"{why}. If memory runs out, no step is retried: give the objects that hold it as extra_state=[...], "
                f"{_WHAT_TO_GIVE}"
            )
        warn_at_the_loop(text)


def warn_at_the_loop(text: str) -> None:
    """Warn at the line of user code that called Plimsoll."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("plimsoll."):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, PlimsollWarning, stacklevel=level)


def first_samples(batch: Any, micro_batch: int, model: nn.Module) -> Any:
    """Return the samples of a batch to compare: as many as BatchNorm needs, but at most ``micro_batch``.

    For a compiled model this is a whole micro-batch. A smaller one would trigger a second compilation.
    """
    most = micro_batch if any(map(is_compiled, model.modules())) else min(_NUM_SAMPLES, micro_batch)
    return pick_samples(batch, range(min(most, batch_size_of(batch))))


def scaler_as_now(scaler: torch.amp.GradScaler) -> torch.amp.GradScaler:
    """Return a new scaler with the same scale. The old scaler's record of seen gradients cannot be removed."""
    fresh = type(scaler)(scaler._device, enabled=scaler.is_enabled())
    fresh.load_state_dict(scaler.state_dict())
    return fresh


@contextmanager
def _noting_outputs(model: nn.Module) -> Iterator[list[tuple[str, list[Print]]]]:
    """Record fingerprints of the outputs of all modules, in the order of their calls."""
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
    """Return the message that the positions of these iterators cannot be restored."""
    what = "is an iterator, whose position" if len(names) == 1 else "are iterators, whose positions"
    return f"{' and '.join(names[:_MOST_NAMES])} {what} cannot be put back"


def _said(
    first: PassPrint, second: PassPrint, one: list[tuple[str, list[Print]]], other: list[tuple[str, list[Print]]]
) -> str:
    """Return the message about two passes that differ; it names the first module with different outputs, if any."""
    pairs = zip(one, other, strict=False)
    differing = next((ours for ours, theirs in pairs if ours != theirs), None)
    if differing is None:
        where = "all modules have equal outputs, so it is in the loss, in a hook or in a backward pass"
    else:
        where = f"the first module with different outputs is {differing[0] or 'the model itself'}"
    what = "different gradients" if first.loss.bits == second.loss.bits else "different losses"
    return f"two passes of the same samples have {what}, so there is state that is not put back ({where})"
